"""The pull requests' own `vllm bench mm-processor`, encoder graphs off and on, with the ledger recording.

Measured: vLLM's `encoder_forward_ms` per request, and from the ledger what that table hides: images per
encoder call, replays per budget, hits, host and GPU time per call. The model folder holds no weights and its
language model is one small layer, so end-to-end times mean nothing. Compilation is off (`"mode": 0`) in both
arms.

Not measured: what the ledger adds (`benchmarks.ledger`), `vllm serve` under a request rate.

    python -m benchmarks.served_ledger --model ernie45_vl --prompts 1000 --out served
"""

import argparse
import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from workbench.encoder.bootstrap import child_environment
from workbench.encoder.checkpoint import make_checkpoint
from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.ledger import ENVIRONMENT_VARIABLE, hit_table, read_ledger, summarize
from workbench.models import model_facts

# Both pull requests' budgets and items; GLM-4.1V's also sets frames.
BUDGETS = [128, 256, 512, 1024, 1536, 2048]
GRAPH = {
    "cudagraph_mm_encoder": True,
    "encoder_cudagraph_token_budgets": BUDGETS,
    "encoder_cudagraph_max_vision_items_per_batch": 4,
}
BASE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
ARMS: dict[str, dict[str, Any]] = {"eager": BASE, "graph": BASE | GRAPH}


def command(folder: Path, arguments: tuple[str, ...], config: dict[str, Any], prompts: int, result: Path) -> list[str]:
    """Return the pull request's command for one arm.

    `--limit-mm-per-prompt` is added: the benchmark's own random-mm limit does not set the server's, and with
    GLM-4.1V's default one a graph holds 600 frames per item (defect D2).
    """
    image = '{"image": 1, "video": 0}'
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "mm-processor", "--model", str(folder)),
        *arguments,
        *("--max-model-len", "4096", "--limit-mm-per-prompt", image),
        *("--dataset-name", "random-mm", "--random-mm-base-items-per-request", "1"),
        *("--random-mm-num-mm-items-range-ratio", "0.0", "--random-mm-bucket-config", "{(224, 224, 1): 1.0}"),
        *("--random-mm-limit-mm-per-prompt", image, "--num-prompts", str(prompts), "--seed", "42"),
        *("--compilation-config", json.dumps(config), "--output-json", str(result)),
    ]


def run_arm(
    name: str, number: int, folder: Path, arguments: tuple[str, ...], prompts: int, out: Path
) -> dict[str, Any]:
    """Run one arm once; return vLLM's figures beside the ledger's."""
    stem = f"{number}-{name}"
    ledger, result, log = (out / f"{stem}.{kind}" for kind in ("ledger.jsonl", "vllm.json", "log"))
    environment = child_environment() | {ENVIRONMENT_VARIABLE: str(ledger.absolute())}
    with log.open("wb") as output:
        made = subprocess.run(
            command(folder, arguments, ARMS[name], prompts, result.absolute()),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if made.returncode or not result.is_file():
        raise WorkbenchError(f"vLLM ended with {made.returncode} in arm {name}; its log is {log}")
    read = read_ledger(ledger)
    return {
        "arm": name,
        "encoder_forward_ms": json.loads(result.read_text())["mm_processor_stats"]["encoder_forward_ms"],
        "ledger": msgspec.to_builtins(summarize(read)),
        "hits": msgspec.to_builtins(hit_table(read)),
        "lost": read.lost,
    }


def main() -> None:
    """Run the arms in ABBA order, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ernie45_vl")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=1, help="pairs of arms; every second pair in reverse order")
    parser.add_argument("--tiny", action="store_true", help="two small layers instead of the real vision tower")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for ledgers, vLLM's JSON, logs and summary.json"
    )
    asked = parser.parse_args()
    if not entry_points(group="vllm.general_plugins", name="workbench_ledger"):
        raise WorkbenchError("vLLM does not see the plugin; install the workbench as a package (pip install -e .)")
    asked.out.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(model_facts(asked.model), asked.out / "model", full=not asked.tiny, overwrite=True)
    order = [name for pair in range(asked.repeats) for name in (ARMS if pair % 2 == 0 else reversed(ARMS))]
    rows = [
        run_arm(name, number, checkpoint.folder, checkpoint.arguments, asked.prompts, asked.out)
        for number, name in enumerate(order)
    ]
    write_json(asked.out / "summary.json", {"model": asked.model, "prompts": asked.prompts, "arms": ARMS, "rows": rows})
    for row in rows:
        figures, ledger = row["encoder_forward_ms"], row["ledger"]
        gpu = "no GPU" if ledger["gpu_us"] is None else f"GPU {ledger['gpu_us'] / 1e3:.2f} ms"
        print(
            f"{row['arm']}: encoder_forward_ms mean {figures['mean']:.2f} median {figures['median']:.2f} "
            f"p99 {figures['p99.0']:.2f}; {ledger['items']} images in {ledger['calls']} calls, {ledger['hits']} hits; "
            f"a call {ledger['host_us'] / 1e3:.2f} ms on the host, {gpu} (median)"
        )


if __name__ == "__main__":
    try:
        main()
    except WorkbenchError as error:
        sys.exit(f"served_ledger: {error}")
