"""Items per second of the planner and of vLLM's own packing loop, on the same workloads in one process.

Measured: `arrange` + `pack` (the whole ledger), `arrange` alone, and `plan_totals` on an arrangement (what a sweep
over configurations repeats), on one thread, arrays resident, compiled code loaded from the cache. Each is the best of
several passes in CPU time, since the machine may be shared; all passes are in the JSON. vLLM's loop is the real
`EncoderCudaGraphManager._execute_local` over a model that encodes nothing, so its figure holds the packing, the item
specifications and the bookkeeping around each batch, but no GPU work; it runs on the first calls of each workload.

Not measured: reading a workload, building the CLI's JSON, the GPU.

    python -m benchmarks.planner --out planner.json
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from workbench.budgets import Configuration, Limits, Resolved, resolve
from workbench.files import write_json
from workbench.planner import Ints, arrange, pack, plan, plan_totals

ITEMS = 2_000_000
VLLM_ITEMS = 20_000
PER_CALL = (1, 4, 16, 64, 1024)
PASSES = 7
TIMER = "time.thread_time (CPU seconds of the one thread), best of passes"


def workload(per_call: int) -> tuple[Ints, Ints]:
    """Return tokens and offsets of calls of `per_call` images, log-normal between 16 and 6,177 tokens."""
    tokens = np.random.default_rng(0).lognormal(5.5, 1.0, ITEMS).clip(16, 6177).astype(np.int64)
    return tokens, np.append(np.arange(0, ITEMS, per_call), ITEMS)


def seconds(work: Callable[[], object], passes: int = PASSES) -> list[float]:
    """Return the seconds of each pass, after one that is not counted."""
    work()
    taken = []
    for _ in range(passes):
        start = time.thread_time()
        work()
        taken.append(time.thread_time() - start)
    return taken


class NoEncoder:
    """The part of a model that packing touches; items are output tokens, batches are kept."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def get_encoder_cudagraph_config(self) -> Any:
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig

        return EncoderCudaGraphConfig(modalities=["image"], buffer_keys=[], out_hidden_size=8)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderItemSpec

        return [EncoderItemSpec(input_size=4 * tokens, output_tokens=tokens) for tokens in mm_kwargs["tokens"]]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        return {"tokens": [mm_kwargs["tokens"][index] for index in indices]}

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> None:
        """Encode nothing."""

    def postprocess_encoder_output(
        self, _outputs: Any, indices: list[int], _tokens: list[int], dest: dict[int, Any], **_: Any
    ) -> None:
        self.batches.append(indices)
        dest.update(dict.fromkeys(indices, 0))


def vllm_manager(configuration: Configuration) -> Any:
    """Return vLLM's real manager over `NoEncoder`; its replays do nothing."""
    from workbench.encoder.engine import require_vllm

    require_vllm()
    from vllm.config import CompilationConfig
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    config = SimpleNamespace(
        compilation_config=CompilationConfig(**configuration.compilation_config()),
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(get_limit_per_prompt=lambda _: 0, mm_encoder_tp_mode="weights")
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    manager = EncoderCudaGraphManager(config, None, None, NoEncoder())
    manager._run_budget_graph = lambda *_, **__: manager
    return manager


def vllm_row(configuration: Configuration, resolved: Resolved, tokens: Ints, per_call: int) -> dict[str, Any]:
    """Time vLLM's loop on the first items, and check that it makes the planner's batches."""
    manager = vllm_manager(configuration)
    count = max(VLLM_ITEMS // per_call, 1) * per_call
    calls = tokens[:count].reshape(-1, per_call).tolist()

    def run() -> None:
        manager.model.batches.clear()
        for call in calls:
            manager._execute_local({"tokens": call})

    taken = seconds(run, 3)
    made = plan(tokens[:count], np.arange(0, count + 1, per_call), resolved)
    in_call = (made.arrangement.item % per_call).tolist()
    mine = [in_call[start:stop] for start, stop in zip(made.first, made.first[1:], strict=False)]
    if mine != manager.model.batches:
        raise AssertionError(f"the planner and vLLM disagree at {per_call} items per call")
    return {"items": count, "seconds": taken, "items_per_second": count / min(taken)}


def measure() -> dict[str, Any]:
    """Return one row per workload."""
    configuration = Configuration((64, 128, 256, 512, 1024, 2048, 4096), 8)
    resolved = resolve(configuration, Limits())
    rows = []
    for per_call in PER_CALL:
        tokens, offsets = workload(per_call)
        arrangement = arrange(tokens, offsets)
        timings = {
            "ledger": seconds(lambda t=tokens, o=offsets: plan(t, o, resolved)),  # type: ignore[misc]
            "arrange": seconds(lambda t=tokens, o=offsets: arrange(t, o)),  # type: ignore[misc]
            "pack": seconds(lambda a=arrangement: pack(a, resolved)),  # type: ignore[misc]
            "totals": seconds(lambda a=arrangement: plan_totals(a, resolved)),  # type: ignore[misc]
        }
        row: dict[str, Any] = {"items_per_call": per_call, "items": len(tokens)}
        row |= {
            name: {"seconds": taken, "items_per_second": len(tokens) / min(taken)} for name, taken in timings.items()
        }
        row["vllm"] = vllm_row(configuration, resolved, tokens, per_call)
        row["ledger_over_vllm"] = row["ledger"]["items_per_second"] / row["vllm"]["items_per_second"]
        rows.append(row)
    return {
        "what": "items packed per second",
        "timer": TIMER,
        "budgets": resolved.budgets,
        "max_items": resolved.max_items,
        "rows": rows,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write the JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    out = parser.parse_args(arguments).out
    result = measure()
    names = ("ledger", "arrange", "pack", "totals", "vllm")
    print("million items per second; " + TIMER)
    print(f"{'items/call':>10}" + "".join(f"{name:>10}" for name in names) + f"{'ledger/vllm':>13}")
    for row in result["rows"]:
        figures = "".join(f"{row[name]['items_per_second'] / 1e6:>10.2f}" for name in names)
        print(f"{row['items_per_call']:>10}{figures}{row['ledger_over_vllm']:>13.0f}")
    if out is not None:
        write_json(out, result)


if __name__ == "__main__":
    main()
