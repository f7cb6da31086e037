#!/usr/bin/env bash
# A sweep on Ray over two H200s: a worker killed, then the sweep itself killed, then resumed, and nothing lost.
#
#   bash scripts/h200_x2_ray.sh [FOLDER] [OPTION of workbench sweep...]     default: sweep_x2
#
# See sweep_trial.py for what is done and checked. Needs two H200s, and torch, vLLM 0.33 and Ray importable by $PYTHON
# (default python3); the workbench is run from this checkout. Ended after 170 s. Leaves FOLDER with the sweep, the logs
# of its two parts, what the GPUs did, and check.json.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-sweep_x2}
shift || true
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# Installed without byte code, vLLM is compiled at every import, in every worker.
for package in vllm transformers ray; do
    folder=$("$python" -c "import importlib.util as u; print(u.find_spec('$package').submodule_search_locations[0])")
    "$python" -m compileall -q -j 0 "$folder" >/dev/null || true # a file of another Python version in it is no loss
done

timeout --kill-after=20 170 "$python" scripts/sweep_trial.py "$out" "$@"
