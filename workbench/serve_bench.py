"""`vllm bench serve` against `vllm serve`, arm after arm: what a client sees of encoder graphs.

    from workbench.engine_bench import Setting, run_bench
    from workbench.serve_bench import explain_served

    bench = run_bench(Setting("glm4_1v", prompts=100), {"eager": None, "graph": configuration}, Path("out"), serve=True)
    print(*explain_served(bench), sep="\\n")

The measures are the GLM pull request's: time to first token (TTFT), time per output token (TPOT), time between tokens
(ITL). Each run starts a server of its own, with the ledger on, and ends it. The language model in the folder is one
small layer: so TTFT is the waiting, processing and encoding of images, and TPOT and ITL are no model's; between arms
they differ where encoding one request holds up the tokens of others.
"""

import socket
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from workbench.budgets import Configuration
from workbench.engine_bench import (
    EAGER,
    ENGINE_STAGES,
    ArmProcess,
    ArmRun,
    EngineBench,
    about_graphs,
    arm_environment,
    average,
    compilation_config,
    end,
    start,
)
from workbench.errors import WorkbenchError
from workbench.files import read_json
from workbench.ingest.bench import is_serve, serve
from workbench.ingest.external import External, Measure
from workbench.ledger import Ledger, read_ledger
from workbench.published import SERVED_PULL_REQUESTS

# vLLM's names in `vllm bench serve`, and what people say.
MEASURES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between tokens",
    "e2el": "end to end",
}
_HOST = "127.0.0.1"


class ServedArm(ArmProcess):
    """One arm: a server, then the client that measures it. The arm's time limit is for both together."""

    log_stages: tuple[tuple[str, str], ...] = (
        *ENGINE_STAGES,
        ("server", "Application startup complete"),
        ("requests", "Serving Benchmark Result"),
    )

    def follow(self, configuration: Configuration | None, on_stage: Callable[[str], None]) -> None:
        """Start the server, run the client, end the server."""
        self.prepare()
        folder, port = str(self.folder.absolute()), _free_port()
        named = ("--served-model-name", self.setting.model)
        command = [
            *("serve", folder, *named, "--host", _HOST, "--port", str(port)),
            *self.setting.engine_arguments(self.arguments, compilation_config(configuration)),
        ]
        log = self.log.with_suffix(".server.log")
        with log.open("wb") as output:
            server = start([*self.launcher, *command], arm_environment(self.ledger), output)
            try:
                if self._await(server, log, on_stage):
                    self.run(self._client(folder, named, port), arm_environment(None), on_stage)
            finally:
                end(server)

    def _await(self, server: "subprocess.Popen[bytes]", log: Path, on_stage: Callable[[str], None]) -> bool:
        """Wait until the server takes requests; else say why not."""
        ended = self.watch(server, log, on_stage, until="server")
        if ended is not None:
            self.error = f"the server ended with {ended}, {self.where()}; its log is {log.name}"
        elif self.seconds > self.setting.arm_seconds:
            self.error = f"ended after {self.seconds:.0f} s, {self.where()}; the server's log is {log.name}"
        return not self.error

    def _client(self, folder: str, named: tuple[str, str], port: int) -> list[str]:
        """Return vLLM's arguments for the client."""
        return [
            *("bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
            *("--base-url", f"http://{_HOST}:{port}", "--model", folder, *named, *self.setting.data_arguments()),
            *("--percentile-metrics", ",".join(MEASURES), "--ignore-eos"),
            *("--save-result", "--save-detailed", "--result-filename", str(self.result.absolute())),
        ]

    def ingested(self) -> External:
        """Read the client's result; see `ArmProcess`."""
        document = read_json(self.result, dict[str, Any])
        if not is_serve(document):
            raise WorkbenchError(f"{self.result} is no result of vllm bench serve")
        if document.get("completed") != self.setting.prompts:
            raise WorkbenchError(
                f"{document.get('completed')} of {self.setting.prompts} requests were answered; the server's log is "
                f"{self.log.with_suffix('.server.log').name}"
            )
        return serve(document, self.result.stem)

    def served(self) -> tuple[Ledger, list[str]]:
        """Return the whole ledger: the client sends its first request once more, before it measures."""
        return read_ledger(self.ledger), []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def measured(run: ArmRun, name: str) -> Measure | None:
    """Return one of `MEASURES` of a run, microseconds."""
    measures = () if run.vllm is None else run.vllm.measures
    return next((measure for measure in measures if measure.name == name), None)


def served_table(bench: EngineBench) -> list[dict[str, Any]]:
    """Return one row per run that gave a result, milliseconds, as the pull request's tables have them."""
    rows: list[dict[str, Any]] = []
    for run in bench.runs:
        if run.error is not None:
            continue
        row: dict[str, Any] = {"run": run.number, "arm": run.arm}
        for name in MEASURES:
            found = measured(run, name)
            values = (None,) * 3 if found is None else (found.mean, found.median, found.percentiles.get("99"))
            row |= {
                f"{name.upper()} {statistic} ms": None if value is None else value / 1e3
                for statistic, value in zip(("mean", "median", "P99"), values, strict=True)
            }
        rate = measured(run, "request_throughput")
        rows.append(row | {"requests/s": None if rate is None else rate.mean})
    return rows


def explain_served(bench: EngineBench) -> list[str]:
    """Say what the runs show: the client's times per arm, the encoder behind them, and arm against arm."""
    sentences = [f"Arm {run.arm} (run {run.number}) gave nothing: {run.error}." for run in bench.runs if run.error]
    done = [run for run in bench.runs if run.error is None]
    arms: dict[str, list[ArmRun]] = {}
    for run in done:
        arms.setdefault(run.arm, []).append(run)
    for runs in arms.values():
        sentences += [f"Arm {runs[0].arm}: {finding}." for finding in runs[0].findings]
        sentences += [*_about(runs, bench.prompts), *about_graphs(runs[0])]
    for name, runs in arms.items():
        if name != EAGER and EAGER in arms:
            sentences += _against(arms[EAGER], runs)
    published = SERVED_PULL_REQUESTS.get((bench.model, bench.workload))
    if published is not None and done:
        times = ", ".join(f"{name.upper()} {off / on:.2f}" for name, (off, on) in published.means.items())
        sentences.append(
            f"{published.source} reports, for a whole model on {published.gpu} ({published.workload}), mean times off "
            f"over on of {times}; only ratios compare."
        )
    if done:
        sentences.append(
            "The language model is one small layer: the times between tokens are no model's, and a real one takes "
            "longer until the first."
        )
    return sentences


def _mean(runs: Iterable[ArmRun], name: str, percentile: str | None = None) -> float | None:
    """A measure's mean, or percentile, averaged over runs; None where one lacks it."""
    found = [measured(run, name) for run in runs]
    return average(
        None if one is None else one.percentiles.get(percentile) if percentile else one.mean for one in found
    )


def _about(runs: list[ArmRun], prompts: int) -> list[str]:
    """The client's times of an arm, and what the ledger says about its encoder."""
    first, tail = _mean(runs, "ttft"), _mean(runs, "ttft", "99")
    if first is None or tail is None:
        return []
    times = len(runs)
    sentences = [
        f"{runs[0].arm}: the first token came after {first / 1e3:.2f} ms in the mean and {tail / 1e3:.2f} ms at P99"
        + (f", averaged over {times} runs." if times > 1 else ".")
    ]
    run = runs[0]
    if run.calls is not None and run.encoder_us is not None and run.calls.calls:
        sentences.append(
            f"{run.arm}: {run.calls.items:,} items of {prompts:,} requests met in {run.calls.calls:,} encoder "
            f"calls, {run.calls.items / run.calls.calls:.1f} a call; the encoder took {run.encoder_us / 1e3:.2f} ms "
            "of the server in all."
        )
    return sentences


def _against(eager: list[ArmRun], runs: list[ArmRun]) -> list[str]:
    """How an arm's client differs from the eager one's."""
    if not any(run.calls is not None and run.calls.hits for run in runs):
        return [f"{runs[0].arm} and eager ran the same encoder: what differs is what two servers differ by."]
    said = []
    for name in ("ttft", "tpot", "itl"):
        for statistic, percentile in (("mean", None), ("P99", "99")):
            before, after = _mean(eager, name, percentile), _mean(runs, name, percentile)
            if before and after:
                said.append(
                    f"{name.upper()} {statistic} {before / 1e3:.2f} to {after / 1e3:.2f} ms ({before / after:.2f})"
                )
    without, spent = (average(run.encoder_us for run in arm) for arm in (eager, runs))
    text = f"{runs[0].arm} against eager, off over on in brackets: {', '.join(said)}."
    if without and spent:
        text += f" The encoder: {without / 1e3:.2f} to {spent / 1e3:.2f} ms ({without / spent:.2f})."
    return [text] if said else []
