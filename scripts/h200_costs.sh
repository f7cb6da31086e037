#!/usr/bin/env bash
# Measure the cost profile that ships with the workbench, check it on what it has not seen, and compare configurations.
#
#   bash scripts/h200_costs.sh [FOLDER]       default: workbench/recordings/costs_h200_ernie45_vl
#
# Needs an H200, and torch and vLLM 0.33 importable by $PYTHON (default python3); the workbench is run from this
# checkout. Two processes, five to nine minutes in all; each has a time limit. Leaves in FOLDER:
#   profile.json     costs of ERNIE-4.5-VL at full depth
#   heldout.json     12 random configurations on 2 workloads that calibration does not use
#   validation.json  vLLM's own budgets, the pull request's and the advised ones on three workloads
#   *.txt            the tables of predicted beside measured
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-workbench/recordings/costs_h200_ernie45_vl}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
published=128,256,512,1024,1536,2048:4 # the configuration of vLLM pull request 45254
mkdir -p "$out"

step() { # SECONDS VERB OPTION...
    local limit=$1
    shift
    local began=$SECONDS
    timeout --kill-after=10 "$limit" "${PYTHON:-python3}" -m workbench "$@" --device cuda
    echo "$1: $((SECONDS - began)) s"
}

step 360 calibrate --out "$out/profile.json" --check "$out/heldout.json" | tee "$out/heldout.txt"
# Its budgets end at 2,048, and the mixed workload has images of 4,096 tokens, on which vLLM 0.33 fails (D1): --cover.
step 220 compare --profile "$out/profile.json" --out "$out/validation.json" \
    --workload pull-request --workload mixed --workload small-many \
    --config "vLLM auto=auto" --config "pull request=$published" --config advised=advised --cover --max-graphs 10 \
    --calls 16 --repeats 6 --warmup 1 | tee "$out/validation.txt"
du -sh "$out"
