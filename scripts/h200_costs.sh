#!/usr/bin/env bash
# Measure the cost profile that ships with the workbench, check it on what it has not seen, and compare configurations.
#
#   bash scripts/h200_costs.sh [MODEL [FOLDER [STEP...]]]
#
# MODEL is ernie45_vl (the default) or glm4_1v, FOLDER by default workbench/recordings/costs_h200_MODEL, STEP calibrate
# and compare, by default both. `compare` alone takes the profile in FOLDER or, where there is none, the one that ships.
#
# Needs an H200, and torch and vLLM 0.33 importable by $PYTHON (default python3); the workbench is run from this
# checkout. A process a step, four to six minutes in all; each has a time limit. Leaves in FOLDER:
#   profile.json     costs of the model at full depth
#   heldout.json     12 random configurations on workloads that calibration does not use
#   validation.json  vLLM's own budgets, the pull request's and the advised ones on the model's workloads
#   *.txt            the tables of predicted beside measured
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:-ernie45_vl}
out=${2:-workbench/recordings/costs_h200_$model}
steps=${*:3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# Configurations are those of vLLM pull requests 45254 and 40576. Ernie's end at 2,048, and the mixed workload has images
# of 4,096 tokens, on which vLLM 0.33 fails (D1): --cover. vLLM's own frames, 600 a video, make GLM's smallest graph
# 600 times too large (D2): `calibrate` times that graph once, and here vLLM's own budgets get 64 frames for 64 items.
case $model in
ernie45_vl)
    calibrating=()
    comparing=(
        --workload pull-request --workload mixed --workload small-many
        --config "vLLM auto=auto" --config "pull request=128,256,512,1024,1536,2048:4" --cover --max-graphs 10
        --calls 16 --repeats 6
    )
    ;;
glm4_1v)
    # A replay takes two to three times as long as Ernie's, so fewer budgets and fewer samples.
    budgets=$(echo $(seq 64 32 512) $(seq 576 64 1024) $(seq 1152 128 2048) 2560 3072 4096 8192 | tr ' ' ,)
    calibrating=(--budgets "$budgets" --samples 4 --calls 5)
    comparing=(
        --workload glm-image --workload glm-video --workload glm-mixed --workload mixed
        --config "vLLM auto, 64 frames=auto:0:64" --config "pull request=64,128,256,512,1024,2048:4:32" --max-graphs 10
        --calls 8 --repeats 4
    )
    ;;
*)
    echo "no costs are recorded for $model; MODEL is ernie45_vl or glm4_1v" >&2
    exit 2
    ;;
esac

mkdir -p "$out"

step() { # SECONDS VERB OPTION...
    local limit=$1
    shift
    local began=$SECONDS
    timeout --kill-after=10 "$limit" "${PYTHON:-python3}" -m workbench "$@" --model "$model" --device cuda
    echo "$1: $((SECONDS - began)) s"
}

for each in ${steps:-calibrate compare}; do
    case $each in
    calibrate)
        step 360 calibrate --out "$out/profile.json" --check "$out/heldout.json" "${calibrating[@]}" |
            tee "$out/heldout.txt"
        ;;
    compare)
        profile=$out/profile.json
        [ -f "$profile" ] || profile=workbench/recordings/costs_h200_$model/profile.json
        step 240 compare --profile "$profile" --out "$out/validation.json" "${comparing[@]}" \
            --config advised=advised --warmup 1 | tee "$out/validation.txt"
        ;;
    *)
        echo "no step is called $each; STEP is calibrate or compare" >&2
        exit 2
        ;;
    esac
done
du -sh "$out"
