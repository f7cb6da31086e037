"""Sweeps without an engine: a worker that invents times, and fails, dies or waits as a task's name says."""

import os
import signal
import sys
import time
from pathlib import Path

from tests.runs import make_run
from workbench.comparison import CallTiming, Comparison, ConfigurationTiming
from workbench.errors import WorkbenchError
from workbench.fleet import SCHEMA_VERSION, Encoder, InProcess, OnRay, Request, Task, Worker, sweep
from workbench.run import Environment


class Invented(Worker):
    """Writes each task's name into the file `measured` of the folder that the request calls its workload."""

    def prepare(self) -> None:
        """Nothing to build; a seed of 13 stands for a machine that cannot."""
        if self.request.encoder.seed == 13:
            raise WorkbenchError("no GPU here; use --device cpu")

    def compare(self, task: Task) -> tuple[Environment, Comparison]:
        folder = Path(self.request.workload)
        with (folder / "measured").open("a") as log:
            log.write(f"{task.name}\n")
        if task.name.startswith("refused"):
            raise WorkbenchError("this one does not fit; take fewer budgets")
        if task.name.startswith("breaks"):
            raise RuntimeError("mat1 and mat2")
        if task.name.startswith("dies") and (task.name == "dies always" or not (folder / "died").exists()):
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while task.name.startswith("waits") and not (folder / "go").exists():
            time.sleep(0.05)
        run = make_run()
        calls = [CallTiming(tokens=[64], wall_us=[1e3] * self.request.repeats) for _ in self.request.calls]
        timing = ConfigurationTiming(name=task.name, budgets=task.budgets, max_items=1, capture=[], calls=calls)
        return run.environment, Comparison(
            workload="invented", model=run.model, replay="static_replay", eager_served=calls, configurations=[timing]
        )


def request(folder: Path, *names: str, repeats: int = 2, seed: int = 0, device: str = "cpu") -> Request:
    """One task of a name each; the worker keeps its log in `folder`."""
    fields: dict[str, object] = dict.fromkeys(Encoder.__struct_fields__)
    fields |= {"model": "ernie45_vl", "dtype": "bfloat16", "seed": seed, "device": device}
    fields |= {"max_model_len": 16_384, "max_num_batched_tokens": 8192}
    return Request(
        schema_version=SCHEMA_VERSION,
        workbench="0",
        encoder=Encoder(**fields),  # type: ignore[arg-type]
        workload=str(folder),
        calls=[[(1, 16, 16)]],
        repeats=repeats,
        warmup=0,
        tasks=[Task(name=name, budgets=[64], max_items=1) for name in names],
    )


def measured(folder: Path) -> list[str]:
    """Names of the tasks that were begun, in order."""
    return (folder / "measured").read_text().splitlines()


if __name__ == "__main__":  # a head to be killed: FOLDER ADDRESS NAME ..., the address empty for this process
    where, address, *wanted = sys.argv[1:]
    executor = OnRay(address, 1, Invented) if address else InProcess(Invented)
    sweep(request(Path(where), *wanted), Path(where) / "sweep", executor)
