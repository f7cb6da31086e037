"""The pull requests' own `vllm bench mm-processor` in the whole engine, with the ledger recording.

Measured: vLLM's `encoder_forward_ms` per request, and from the ledger what that table hides: images per
encoder call, replays per budget, hits, host and GPU time per call. The model folder holds no weights and its
language model is one small layer, so end-to-end times mean nothing. Compilation is off (`"mode": 0`) in all
arms. With a cost profile, the calls that the ledger saw are planned and priced: `predicted_ms` per image.

Not measured: what the ledger adds (`benchmarks.ledger`), `vllm serve` under a request rate.

    python -m benchmarks.served_ledger --model ernie45_vl --prompts 1000 --out served
    python -m benchmarks.served_ledger --workload mixed --prompts 150 --profile profile.json \\
        --config graph=128,256,512,1024,1536,2048,4096:4 --config advised=advised --out served
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from workbench.advisor import advise
from workbench.budgets import Configuration, Limits, resolve
from workbench.commands.costs import parse_named
from workbench.costs import CostModel, read_profile
from workbench.encoder.bootstrap import child_environment
from workbench.encoder.checkpoint import make_checkpoint
from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.ledger import ENVIRONMENT_VARIABLE, hit_table, read_ledger, summarize, to_workload
from workbench.models import model_facts
from workbench.planner import plan
from workbench.presets import PRESETS
from workbench.random_mm import RandomMM

# Both pull requests' budgets and items; GLM-4.1V's also sets frames.
PULL_REQUEST = "graph=128,256,512,1024,1536,2048:4"
BASE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
EAGER = "eager"
MAX_MODEL_LEN = 16_384
PULL_REQUEST_MODEL_LEN = 4096  # the pull requests' own


@dataclass(frozen=True)
class Bench:
    """What all arms share: the folder, the workload's random-mm setting and the server's limits."""

    folder: Path
    arguments: tuple[str, ...]
    recipe: RandomMM
    prompts: int
    max_model_len: int

    def command(self, config: dict[str, Any], result: Path) -> list[str]:
        """Return the pull request's command for one arm.

        `--limit-mm-per-prompt` is added: the benchmark's own random-mm limit does not set the server's, and with
        GLM-4.1V's default one a graph holds 600 frames per item (defect D2).
        """
        limit = json.dumps(dict(self.recipe.limit))
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "mm-processor", "--model", str(self.folder)),
            *self.arguments,
            *("--max-model-len", str(self.max_model_len), "--limit-mm-per-prompt", limit),
            # The language model is one small layer; on a CPU vLLM asks for this share of all memory.
            *("--gpu-memory-utilization", "0.4"),
            *("--dataset-name", "random-mm", "--random-mm-base-items-per-request", str(self.recipe.base_items)),
            *("--random-mm-num-mm-items-range-ratio", str(self.recipe.range_ratio)),
            *("--random-mm-bucket-config", str(dict(self.recipe.buckets))),
            *("--random-mm-limit-mm-per-prompt", limit, "--num-prompts", str(self.prompts)),
            *("--seed", str(self.recipe.seed), "--compilation-config", json.dumps(config)),
            *("--output-json", str(result)),
        ]


def run_arm(name: str, number: int, configuration: Configuration | None, bench: Bench, out: Path) -> dict[str, Any]:
    """Run one arm once; return vLLM's figures beside the ledger's. No configuration: encoder graphs off."""
    stem = f"{number}-{name}"
    ledger, result, log = (out / f"{stem}.{kind}" for kind in ("ledger.jsonl", "vllm.json", "log"))
    environment = child_environment() | {ENVIRONMENT_VARIABLE: str(ledger.absolute())}
    config = BASE | (configuration.compilation_config() if configuration else {})
    with log.open("wb") as output:
        made = subprocess.run(
            bench.command(config, result.absolute()),
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
        "config": config,
        "encoder_forward_ms": json.loads(result.read_text())["mm_processor_stats"]["encoder_forward_ms"],
        "ledger": msgspec.to_builtins(summarize(read)),
        "hits": msgspec.to_builtins(hit_table(read)),
        "lost": read.lost,
    }


def predicted_ms(model: CostModel, ledger: Path, configuration: Configuration, limits: Limits) -> float | None:
    """Milliseconds of encoder time per image that the profile predicts for the calls that a ledger saw.

    None where the workload holds an item that no budget holds and the model's fallback fails.
    """
    facts = model_facts(model.profile.model.key)
    calls = to_workload(read_ledger(ledger), facts)
    made = plan(calls.tokens, calls.offsets, resolve(configuration, limits))
    costs = model.call_costs(made)
    return float(costs.wall_us.sum() / 1e3 / calls.items) if costs.replays_only.all() else None


def advised(model: CostModel | None, ledger: Path, limits: Limits) -> Configuration:
    """The advisor's answer for the calls that the arm before recorded: traffic as the scheduler groups it.

    Raises:
        WorkbenchError: no profile to advise from.
    """
    if model is None:
        raise WorkbenchError("NAME=advised needs a cost profile; pass --profile")
    calls = to_workload(read_ledger(ledger), model_facts(model.profile.model.key))
    return advise(calls, model, limits).answer.configuration


def main() -> None:
    """Run the arms in ABBA order, print a table, write JSON after every arm."""
    asked = _arguments()
    if not entry_points(group="vllm.general_plugins", name="workbench_ledger"):
        raise WorkbenchError("vLLM does not see the plugin; install the workbench as a package (pip install -e .)")
    asked.out.mkdir(parents=True, exist_ok=True)
    facts = model_facts(asked.model)
    model_len = PULL_REQUEST_MODEL_LEN if asked.workload == "pull-request" else MAX_MODEL_LEN
    limits = Limits.of(facts, max_model_len=model_len, max_num_batched_tokens=model_len, video_limit=0)
    priced = None if asked.profile is None else CostModel(read_profile(asked.profile, asked.model))
    arms: dict[str, Configuration | None] = {} if asked.no_eager else {EAGER: Configuration()}
    arms |= dict(parse_named(text) for text in asked.config or [PULL_REQUEST])
    checkpoint = make_checkpoint(facts, asked.out / "model", full=not asked.tiny, overwrite=True)
    bench = Bench(checkpoint.folder, checkpoint.arguments, PRESETS[asked.workload].recipe, asked.prompts, model_len)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(n for i in range(asked.repeats) for n in (arms if i % 2 == 0 else reversed(arms))):
        if arms[name] is None:
            arms[name] = advised(priced, asked.out / f"{number - 1}-{rows[-1]['arm']}.ledger.jsonl", limits)
        configuration = None if name == EAGER else arms[name]
        row = run_arm(name, number, configuration, bench, asked.out)
        if priced is not None and configuration is not None:
            ledger = asked.out / f"{number}-{name}.ledger.jsonl"
            row["predicted_ms"] = predicted_ms(priced, ledger, configuration, limits)
        rows.append(row)
        _print(row)
        summary = {"model": asked.model, "workload": asked.workload, "prompts": asked.prompts, "rows": rows}
        write_json(asked.out / "summary.json", summary)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ernie45_vl")
    parser.add_argument("--workload", default="pull-request", choices=sorted(PRESETS))
    parser.add_argument("--config", action="append", help="NAME=128,256:4, repeatable; default: the pull request's")
    parser.add_argument("--no-eager", action="store_true", help="leave the arm with encoder graphs off out")
    parser.add_argument("--profile", type=Path, help="a cost profile, for predictions and NAME=advised")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=1, help="rounds of all arms; every second in reverse order")
    parser.add_argument("--tiny", action="store_true", help="two small layers instead of the real vision tower")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for ledgers, vLLM's JSON, logs and summary.json"
    )
    return parser.parse_args()


def _print(row: dict[str, Any]) -> None:
    figures, ledger, predicted = row["encoder_forward_ms"], row["ledger"], row.get("predicted_ms")
    gpu = "no GPU" if ledger["gpu_us"] is None else f"GPU {ledger['gpu_us'] / 1e3:.2f} ms"
    print(
        f"{row['arm']}: encoder_forward_ms mean {figures['mean']:.2f} median {figures['median']:.2f} "
        f"p99 {figures['p99.0']:.2f}; {ledger['items']} images in {ledger['calls']} calls, {ledger['hits']} hits; "
        f"a call {ledger['host_us'] / 1e3:.2f} ms on the host, {gpu} (median)"
        + ("" if predicted is None else f"; predicted {predicted:.2f} ms an image"),
        flush=True,
    )


if __name__ == "__main__":
    try:
        main()
    except WorkbenchError as error:
        sys.exit(f"served_ledger: {error}")
