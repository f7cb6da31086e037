#!/usr/bin/env bash
# Measure the variants of an encoder on an H200, with the project's own command line.
#
#   bash scripts/h200_variants.sh [MODEL] [FOLDER] [SECONDS] [OPTION...]     options are those of `workbench ladder`
#                                    default: ernie45_vl workbench/recordings/variants_MODEL 480
#
# Needs torch, Triton and vLLM 0.33 importable by $PYTHON (default python3), cuda-bindings for the module maps; the
# workbench is run from this checkout. One run yields eager, vLLM's graph, each variant and all of them on single items
# of 64 to 2,048 tokens, 4 x 64, a mixed call and videos: samples, GPU time, nodes, parity beside the noise floor, the
# module maps and the capture boundary. Of a model whose graphs take videos, also an image where videos are allowed.
# FOLDER/ladder.json is written after every case, so a run that is cut short leaves what it has. About eight minutes,
# one of them for compiling the kernels of variant fused.
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:-ernie45_vl}
out=${2:-workbench/recordings/variants_$model}
seconds=${3:-480}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4

mkdir -p "$out"
python=${PYTHON:-python3}
more=()
if [[ $model == ernie45_vl ]]; then
    # The kernels' own test first, by the GPU's compiler: it explains a failure better than a wrong embedding does.
    "$python" -m workbench.encoder.variants.check || echo "the Triton kernels differ from torch: judge 'fused' by its parity"
    # Whether attention can be planned once per call is tried in a process of its own, which it may end.
    if timeout 90 "$python" -m workbench.encoder.variants.check attention-plan; then more+=(--attention-plan); fi
fi
"$python" -m workbench ladder --device cuda --model "$model" --out "$out" --seconds "$seconds" "${more[@]}" "${@:4}"
