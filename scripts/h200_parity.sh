#!/usr/bin/env bash
# Make the parity sessions that ship with the workbench, on an H200, with the project's own command line.
#
#   bash scripts/h200_parity.sh [FOLDER]      default: workbench/recordings
#
# Needs torch and vLLM 0.33 importable by $PYTHON (default python3); the workbench is run from this checkout.
# The five sessions run side by side on one GPU: they compare outputs and time nothing. The matrices
# take about two minutes, the planted faults two to four more; parity.json is rewritten after each fault. Those of the
# variants also replay vLLM's own graphs, so they take longer.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-workbench/recordings}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4

observe() { # NAME OPTION...
    local name=$1 log
    shift
    log=$(mktemp)
    # Exit code 1 means that something was found, which D1, D4 and D6 see to.
    "${PYTHON:-python3}" -m workbench parity --device cuda --name "$name" --out "$out/$name" "$@" \
        >"$log" 2>&1
    echo "== $name: exit code $?"
    tail -n 40 "$log"
    rm "$log"
}

observe parity_ernie45_vl --model ernie45_vl --attention-backend FLASH_ATTN --clean 100 --faults --fault-depth 2 &
observe parity_ernie45_vl-triton --model ernie45_vl --attention-backend TRITON_ATTN --clean 50 &
observe parity_glm4_1v --model glm4_1v --attention-backend FLASH_ATTN --clean 50 --faults --fault-depth 2 &
observe parity_ernie45_vl-variants --model ernie45_vl --variants all --attention-backend FLASH_ATTN --clean 100 \
    --faults --fault-depth 2 &
observe parity_glm4_1v-variants --model glm4_1v --variants all --attention-backend FLASH_ATTN --clean 50 &
wait
