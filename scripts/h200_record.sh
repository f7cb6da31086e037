#!/usr/bin/env bash
# Make the recordings that ship with the workbench, on an H200, with the project's own command line.
#
#   bash scripts/h200_record.sh [FOLDER]      default: workbench/recordings
#
# Needs torch and vLLM 0.33 importable by $PYTHON (default python3); the workbench is run from this checkout.
# Takes about four minutes of GPU time. Every number in the recordings comes from these commands.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-workbench/recordings}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
published=128,256,512,1024,1536,2048 # the budgets of vLLM pull request 45254

record() { # NAME OPTION...
    local name=$1
    shift
    "${PYTHON:-python3}" -m workbench capture --device cuda --name "$name" --out "$out/$name" --overwrite "$@"
    du -sh "$out/$name"
}

# The pull request's own workload: one 224 x 224 image per call.
record ernie45_vl-224 --model ernie45_vl --workload pull-request --budgets "$published" --max-items 4 \
    --repeats 200 --warmup 60
# Its budgets on mixed sizes: an image of 4,096 tokens is above the largest, and vLLM 0.33 fails on it (D1).
record ernie45_vl-mixed-2048 --model ernie45_vl --workload mixed --budgets "$published" --max-items 4 \
    --repeats 4 --warmup 1 --profiled-repeats 0 --max-calls 12
# The same calls under budgets that hold them.
record ernie45_vl-mixed --model ernie45_vl --workload mixed --budgets "$published,4096" --max-items 4 \
    --repeats 16 --warmup 2 --profiled-repeats 1 --max-calls 12
# GLM-4.1V: one 224 x 224 image, one video of 8 such frames, 4 in time. More frames than items would be D6: the image's
# replay would come out wrong.
record glm4_1v --model glm4_1v --workload '{(224, 224, 1): 0.5, (224, 224, 8): 0.5}' --video-limit 1 \
    --budgets 64,128,256,512,1024,2048 --max-items 4 --max-frames 4 --repeats 60 --warmup 20 --profiled-repeats 1
