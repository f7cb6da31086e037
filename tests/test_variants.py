"""The encoder variants: bit for bit vLLM's graph, videos like vLLM's eager path, and refusal where vLLM differs.

Static replays of a small encoder: what the manager packs, copies and pads is vLLM's own code.
"""

import random
import re
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.budgets import Configuration
from workbench.errors import WorkbenchError
from workbench.models import Modality

pytestmark = pytest.mark.engine

torch = pytest.importorskip("torch", reason="needs an engine")

from workbench.encoder import engine  # noqa: E402 - needs an engine
from workbench.encoder.session import EncoderSession, Grid, SessionOptions, open_session  # noqa: E402
from workbench.encoder.variants import VARIANTS, attach, guard, names_for  # noqa: E402
from workbench.encoder.variants.attention import TILES  # noqa: E402
from workbench.encoder.variants.base import ErnieVariant  # noqa: E402
from workbench.encoder.variants.gemm import Gemm, Multiply, Quack  # noqa: E402
from workbench.encoder.variants.recipe import Recipe  # noqa: E402

NAMES = names_for("ernie45_vl")
EXACT = [variant.name for variant in VARIANTS if variant.exact and variant.model == "ernie45_vl"]
COMBINATIONS = [*([name] for name in NAMES), ["one_pass", "metadata_cache"], EXACT, list(NAMES)]
BUDGETS = (16, 32, 64)
GRIDS = 400  # for each of the combinations, so thousands in all


@pytest.fixture(scope="module")
def plain() -> Iterator[EncoderSession]:
    """A captured ERNIE of one block and one head, as vLLM makes it."""
    options = SessionOptions(depth=1, width=80, video_limit=1)
    with open_session(options, Configuration(BUDGETS, 4)) as session:
        session.capture()
        yield session


@pytest.fixture(scope="module", params=COMBINATIONS, ids="+".join)
def changed(request: pytest.FixtureRequest, plain: EncoderSession) -> Iterator[EncoderSession]:
    """The same encoder with variants, captured."""
    with plain.with_variants(request.param) as session:
        session.capture()
        yield session


@pytest.fixture(scope="module")
def everything(plain: EncoderSession) -> Iterator[EncoderSession]:
    """The same encoder with all variants, captured."""
    with plain.with_variants(NAMES) as session:
        session.capture()
        yield session


def random_images(chance: random.Random) -> list[Grid]:
    """Between one and six images of at most the largest budget."""
    grids: list[Grid] = []
    for _ in range(chance.randint(1, 6)):
        height = chance.randint(1, 12)
        grids.append((1, 2 * height, 2 * chance.randint(1, min(12, BUDGETS[-1] // height))))
    return grids


def same(got: list[Any], expected: list[Any]) -> bool:
    """Bit for bit."""
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def buffers(session: EncoderSession, budget: int) -> dict[str, Any]:
    """The captured input buffers of `budget`."""
    held: dict[str, Any] = session.manager.budget_graphs["default"][budget].input_buffers
    return held


# Images -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replayed(plain: EncoderSession) -> list[tuple[Any, list[Any]]]:
    """Random calls, and what vLLM's graph makes of them."""
    chance = random.Random(0)
    calls: list[tuple[Any, list[Any]]] = []
    while sum(len(inputs.grids) for inputs, _ in calls) < GRIDS:
        inputs = plain.inputs(random_images(chance), seed=len(calls))
        calls.append((inputs, plain.graph(inputs)))
    return calls


def test_images_are_bit_identical_to_the_graph_of_vllm(
    replayed: list[tuple[Any, list[Any]]], changed: EncoderSession
) -> None:
    for inputs, expected in replayed:
        assert same(changed.graph(inputs), expected), inputs.grids
    assert changed.stats["graph_misses"] == 0
    assert not changed.findings


def test_buffers_hold_what_those_of_vllm_hold(plain: EncoderSession, changed: EncoderSession) -> None:
    """Padding rows included: what a replay sees is the same, whatever the replay before left behind."""
    chance = random.Random(1)
    for seed in range(40):
        inputs = plain.inputs(random_images(chance), seed=seed)
        with plain.watch() as batches:
            plain.graph(inputs)
        changed.graph(inputs)
        mine, theirs = (buffers(session, batches[-1].budget or 0) for session in (changed, plain))
        for key, expected in theirs.items():
            got = mine[key]
            if key == "cu_seqlens":
                assert torch.equal(got[: len(expected)], expected)
                assert (got[len(expected) :] == expected[-1]).all()
            else:
                assert torch.equal(got, expected), (key, inputs.grids)


def test_inputs_written_again_in_place_are_seen(plain: EncoderSession, changed: EncoderSession) -> None:
    """Nothing is remembered by the identity of a tensor that its owner may write to."""
    first, second = plain.inputs([(1, 4, 6), (1, 8, 8)], seed=1), plain.inputs([(1, 8, 8), (1, 4, 6)], seed=2)
    call = first.mm_kwargs
    with torch.inference_mode():
        before = [x.clone() for x in changed.manager.execute(call)]
        first.pixels.copy_(second.pixels)
        first.grid.copy_(second.grid)
        after = changed.manager.execute(call)
    assert same(after, plain.graph(second))
    assert not same(before, after)


def test_pixels_alone_written_again_in_place_are_seen(plain: EncoderSession, changed: EncoderSession) -> None:
    """The very same tensors as in the call before, where a whole call is one batch."""
    for grids in ([(1, 8, 8)], [(1, 4, 6), (1, 8, 8)]):
        first, second = plain.inputs(grids, seed=1), plain.inputs(grids, seed=2)
        call = first.mm_kwargs
        with torch.inference_mode():
            before = changed.manager.execute(call)
            first.pixels.copy_(second.pixels)
            after = changed.manager.execute(call)
        assert same(after, plain.graph(second))
        assert not same(before, after)


@pytest.mark.parametrize("ranks", [2, 5])
def test_shards_of_a_call_give_what_the_whole_call_gives(
    plain: EncoderSession, changed: EncoderSession, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """As where ranks share a call out: each selects its items of the call, then its batches of these, or nothing."""
    manager, place = changed.manager, "vllm.v1.worker.encoder_cudagraph.get_tensor_model_parallel"
    monkeypatch.setattr(f"{place}_world_size", lambda: ranks)
    calls: list[tuple[Modality, list[Grid]]] = [("image", [(1, 8, 8), (1, 2, 2), (1, 4, 6)]), ("image", [(1, 2, 4)])]
    if manager.supports_modality("video"):
        calls.append(("video", [(2, 4, 4), (4, 2, 2), (2, 2, 6)]))
    for modality, grids in calls:
        inputs = changed.inputs(grids, modality)
        outputs: dict[int, Any] = {}
        expected = plain.graph(inputs) if modality == "image" else plain.eager_served(inputs)
        for rank in range(ranks):
            monkeypatch.setattr(f"{place}_rank", lambda rank=rank: rank)
            with torch.inference_mode():
                tokens = manager._get_per_item_out_tokens(inputs.mm_kwargs)
                local, order, counts, _ = manager._dp_shard(inputs.mm_kwargs, tokens)
                made = manager._execute_local(local)
            items = order[sum(counts[:rank]) :][: counts[rank]]
            outputs |= dict(zip(items, made, strict=True))
        assert same([outputs[item] for item in range(len(grids))], expected), (modality, grids)


def test_padding_rows_never_reach_an_item(plain: EncoderSession, changed: EncoderSession) -> None:
    """NaN in what an earlier replay left behind would spread if a kernel read it."""
    small, large = plain.inputs([(1, 2, 2)], seed=3), plain.inputs([(1, 8, 8)], seed=4)
    expected = plain.graph(small)
    poisoned = plain.inputs([(1, 8, 8)], seed=4)
    poisoned.pixels.fill_(float("nan"))
    changed.graph(poisoned)
    assert same(changed.graph(small), expected)
    assert same(changed.graph(large), plain.graph(large))


# An item above the largest budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["fallback"], ["resampler"], list(NAMES)], ids="+".join)
def test_an_item_above_the_largest_budget_is_postprocessed_once(plain: EncoderSession, names: list[str]) -> None:
    inputs = plain.inputs([(1, 4, 4), (1, 16, 18), (1, 2, 6), (1, 20, 20)])
    with pytest.raises(RuntimeError):
        plain.graph(inputs)  # D1
    with plain.with_variants(names) as session:
        session.capture()
        assert same(session.graph(inputs), plain.eager_served(inputs))
        assert same(session.eager_fallback(inputs), plain.eager_served(inputs))
        assert session.stats["graph_misses"] == 2


# Videos -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[["resampler"], ["resampler", "metadata_cache"], list(NAMES)], ids="+".join)
def video(request: pytest.FixtureRequest, plain: EncoderSession) -> Iterator[EncoderSession]:
    """An encoder that has graphs for videos."""
    with plain.with_variants(request.param) as session:
        session.capture()
        yield session


def test_videos_equal_the_eager_path_of_vllm(video: EncoderSession) -> None:
    chance = random.Random(2)
    batched = 0
    for seed in range(150):
        grids: list[Grid] = []
        for _ in range(chance.randint(1, 5)):
            height, width = chance.randint(1, 5), chance.randint(1, 5)
            grids.append((2 * chance.randint(1, 4), 2 * height, 2 * width))
        inputs = video.inputs(grids, "video", seed=seed)
        with video.watch() as batches:
            outputs = video.graph(inputs)
        assert [len(x) for x in outputs] == list(inputs.tokens)
        assert same(outputs, video.eager_served(inputs)), grids
        batched += sum(batch.budget is not None for batch in batches)
    assert batched > 100
    assert not video.findings


def test_images_and_videos_alternate_in_the_same_graphs(plain: EncoderSession, video: EncoderSession) -> None:
    for seed in range(4):
        clip = video.inputs([(4, 6, 4), (2, 4, 4)], "video", seed=seed)
        images = plain.inputs([(1, 8, 12), (1, 4, 4)], seed=seed)
        assert same(video.graph(clip), video.eager_served(clip))
        assert same(video.graph(images), plain.graph(images))


def test_more_frames_than_a_graph_has_slots_for_run_eagerly(video: EncoderSession) -> None:
    """Packing counts frames (D4): one video with more goes vLLM's eager way, several are spread over replays."""
    long = video.inputs([(40, 2, 2)], "video")
    with video.watch() as batches:
        assert same(video.graph(long), video.eager_served(long))
    assert [batch.budget for batch in batches] == [None]
    several = video.inputs([(10, 2, 2)] * 4, "video")
    with video.watch() as batches:
        assert same(video.graph(several), video.eager_served(several))
    assert len(batches) == 4
    assert all(batch.budget == 64 for batch in batches)


@pytest.mark.parametrize("frames", [1, 3, 7])
def test_odd_frames_are_refused_as_the_eager_path_refuses_them(video: EncoderSession, frames: int) -> None:
    inputs = video.inputs([(frames, 4, 4)], "video")
    with pytest.raises(RuntimeError):
        video.eager_served(inputs)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{frames} frames cannot be merged in pairs"):
            video.graph(inputs)


def test_a_grid_that_the_merge_does_not_divide_is_refused(video: EncoderSession) -> None:
    with pytest.raises(WorkbenchError, match="multiples of 2"):
        video.inputs([(2, 3, 4)], "video")
    call = {"pixel_values_videos": torch.zeros(24, 588), "video_grid_thw": torch.tensor([[2, 3, 4]])}
    with pytest.raises(ValueError, match="not divisible by the merge"):
        video.manager.execute(call)


def test_videos_need_the_variant_and_a_video_limit(plain: EncoderSession) -> None:
    with pytest.raises(WorkbenchError, match="captures no video graphs"):
        plain.inputs([(2, 4, 4)], "video")


def test_without_the_temporal_part_there_are_images_only(plain: EncoderSession) -> None:
    resampler = plain.model.resampler_model
    resampler.use_temporal_conv = False
    merged = resampler.mlp
    try:
        with plain.with_variants(["resampler"]) as session:
            assert session.manager.config.modalities == ["image"]
            session.capture()
            assert "temporal" not in buffers(session, 16)
            inputs = plain.inputs([(1, 4, 6), (1, 8, 8)])
            assert same(session.graph(inputs), plain.eager_served(inputs))
    finally:
        resampler.use_temporal_conv = True
        assert resampler.mlp is merged


# GLM-4.1V -----------------------------------------------------------------------------------------------------------


def test_the_offsets_of_glm_never_fall() -> None:
    options = SessionOptions(model="glm4_1v", depth=1, width=128, video_limit=1)
    with open_session(options, Configuration((16, 32), 4, 10)) as session:
        session.capture()
        images = session.inputs([(1, 4, 4), (1, 4, 6)])
        clip = session.inputs([(4, 4, 4)], "video")
        session.graph(images)
        assert [finding.defect for finding in session.findings] == ["D6"]
        with session.with_variants(["cu_seqlens_tail"]) as fixed:
            fixed.capture()
            for inputs in (clip, images, clip):
                assert same(fixed.graph(inputs), session.eager_served(inputs))
            assert not fixed.findings


@pytest.fixture(scope="module")
def glm_beside_videos() -> Iterator[EncoderSession]:
    """A captured GLM-4.1V of one block and one head that takes videos; its images have the zeroed tails of D6."""
    options = SessionOptions(model="glm4_1v", depth=1, width=128, video_limit=1)
    with open_session(options, Configuration((16, 32, 64), 4, 16)) as session:
        session.capture()
        yield session


def random_clips(chance: random.Random) -> list[Grid]:
    """Up to three videos of at most four frames, as many as a batch has room for."""
    return [
        (chance.randint(1, 4), 2 * chance.randint(1, 4), 2 * chance.randint(1, 4)) for _ in range(chance.randint(1, 3))
    ]


@pytest.mark.parametrize("names", [["position_cache"], ["position_cache", "cu_seqlens_tail"]], ids="+".join)
def test_cached_positions_are_those_of_vllm(glm_beside_videos: EncoderSession, names: list[str]) -> None:
    plain, chance, items = glm_beside_videos, random.Random(2), 0
    with plain.with_variants(names) as changed:
        changed.capture()
        while items < 2 * GRIDS:
            video = chance.random() < 0.5
            grids = random_clips(chance) if video else random_images(chance)
            inputs = plain.inputs(grids, "video" if video else "image", seed=items)
            expected = plain.graph(inputs)
            assert same(changed.graph(inputs), expected), grids
            items += len(grids)
        cache = changed.model.position_cache
        assert cache.hits > cache.misses > 100
        held = buffers(changed, 64), buffers(plain, 64)
        for key in ("pos_embeds", "rotary_pos_emb_cos", "rotary_pos_emb_sin"):
            assert torch.equal(held[0][key], held[1][key])


def test_cached_positions_are_forgotten_with_the_weights(glm_beside_videos: EncoderSession) -> None:
    plain = glm_beside_videos
    inputs = plain.inputs([(1, 4, 6)])
    weight = plain.model.visual.embeddings.position_embedding.weight
    kept = weight.detach().clone()
    with plain.with_variants(["position_cache"]) as changed:
        changed.capture()
        before = changed.graph(inputs)
        changed.model.load_weights([("visual.embeddings.position_embedding.weight", kept * 3)])
        try:
            after = changed.graph(inputs)
            assert same(after, plain.eager_served(inputs))
            assert not same(after, before)
        finally:
            weight.data.copy_(kept)


def test_cached_positions_are_forgotten_with_a_weight_that_is_replaced(glm_beside_videos: EncoderSession) -> None:
    """A new weight may lie where one before it lay."""
    plain = glm_beside_videos
    inputs, embedding = plain.inputs([(1, 4, 6)]), plain.model.visual.embeddings.position_embedding
    kept = embedding.weight
    with plain.with_variants(["position_cache"]) as changed:
        changed.capture()
        try:
            for scale in range(2, 8):
                embedding.weight = torch.nn.Parameter(kept.detach() * scale, requires_grad=False)
                assert same(changed.graph(inputs), plain.eager_served(inputs)), scale
        finally:
            embedding.weight = kept


def test_positions_of_a_call_are_computed_once_whatever_the_cache_holds(glm_beside_videos: EncoderSession) -> None:
    from workbench.encoder.variants.metadata_cache import TensorCache

    plain = glm_beside_videos
    inputs = plain.inputs([(1, 4, 6), (1, 6, 4), (1, 4, 6)])
    with plain.with_variants(["position_cache"]) as changed:
        changed.capture()
        changed.model.position_cache = cache = TensorCache(0)
        assert same(changed.graph(inputs), plain.graph(inputs))
        assert (cache.misses, cache.hits, cache.held_bytes) == (2, 0, 0)


# How `fused` computes its steps -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_float32() -> Iterator[EncoderSession]:
    """A captured ERNIE of two blocks in float32, whose weights can be read: the CPU's layers pack theirs away."""
    pytest.importorskip("triton", reason="there is nothing to choose without")
    from workbench.encoder import weights

    finish = weights.finish

    def finish_and_keep(model: Any) -> None:
        kept = {module: module.weight.detach().clone() for module in model.modules() if hasattr(module, "quant_method")}
        for module in kept:
            if getattr(module, "bias", None) is not None:  # most of a session's biases are zero, and could be lost
                module.bias.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(0))
        finish(model)
        for module, weight in kept.items():
            module.weight = torch.nn.Parameter(weight, requires_grad=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "finish", finish_and_keep)
        with open_session(SessionOptions(depth=2, width=160, dtype="float32"), Configuration(BUDGETS, 4)) as session:
            session.capture()
            yield session


@pytest.fixture
def unmeasured() -> None:
    """Forget what was measured on a tower."""
    from workbench.encoder.variants import fused

    fused._MEASURED.clear()


QUACK = Quack(128, 160, True, (2, 1))
WHOLE, IN_PARTS = Multiply(64, 64, 32, 4, 4), Multiply(64, 32, 16, 4, 4, 2)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(0, 1, 1, 1),
        Recipe(0, 2, 4, 2, TILES[0]),
        Recipe(QUACK, 4, QUACK, 1),
        Recipe(QUACK, 0, 2, 4, TILES[1]),
        Recipe(WHOLE, WHOLE, QUACK, IN_PARTS, TILES[0]),
    ],
    ids=str,
)
def test_a_tower_is_the_same_by_every_recipe(
    in_float32: EncoderSession, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where no sum is rounded that would tell ways apart."""
    made: list[int] = []

    def choose(blocks: Any, kernels: Any, rows: int, *_: Any) -> Recipe:
        made.append(rows)
        return recipe

    def linear(x: Any, weight: Any, bias: Any, gemm: Gemm, activation: str | None = None) -> Any:
        if gemm == IN_PARTS:
            assert bias is None
            return torch.stack([a @ b.t() for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)])
        result = x @ weight.t() + bias
        return result * torch.sigmoid(1.702 * result) if activation == "quick_gelu" else result

    monkeypatch.setattr("workbench.encoder.variants.gemm.linear", linear)
    monkeypatch.setattr("workbench.encoder.variants.fused.choose", choose)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    inputs = in_float32.inputs([(1, 8, 8), (1, 4, 6), (1, 2, 2)])
    with in_float32.with_variants(["fused"]) as changed:
        changed.model.in_triton = True
        changed.capture()
        assert made == [4 * budget for budget in sorted(BUDGETS, reverse=True)]  # once for a graph, before its capture
        for got, expected in zip(changed.graph(inputs), in_float32.graph(inputs), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert set(changed.model.recipes.values()) == {recipe}
        assert len(made) == len(BUDGETS)


@pytest.mark.usefixtures("unmeasured")
def test_nothing_is_measured_while_a_graph_is_captured(
    in_float32: EncoderSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attach(in_float32.model, ["fused"])
    model.in_triton = True
    metadata = {"cu_seqlens": torch.tensor([0, 64], dtype=torch.int32), "max_seqlen": torch.tensor(64)}
    monkeypatch.setattr("workbench.encoder.variants.fused.choose", lambda *_: Recipe(proj=2))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert model._recipe(64, metadata) == Recipe()
    assert not model.recipes  # the next graph of this shape can still be measured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert model._recipe(64, metadata) == Recipe(proj=2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert model._recipe(64, metadata) == Recipe(proj=2)
    longer = metadata | {"cu_seqlens": torch.tensor([0, 64, 64], dtype=torch.int32)}
    assert model._recipe(64, longer) == Recipe()  # more slots are another graph
    again = attach(in_float32.model, ["fused", "resampler"])
    again.in_triton = True
    assert again._recipe(64, metadata) == Recipe(proj=2)  # models of one tower compute alike
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    again._recipe(64, longer)
    assert [*model.recipes] == [(64, 1, 64)]  # and each has on record what its own graphs do
    assert [*again.recipes] == [(64, 1, 64), (64, 2, 64)]


def test_no_other_product_is_offered_to_a_quantised_layer() -> None:
    from workbench.encoder.variants.fused import Fused

    for stored in ({"qweight": torch.zeros(8, 8)}, {"weight": torch.zeros(64)}):
        block = SimpleNamespace(attn=SimpleNamespace(qkv=SimpleNamespace(**stored)))
        tower: Any = SimpleNamespace(vision_model=SimpleNamespace(blocks=[block]))
        assert Fused._gemms(tower, "qkv", 256) == ()


# Attaching ----------------------------------------------------------------------------------------------------------


def test_the_parts_are_shared_and_the_model_stays_as_it_is(plain: EncoderSession) -> None:
    before = dict(vars(plain.model)), type(plain.model)
    model = attach(plain.model, ["resampler", "fused"])
    assert model.vision_model is plain.model.vision_model
    assert isinstance(model, type(plain.model))
    model.extra = torch.nn.Linear(1, 1)
    assert not hasattr(plain.model, "extra")
    assert (dict(vars(plain.model)), type(plain.model)) == before


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["rotary"], "'rotary' names no variant"),
        ([], "an empty list"),
        (["fused", "fused"], "named twice"),
        (["cu_seqlens_tail"], "names no variant of ernie45_vl"),
    ],
)
def test_names_that_cannot_be_attached(plain: EncoderSession, names: list[str], words: str) -> None:
    with pytest.raises(WorkbenchError, match=words), plain.with_variants(names):
        pass


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_vllm_whose_methods_differ_is_refused(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.require_vllm()
    guard.require_sources(variant.name, variant.sources)
    for name in variant.sources:
        monkeypatch.setitem(guard.HASHES, name, "0" * 12)
        with pytest.raises(WorkbenchError, match=r"0\.32\.0 and 0\.33\.0") as refused:
            guard.require_sources(variant.name, variant.sources)
        assert name.partition(":")[2] in str(refused.value)
        monkeypatch.undo()


def test_a_method_that_was_edited_or_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine.require_vllm()
    from vllm.model_executor.models import ernie45_vl

    name = guard.REPLAY[1]
    monkeypatch.setattr(ernie45_vl.Ernie4_5_VisionTransformer, "prepare_encoder_metadata", lambda self: {})
    assert guard.source_hash.__wrapped__(name) != guard.HASHES[name]
    monkeypatch.delattr(ernie45_vl.Ernie4_5_VisionTransformer, "prepare_encoder_metadata")
    with pytest.raises(WorkbenchError, match="no readable"):
        guard.source_hash.__wrapped__(name)


def test_fused_refuses_what_it_was_not_written_for(plain: EncoderSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain.model.vision_model.blocks[0].attn, "tp_size", 2)
    with pytest.raises(WorkbenchError, match="one GPU"):
        attach(plain.model, ["fused"])


# Parts --------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 9)), min_size=1, max_size=12))
def test_narrow_copies_leave_what_zero_and_copy_leaves(steps: list[tuple[int, bool, int]]) -> None:
    from workbench.encoder.variants.padding import NarrowCopy, held_offsets, repeat_last

    values = {rows: torch.full((rows, 2), float(rows)) for rows in range(1, 10)}
    for immutable in (True, False):
        copy = NarrowCopy(immutable)
        held = [torch.randn(9, 2), torch.randn(9, 2)]
        for _, which, rows in steps:
            buffer, value = held[which], values[rows]
            copy(buffer, value)
            expected = torch.zeros(9, 2)
            expected[:rows] = value
            assert torch.equal(buffer, expected)
            line, repeated = torch.zeros(9), torch.zeros(9)
            held_offsets(line, value[:, 0])
            repeat_last(repeated, value[:, 0])
            assert torch.equal(line, repeated)
            assert (line[rows:] == value[-1, 0]).all()


def test_a_copy_that_fails_is_not_believed_to_have_happened() -> None:
    from workbench.encoder.variants.padding import NarrowCopy

    copy = NarrowCopy(immutable=True)
    buffer, small, large = torch.zeros(3, 2), torch.ones(2, 2), torch.full((4, 2), 5.0)
    copy(buffer, small)
    with pytest.raises(RuntimeError):
        copy(buffer, large)
    buffer.fill_(7)
    copy(buffer, small)
    assert torch.equal(buffer, torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))


def test_offsets_that_fail_to_be_copied_are_not_believed_to_be_held() -> None:
    from workbench.encoder.variants.padding import held_offsets

    buffer, short, long = torch.zeros(4), torch.tensor([0.0, 2.0]), torch.arange(6.0)
    held_offsets(buffer, short)
    with pytest.raises(RuntimeError):
        held_offsets(buffer, long)
    buffer.fill_(7)
    held_offsets(buffer, short)
    assert buffer.tolist() == [0, 2, 2, 2]


def test_what_a_buffer_holds_is_forgotten_with_it() -> None:
    """The value it held is let go, and a buffer in the place of another is not taken for it."""
    from workbench.encoder.variants.padding import NarrowCopy

    copy, value, memory = NarrowCopy(immutable=True), torch.ones(2, 2), torch.full((3, 2), 7.0)
    buffer, given = memory.view(3, 2), torch.zeros(3, 2)
    held = weakref.ref(given)
    copy(buffer, given)
    del given
    assert held() is not None
    del buffer
    assert held() is None
    for _ in range(3):  # views of one memory, whose objects are likely to lie where the one before lay
        memory.fill_(7)
        copy(memory.view(3, 2), value)
        assert memory.tolist() == [[1, 1], [1, 1], [0, 0]]


def test_graphs_captured_anew_hold_nothing_of_those_before(plain: EncoderSession) -> None:
    with plain.with_variants(NAMES) as session:
        inputs, clip = plain.inputs([(1, 4, 6), (1, 8, 8)]), session.inputs([(2, 4, 4)], "video")
        session.capture()
        expected = session.graph(inputs), session.graph(clip)
        gone = [weakref.ref(buffer) for budget in BUDGETS for buffer in buffers(session, budget).values()]
        session.manager.clear()
        assert not any(buffer() is not None for buffer in gone)
        session.capture()
        assert same(session.graph(inputs), expected[0])
        assert same(session.graph(clip), expected[1])


def test_a_grid_written_in_place_is_seen_by_the_next_call(everything: EncoderSession) -> None:
    """The same tensors, the same number of patches, and the other shape."""
    cases: list[tuple[Modality, list[Grid], list[Grid]]] = [
        ("image", [(1, 4, 6), (1, 2, 2)], [(1, 2, 2), (1, 6, 4)]),
        ("video", [(2, 4, 6)], [(4, 2, 6)]),
    ]
    for modality, grids, others in cases:
        written, other = everything.inputs(grids, modality, seed=5), everything.inputs(others, modality, seed=5)
        call = written.mm_kwargs
        for _ in range(2):
            for inputs in (other, everything.inputs(grids, modality, seed=5)):
                written.grid.copy_(inputs.grid)
                with torch.inference_mode():
                    assert same(everything.manager.execute(call), everything.graph(inputs)), inputs.grids


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_items_and_their_specs_are_those_of_vllm(
    plain: EncoderSession, everything: EncoderSession, data: st.DataObject
) -> None:
    """Any items in any order, from all of them to none; neither the call's dict nor kept specs are handed out."""
    inputs = plain.inputs(random_images(random.Random(data.draw(st.integers(0, 30)))))
    items = st.permutations(range(len(inputs.grids)))
    indices = list(data.draw(items))[: data.draw(st.integers(0, len(inputs.grids)))]
    if data.draw(st.booleans()):
        indices.sort()
    call = inputs.mm_kwargs
    expected = plain.model.get_encoder_cudagraph_item_specs(call)
    for _ in range(2):
        specs = everything.model.get_encoder_cudagraph_item_specs(call)
        assert specs == expected
        specs.clear()
    theirs = plain.model.select_encoder_cudagraph_items(call, indices)
    mine = everything.model.select_encoder_cudagraph_items(call, indices)
    for key, value in theirs.items():
        assert torch.equal(mine[key], value), (key, indices)
    assert everything.model.get_encoder_cudagraph_item_specs(mine) == [expected[i] for i in indices]
    assert call.keys() == theirs.keys()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from((1, 2, 4, 6)), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5))
def test_each_row_that_comes_out_pairs_two_frames(grids: list[Grid]) -> None:
    from workbench.encoder.variants.resampler import temporal_pairs

    grids = [(t, 2 * h, 2 * w) for t, h, w in grids]
    expected, start = [], 0
    for t, h, w in grids:
        area = h * w // 4
        for row in range(max(1, t // 2) * area):
            first = start + 2 * (row // area) * area + row % area
            expected += [first, first + (area if t > 1 else 0)]
        start += t * area
    assert temporal_pairs(tuple(grids), 2).tolist() == expected


def rows_of(key: int) -> dict[str, Any]:
    """A value of `4 * key` bytes."""
    return {"rows": torch.full((key,), float(key))}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.integers(0, 200))
def test_the_cache_is_bounded_and_drops_the_oldest(keys: list[int], limit: int) -> None:
    from workbench.encoder.variants.metadata_cache import TensorCache

    cache = TensorCache(limit)
    recent: list[int] = []
    for key in keys:
        value = cache.get(key, partial(rows_of, key))["rows"]
        assert torch.equal(value, torch.full((key,), float(key)))
        recent = [*(k for k in recent if k != key), key]
        while sum(4 * k for k in recent) > limit:
            recent.pop(0)
        assert cache.held_bytes == sum(4 * k for k in recent)
    assert cache.hits + cache.misses == len(keys)


@pytest.mark.parametrize(
    ("device", "copied"), [("cuda:0", ["offsets", "nothing"]), ("cpu", ["offsets", "most", "nothing"])]
)
def test_a_cuda_graph_is_given_no_values_of_the_host(device: str, copied: list[str]) -> None:
    """It has them baked in; a static replay reads them."""
    offsets, most = SimpleNamespace(is_cuda=True), torch.tensor(3)
    model: Any = SimpleNamespace(
        vision_model=SimpleNamespace(device=torch.device(device)),
        tower_metadata=lambda grids, slots: {"offsets": offsets, "most": most, "nothing": None},
    )
    assert list(ErnieVariant.replay_metadata(model, ((1, 4, 4),), 4)) == copied


def test_metadata_is_computed_once_per_grid(plain: EncoderSession) -> None:
    with plain.with_variants(["metadata_cache"]) as session:
        session.capture()
        for seed in range(3):
            session.graph(plain.inputs([(1, 4, 6), (1, 8, 8)], seed=seed))
        session.graph(plain.inputs([(1, 8, 8)]))
        model = session.model
        assert (model.batch_cache.misses, model.batch_cache.hits) == (2, 2)
        assert model.item_cache.misses == 2


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_has_a_page(variant: Any) -> None:
    pages = Path(__file__).parents[1] / "docs"
    text = (pages / "variants" / f"{variant.name}.md").read_text()
    for heading in ("Idea", "The change in words", "Limits", "How to upstream", "Figures"):
        assert f"\n## {heading}\n" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120
    assert f"variants/{variant.name}.md" in (pages / "variants.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (pages / "variants" / target).resolve().is_file(), target
