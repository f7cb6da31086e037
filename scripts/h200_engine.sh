#!/usr/bin/env bash
# The pull requests' own benchmarks in the whole engine: eager, their budgets and, for ERNIE-4.5-VL, advised budgets.
#
#   bash scripts/h200_engine.sh [FOLDER] [WORKLOAD...]     default: served; pull-request mixed small-many
#   SERVE=1 bash scripts/h200_engine.sh server glm-video   a server and its client in place of the offline benchmark
#
# Workloads of ERNIE-4.5-VL: pull-request, mixed, small-many; of GLM-4.1V: glm-image, glm-video.
# Needs an H200, and torch, vLLM 0.33 and the workbench as an installed package (its plugin is found by its metadata)
# importable by $PYTHON (default python3). Each workload is two or three arms, each ended after ARM_SECONDS (default 110), so it
# is over after 6 minutes at the latest and all three after 17; run one workload a call where a call is limited. An arm
# took 34 to 108 s on one H200, most of it the start of the engine.
# Leaves FOLDER-WORKLOAD/summary.json, ledgers, logs and the explanation as explanation.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-served}
shift || true
workloads=("$@")
((${#workloads[@]})) || workloads=(pull-request mixed small-many)
python=${PYTHON:-python3}
limit=${ARM_SECONDS:-110}
published=128,256,512,1024,1536,2048:4
declare -A prompts=([pull-request]=400 [mixed]=150 [small-many]=60 [glm-image]=200 [glm-video]=100)
declare -A graph=([pull-request]=$published [small-many]=$published [glm-image]=$published [glm-video]=$published:32)
graph[mixed]=128,256,512,1024,1536,2048,4096:4 # its images of 4,096 tokens would end the engine (D1)

# Installed without byte code, vLLM is compiled at every import, in every process.
for package in vllm transformers torch; do
    folder=$("$python" -c "import importlib.util as u; print(u.find_spec('$package').submodule_search_locations[0])")
    "$python" -m compileall -q -j 0 "$folder" >/dev/null || true # a file of another Python version in it is no loss
done

failed=0
for workload in "${workloads[@]}"; do
    began=$SECONDS
    options=(--config "graph=${graph[$workload]}")
    case $workload in
    glm-*) options+=(--model glm4_1v) ;;
    *) options+=(--config advised=advised --profile workbench/recordings/costs_h200_ernie45_vl/profile.json) ;;
    esac
    if [ -n "${SERVE:-}" ]; then options+=(--serve); fi
    timeout --kill-after=10 $((3 * limit + 30)) "$python" -m workbench engine-bench --workload "$workload" \
        --prompts "${prompts[$workload]}" "${options[@]}" --arm-seconds "$limit" --out "$out-$workload" --overwrite \
        >"$out-$workload.txt" || failed=1
    cat "$out-$workload.txt"
    mkdir -p "$out-$workload"
    mv "$out-$workload.txt" "$out-$workload/explanation.txt"
    echo "$workload: $((SECONDS - began)) s"
done
exit $failed
