#!/usr/bin/env bash
# One encoder call over two H200s beside one: GLM-4.1V's data-parallel encoder, and ERNIE-4.5-VL with shared weights.
#
#   bash scripts/h200_x2_dp.sh [FOLDER]       default: ranks_h200
#
# Calls: 1, 2 and 8 images of 336 x 336, a skewed mix, and of GLM-4.1V what pull request 40576 gives two GPUs: two images
# of 224 x 224, two videos of 8 such frames. Needs two H200s, and torch and vLLM 0.33 importable by $PYTHON (default
# python3); the workbench is run from this checkout. Every step has its own time limit, 240 s together, and leaves what it
# made if a later one fails: FOLDER/glm4_1v, FOLDER/glm4_1v-video and FOLDER/ernie45_vl, each with parallel.json, a folder
# per rank and the table as table.txt. Where ERNIE fails with vLLM's custom all-reduce, it is tried once more with NCCL's
# alone, as FOLDER/ernie45_vl-nccl.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-ranks_h200}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=8
# vLLM would try NVLink multicast through symmetric memory; lent machines must not use it.
export VLLM_ALLREDUCE_USE_SYMM_MEM=0
calls=(--call 336x336 --call "336x336*2" --call "336x336*8" --call 224x224,896x896,336x336,560x560)
failed=0

step() { # NAME SECONDS ARGUMENTS...
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    timeout --kill-after=5 "$seconds" "${PYTHON:-python3}" -m workbench parallel --device cuda --ranks 2 \
        --budgets 64,128,256,512,1024,2048 --max-items 8 --seconds $((seconds - 12)) --overwrite --out "$out/$name" \
        "$@" >"$out/$name.txt" 2>"$out/$name.log"
    local code=$?
    cat "$out/$name.txt"
    tail -n 5 "$out/$name.log"
    [ -d "$out/$name" ] && mv "$out/$name.txt" "$out/$name/table.txt"
    echo "$name: exit code $code, $((SECONDS - began)) s"
    return $code
}

step glm4_1v 90 --model glm4_1v --repeats 40 "${calls[@]}" --call "224x224*2" || failed=1
step glm4_1v-video 65 --model glm4_1v --repeats 40 --max-frames 8 --call "224x224x8*2" || failed=1
left=$((240 - SECONDS))
if ! step ernie45_vl $((left < 85 ? left : 85)) --model ernie45_vl --tp-mode weights --repeats 30 "${calls[@]}"; then
    failed=1
    left=$((240 - SECONDS))
    [ "$left" -gt 35 ] && step ernie45_vl-nccl "$left" --model ernie45_vl --tp-mode weights --repeats 15 \
        --disable-custom-all-reduce "${calls[@]}"
fi
exit $failed
