#!/usr/bin/env bash
# GLM-4.1V's data-parallel vision encoder on two H200s: over both and on one, by graphs and eagerly.
#
#   bash scripts/h200_x2_dp.sh [FOLDER]       default: parallel_glm4_1v
#
# The pull request's calls of 1, 2 and 8 images of 336 x 336, and a skewed mix. Needs two H200s, and torch and vLLM 0.33
# importable by $PYTHON (default python3); the workbench is run from this checkout. Ended after 170 s. Leaves FOLDER with
# parallel.json, a folder per rank, and the table as table.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-parallel_glm4_1v}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
began=$SECONDS
timeout --kill-after=10 170 "${PYTHON:-python3}" -m workbench parallel --model glm4_1v --device cuda --ranks 2 \
    --budgets 64,128,256,512,1024,2048 --max-items 8 --repeats 40 --seconds 150 --overwrite --out "$out" \
    --call 336x336 --call "336x336*2" --call "336x336*8" --call 224x224,896x896,336x336,560x560 | tee "$out.txt"
mv "$out.txt" "$out/table.txt"
echo "parallel: $((SECONDS - began)) s"
