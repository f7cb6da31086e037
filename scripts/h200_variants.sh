#!/usr/bin/env bash
# Measure the variants of ERNIE's encoder on an H200, with the project's own command line.
#
#   bash scripts/h200_variants.sh [FOLDER] [SECONDS]      default: workbench/recordings/variants_ernie45_vl 240
#
# Needs torch, Triton and vLLM 0.33 importable by $PYTHON (default python3), cuda-bindings for the module maps; the
# workbench is run from this checkout. One run yields eager, vLLM's graph, each variant and all of them on single items
# of 64 to 2,048 tokens, 4 x 64, a mixed call and a video: samples, GPU time, nodes, parity beside the noise floor, the
# module maps and the capture boundary. FOLDER/ladder.json is written after every case, so a run that is cut short
# leaves what it has. Under five minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-workbench/recordings/variants_ernie45_vl}
seconds=${2:-240}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4

mkdir -p "$out"
python=${PYTHON:-python3}
# The kernels' own test first, by the GPU's compiler: it explains a failure better than a wrong embedding does.
"$python" -m workbench.encoder.variants.check || echo "the Triton kernels differ from torch: judge 'fused' by its parity"
# Whether attention can be planned once per call is tried in a process of its own, which it may end.
plan=()
if timeout 90 "$python" -m workbench.encoder.variants.check attention-plan; then plan=(--attention-plan); fi
"$python" -m workbench ladder --device cuda --out "$out" --seconds "$seconds" "${plan[@]}"
