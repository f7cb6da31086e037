"""What recording a ledger adds to an encoder call on the host.

Measured: the plugin's own wrappers, file included, around functions of vLLM's names and call order that do nothing,
minus the same functions without wrappers; blocks of calls in alternation (ABBA), CPU seconds of the thread, median of
blocks. With a CUDA device each call also records and later reads two events, as in a server.

Not measured: the encoder, vLLM's own work around it, and what the two events cost on the GPU.

    python -m benchmarks.ledger --out ledger.json
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from workbench.encoder import ledger_plugin
from workbench.encoder.ledger_plugin import MANAGER, RUNNER_V2, Recorder
from workbench.files import write_json

CALLS = 500  # per block
BLOCKS = 20
ITEMS = (1, 4, 16, 64)
MAX_ITEMS = 4  # per batch
TARGET_US = 20.0


def cuda_event() -> Callable[..., Any] | None:
    """Return torch's CUDA event where there is a device."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch.cuda.Event if torch.cuda.is_available() else None


class Manager:
    """The call order of `EncoderCudaGraphManager`, without work."""

    model, token_budgets, max_batch_size, max_frames_per_batch, use_dp = None, (256,), MAX_ITEMS, 0, False

    def __init__(self, items: int) -> None:
        self.specs = [SimpleNamespace(output_tokens=64)] * items
        self.outputs = [np.empty((64, 0))] * items
        self.batches = [list(range(first, min(first + MAX_ITEMS, items))) for first in range(0, items, MAX_ITEMS)]

    def _get_item_specs(self, _: Any) -> Any:
        return self.specs

    def _select_items(self, mm_kwargs: Any, _: list[int]) -> Any:
        return mm_kwargs

    def _run_budget_graph(self, mm_kwargs: Any, _: int) -> Any:
        return self._get_item_specs(mm_kwargs)

    def _execute_local(self, mm_kwargs: Any) -> Any:
        self._get_item_specs(mm_kwargs)
        for batch in self.batches:
            self._select_items(mm_kwargs, batch)
            self._run_budget_graph(mm_kwargs, 256)
        return self.outputs

    def execute(self, mm_kwargs: Any) -> Any:
        return self._execute_local(mm_kwargs)


class Runner:
    """The call order of `EncoderRunner`, without work; `module` holds its `group_and_batch_mm_kwargs`."""

    def __init__(self, module: ModuleType, items: int) -> None:
        self.module = module
        self.device = SimpleNamespace(type="cuda" if cuda_event() else "cpu")
        self.manager = module.EncoderCudaGraphManager(items)

    def execute_mm_encoder(self, mm_kwargs: list[Any]) -> Any:
        made: list[Any] = []
        for _, _, batch in self.module.group_and_batch_mm_kwargs(mm_kwargs):
            made.extend(self.manager.execute(batch))
        return made

    def profile_encoder_cache(self) -> None:
        """Named by the plugin, unused here."""


def functions(items: int) -> ModuleType:
    """Return a module of fresh classes that do nothing, under vLLM's names, for calls of `items` images."""
    module = ModuleType(RUNNER_V2)
    grid = SimpleNamespace(
        device=SimpleNamespace(type="cpu"), shape=(items, 3), tolist=lambda: [[1, 16, 16] for _ in range(items)]
    )

    def group_and_batch_mm_kwargs(_: Any) -> Iterator[Any]:
        yield "image", items, {"pixel_values": None, "image_grid_thw": grid}

    module.__dict__.update(
        EncoderRunner=type("EncoderRunner", (Runner,), dict(vars(Runner))),
        EncoderCudaGraphManager=type("EncoderCudaGraphManager", (Manager,), dict(vars(Manager))),
        group_and_batch_mm_kwargs=group_and_batch_mm_kwargs,
    )
    return module


def block(call: Callable[[list[Any]], Any], argument: list[Any]) -> float:
    """Return the CPU microseconds per call over one block."""
    start = time.thread_time_ns()
    for _ in range(CALLS):
        call(argument)
    return (time.thread_time_ns() - start) / CALLS / 1e3


def measure(items: int, folder: Path) -> dict[str, Any]:
    """Return the overhead of calls of `items` images."""
    bare, wrapped = functions(items), functions(items)
    recorder = Recorder(folder / f"{items}.jsonl", 2**30)
    for name in (RUNNER_V2, MANAGER):
        ledger_plugin._PATCHES[name](wrapped, recorder)
    argument = [("image", None)] * items
    arms = {
        "bare": bare.EncoderRunner(bare, items).execute_mm_encoder,
        "wrapped": wrapped.EncoderRunner(wrapped, items).execute_mm_encoder,
    }
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        block(arm, argument)
    for number in range(BLOCKS):
        for name in ("bare", "wrapped") if number % 2 else ("wrapped", "bare"):
            taken[name].append(block(arms[name], argument))
    if recorder.off:
        raise RuntimeError("the recorder switched itself off; there is nothing to measure")
    recorder.close()
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "items": items,
        "batches": -(-items // MAX_ITEMS),
        "overhead_us": medians["wrapped"] - medians["bare"],
        "bytes_per_call": round((folder / f"{items}.jsonl").stat().st_size / (CALLS * (BLOCKS + 1))),
        "blocks_us": taken,
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(items, Path(folder)) for items in ITEMS]
    write_json(
        out,
        {
            "timer": "time.thread_time_ns, median of blocks",
            "calls_per_block": CALLS,
            "blocks": BLOCKS,
            "cuda_events": cuda_event() is not None,
            "target_us": TARGET_US,
            "rows": rows,
        },
    )
    for row in rows:
        print(f"{row['items']:3} items, {row['batches']:2} batches: {row['overhead_us']:6.1f} us a call")


if __name__ == "__main__":
    main()
