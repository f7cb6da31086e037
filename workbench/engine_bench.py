"""vLLM's own `vllm bench mm-processor` in the whole engine, arm after arm, beside what the workbench predicts.

    from workbench.engine_bench import Setting, explain, run_bench

    bench = run_bench(Setting(model="glm4_1v", prompts=100), {"eager": None, "graph": configuration}, Path("served"))
    print(*explain(bench), sep="\\n")

Every arm is the pull requests' command in a process of its own, on a model folder without weights, with the encoder
ledger on. vLLM's `encoder_forward` is the time of an encoder call divided by the requests in it; what that hides is
in the ledger: how many images met in a call, which replays it became, how full they were. The language model in the
folder is one small layer, so end-to-end times mean nothing.

What makes an arm start faster and leaves the encoder alone (`FAST_START`, `_environment`): no memory profiling (so the
graphs are captured once, not twice), no profiling of the largest images, no autotuning, the engine's process forked
from one that has imported vLLM.
"""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import IO, Any, Literal

import msgspec
import numpy as np

import workbench
from workbench.advisor import advise
from workbench.budgets import DEFAULT_VIDEO_LIMIT, Configuration, Limits, resolve
from workbench.costs import CostModel, sequence_squares
from workbench.errors import WorkbenchError
from workbench.files import read_versioned, refuse_occupied, write_json
from workbench.ingest.bench import is_mm_processor, mm_processor
from workbench.ingest.external import External, Measure
from workbench.ledger import (
    ENVIRONMENT_VARIABLE,
    CallSummary,
    HitRow,
    Ledger,
    hit_table,
    read_ledger,
    summarize,
    to_workload,
)
from workbench.lifeline import bound
from workbench.lint import lint
from workbench.models import ModelFacts, model_facts
from workbench.planner import arrange, plan
from workbench.presets import PRESETS, Preset
from workbench.progress import Progress, silent
from workbench.published import PULL_REQUEST_BUDGETS, PULL_REQUEST_FRAMES, PULL_REQUEST_ITEMS
from workbench.random_mm import modality
from workbench.run import RECORDINGS, Environment, Record

SCHEMA_VERSION = 1
RESULT_FILE = "summary.json"
EAGER = "eager"
PULL_REQUEST = Configuration(PULL_REQUEST_BUDGETS, PULL_REQUEST_ITEMS)
PULL_REQUEST_MODEL_LEN = 4096
MODEL_LEN = 16_384
BATCHED_TOKENS = 16_384  # vLLM's default for `LLM` on a GPU of 70 to 160 GiB
# vLLM's random clips have 30 frames a second and GLM-4.1V samples 2 a second: of 8 frames none. On that vLLM 0.33's
# loader ends with "max() iterable argument is empty", and its processor makes a video of no tokens. So both sample all.
CLIP_FPS = 30
# The pull requests' compilation settings: the language model's decoding as a server has it, nothing compiled.
_BASE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
FAST_START = (
    *("--kv-cache-memory-bytes", str(2**32)),  # enough for one small layer; given, vLLM skips its memory profiling
    "--skip-mm-profiling",
    *("--kernel-config", '{"enable_flashinfer_autotune": false, "enable_cutedsl_warmup": false}'),
)
_VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
_POLL_SECONDS = 0.25
ENGINE_STAGES = (
    ("imports", "non-default args"),
    ("model inspection", "Resolved architecture"),
    ("engine process", "Initializing a V1 LLM engine"),
    ("weights", "Model loading took"),
    ("profiling", "KV cache size"),
    ("engine start", "init engine"),
)
_BENCH_STAGES = (
    ("data set", "warmup requests"),
    ("warm-up", "requests..."),
    ("requests", "Multimodal Processor Benchmark Results"),
)


@dataclass(frozen=True)
class Setting:
    """What all arms share.

    Attributes:
        model: registry key.
        workload: name of a preset (`workbench.presets`).
        prompts: requests per arm.
        full: the real vision tower; else two small layers.
        video_limit: videos per prompt; None: the preset's.
        input_tokens, output_tokens: of text per request, given and generated; None: the benchmark's own.
        max_model_len: the server's; None: see `model_len`.
        arm_seconds: after which an arm is ended.
    """

    model: str = "ernie45_vl"
    workload: str = "pull-request"
    prompts: int = 1000
    full: bool = True
    video_limit: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    max_model_len: int | None = None
    arm_seconds: float = 300.0

    @property
    def facts(self) -> ModelFacts:
        """The model's."""
        return model_facts(self.model)

    @property
    def preset(self) -> Preset:
        """The workload's.

        Raises:
            WorkbenchError: no such preset, or one of a modality that the model does not take.
        """
        if self.workload not in PRESETS:
            raise WorkbenchError(f"unknown workload {self.workload!r}; the presets are {', '.join(PRESETS)}")
        preset = PRESETS[self.workload]
        missing = {modality(bucket) for bucket in preset.recipe.buckets} - set(self.facts.limits)
        if missing:
            raise WorkbenchError(f"{self.facts.title} takes no {missing.pop()} here; choose another workload")
        return preset

    @property
    def model_len(self) -> int:
        """`--max-model-len`: as given, the pull requests' on their workloads, else room for many images."""
        own = self.workload in ("pull-request", "glm-image", "glm-video")
        return self.max_model_len or (PULL_REQUEST_MODEL_LEN if own else MODEL_LEN)

    @property
    def mm_limit(self) -> dict[str, int]:
        """`--limit-mm-per-prompt`. The benchmark's own random-mm limit does not set the server's."""
        limit = dict(self.preset.recipe.limit)
        return limit if self.video_limit is None else limit | {"video": self.video_limit}

    @property
    def videos(self) -> bool:
        """Whether the requests have videos."""
        return any(modality(bucket) == "video" for bucket in self.preset.recipe.buckets)

    @property
    def published(self) -> Configuration:
        """The pull requests' configuration: for videos with GLM-4.1V's frames."""
        return replace(PULL_REQUEST, max_frames=PULL_REQUEST_FRAMES) if self.videos else PULL_REQUEST

    @property
    def limits(self) -> Limits:
        """What vLLM infers budgets from."""
        return Limits.of(
            self.facts,
            max_model_len=self.model_len,
            max_num_batched_tokens=max(BATCHED_TOKENS, self.model_len),
            video_limit=self.mm_limit.get("video", DEFAULT_VIDEO_LIMIT),
        )

    def command(self, folder: Path, arguments: tuple[str, ...], config: Mapping[str, Any], result: Path) -> list[str]:
        """Return vLLM's arguments for one arm: `bench mm-processor ...`."""
        return [
            *("bench", "mm-processor", "--model", str(folder), *self.engine_arguments(arguments, config)),
            *(*self.data_arguments(), "--output-json", str(result)),
        ]

    def engine_arguments(self, arguments: tuple[str, ...], config: Mapping[str, Any]) -> list[str]:
        """Return what the engine of one arm is started with, after its model."""
        every_frame = ("--media-io-kwargs", json.dumps({"video": {"fps": CLIP_FPS}})) if self.videos else ()
        return [
            *(*arguments, *FAST_START, "--compilation-config", json.dumps(config)),
            *("--max-model-len", str(self.model_len), "--limit-mm-per-prompt", json.dumps(self.mm_limit), *every_frame),
        ]

    def data_arguments(self) -> list[str]:
        """Return which requests a benchmark of vLLM makes."""
        recipe = self.preset.recipe
        optional = (("--random-input-len", self.input_tokens), ("--random-output-len", self.output_tokens))
        return [
            *("--dataset-name", "random-mm", "--random-mm-base-items-per-request", str(recipe.base_items)),
            *("--random-mm-num-mm-items-range-ratio", str(recipe.range_ratio)),
            *("--random-mm-bucket-config", str(dict(recipe.buckets))),
            *("--random-mm-limit-mm-per-prompt", json.dumps(dict(recipe.limit)), "--num-prompts", str(self.prompts)),
            *(text for name, value in optional if value is not None for text in (name, str(value))),
            *("--seed", str(recipe.seed)),
        ]


class ArmRun(Record, frozen=True):
    """One arm, run once.

    Attributes:
        number: place in the order of all runs, from 0.
        budgets, max_items, max_frames: as asked; all None with encoder graphs off.
        findings: errors that `workbench lint` names in the configuration.
        seconds: of the process. `stages` are the seconds at which each stage of its log had ended.
        error: why there is no result; None for a run that ended well.
        vllm: the benchmark's JSON.
        calls, hits: the ledger without warm-up. `host_us`, `gpu_us`: sums over its calls.
        predicted_us: encoder time per request that the profile gives for the calls of the ledger.
        alone_us: the profile's time of a call of one image, the workload's median one.
        notes: what is missing or doubtful.
    """

    number: int
    arm: str
    budgets: list[int] | None
    max_items: int | None
    max_frames: int | None
    findings: list[str]
    seconds: float
    stages: dict[str, float]
    error: str | None = None
    vllm: External | None = None
    calls: CallSummary | None = None
    hits: list[HitRow] = []
    host_us: float | None = None
    gpu_us: float | None = None
    predicted_us: float | None = None
    alone_us: float | None = None
    notes: list[str] = []

    @property
    def forward(self) -> Measure | None:
        """vLLM's `encoder_forward` per request, microseconds."""
        measures = () if self.vllm is None else self.vllm.measures
        return next((measure for measure in measures if measure.name == "encoder_forward"), None)

    @property
    def encoder_us(self) -> float | None:
        """Of all calls, until the GPU was done: the host goes on as soon as a replay without waits is launched."""
        return None if self.host_us is None else max(self.host_us, self.gpu_us or 0.0)


class EngineBench(Record, frozen=True):
    """What `workbench engine-bench` measured; written after every arm, so `runs` may be fewer than asked.

    `kind` is the benchmark of vLLM: offline, or of a server (`workbench.serve_bench`).
    """

    schema_version: int
    workbench: str
    created: str
    environment: Environment
    model: str
    workload: str
    prompts: int
    full: bool
    profile: str | None
    runs: list[ArmRun]
    kind: Literal["mm-processor", "serve"] = "mm-processor"


def abba(names: list[str], repeats: int) -> list[str]:
    """Return the order of all runs: every second round backwards, so that a drift meets all arms alike."""
    rounds = (names if index % 2 == 0 else names[::-1] for index in range(repeats))
    return list(itertools.chain.from_iterable(rounds))


def run_bench(
    setting: Setting,
    arms: Mapping[str, Configuration | None],
    out: Path,
    *,
    profile: CostModel | None = None,
    repeats: int = 1,
    serve: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
    launcher: tuple[str, ...] = _VLLM,
) -> EngineBench:
    """Run all arms and return what they gave; `out` gets ledgers, logs, vLLM's JSON and `summary.json`.

    Args:
        arms: name to configuration. The arm `eager` has encoder graphs off; any other arm of None is advised from
            the ledger of the run before it, the traffic as the scheduler grouped it.
        out: a new folder.
        profile: costs, for predictions and advice.
        repeats: rounds of all arms in ABBA order.
        serve: measure a server, `vllm serve` and `vllm bench serve`, in place of the offline benchmark.
        launcher: the command whose arguments are vLLM's.

    Raises:
        WorkbenchError: no such preset or model, an arm to advise without a profile or as the first run, a folder that
            is occupied, a plugin that vLLM would not see, or no run with a result.
    """
    from workbench.encoder.checkpoint import make_checkpoint
    from workbench.environment import environment
    from workbench.serve_bench import ServedArm

    _check(setting, arms, profile, repeats)
    refuse_occupied(out, overwrite)
    clip_fps = CLIP_FPS if setting.videos else None
    folder = make_checkpoint(setting.facts, out / "model", full=setting.full, video_fps=clip_fps, overwrite=True)
    bench = EngineBench(
        schema_version=SCHEMA_VERSION,
        workbench=workbench.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(),
        model=setting.model,
        workload=setting.workload,
        prompts=setting.prompts,
        full=setting.full,
        profile=None if profile is None else profile.profile.title,
        runs=[],
        kind="serve" if serve else "mm-processor",
    )
    order = abba(list(arms), repeats)
    configurations = dict(arms)
    for number, name in enumerate(order):
        started = number / len(order)
        progress(f"arm {number + 1} of {len(order)}, {name}: start", started)
        try:
            if name != EAGER and configurations[name] is None:
                configurations[name] = _advised(profile, _ledger(out, number - 1, order[number - 1]), setting)
        except WorkbenchError as error:
            run = _failed(number, name, f"no advice: {error}")
        else:
            arm = ServedArm if serve else ArmProcess
            process = arm(setting, folder.folder, folder.arguments, out, number, name, launcher)
            process.follow(configurations[name], lambda stage, at=started: progress(stage, at))  # type: ignore[misc]
            run = _judge(process, configurations[name], setting, profile)
        bench = msgspec.structs.replace(bench, runs=[*bench.runs, run])
        write_json(out / RESULT_FILE, bench)
    if all(run.error for run in bench.runs):
        raise WorkbenchError(f"no arm gave a result: {bench.runs[0].error}")
    return bench


def _check(setting: Setting, arms: Mapping[str, Configuration | None], profile: CostModel | None, repeats: int) -> None:
    """Refuse what cannot run, before anything is written."""
    from importlib.metadata import entry_points

    if setting.prompts < 1 or repeats < 1:
        raise WorkbenchError("prompts and repeats are at least 1")
    if not arms:
        raise WorkbenchError("there is no arm to run; keep eager, or give --config NAME=128,256:4")
    waiting = [name for name, configuration in arms.items() if configuration is None and name != EAGER]
    if waiting and profile is None:
        raise WorkbenchError(f"{waiting[0]}=advised needs a cost profile; pass --profile")
    if waiting and waiting[0] == next(iter(arms)):
        raise WorkbenchError(f"{waiting[0]}=advised is advised from the arm before it and is the first; add one before")
    for configuration in arms.values():
        if configuration is not None:
            resolve(configuration, setting.limits)
    if not entry_points(group="vllm.general_plugins", name="workbench_ledger"):
        raise WorkbenchError(
            "vLLM does not see the ledger plugin; install the workbench as a package (pip install -e .)"
        )


def _ledger(out: Path, number: int, arm: str) -> Path:
    return out / f"{number}-{arm}.ledger.jsonl"


def _advised(profile: CostModel | None, ledger: Path, setting: Setting) -> Configuration:
    """The advisor's answer for the calls that the run before recorded."""
    assert profile is not None  # `_check`
    served = without_warmup(read_ledger(ledger), setting)[0]
    return advise(to_workload(served, setting.facts), profile, setting.limits).answer.configuration


def arm_environment(ledger: Path | None) -> dict[str, str]:
    """The environment of an arm's process; `ledger` is where its engine writes, None for a process without one."""
    from workbench.encoder.bootstrap import child_environment

    environment = child_environment() | {
        # A fork of the process that has imported vLLM. vLLM spawns all the same where a fork cannot work: on the CPU,
        # and once CUDA is initialised.
        "VLLM_WORKER_MULTIPROC_METHOD": os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",  # stages are read from the log
    }
    environment.pop(ENVIRONMENT_VARIABLE, None)
    return environment if ledger is None else environment | {ENVIRONMENT_VARIABLE: str(ledger.absolute())}


class ArmProcess:
    """One arm's process: its files, how long it took, how it ended.

    `log_stages`: a line of vLLM's log that ends a stage, behind the stage's name, in the order in which they come.
    """

    log_stages: tuple[tuple[str, str], ...] = (*ENGINE_STAGES, *_BENCH_STAGES)

    def __init__(
        self,
        setting: Setting,
        folder: Path,
        arguments: tuple[str, ...],
        out: Path,
        number: int,
        name: str,
        launcher: tuple[str, ...],
    ) -> None:
        self.setting, self.folder, self.arguments, self.launcher = setting, folder, arguments, launcher
        self.number, self.name = number, name
        self.ledger = _ledger(out, number, name)
        self.result, self.log = out / f"{number}-{name}.vllm.json", out / f"{number}-{name}.log"
        self.seconds = 0.0
        self.stages: dict[str, float] = {}
        self.error: str | None = None

    def follow(self, configuration: Configuration | None, on_stage: Callable[[str], None]) -> None:
        """Run it to its end or its time limit."""
        command = self.setting.command(
            self.folder.absolute(), self.arguments, compilation_config(configuration), self.result.absolute()
        )
        self.prepare()
        self.run(command, arm_environment(self.ledger), on_stage)

    def prepare(self) -> None:
        """Remove what an earlier run of this name left."""
        for stale in (self.ledger, self.result):
            stale.unlink(missing_ok=True)

    def run(self, command: list[str], environment: dict[str, str], on_stage: Callable[[str], None]) -> None:
        """Run vLLM with these arguments to its end or the arm's time limit, following its log."""
        with self.log.open("wb") as output:
            process = start([*self.launcher, *command], environment, output)
            try:
                ended = self.watch(process, self.log, on_stage)
            finally:
                end(process)
        if ended is None:
            self.error = f"ended after {self.setting.arm_seconds:.0f} s, {self.where()}; its log is {self.log.name}"
        elif ended != 0 or not self.result.is_file():
            self.error = f"vLLM ended with {ended}, {self.where()}; its log is {self.log.name}"

    def watch(
        self, process: "subprocess.Popen[bytes]", log: Path, on_stage: Callable[[str], None], until: str = ""
    ) -> int | None:
        """Follow a process's log until it ends, stage `until` has ended, or the arm's time is over.

        Time goes on from `seconds`, which an earlier process of this arm may have left.

        Returns:
            the exit code; None while the process still runs.
        """
        began, text = time.perf_counter() - self.seconds, ""
        with log.open("rb") as lines:
            while True:
                self.seconds = time.perf_counter() - began
                ended = process.poll()
                text = self.advance(text[-200:] + lines.read().decode(errors="replace"), on_stage)
                if ended is not None or until in self.stages or self.seconds > self.setting.arm_seconds:
                    return ended
                time.sleep(_POLL_SECONDS)

    def ingested(self) -> External:
        """Read vLLM's result.

        Raises:
            WorkbenchError: it is none.
        """
        return _ingested(self.result)

    def served(self) -> tuple[Ledger, list[str]]:
        """Return the ledger of the benchmark's own requests, and what is doubtful about it."""
        return without_warmup(read_ledger(self.ledger), self.setting)

    def advance(self, text: str, on_stage: Callable[[str], None]) -> str:
        """Note the stages that `text`, of a log, ends."""
        for stage, marker in self.log_stages:
            if stage not in self.stages and marker in text:
                self.stages[stage] = round(self.seconds, 2)
                on_stage(f"arm {self.name}: {self.where()}")
        return text

    def where(self) -> str:
        """Say which stage it is in."""
        open_stages = [stage for stage, _ in self.log_stages if stage not in self.stages]
        return f"in its stage {open_stages[0]}" if open_stages else "after its last request"


def compilation_config(configuration: Configuration | None) -> dict[str, Any]:
    """Return the engine's `--compilation-config`; None: encoder graphs off."""
    return _BASE | (configuration.compilation_config() if configuration else {})


def start(command: list[str], environment: dict[str, str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start a process of vLLM in a session of its own: its engine's process ends with it, and both with this one."""
    return subprocess.Popen(
        bound(command),
        env=environment,
        stdin=subprocess.DEVNULL,  # transformers asks there whether to run the folder's code, and vLLM goes on
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and what it started, if any of it is left."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _failed(number: int, name: str, error: str) -> ArmRun:
    return ArmRun(
        number=number,
        arm=name,
        budgets=None,
        max_items=None,
        max_frames=None,
        findings=[],
        seconds=0.0,
        stages={},
        error=error,
    )


def _judge(
    process: ArmProcess, configuration: Configuration | None, setting: Setting, profile: CostModel | None
) -> ArmRun:
    """Read what a run left, and price its calls."""
    run = ArmRun(
        number=process.number,
        arm=process.name,
        budgets=None if configuration is None else list(configuration.budgets),
        max_items=None if configuration is None else configuration.max_items,
        max_frames=None if configuration is None else configuration.max_frames,
        findings=lint_errors(setting, configuration),
        seconds=round(process.seconds, 2),
        stages=process.stages,
        error=process.error,
    )
    if run.error:
        return run
    try:
        vllm = process.ingested()
        served, notes = process.served()
    except WorkbenchError as error:
        return msgspec.structs.replace(run, error=str(error))
    lines = served.served()
    gpu = [line.gpu_us for line in lines if line.gpu_us is not None]
    run = msgspec.structs.replace(
        run,
        vllm=vllm,
        calls=summarize(served),
        hits=hit_table(served),
        host_us=float(sum(line.host_us for line in lines)),
        gpu_us=float(sum(gpu)) if gpu else None,
        notes=[*served.lost, *notes],
    )
    if profile is None:
        return run
    try:
        predicted, alone = price(profile, served, configuration, setting)
    except WorkbenchError as error:
        return msgspec.structs.replace(run, notes=[*run.notes, f"no prediction: {error}"])
    return msgspec.structs.replace(run, predicted_us=predicted, alone_us=alone)


def _ingested(path: Path) -> External:
    document = json.loads(path.read_text())
    if not is_mm_processor(document):
        raise WorkbenchError(f"{path} is no result of vllm bench mm-processor")
    return mm_processor(document, path.stem)


def lint_errors(setting: Setting, configuration: Configuration | None) -> list[str]:
    """Return what `workbench lint` calls an error in `configuration`, before any GPU time is spent on it."""
    if configuration is None:
        return []
    findings = lint(setting.facts, configuration, setting.limits).findings
    return [f"{one.rule}: {one.message}; {one.remedy}" for one in findings if one.severity == "error"]


def without_warmup(ledger: Ledger, setting: Setting) -> tuple[Ledger, list[str]]:
    """Return `ledger` without the calls of the benchmark's warm-up request, which comes first and alone.

    Its calls are those before which the ledger had no more images than one request has; where several numbers of first
    calls could be it, the longest pause follows its last one. Where none could be, nothing is left out and a note says
    so.
    """
    recipe = setting.preset.recipe
    least = math.floor(recipe.base_items * (1 - recipe.range_ratio))
    most = min(math.ceil(recipe.base_items * (1 + recipe.range_ratio)), sum(setting.mm_limit.values()))
    served = ledger.served()
    images = np.cumsum([sum(len(group.tokens) for group in call.groups) for call in served])
    possible = np.flatnonzero((images[:-1] >= max(least, 1)) & (images[:-1] <= most))
    if not possible.size:
        return ledger, ["the benchmark's warm-up could not be told from the other calls, and is among them"]
    pauses = [served[last + 1].t - served[last].t - served[last].host_us / 1e6 for last in possible]
    warmup = {id(call) for call in served[: int(possible[int(np.argmax(pauses))]) + 1]}
    return msgspec.structs.replace(ledger, calls=[call for call in ledger.calls if id(call) not in warmup]), []


def price(
    model: CostModel, ledger: Ledger, configuration: Configuration | None, setting: Setting
) -> tuple[float, float]:
    """Return microseconds per request for the ledger's calls, and for a call of its median image alone.

    Raises:
        WorkbenchError: an item or budget that the profile cannot price; an item above the largest budget of a model
            whose fallback fails.
    """
    calls = to_workload(ledger, setting.facts)
    median = int(np.sort(calls.tokens)[len(calls.tokens) // 2])
    if configuration is None:
        arrangement = arrange(calls.tokens, calls.offsets, calls.grids[:, 0])
        items = (arrangement.tokens, sequence_squares(arrangement))
        tokens, squares = (np.add.reduceat(each, calls.offsets[:-1]) for each in items)
        wall = model.served_us(tokens, squares, np.diff(calls.offsets))
        alone = model.eager_us([median], "eager_served")
    else:
        resolved = resolve(configuration, setting.limits)
        costs = model.call_costs(plan(calls.tokens, calls.offsets, resolved, calls.grids[:, 0]))
        if setting.facts.extra.get("fallback_crashes") and not costs.replays_only.all():
            raise WorkbenchError("an image is above the largest budget, and the model's eager fallback fails (D1)")
        wall, alone = costs.wall_us, model.call_costs(plan([median], [0, 1], resolved)).wall_us
    return float(wall.sum() / setting.prompts), float(alone[0])


def read_bench(folder: Path) -> EngineBench:
    """Read `folder`/summary.json.

    Raises:
        WorkbenchError: no such file, or of another schema version.
    """
    path = folder / RESULT_FILE
    if not path.is_file():
        raise WorkbenchError(f"{folder} has no {RESULT_FILE}; make one with `workbench engine-bench`")
    return read_versioned(path, EngineBench, SCHEMA_VERSION)


def recorded(model: str, profile: CostModel | None = None) -> list[EngineBench]:
    """Return the shipped measurements of `model` in the whole engine, by workload.

    Args:
        profile: price the ledgers' calls by this one instead of the one that was there at the measurement.
    """
    found = []
    for path in sorted(RECORDINGS.glob(f"served_{model}-*/{RESULT_FILE}")):
        bench = read_bench(path.parent)
        found.append(bench if profile is None else reprice(bench, path.parent, profile))
    return found


def reprice(bench: EngineBench, folder: Path, profile: CostModel) -> EngineBench:
    """Return `bench`, which lies in `folder`, with predictions of `profile` for the calls of its ledgers.

    Raises:
        WorkbenchError: a ledger is missing or damaged; calls that the profile cannot price, see `price`.
    """
    return msgspec.structs.replace(bench, runs=[_repriced(run, folder, bench, profile) for run in bench.runs])


def _repriced(run: ArmRun, folder: Path, bench: EngineBench, profile: CostModel) -> ArmRun:
    if run.error is not None:
        return run
    setting = Setting(model=bench.model, workload=bench.workload, prompts=bench.prompts, full=bench.full)
    ledger, _ = without_warmup(read_ledger(_ledger(folder, run.number, run.arm)), setting)
    asked = None if run.budgets is None else Configuration(tuple(run.budgets), run.max_items or 0, run.max_frames)
    predicted, alone = price(profile, ledger, asked, setting)
    return msgspec.structs.replace(run, predicted_us=predicted, alone_us=alone)


def arms_table(benches: Iterable[EngineBench]) -> list[dict[str, Any]]:
    """Return one row per run that gave a result; milliseconds are per request, as vLLM divides a call's time.

    `encoder s` is the sum over all calls, until the GPU was done: where arms met different calls, it is what compares.
    """
    rows = []
    for bench in benches:
        for run in bench.runs:
            if run.error is not None or run.forward is None or run.calls is None:
                continue
            tail = run.forward.percentiles.get("99")
            replays = sum(row.batches for row in run.hits if row.route == "graph")
            rows.append(
                {
                    "workload": bench.workload,
                    "arm": run.arm,
                    "graphs": len(run.budgets or []),
                    "max items": run.max_items,
                    "mean ms": _thousandth(run.forward.mean),
                    "median ms": _thousandth(run.forward.median),
                    "P99 ms": _thousandth(tail),
                    "predicted ms": _thousandth(run.predicted_us),
                    "error": run.predicted_us / run.forward.mean - 1 if run.predicted_us and run.forward.mean else None,
                    "encoder s": None if run.encoder_us is None else run.encoder_us / 1e6,
                    "items": run.calls.items,
                    "calls": run.calls.calls,
                    "items a call": run.calls.items / run.calls.calls if run.calls.calls else None,
                    "replays a call": replays / run.calls.calls if run.calls.calls else None,
                }
            )
    return rows


def _thousandth(microseconds: float | None) -> float | None:
    return None if microseconds is None else microseconds / 1e3


# In sentences ---------------------------------------------------------------------------------------------------


def explain(bench: EngineBench) -> list[str]:
    """Say what the arms' figures mean and why they differ, from the runs alone."""
    if bench.kind == "serve":
        from workbench.serve_bench import explain_served

        return explain_served(bench)
    done = [run for run in bench.runs if run.error is None and run.forward is not None and run.calls is not None]
    sentences = [f"Arm {run.arm} (run {run.number}) gave nothing: {run.error}." for run in bench.runs if run.error]
    sentences += [f"Arm {run.arm}: {finding}." for run in done for finding in run.findings]
    kind = _kind(bench)
    for run in done:
        sentences += _about(run, bench.prompts, kind)
    arms: dict[str, list[ArmRun]] = {}
    for run in done:
        arms.setdefault(run.arm, []).append(run)
    for name, runs in arms.items():
        if name != EAGER and EAGER in arms:
            sentences += _against(arms[EAGER], runs, kind)
    return sentences


def _kind(bench: EngineBench) -> str:
    """What the requests hold: "image", "video", or "item" where both."""
    preset = PRESETS.get(bench.workload)
    kinds = {modality(bucket) for bucket in preset.recipe.buckets} if preset else set()
    return kinds.pop() if len(kinds) == 1 else "item"


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f} ms"


def _about(run: ArmRun, prompts: int, kind: str) -> list[str]:
    """What one run did."""
    forward, calls = run.forward, run.calls
    assert forward is not None
    assert calls is not None
    per_call = calls.items / calls.calls if calls.calls else 0.0
    sentences = []
    if forward.mean is not None and run.encoder_us is not None:
        host, spent = calls.host_us or 0.0, max(calls.host_us or 0.0, calls.gpu_us or 0.0)
        ahead = f", of which the host needs {_ms(host)} to launch it" if host < 0.9 * spent else ""
        sentences.append(
            f"{run.arm}: {calls.items:,} {kind}s met in {calls.calls:,} encoder calls, {per_call:.1f} a call; a call's "
            f"median is {_ms(spent)}{ahead}, and shared by its requests that is vLLM's mean of "
            f"{_ms(forward.mean)} per request (the ledger's sum gives {_ms(run.encoder_us / prompts)})."
        )
    sentences += about_graphs(run, kind)
    if run.predicted_us is not None and forward.mean:
        sentences.append(
            f"{run.arm}: the profile gives {_ms(run.predicted_us)} per request for these calls; measured "
            f"{_ms(forward.mean)} is {forward.mean / run.predicted_us - 1:+.0%}"
            + ("." if run.alone_us is None else f". One {kind} alone would take {_ms(run.alone_us)}.")
        )
    return sentences


def about_graphs(run: ArmRun, kind: str = "image") -> list[str]:
    """How many of a run's images or videos went through graphs; nothing for an arm without."""
    if run.budgets is None or run.calls is None:
        return []
    calls, graphs = run.calls, [row for row in run.hits if row.route == "graph"]
    if calls.hits == 0:
        return [
            f"{run.arm}: no {kind} went through a graph: this engine has no encoder graphs (the CPU's has none), "
            "so the arm measures the eager encoder."
        ]
    replays, fill = sum(row.batches for row in graphs), sum(row.tokens for row in graphs)
    held = sum(row.batches * (row.budget or 0) for row in graphs)
    return [
        f"{run.arm}: {calls.hits:,} of {calls.items:,} {kind}s went through {replays:,} replays, "
        f"{replays / calls.calls:.1f} a call, {fill / held:.0%} full."
    ]


def average(values: Iterable[float | None]) -> float | None:
    """The mean over an arm's runs; None where a run lacks the value, or there is none."""
    every = list(values)
    known = [value for value in every if value is not None]
    return fmean(known) if known and len(known) == len(every) else None


def _against(eagers: list[ArmRun], runs: list[ArmRun], kind: str) -> list[str]:
    """Why an arm differs from the eager one; figures are averaged over the rounds."""
    eager, run = eagers[0], runs[0]
    assert eager.calls is not None
    assert run.calls is not None
    if not any(one.calls is not None and one.calls.hits for one in runs):
        return [f"{run.arm} and eager ran the same encoder: what differs is what two runs of it differ by."]
    forwards = [[one.forward for one in arm if one.forward is not None] for arm in (eagers, runs)]
    before, after = (average(forward.mean for forward in arm) for arm in forwards)
    tails = [average(forward.percentiles.get("99") for forward in arm) for arm in forwards]
    if not before or not after:
        return []
    sentences = [
        f"{run.arm} against eager: {before / after:.2f} times as fast by vLLM's mean per request ("
        f"{_ms(before)} to {_ms(after)}"
        + (f", P99 {_ms(tails[0])} to {_ms(tails[1])}" if tails[0] and tails[1] else "")
        + (f"; averages of {len(eagers)} and {len(runs)} runs" if len(eagers) + len(runs) > 2 else "")
        + ")."
    ]
    if eager.alone_us and run.alone_us:
        sentences.append(
            f"For one {kind} alone the profile gives {eager.alone_us / run.alone_us:.1f} times ({_ms(eager.alone_us)} "
            f"to {_ms(run.alone_us)}): an eager call pays its launches once however many {kind}s it holds, and a "
            f"replay holds at most {run.max_items or 'a few'} {kind}s, so a call of many {kind}s gains less."
        )
    shares = [summary.items / summary.calls for summary in (eager.calls, run.calls) if summary.calls]
    if len(shares) == 2 and max(shares) > 1.25 * min(shares):
        sentences.append(
            f"The arms did not see the same calls: {shares[0]:.1f} {kind}s a call eagerly, {shares[1]:.1f} with "
            f"{run.arm}, because a faster encoder lets fewer requests wait; compare sums over all calls instead."
        )
    return sentences
