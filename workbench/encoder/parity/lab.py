"""One encoder session under observation: three arms per call, judged against measured noise.

    from workbench.budgets import Configuration
    from workbench.encoder.parity.lab import open_lab
    from workbench.encoder.session import SessionOptions

    with open_lab(SessionOptions(depth=2, width=160), Configuration((16, 32, 64), 4)) as lab:
        seen = lab.observe([(1, 8, 8), (1, 4, 6)], "example")
        print(seen.status, seen.findings)

The arms: *eager as served* (the reference), *eager on the padded buffers* (the captured forward, run eagerly on what
the manager copied), and the *graph*. What separates the first two is padding and metadata; what separates the last two
is capture and replay.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.budgets import Configuration
from workbench.encoder import engine
from workbench.encoder.instruments import wrapped
from workbench.encoder.parity.bisect import RESAMPLER, TOWER, tower_of
from workbench.encoder.parity.metrics import compare
from workbench.encoder.parity.noise import measure_noise, noise_grids
from workbench.encoder.parity.tape import BeforeReplay, TapedBatch, taping
from workbench.encoder.session import EncoderInputs, EncoderSession, Grid, SessionOptions, open_session
from workbench.errors import WorkbenchError
from workbench.models import Modality, model_facts, small_size
from workbench.parity import Difference, Finding, Noise, Status

# On the CPU, the work of such an encoder's layers is too small to share among threads.
SMALL_WIDTH = 512

# What vLLM's manager and models raise on inputs they do not hold; anything else is the workbench's own fault.
ENCODER_ERRORS = (RuntimeError, AssertionError, ValueError, IndexError, KeyError, TypeError, AttributeError)


@dataclass
class Observation:
    """One call in the three arms.

    Attributes:
        budgets: per item, the token budget it was replayed in; None for a fallback or when the call failed before.
        graph, padded: per item, distance to eager as served; `padded` is None where it was not run.
        error: "Type: message" of the graph arm, "" when it ran.
        phase: where the error was raised.
        as_graph: with variants, per item that vLLM's own graph replays in the same budget: whether the bits are its.
    """

    scenario: str
    call: EncoderInputs
    given: dict[str, Any]
    served: list[torch.Tensor]
    outputs: list[torch.Tensor]
    batches: list[TapedBatch]
    budgets: list[int | None]
    graph: list[Difference]
    padded: list[Difference | None]
    error: str = ""
    phase: str = ""
    findings: list[Finding] = field(default_factory=list)
    item_statuses: list[Status] = field(default_factory=list)
    ratio: float | None = None
    as_graph: list[bool] = field(default_factory=list)

    @property
    def status(self) -> Status:
        """Worst of the items, the error and the findings."""
        if self.error:
            return "error"
        severities = {finding.severity for finding in self.findings}
        if "mismatch" in self.item_statuses or "mismatch" in severities:
            return "mismatch"
        if severities or "hazard" in self.item_statuses:
            return "hazard"
        return "within_noise" if "within_noise" in self.item_statuses else "equal"

    @property
    def primary_budget(self) -> int | None:
        """The largest budget that the call used."""
        return max((budget for budget in self.budgets if budget is not None), default=None)


class Lab:
    """A session with graphs, its noise floor, and what its graphs baked in at capture.

    Attributes:
        session: the session; its manager is the one under observation.
        noise: set by `measure_noise`.
        baked: token budget -> the `max_seqlen` that was captured; no entry where the model gives none.
        digest: when set, takes in the fingerprint of every observed call.
        variants: names of the variants that the session has.
        plain: with variants, the captured session without them, over the same weights; None where there is none.
    """

    def __init__(
        self,
        session: EncoderSession,
        seed: int = 0,
        variants: Sequence[str] = (),
        plain: EncoderSession | None = None,
    ) -> None:
        self.session = session
        self.seed = seed
        self.variants = tuple(variants)
        self.plain = plain
        self.noise: Noise | None = None
        self.baked: dict[int, int] = {}
        self.digest: Any = None
        self._seeds = itertools.count(seed + 1)

    # What the session is made of -----------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """vLLM's model object."""
        return self.session.model

    @property
    def tower(self) -> Any:
        """The vision transformer: what the graph holds."""
        return tower_of(self.session)

    @property
    def manager(self) -> Any:
        """The graph manager under observation."""
        return self.session.manager

    @property
    def budgets(self) -> list[int]:
        """Distinct token budgets, ascending."""
        return sorted(set(self.manager.token_budgets))

    @property
    def cuda(self) -> bool:
        """Graphs are CUDA graphs."""
        return self.session.replay == "cuda_graph"

    @property
    def bakes(self) -> bool:
        """Graphs hold the kernels, addresses and host values of their capture, which a static replay's do not."""
        return self.cuda or bool(getattr(self.manager, "bakes", False))

    # What variants change about what to expect --------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Every variant promises the bits of vLLM's graph at the same budget."""
        from workbench.encoder.variants import VARIANTS

        return all(variant.exact for variant in VARIANTS if variant.name in self.variants)

    @property
    def fused(self) -> bool:
        """The captured forward calls kernels and linear layers, no block as a module."""
        return "fused" in self.variants

    @property
    def resamples(self) -> bool:
        """The resampler is inside the graph."""
        return "resampler" in self.variants

    @property
    def last_stage(self) -> str:
        """Name of the stage whose rows a graph gives (`bisect.staged`)."""
        return RESAMPLER if self.resamples else TOWER

    @property
    def frames_per_step(self) -> int:
        """Frames of a video that the encoder merges into one, so a video has a multiple of them."""
        extra = self.session.facts.extra
        return int(extra["temporal_merge"]) if extra.get("use_temporal_conv") else 1

    def budget_tokens(self, call: EncoderInputs, item: int) -> int:
        """Return what an item takes of a budget: its tokens; a video's before its frames are merged in time.

        With variant `resampler`, a frame takes at least `TOKENS_PER_FRAME`.
        """
        if call.modality == "image" or not self.resamples:
            return call.tokens[item]
        from workbench.encoder.variants.resampler import TOKENS_PER_FRAME

        grid = call.grids[item]
        return max(self.session.facts.tokens(grid), TOKENS_PER_FRAME * grid[0])

    def tower_metadata(self, grids: list[list[int]]) -> dict[str, torch.Tensor]:
        """Return the metadata that eager as served computes for `grids`: positions, cu_seqlens, max_seqlen."""
        with torch.inference_mode():
            # Ernie's takes tensors or lists, GLM's lists.
            metadata: dict[str, torch.Tensor] = self.tower.prepare_encoder_metadata(grids)
        return metadata

    # Managers ------------------------------------------------------------------------------------------------------

    def capture(self, manager: Any = None, order: Sequence[int] | None = None) -> None:
        """Capture every budget of `manager` (default: the session's), noting what is baked in.

        Args:
            order: budgets in the order of capture; None is vLLM's, largest first.

        Raises:
            WorkbenchError: the session's own graphs do not fit into memory.
        """
        if manager is None:
            with self.recording_baked():
                self.session.capture()
            return
        with self.recording_baked(), torch.inference_mode():
            pool = torch.cuda.graph_pool_handle() if self.cuda else object()
            if order is None:
                manager.capture(pool)
                return
            manager.graph_pool = pool
            for budget in order:
                manager._capture_budget_graph(budget, path="default", axis_keys=())

    @contextmanager
    def recording_baked(self) -> Iterator[None]:
        """Note the `max_seqlen` of each budget captured while the block lasts."""

        def noting(original: Any) -> Any:
            def prepare(token_budget: int, *args: Any, **kwargs: Any) -> Any:
                result = original(token_budget, *args, **kwargs)
                value = result.values.get("max_seqlen")
                if value is not None:
                    self.baked[token_budget] = int(value)
                return result

            return prepare

        with wrapped(self.model, "prepare_encoder_cudagraph_capture_inputs", noting):
            yield

    def new_manager(self, configuration: Configuration | None = None) -> Any:
        """Return another manager over the same weights, nothing captured yet.

        Args:
            configuration: None is that of the manager under observation.
        """
        config = self.manager.vllm_config
        if configuration is not None:
            config = engine.manager_config(self.session.vllm_config, configuration)
        return type(self.manager)(config, self.session.device, self.session.dtype, self.model)

    @contextmanager
    def using(self, manager: Any) -> Iterator[None]:
        """Observe `manager` while the block lasts."""
        before, baked = self.session.manager, dict(self.baked)
        self.session.manager = manager
        try:
            yield
        finally:
            self.session.manager, self.baked = before, baked

    # Calls ---------------------------------------------------------------------------------------------------------

    def inputs(self, grids: Sequence[Grid], modality: Modality = "image") -> EncoderInputs:
        """Make a call's items; every call of a lab has rows of its own, the same in every lab with this seed."""
        return self.session.inputs(grids, modality, seed=next(self._seeds))

    def restart_inputs(self) -> None:
        """Begin the sequence of input seeds anew."""
        self._seeds = itertools.count(self.seed + 1)

    def part(self, call: EncoderInputs, items: Sequence[int]) -> EncoderInputs:
        """Return the call of these items of `call`, in this order; independent of vLLM's own selection."""
        sizes = [t * h * w for t, h, w in call.grids]
        starts = [0, *itertools.accumulate(sizes)]
        return EncoderInputs(
            modality=call.modality,
            grids=tuple(call.grids[i] for i in items),
            tokens=tuple(call.tokens[i] for i in items),
            pixels=torch.cat([call.pixels[starts[i] : starts[i + 1]] for i in items]),
            grid=call.grid[list(items)],
        )

    def part_none(self, call: EncoderInputs) -> EncoderInputs:
        """Return a call without items, of the modality of `call`."""
        return dataclasses.replace(call, grids=(), tokens=(), pixels=call.pixels[:0], grid=call.grid[:0])

    def observe(
        self,
        call: EncoderInputs | Sequence[Grid],
        scenario: str,
        *,
        before_replay: BeforeReplay | None = None,
        padded: bool = False,
        probe: bool = False,
    ) -> Observation:
        """Run one call in the arms, compare, and diagnose.

        Args:
            call: made by `inputs`, or grids of images.
            scenario: name put into findings.
            before_replay: see `tape.taping`.
            padded: also run eager on the padded buffers.
            probe: the scenario itself breaks the manager's promises, so what would be a mismatch is a hazard.
        """
        from workbench.encoder.parity.diagnose import diagnose

        if not isinstance(call, EncoderInputs):
            call = self.inputs(call)
        if self.digest is not None:
            self.digest.update(call.fingerprint().encode())
        # vLLM never calls an encoder without items; only the manager is asked to.
        served = self.session.eager_served(call) if call.grids else []
        outputs: list[torch.Tensor] = []
        error = ""
        with taping(self.manager, before_replay) as tape:
            try:
                outputs = self.session.graph(call)
            except ENCODER_ERRORS as raised:
                error = f"{type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else ''}"
        budgets: list[int | None] = [None] * len(call.grids)
        for batch in tape.batches:
            for item in batch.items:
                budgets[item] = batch.budget
        observation = Observation(
            scenario=scenario,
            call=call,
            given=tape.given,
            served=served,
            outputs=outputs,
            batches=tape.batches,
            budgets=budgets,
            graph=[compare(output, reference) for output, reference in zip(outputs, served, strict=False)],
            padded=self._padded(call, tape.batches, served) if padded and not error else [None] * len(served),
            error=error,
            phase=tape.phase,
        )
        self._judge(observation, "hazard" if probe else "mismatch")
        observation.findings = diagnose(self, observation, probe=probe)
        if not probe:
            self._compare_with_graph(observation)
        return observation

    def _compare_with_graph(self, seen: Observation) -> None:
        """Run the same call through vLLM's own graphs, where these hold it, and compare bits."""
        if self.plain is None or seen.error or not seen.call.grids or not self._configured_as_plain(seen.call):
            return
        with self.plain.watch() as batches:
            try:
                own = self.plain.graph(seen.call)
            except ENCODER_ERRORS:
                return  # a defect of vLLM (D1) that the variants may not have
        pairs = [(item, batch.budget) for batch in batches for item in batch.items if batch.budget is not None]
        compared = [item for item, budget in pairs if seen.budgets[item] == budget]
        seen.as_graph = [torch.equal(seen.outputs[item], own[item]) for item in compared]
        if self.exact and not all(seen.as_graph) and set(seen.item_statuses).isdisjoint(("mismatch", "hazard")):
            count = sum(not same for same in seen.as_graph)
            message = f"{count} of {len(compared)} items do not have the bits of vLLM's graph at the same budget"
            seen.findings.append(
                Finding(
                    suspect="variant",
                    severity="hazard",
                    scenario=seen.scenario,
                    budget=seen.primary_budget,
                    message=message,
                )
            )

    def _configured_as_plain(self, call: EncoderInputs) -> bool:
        assert self.plain is not None
        mine, theirs = (
            (sorted(manager.token_budgets), manager.max_batch_size, manager.max_frames_per_batch)
            for manager in (self.manager, self.plain.manager)
        )
        return call.modality in self.plain.facts.graph_modalities and mine == theirs

    def _judge(self, observation: Observation, bad: Status) -> None:
        ratios = []
        for difference in observation.graph:
            ratio = self.ratio(difference)
            ratios.append(ratio)
            mismatch = ratio is None or ratio > 1
            observation.item_statuses.append(bad if mismatch else "equal" if difference.bit_equal else "within_noise")
        known = [ratio for ratio in ratios if ratio is not None]
        observation.ratio = None if len(known) < len(ratios) else max(known, default=None)

    def ratio(self, difference: Difference) -> float | None:
        """Return the distance over its limit, worse of relative RMS and worst row; None when not finite.

        Raises:
            WorkbenchError: the noise was not measured.
        """
        if self.noise is None:
            raise WorkbenchError("the noise floor is not measured yet; call measure_noise first")
        if not difference.finite or difference.relative_rms is None or difference.worst_row is None:
            return None
        return max(difference.relative_rms / self.noise.limit_rms, difference.worst_row / self.noise.limit_worst_row)

    # Eager on the padded buffers -----------------------------------------------------------------------------------

    def padded_raw(self, batch: TapedBatch) -> torch.Tensor:
        """Run the captured forward eagerly on the buffers that the manager filled for `batch`."""
        assert batch.budget is not None
        with torch.inference_mode(), self.padded_attention(batch.budget):
            output: torch.Tensor = self.model.encoder_cudagraph_forward(dict(batch.buffers), path="default")
        return output

    def padded_attention(self, budget: int) -> AbstractContextManager[Any]:
        """Let attention take padded tails as it does in a graph."""
        if self.bakes:
            return as_captured()
        from workbench.encoder.static_replay import padded_tails

        return padded_tails([], budget)

    def postprocess(self, call: EncoderInputs, batch: TapedBatch, raw: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return per item what the model makes of `raw`."""
        outputs: dict[int, torch.Tensor] = {}
        with torch.inference_mode():
            self.model.postprocess_encoder_output(
                {"default": raw}, batch.items, list(call.tokens), outputs, clone=True, batch_mm_kwargs=batch.selected
            )
        return outputs

    def _padded(
        self, call: EncoderInputs, batches: list[TapedBatch], served: list[torch.Tensor]
    ) -> list[Difference | None]:
        differences: list[Difference | None] = [None] * len(served)
        for batch in batches:
            if not batch.buffers:
                continue
            try:
                outputs = self.postprocess(call, batch, self.padded_raw(batch))
            except ENCODER_ERRORS:
                continue  # the graph arm met the same and says so
            for item, output in outputs.items():
                differences[item] = compare(output, served[item])
        return differences

    # Noise ---------------------------------------------------------------------------------------------------------

    def measure_noise(self, reference: EncoderSession, calls: Sequence[EncoderInputs]) -> Noise:
        """Measure the noise floor (see `noise.measure_noise`), and judge by it from now on."""
        self.noise = measure_noise(self, reference, calls)
        return self.noise


@contextmanager
def as_captured() -> Iterator[None]:
    """Let an eager run take the way of a capture, on memory that holds NaN until something is written to it.

    vLLM zeroes FlashAttention's output during a capture only, so a plain eager run has in its padded rows whatever was
    in memory, and differs from the graph, and from itself, where a kernel reads behind the last sequence.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with wrapped(torch.cuda, "is_current_stream_capturing", lambda _original: lambda: True), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # operators without a deterministic kernel
        torch.use_deterministic_algorithms(True, warn_only=True)  # this fills what `torch.empty` returns
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def lab_options(model: str, device: str | None = None) -> tuple[SessionOptions, tuple[int, ...]]:
    """Return the encoder and budgets that suit this machine: all of it on CUDA, depth 2 and two heads on the CPU."""
    if engine.choose_device(device).type == "cuda":
        return SessionOptions(model=model, device=device), (64, 128, 256, 512, 1024, 2048)
    depth, width = small_size(model_facts(model))
    return SessionOptions(model=model, device=device, depth=depth, width=width), (16, 32, 64)


@contextmanager
def open_with_variants(
    options: SessionOptions, configuration: Configuration, variants: Sequence[str]
) -> Iterator[tuple[EncoderSession, EncoderSession | None]]:
    """Yield a session with `variants` and, where there are any, the one without them over the same weights.

    Raises:
        WorkbenchError: see `session.open_session` and `variants.attach`.
    """
    with open_session(options, configuration) as plain:
        if not variants:
            yield plain, None
            return
        with plain.with_variants(variants) as session:
            yield session, plain


@contextmanager
def open_lab(
    options: SessionOptions, configuration: Configuration, *, seed: int = 0, variants: Sequence[str] = ()
) -> Iterator[Lab]:
    """Open a session, capture its graphs and measure its noise floor against the same encoder in float32.

    Args:
        variants: names of `workbench.encoder.variants` that the graphs under observation are made with. Eager as
            served stays vLLM's, and so do the graphs of `Lab.plain`.

    Raises:
        WorkbenchError: see `open_with_variants`; a session that is float32 itself.
    """
    if options.dtype == "float32":
        raise WorkbenchError("float32 is the lab's own reference; observe bfloat16 or float16")
    with ExitStack() as stack:
        session, plain = stack.enter_context(open_with_variants(options, configuration, variants))
        if session.facts.width <= SMALL_WIDTH and session.device.type == "cpu":
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        lab = Lab(session, seed, variants, plain)
        lab.capture()
        if plain is not None:
            plain.capture()
        calls = [lab.inputs(grids) for grids in noise_grids(lab.budgets, session.facts.merge)]
        with open_session(session.float32_options, configuration) as reference:
            lab.measure_noise(reference, calls)
        lab.restart_inputs()
        yield lab
