#!/usr/bin/env python3
"""Try what a live sweep promises: on a Ray of this machine, kill a worker, kill the sweep, resume it, lose nothing.

    python scripts/sweep_trial.py FOLDER [OPTION of workbench sweep...]

1. `ray start --head` with every GPU there is, then `workbench sweep` of 48 configurations, one worker per GPU.
2. After three results one worker gets SIGKILL. Ray must start another and run its task again.
3. When that task's result is there, the command gets SIGKILL.
4. The same command with `--resume`.

FOLDER/check.json says what was found. Exit code 1 unless every configuration has a result that did not fail, the
results from before the kill are the same bytes, two tasks ran at the same time, and every GPU worked. Without a GPU,
`--device cpu --depth 1 --width 160 --workers 2` tries the same on static replays.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

PORT = 26_391
MARK = "WORKBENCH_SWEEP_TRIAL"  # in the environment of this trial's workers, which alone may be killed
CONFIGURATIONS = [
    f"from{low}to{high}x{items}={','.join(str(low << i) for i in range(9) if low << i <= high)}:{items}"
    for low in (64, 128, 256, 512)
    for high in (1024, 2048, 4096)
    for items in (1, 2, 4, 8)
]
BEFORE_KILL = 3
GPUS = shutil.which("nvidia-smi") is not None
Results = dict[int, bytes]


def main(out: Path, options: list[str]) -> int:
    """Run the trial in the folder `out`; return the exit code."""
    began = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "configurations.txt").write_text("\n".join(CONFIGURATIONS) + "\n")
    sweep = out / "sweep"
    command = [
        sys.executable,
        "-m",
        "workbench",
        "sweep",
        "--workload",
        "pull-request",
        "--calls",
        "4",
        "--repeats",
        "6",
    ]
    command += [
        "--configs",
        str(out / "configurations.txt"),
        "--out",
        str(sweep),
        "--ray",
        f"127.0.0.1:{PORT}",
        *options,
    ]
    found: dict[str, object] = {"configurations": len(CONFIGURATIONS)}
    with cluster(), gpu_use(out / "gpus.csv"):
        with (out / "first.log").open("w") as log:
            head = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            wait(lambda: len(results(sweep)) >= BEFORE_KILL and workers(), head)
            begun = [n for n in range(len(CONFIGURATIONS)) if n not in results(sweep)][: len(workers())]
            victim = workers()[0]
            os.kill(victim, signal.SIGKILL)
            found |= {"worker_killed_after_s": round(time.monotonic() - began, 1), "tasks_it_could_have": begun}
            wait(lambda: all(number in results(sweep) for number in begun), head)
            before = results(sweep)
            head.kill()
            head.wait()
        found |= {"sweep_killed_after_s": round(time.monotonic() - began, 1), "results_then": len(before)}
        with (out / "resumed.log").open("w") as log:
            code = subprocess.call([*command, "--resume"], stdout=log, stderr=subprocess.STDOUT)
    found |= {"exit_code_of_resume": code} | check(sweep, before) | worked(out / "gpus.csv")
    found["seconds"] = round(time.monotonic() - began, 1)
    promises = ("all_there", "none_failed", "before_unchanged", "tasks_at_once", "all_gpus_worked")
    found["passed"] = code == 0 and all(found[name] for name in promises)
    (out / "check.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    print((out / "resumed.log").read_text()[-6000:])
    return 0 if found["passed"] else 1


@contextmanager
def cluster() -> Iterator[None]:
    """Start a Ray of this machine, with all its GPUs, for as long as the context is open."""
    secret = secrets.token_hex(32)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secret, "RAY_USAGE_STATS_ENABLED": "0", MARK: secret}
    gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=True).stdout.count(b"GPU ") if GPUS else 0
    start = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={PORT}", "--include-dashboard=false"]
    start += [f"--num-gpus={gpus}"]
    ray = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *start], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait(answers, ray)
        yield
    finally:
        ray.terminate()
        try:
            ray.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(ray.pid, signal.SIGKILL)


@contextmanager
def gpu_use(file: Path) -> Iterator[None]:
    """Write index, utilisation in % and memory in MiB of every GPU into `file`, twice a second."""
    if not GPUS:
        yield
        return
    query = [
        "nvidia-smi",
        "--query-gpu=index,utilization.gpu,memory.used",
        "--format=csv,noheader,nounits",
        "-lms",
        "500",
    ]
    with file.open("w") as log:
        watcher = subprocess.Popen(query, stdout=log)
        try:
            yield
        finally:
            watcher.terminate()
            watcher.wait()


def answers() -> bool:
    """Whether the cluster accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", PORT), 1).close()
    except OSError:
        return False
    return True


def workers() -> list[int]:
    """Return the processes of this trial that are measuring."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:  # gone, or another's
            continue
        if title.startswith(b"ray::Worker.measure") and f"{MARK}={os.environ[MARK]}".encode() in environment:
            found.append(int(process.name))
    return sorted(found)


def wait(condition: Callable[[], object], process: "subprocess.Popen[bytes]") -> None:
    """Wait until `condition`; `process` must not end before."""
    while not condition():
        if process.poll() is not None:
            sys.exit("Ray or the sweep ended too early: see first.log; more configurations, or slower calls?")
        time.sleep(0.1)


def results(sweep: Path) -> Results:
    """Return the files of the results there are, by number."""
    return {int(file.stem): file.read_bytes() for file in sweep.glob("results/[0-9]*.json")}


def check(sweep: Path, before: Results) -> dict[str, object]:
    """Compare what is there now with the request and with what was there `before` the kill."""
    now = {number: json.loads(data) for number, data in results(sweep).items()}
    ends = {number: (sweep / "results" / f"{number:04}.json").stat().st_mtime for number in now}
    spans = sorted((ends[number] - one["seconds"], ends[number]) for number, one in now.items())
    return {
        "all_there": sorted(now) == list(range(len(CONFIGURATIONS))),
        "none_failed": all(one["comparison"] and not one["failed"] for one in now.values()),
        "before_unchanged": all(results(sweep).get(number) == data for number, data in before.items()),
        "tasks_at_once": sum(begin < end for (_, end), (begin, _) in pairwise(spans)),
        "task_seconds": round(sum(one["seconds"] for one in now.values()), 1),
    }


def worked(file: Path) -> dict[str, object]:
    """Return what each GPU did; on a machine without one, that all of them worked."""
    rows = [line.split(", ") for line in file.read_text().splitlines()] if file.exists() else []
    use: dict[str, list[tuple[int, int]]] = {}
    for index, percent, mib in (row for row in rows if len(row) == 3):
        use.setdefault(index, []).append((int(percent), int(mib)))
    told = [
        {
            "index": int(index),
            "samples": len(seen),
            "samples_busy": sum(percent > 0 for percent, _ in seen),
            "highest_percent": max(percent for percent, _ in seen),
            "highest_mib": max(mib for _, mib in seen),
        }
        for index, seen in sorted(use.items())
    ]
    return {"gpus": told, "all_gpus_worked": all(one["samples_busy"] for one in told)}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the cluster is ended, too
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
