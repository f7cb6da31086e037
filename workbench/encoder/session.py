"""An encoder session: vLLM's real encoder and its real graph manager, without the language model.

    from workbench.budgets import DEFAULT_VIDEO_LIMIT, Configuration, Limits, Resolved, resolve
    from workbench.encoder.session import SessionOptions, open_session

    with open_session(SessionOptions(depth=2, width=160), Configuration((128, 256), 4)) as session:
        session.capture()
        inputs = session.inputs([(1, 16, 16), (1, 8, 8)])
        graph, eager = session.graph(inputs), session.eager_served(inputs)

On a GPU the graphs are CUDA graphs. On a machine without one they are static replays (`session.replay` says which;
see `workbench.encoder.static_replay` for what those can and cannot show).

Three arms run the same inputs:

* `eager_served`: `embed_multimodal`, what a server runs with encoder graphs off;
* `eager_fallback`: `encoder_eager_forward`, what the graph manager runs for an item above the largest budget;
* `graph`: `EncoderCudaGraphManager.execute`.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.budgets import DEFAULT_VIDEO_LIMIT, Configuration, Limits, Resolved, resolve
from workbench.encoder import engine
from workbench.errors import WorkbenchError, check_seed
from workbench.models import Modality, ModelFacts
from workbench.run import Arm, Batch, CaptureCost, ConfigRecord, ModelRecord, Replay
from workbench.shapes import captured_shapes

if TYPE_CHECKING:
    from workbench.encoder.instruments import Span
    from workbench.encoder.registry import Builder
    from workbench.encoder.static_replay import Finding

Grid = tuple[int, int, int]

# Values per patch row and feature that capturing a graph holds at once. Seen on an H200: 562 MiB for the 8,192 rows of
# Ernie-4.5-VL's budget 2048, which is 28 values of bf16; a static replay keeps no activations between its layers.
_CAPTURE_VALUES: dict[Replay, int] = {"cuda_graph": 30, "static_replay": 12}


@dataclass(frozen=True)
class SessionOptions:
    """What to build.

    Attributes:
        model: registry key, see `workbench.models`.
        depth, width: blocks and features of a smaller encoder for quick tests; None is the full size.
        dtype: bfloat16, float16 or float32.
        seed: of the dummy weights; ignored with a checkpoint.
        checkpoint: folder with safetensors files of the whole model; only the encoder's tensors are read.
        device: "cuda", "cuda:1" or "cpu"; None is CUDA if there is a device, else the CPU.
        max_model_len: the server's, in tokens; inferred budgets end at the smaller of this and the next.
        max_num_batched_tokens: the server's, in tokens; the default is that of `vllm serve` on a GPU of 70 to 160 GiB.
        video_limit: videos per prompt. 0, the default, is the image workload of the Ernie pull request; None is vLLM's
            own default of 999, under which GLM-4.1V captures 600 frames per item (defect D2).
        attention_backend: vLLM's name, such as FLASH_ATTN or TORCH_SDPA; None is vLLM's choice for the device.
        place: this process among several that share encoder calls (`workbench.encoder.parallel`); None: alone.
    """

    model: str = "ernie45_vl"
    depth: int | None = None
    width: int | None = None
    dtype: str = "bfloat16"
    seed: int = 0
    checkpoint: Path | None = None
    device: str | None = None
    max_model_len: int = 16_384
    max_num_batched_tokens: int = 8_192
    video_limit: int | None = 0
    attention_backend: str | None = None
    place: engine.Place | None = None

    def plain(self) -> dict[str, Any]:
        """Return the fields as JSON holds them, for another process; `place` is that one's own, so it is left out."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "place"}
        return fields | {"checkpoint": None if self.checkpoint is None else str(self.checkpoint.absolute())}

    @classmethod
    def from_plain(cls, fields: dict[str, Any], place: engine.Place | None = None) -> "SessionOptions":
        """Return the options whose `plain` is `fields`, at `place`."""
        checkpoint = None if fields["checkpoint"] is None else Path(fields["checkpoint"])
        return cls(**fields | {"checkpoint": checkpoint}, place=place)


@dataclass(frozen=True)
class EncoderInputs:
    """The items of one encoder call, as vLLM's model runner hands them to the model.

    Attributes:
        modality: "image" or "video"; one call has one modality.
        grids: (t, h, w) in patches per item.
        tokens: output tokens per item.
        pixels: [sum of t * h * w, patch features] in the model's dtype, on the model's device.
        grid: [items, 3] int64 on the CPU, where vLLM keeps it (`keep_on_cpu`).
    """

    modality: Modality
    grids: tuple[Grid, ...]
    tokens: tuple[int, ...]
    pixels: torch.Tensor = field(repr=False)
    grid: torch.Tensor = field(repr=False)

    @property
    def mm_kwargs(self) -> dict[str, torch.Tensor]:
        """A new dict of the two tensors under vLLM's names."""
        if self.modality == "image":
            return {"pixel_values": self.pixels, "image_grid_thw": self.grid}
        return {"pixel_values_videos": self.pixels, "video_grid_thw": self.grid}

    def fingerprint(self) -> str:
        """SHA-256 over modality, grids, dtype and pixel rows."""
        digest = hashlib.sha256(f"{self.modality} {self.grids} {self.pixels.dtype}\n".encode())
        digest.update(self.pixels.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


class EncoderSession:
    """vLLM's encoder and graph manager, ready to run. Made by `open_session`.

    Attributes:
        facts: sizes of the encoder as built (reduced depth and width included).
        device: where it runs.
        replay: "cuda_graph" or "static_replay"; name it wherever a result of `graph` is shown.
        model: vLLM's model object, without a language model.
        whole: the model with all weights; another one where ranks share them (`mm_encoder_tp_mode="weights"`).
        manager: vLLM's `EncoderCudaGraphManager` for `configuration`.
        model_record, config_record: what a run folder stores about them.
    """

    def __init__(
        self,
        facts: ModelFacts,
        options: SessionOptions,
        device: torch.device,
        model: Any,
        vllm_config: Any,
        model_record: ModelRecord,
        whole: Any = None,
    ) -> None:
        self.facts = facts
        self.options = options
        self.limits = server_limits(options, facts)
        self.device = device
        self.dtype = engine.choose_dtype(options.dtype)
        self.replay: Replay = "cuda_graph" if device.type == "cuda" else "static_replay"
        self.model = model
        self.whole = model if whole is None else whole
        self.vllm_config = vllm_config
        self.model_record = model_record
        self.configuration = Configuration()
        self.manager: Any = None

    def configure(self, configuration: Configuration) -> None:
        """Replace the manager by a new one for `configuration`, over the same weights; its graphs are released.

        Raises:
            WorkbenchError: vLLM refuses the configuration.
        """
        manager = self._new_manager(configuration)
        self._release_graphs()
        self.manager = manager
        self.configuration = configuration

    @contextlib.contextmanager
    def alongside(self, configuration: Configuration, *, alone: bool = False) -> Iterator[Any]:
        """Yield one more manager over the same weights, nothing captured; use it with `using`.

        Several configurations can so be captured at once and compared in alternation. Its graphs are released when
        the block ends.

        Args:
            alone: over all weights, for whole calls on this rank alone.

        Raises:
            WorkbenchError: vLLM refuses the configuration.
        """
        manager = self._new_manager(configuration, alone=alone)
        try:
            yield manager
        finally:
            self.synchronize()
            manager.clear()
            del manager
            engine.release_memory(self.device)

    @contextlib.contextmanager
    def using(self, manager: Any, configuration: Configuration) -> Iterator[None]:
        """Let `capture`, `graph`, `watch` and `phases` use `manager`, made by `alongside`, while the block lasts."""
        before = self.manager, self.configuration
        self.manager, self.configuration = manager, configuration
        try:
            yield
        finally:
            self.manager, self.configuration = before

    @contextlib.contextmanager
    def with_variants(self, names: Sequence[str]) -> Iterator["EncoderSession"]:
        """Yield a session over the same weights whose model has the named variants; nothing is captured yet.

        Its configuration is this session's, its graphs are released when the block ends.

        Raises:
            WorkbenchError: see `workbench.encoder.variants.attach`; vLLM refuses the configuration.
        """
        from workbench.encoder.variants import attach, chosen

        modalities = dict.fromkeys(self.facts.graph_modalities)
        for variant in chosen(self.facts.key, names):
            modalities |= dict.fromkeys(variant.modalities)
        facts = dataclasses.replace(self.facts, graph_modalities=tuple(modalities))
        model = attach(self.model, names, self.facts.key)
        session = EncoderSession(facts, self.options, self.device, model, self.vllm_config, self.model_record)
        try:
            session.configure(self.configuration)
            yield session
        finally:
            session.close()

    @contextlib.contextmanager
    def alone(self, configuration: Configuration) -> Iterator[Any]:
        """Yield one more captured manager over the same weights that runs whole calls on this rank alone."""
        with self.alongside(configuration, alone=True) as manager:
            with torch.inference_mode():
                manager.capture(torch.cuda.graph_pool_handle() if self.device.type == "cuda" else object())
            yield manager

    def _new_manager(self, configuration: Configuration, *, alone: bool = False) -> Any:
        from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

        from workbench.encoder.static_replay import StaticReplayManager

        _refuse_unplanned(self.facts.title, self.model)
        kind = EncoderCudaGraphManager if self.device.type == "cuda" else StaticReplayManager
        resolve(configuration, self.limits)  # refuses what vLLM refuses, in the workbench's words
        place = self.options.place
        config = engine.manager_config(self.vllm_config, configuration, place.size if place and not alone else 1)
        with torch.inference_mode():
            return kind(config, self.device, self.dtype, self.whole if alone else self.model)

    @property
    def config_record(self) -> ConfigRecord:
        """The configuration as asked and as vLLM's manager resolved it."""
        smallest, _ = self.model.get_encoder_cudagraph_budget_range(self.vllm_config)
        return ConfigRecord(
            requested_budgets=list(self.configuration.budgets),
            requested_max_items=self.configuration.max_items,
            requested_max_frames=self.configuration.max_frames,
            budgets=list(self.manager.token_budgets),
            max_items=self.manager.max_batch_size,
            max_frames=self.manager.max_frames_per_batch,
            min_budget=smallest,
            max_model_len=self.options.max_model_len,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
        )

    @property
    def float32_options(self) -> SessionOptions:
        """Options of the same encoder in float32, the reference of outputs; on CUDA with an attention that takes it."""
        backend = "TORCH_SDPA" if self.device.type == "cuda" else self.options.attention_backend
        return dataclasses.replace(self.options, dtype="float32", attention_backend=backend)

    @property
    def findings(self) -> list["Finding"]:
        """What static replays saw to be wrong in vLLM's buffers; always empty on CUDA, which cannot look inside."""
        return list(getattr(self.manager, "findings", []))

    def forget_findings(self) -> None:
        """Let `findings` hold what is seen from now on."""
        getattr(self.manager, "findings", []).clear()

    @property
    def stats(self) -> dict[str, Any]:
        """vLLM's own counters: graph_hits and graph_misses in items, hit_rate, num_budgets, token_budgets."""
        return dict(self.manager.get_cumulative_stats())

    # Inputs and arms ----------------------------------------------------------------------------------------------

    def inputs(self, grids: Sequence[Grid], modality: Modality = "image", seed: int = 0) -> EncoderInputs:
        """Make items of standard normal pixel rows, which is what normalised images are like.

        Args:
            grids: (t, h, w) in patches per item; an image has t = 1.
            modality: of all items.
            seed: of the pixel rows; the same rows on every device.

        Raises:
            WorkbenchError: a modality without graphs, or a grid the encoder cannot take.
        """
        self._check_modality(modality)
        for grid in grids:
            self._check_grid(grid, modality)
        if not grids:
            raise WorkbenchError("a call without items encodes nothing; give at least one grid")
        rows = sum(t * h * w for t, h, w in grids)
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randn(rows, self.facts.patch_features, generator=generator, dtype=torch.float32)
        return EncoderInputs(
            modality=modality,
            grids=tuple(grids),
            tokens=tuple(self._tokens(grid, modality) for grid in grids),
            pixels=pixels.to(self.dtype).to(self.device),
            grid=torch.tensor(grids, dtype=torch.int64),
        )

    def _check_modality(self, modality: str) -> None:
        if modality not in self.facts.graph_modalities:
            raise WorkbenchError(
                f"vLLM captures no {modality} graphs for {self.facts.title}; "
                f"use {' or '.join(self.facts.graph_modalities)}"
            )
        if modality == "video" and self.options.video_limit == 0:
            raise WorkbenchError(
                "this session's video limit is 0, so it takes no videos; open it with a video limit of 1"
            )

    def _check_grid(self, grid: Grid, modality: Modality) -> None:
        t, h, w = grid
        if min(grid) < 1 or h % self.facts.merge or w % self.facts.merge or (modality == "image" and t != 1):
            raise WorkbenchError(
                f"{modality} grid {t} x {h} x {w} is not one that {self.facts.title} takes; height and width are "
                f"positive multiples of {self.facts.merge}, and an image has one frame"
            )

    def _tokens(self, grid: Grid, modality: Modality) -> int:
        """Output tokens of an item: ERNIE's resampler merges a video's frames in pairs."""
        merges = modality == "video" and self.facts.extra.get("use_temporal_conv", False)
        return self.facts.tokens(grid) // (int(self.facts.extra["temporal_merge"]) if merges else 1)

    @torch.inference_mode()
    def eager_served(self, inputs: EncoderInputs) -> list[torch.Tensor]:
        """Run what a server runs with encoder graphs off; per item [tokens, out width]."""
        return list(self.model.embed_multimodal(**inputs.mm_kwargs))

    @torch.inference_mode()
    def eager_fallback(self, inputs: EncoderInputs) -> list[torch.Tensor]:
        """Run what the manager runs for an item above the largest budget; per item [tokens, out width].

        Only the forward: the manager would then postprocess it once more, which for Ernie-4.5-VL raises (defect D1).
        """
        output: torch.Tensor = self.model.encoder_eager_forward(inputs.mm_kwargs)
        return list(torch.split(output, list(inputs.tokens)))

    @torch.inference_mode()
    def graph(self, inputs: EncoderInputs) -> list[torch.Tensor]:
        """Run the manager's `execute`; per item [tokens, out width].

        Raises:
            WorkbenchError: nothing is captured yet.
            RuntimeError: vLLM's own failure on these inputs (defects D1, D3, D4).
        """
        if not self.manager.is_captured():
            raise WorkbenchError("the session has no graphs yet; call its capture() first")
        return list(self.manager.execute(inputs.mm_kwargs))

    def run(self, arm: Arm, inputs: EncoderInputs) -> list[torch.Tensor]:
        """Run one arm by its name."""
        outputs: list[torch.Tensor] = getattr(self, arm)(inputs)
        return outputs

    # Capture ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, on_budget: Callable[[CaptureCost], None] | None = None) -> list[CaptureCost]:
        """Let the manager capture all its budgets, largest first, and return what each took.

        Args:
            on_budget: called after each budget, for a progress bar.

        Raises:
            WorkbenchError: a budget does not fit into memory.
        """
        from workbench.encoder.instruments import measured_captures

        needed, most_patches = self._capture_bytes()
        engine.require_memory(self.device, needed, f"capturing {most_patches:,} patches")
        with measured_captures(self.manager, self.device, on_budget) as costs:
            pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else object()
            try:
                with engine.capturing(self.device, self.options.place):
                    self.manager.capture(pool)
            except torch.cuda.OutOfMemoryError as error:
                self._release_graphs()
                largest = max(self.manager.token_budgets)
                raise WorkbenchError(
                    f"capturing up to budget {largest} does not fit into {self.device}'s memory; lower the largest "
                    "budget, the items or the frames"
                ) from error
        return costs

    def _capture_bytes(self) -> tuple[int, int]:
        """Estimate what capturing takes: bytes, and the patches of the largest graph."""
        manager = self.manager
        resolved = Resolved(tuple(manager.token_budgets), manager.max_batch_size, manager.max_frames_per_batch)
        captures = captured_shapes(self.facts, resolved, self.options.dtype)
        most_patches = max(capture.patches for capture in captures)
        values = _CAPTURE_VALUES[self.replay] * most_patches * self.facts.width
        return sum(capture.bytes for capture in captures) + values * self.dtype.itemsize, most_patches

    def _release_graphs(self) -> None:
        if self.manager is not None:
            self.synchronize()
            self.manager.clear()
            engine.release_memory(self.device)

    # Looking inside -----------------------------------------------------------------------------------------------

    def watch(self) -> AbstractContextManager[list[Batch]]:
        """Yield a list that grows by one entry per batch of the manager; see `instruments.watch_batches`."""
        from workbench.encoder.instruments import watch_batches

        return watch_batches(self.manager)

    def phases(self, span: "Span") -> AbstractContextManager[None]:
        """Enter `span(name)` around each phase of `graph`; the names are `instruments.PHASES`."""
        from workbench.encoder import instruments, registry

        return instruments.span_phases(self.manager, registry.builder(self.facts.key).module, span)

    def module_spans(self, span: "Span") -> AbstractContextManager[None]:
        """Enter `span(name)` around each module of the encoder; for eager arms, as a replay runs no module."""
        from workbench.encoder import instruments, registry

        return instruments.span_modules(self.model, registry.builder(self.facts.key).parts, span)

    def synchronize(self) -> None:
        """Wait until the device has done all work; nothing to wait for on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Drop graphs, weights and buffers, for `open_session` to free; a second call does nothing."""
        if self.manager is not None:
            self.synchronize()
            self.manager.clear()
        self.manager = self.model = self.whole = None


@contextlib.contextmanager
def open_session(options: SessionOptions, configuration: Configuration) -> Iterator[EncoderSession]:
    """Build the encoder and its manager; nothing is captured yet. Everything is released when the block ends.

    Raises:
        WorkbenchError: an unknown model, size, dtype, device or backend; a configuration vLLM refuses; a vLLM of
            another version; a checkpoint without the encoder's tensors; not enough memory.
    """
    engine.require_vllm()
    from workbench.encoder import registry, weights
    from workbench.encoder.static_replay import checked_linears

    builder = registry.builder(options.model)
    facts = registry.reduced_facts(options.model, options.depth, options.width)
    check_seed(options.seed)
    dtype = engine.choose_dtype(options.dtype)
    device = engine.choose_device(options.device)
    backend = engine.attention_backend(options.attention_backend)
    limits = server_limits(options, facts)
    resolve(configuration, limits)
    size = f"{facts.title} of depth {facts.depth} and width {facts.width}"
    engine.require_memory(device, builder.parameters(facts) * dtype.itemsize, size)

    with contextlib.ExitStack() as stack:
        vllm_config = stack.enter_context(engine.surroundings(limits, device, dtype, backend, options.place))
        model, whole = _build(builder, facts, options, device, dtype)
        record = ModelRecord(
            key=facts.key,
            architecture=facts.architecture,
            depth=facts.depth,
            width=facts.width,
            dtype=options.dtype,
            attention_backend=_backend_name(model, builder.parts[0]),
            weights=f"dummy seed {options.seed}" if options.checkpoint is None else "checkpoint",
            weights_fingerprint=weights.fingerprint(whole),
            out_width=facts.out_width,
        )
        for each in {id(model): model, id(whole): whole}.values():
            weights.finish(each)
            if device.type == "cpu":
                stack.enter_context(checked_linears(each))
        session = EncoderSession(facts, options, device, model, vllm_config, record, whole)
        del model, whole, each
        stack.callback(session.close)
        session.configure(configuration)
        yield session


def _build(
    builder: "Builder", facts: ModelFacts, options: SessionOptions, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Build and fill the encoder; return the model this process runs and the one with all weights, often the same."""
    from workbench.encoder import weights

    place = options.place
    sharded = place is not None and place.mode == "weights"
    with contextlib.ExitStack() as alone:
        if place is not None and sharded:
            alone.enter_context(engine.one_rank(place, device))
        with engine.building(device, dtype):
            whole = builder.build(facts)
    if options.checkpoint is None:
        weights.fill_dummy(whole, options.seed)
    else:
        weights.load_checkpoint(whole, builder.parts, facts.depth, options.checkpoint)
    whole.use_data_parallel = place is not None and place.mode == "data"
    if not sharded:
        return whole, whole
    with engine.building(device, dtype):
        model = builder.build(facts)
    weights.share(whole, model, builder.parts)
    model.use_data_parallel = False
    return model, whole


def _refuse_unplanned(title: str, model: Any) -> None:
    """Refuse a model of whose graphs the planner would count too few.

    Raises:
        WorkbenchError: it captures along further axes, or has several paths with budgets of their own.
    """
    config = model.get_encoder_cudagraph_config()
    found = None
    if config.capture_axes:
        found = "captures one graph per budget and axis key (capture_axes)"
    elif len(config.paths) > 1:
        found = "has several paths with budgets of their own (paths)"
    if found is not None:
        raise WorkbenchError(f"{title} {found}, which the planner does not count; choose another model")


def server_limits(options: SessionOptions, facts: ModelFacts) -> Limits:
    """Return what vLLM infers a configuration from, for `budgets.resolve`.

    Raises:
        WorkbenchError: a limit that vLLM refuses.
    """
    for name in ("max_model_len", "max_num_batched_tokens"):
        if getattr(options, name) <= 0:
            raise WorkbenchError(f"{name} {getattr(options, name)} is not positive; vLLM refuses it, so raise it")
    if options.video_limit is not None and options.video_limit < 0:
        raise WorkbenchError(f"video limit {options.video_limit} is negative; use 0 for no videos")
    return Limits.of(
        facts,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        video_limit=DEFAULT_VIDEO_LIMIT if options.video_limit is None else options.video_limit,
    )


def _backend_name(model: Any, part: str) -> str:
    """vLLM's name of the attention backend, with the FlashAttention version where there is one."""
    tower = getattr(model, part)
    version = tower.blocks[0].attn.attn._fa_version
    return f"{tower.attn_backend.name} {version}" if version else str(tower.attn_backend.name)
