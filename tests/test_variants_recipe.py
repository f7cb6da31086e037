"""How variant `fused` chooses between ways to compute a step, on the CPU: what is equal, what is refused, who wins."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from workbench.encoder.variants import dataflow, gemm, recipe
from workbench.encoder.variants.attention import FLASH4, TILES
from workbench.encoder.variants.gemm import Gemm, Multiply, Quack
from workbench.encoder.variants.recipe import LAYERS, Recipe, activated, can_be_cut, choose, product

WIDTH, HEADS, SIZE, ROWS = 64, 2, 32, 48


class Linear(torch.nn.Linear):
    """Returns what vLLM's linear layers return."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def a_block() -> Any:
    attn = SimpleNamespace(
        qkv=Linear(WIDTH, 3 * WIDTH), proj=Linear(WIDTH, WIDTH), attn=SimpleNamespace(scale=SIZE**-0.5),
        num_attention_heads_per_partition=HEADS, hidden_size_per_attention_head=SIZE,
    )  # fmt: skip
    mlp = SimpleNamespace(fc1=Linear(WIDTH, 2 * WIDTH), fc2=Linear(2 * WIDTH, WIDTH))
    return SimpleNamespace(attn=attn, mlp=mlp, norm1=torch.nn.LayerNorm(WIDTH), norm2=torch.nn.LayerNorm(WIDTH))


@pytest.fixture
def blocks() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield [a_block(), a_block()]


def offsets_of(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def plain(offsets: torch.Tensor, _: Any, rows: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    dataflow.attend(rows, offsets, ROWS, SIZE**-0.5, context, TILES[0])
    return context


def by_kernel(kernels: Any, offsets: torch.Tensor, tile: Any, _: Any, rows: torch.Tensor, context: torch.Tensor) -> Any:
    kernels.attend(rows, offsets, ROWS, SIZE**-0.5, context, tile)
    return context


def ways_of(offsets: torch.Tensor, kernels: Any = dataflow, vllm: Any = None) -> dict[Any, Any]:
    """vLLM's attention and the short kernel's, by name."""
    theirs = partial(plain, offsets) if vllm is None else vllm
    return {None: theirs} | {tile: partial(by_kernel, kernels, offsets, tile) for tile in TILES}


def chosen_by(
    blocks: Any, offsets: torch.Tensor, kernels: Any = dataflow, vllm: Any = None, more: Any = None
) -> Recipe:
    gemms: dict[str, Any] = dict.fromkeys(LAYERS, ()) | (more or {})
    return choose(blocks, dataflow, ROWS, ways_of(offsets, kernels, vllm), gemms, offsets)


def timed_by(monkeypatch: pytest.MonkeyPatch, time: Callable[[Any, Recipe], float]) -> None:
    """Let a bench's recipe cost what `time` says; what it raises ends the capture."""

    def captured(bench: Any, made: Recipe) -> Recipe:
        time(bench, made)
        return made

    def times(bench: Any, graphs: dict[Any, Recipe]) -> dict[Any, float]:
        return {way: time(bench, made) for way, made in graphs.items()}

    monkeypatch.setattr(recipe._Bench, "captured", captured)
    monkeypatch.setattr(recipe._Bench, "times", times)


def with_times(monkeypatch: pytest.MonkeyPatch, cost: Callable[[Any], float]) -> None:
    """Let a recipe cost what its ways cost: parts, tile, another's product; vLLM's attention has none."""

    def time(bench: Any, made: Recipe) -> float:
        return 1.0 + sum(map(cost, (made.qkv, made.proj, made.fc1, made.fc2, made.attention)))

    timed_by(monkeypatch, time)


def without_a_gpu(monkeypatch: pytest.MonkeyPatch, cost: Callable[[], float] = lambda: 1.0) -> None:
    """Let every recipe that runs cost alike."""

    def time(bench: Any, made: Recipe) -> float:
        bench.run(made, bench.blocks)
        return cost()

    timed_by(monkeypatch, time)


@pytest.mark.parametrize("parts", [0, 1, 2, 4])
def test_parts_and_bias_add_up_to_the_layer(blocks: Any, parts: int) -> None:
    layer, x = blocks[0].mlp.fc2, torch.randn(7, 2 * WIDTH)
    seen: list[Any] = []
    handle = layer.register_forward_hook(lambda module, given, output: seen.append(output))
    got, bias = product(layer, x, parts)
    handle.remove()
    assert (bias is None) == (parts == 0)
    assert got.dim() == (3 if parts > 1 else 2)
    torch.testing.assert_close(dataflow.whole(got, bias), layer(x)[0])
    assert len(seen) == 1  # a hook sees the product as the layer's
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("own", [False, True])
def test_a_failing_product_leaves_the_layer_as_it_was(blocks: Any, own: bool) -> None:
    layer = blocks[0].attn.proj
    forward = layer.forward
    if own:  # as one that is watched has
        layer.forward = forward
    with pytest.raises(RuntimeError):
        product(layer, torch.randn(7, WIDTH + 1), 1)
    assert vars(layer).get("forward") is (forward if own else None)


def test_which_weights_can_be_cut(blocks: Any) -> None:
    layer = blocks[0].mlp.fc2
    assert can_be_cut(layer, 4, torch.float32)
    assert not can_be_cut(layer, 3, torch.float32)
    assert not can_be_cut(layer, 2, torch.bfloat16)  # a quantised weight has another dtype
    layer.bias = None
    assert not can_be_cut(layer, 2, torch.float32)


def in_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gemm: Any, activation: str | None = None
) -> Any:
    """What `gemm.linear` computes, in torch."""
    if getattr(gemm, "parts", 1) > 1:
        assert bias is None
        shares = zip(x.chunk(gemm.parts, 1), weight.chunk(gemm.parts, 1), strict=True)
        return torch.stack([left @ right.t() for left, right in shares])
    result = x @ weight.t() + (0 if bias is None else bias)
    return result * torch.sigmoid(1.702 * result) if activation == "quick_gelu" else result


QUACK = Quack(128, 160, True, (2, 1))
WHOLE, IN_PARTS = Multiply(64, 64, 32, 4, 4), Multiply(64, 128, 16, 4, 4, 2)
MORE = {"qkv": (QUACK, WHOLE), "fc1": (QUACK,), "proj": (IN_PARTS,), "fc2": (WHOLE, IN_PARTS)}


def test_quacks_product_has_bias_and_activation_inside(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "linear", in_torch)
    layer, x = blocks[0].mlp.fc1, torch.randn(7, WIDTH)
    seen: list[Any] = []
    handle = layer.register_forward_hook(lambda module, given, output: seen.append(output))
    got, bias = product(layer, x, QUACK)
    inside = activated(dataflow, layer, x, QUACK)
    handle.remove()
    assert bias is None
    assert len(seen) == 2
    torch.testing.assert_close(got, layer(x)[0])
    torch.testing.assert_close(inside, activated(dataflow, layer, x, 0))
    torch.testing.assert_close(inside, activated(dataflow, layer, x, 2))


@pytest.mark.parametrize("way", [WHOLE, IN_PARTS])
def test_our_product_has_the_bias_inside_unless_it_comes_in_parts(
    blocks: Any, monkeypatch: pytest.MonkeyPatch, way: Multiply
) -> None:
    monkeypatch.setattr(gemm, "linear", in_torch)
    layer, x = blocks[0].mlp.fc2, torch.randn(7, 2 * WIDTH)
    got, bias = product(layer, x, way)
    assert (bias is None) == (way.parts == 1)
    assert got.dim() == (2 if way.parts == 1 else 3)
    torch.testing.assert_close(dataflow.whole(got, bias), layer(x)[0])


def test_the_fastest_way_of_each_step_wins(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "linear", in_torch)
    costs = {
        0: 5.0, 1: 4.0, 2: 1.0, 4: 3.0, TILES[0]: 2.0, TILES[1]: 1.5, TILES[2]: 2.5, None: 3.0, QUACK: 0.5, WHOLE: 0.6,
        IN_PARTS: 0.4,
    }  # fmt: skip
    with_times(monkeypatch, costs.__getitem__)
    offsets = offsets_of(0, 10, 20, 20)
    assert chosen_by(blocks, offsets) == Recipe(proj=2, fc1=2, fc2=2, attention=TILES[1])
    chosen = chosen_by(blocks, offsets, more=MORE)
    assert chosen == Recipe(QUACK, IN_PARTS, QUACK, IN_PARTS, TILES[1])
    assert offsets.tolist() == [0, 10, 20, 20]  # as they were
    assert chosen.words() == {
        "attention": "Triton, 64 x 64, 2 stages", "qkv": "quack, 128 x 160", "proj": "Triton, 64 x 128, 2 parts",
        "fc1": "quack, 128 x 160", "fc2": "Triton, 64 x 128, 2 parts",
    }  # fmt: skip
    assert set(Recipe().words().values()) == {"vLLM's"}
    assert Recipe(fc1=1, fc2=2, qkv=WHOLE).words()["fc1"] == "bias behind"
    assert Recipe(fc1=1, fc2=2, qkv=WHOLE).words()["fc2"] == "2 parts"
    assert Recipe(fc1=1, fc2=2, qkv=WHOLE).words()["qkv"] == "Triton, 64 x 64"
    assert Recipe(attention=FLASH4[0]).words()["attention"] == "FlashAttention 4, 128 x 128"


def test_a_way_that_pays_only_beside_another_is_found(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one kernel may start before the one in front has ended, and only some kernels let it."""
    monkeypatch.setattr(gemm, "linear", in_torch)

    def time(bench: Any, made: Recipe) -> float:
        return 3.0 - (made.proj == IN_PARTS) - (made.attention == TILES[0] and made.proj == IN_PARTS)

    timed_by(monkeypatch, time)
    assert chosen_by(blocks, offsets_of(0, 24, 48), more=MORE) == Recipe(proj=IN_PARTS, attention=TILES[0])


def test_every_way_of_every_step_is_run(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed works: nothing is refused, and the first of equals is vLLM's."""
    without_a_gpu(monkeypatch)
    monkeypatch.setattr(gemm, "linear", in_torch)
    offsets = offsets_of(0, 24, 48)
    chosen = chosen_by(blocks, offsets, more=MORE)
    assert chosen == Recipe()
    assert chosen.refused == ()


def test_all_blocks_compute_what_vllms_do(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the recipe."""
    monkeypatch.setattr(gemm, "linear", in_torch)
    offsets, made = offsets_of(0, 24, 48), []
    for one in (Recipe(), Recipe(QUACK, IN_PARTS, QUACK, WHOLE, TILES[0]), Recipe(WHOLE, 1, 2, 4, TILES[1])):
        bench = recipe._Bench(blocks, dataflow, ROWS, ways_of(offsets), offsets)
        bench.run(one, blocks)
        made.append((bench.stream.normed, bench.stream.hidden))
    for normed, hidden in made[1:]:
        torch.testing.assert_close(normed, made[0][0])
        torch.testing.assert_close(hidden, made[0][1])


def test_a_wrong_product_is_never_chosen(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch, iter(range(1000, 0, -1)).__next__)  # the later the faster

    def wrong(*given: Any, **named: Any) -> Any:
        return in_torch(*given, **named) * 1.05

    monkeypatch.setattr(gemm, "linear", wrong)
    offsets = offsets_of(0, 24, 48)
    chosen = chosen_by(blocks, offsets, more={"qkv": (QUACK,), "fc1": (QUACK,), "fc2": (IN_PARTS,)})
    assert not any(isinstance(way, Gemm) for way in (chosen.qkv, chosen.fc1, chosen.fc2))
    assert chosen.refused == (
        "fc1 by quack, 128 x 160: another result",
        "qkv by quack, 128 x 160: another result",
        "fc2 by Triton, 64 x 128, 2 parts: another result",
    )


def test_what_cannot_be_compiled_is_left_out_and_said(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, lambda way: 10.0 - way if isinstance(way, int) else 0.0 if way else 1.0)

    def fails(*given: Any, **named: Any) -> Any:
        raise RuntimeError("no such tile\nand a trace")

    monkeypatch.setattr(gemm, "linear", fails)
    offsets = offsets_of(0, 24, 48)
    chosen = chosen_by(blocks, offsets, with_attention(fails), more={"qkv": (QUACK,), "fc1": (QUACK,)})
    assert chosen == Recipe(0, 4, 4, 4)
    assert chosen.refused == (
        "fc1 by quack, 128 x 160: RuntimeError no such tile",
        "qkv by quack, 128 x 160: RuntimeError no such tile",
        *(f"attention by {tile}: RuntimeError no such tile" for tile in TILES),
    )
    assert offsets.tolist() == [0, 24, 48]


def test_what_cannot_be_captured_is_left_out_and_said(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gave the right result, and failed only where it was timed. A capture that failed may leave its marks."""
    monkeypatch.setattr(gemm, "linear", in_torch)
    failed = []

    def time(bench: Any, made: Recipe) -> float:
        if made.fc2 == IN_PARTS:
            failed.append(made)
            raise RuntimeError("not while capturing")
        return 1.0

    timed_by(monkeypatch, time)
    chosen = chosen_by(blocks, offsets_of(0, 24, 48), more={"fc2": (IN_PARTS,)})
    assert chosen == Recipe()
    assert chosen.refused == ("fc2 by Triton, 64 x 128, 2 parts: RuntimeError not while capturing",)
    assert len(failed) == 1


def test_vllms_own_way_has_to_work(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)

    def fails(*given: Any) -> Any:
        raise RuntimeError("broken")

    offsets = offsets_of(0, 24, 48)
    with pytest.raises(RuntimeError, match="broken"):
        chosen_by(blocks, offsets, vllm=fails)
    assert offsets.tolist() == [0, 24, 48]
    monkeypatch.setattr(blocks[0].mlp.fc2, "forward", fails)
    with pytest.raises(RuntimeError, match="broken"):
        chosen_by(blocks, offsets)


def test_what_a_hopper_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    for cuda, capability, hopper in (("13.0", (9, 0), True), ("13.0", (10, 0), False), (None, (9, 0), False)):
        monkeypatch.setattr(torch.version, "cuda", cuda)  # None: one of AMD's
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert gemm.is_hopper(gpu) == hopper
    assert not gemm.is_hopper(torch.device("cpu"))


def test_small_graphs_try_small_tiles_and_large_ones_large() -> None:
    def ways(step: str, rows: int, quack: bool = True) -> set[Any]:
        return set(gemm.candidates(step, rows, 5120, 1280, 132, quack))

    assert not ways("fc1", 256) & ways("fc1", 8192)
    assert ways("fc1", 1024) == ways("fc1", 256) | ways("fc1", 8192)
    assert ways("proj", 8192) == ways("fc1", 256, quack=False) == set()
    assert ways("qkv", 256, quack=False) < ways("qkv", 256)


@pytest.mark.parametrize("rows", [64, 256, 300, 512, 1024])
@pytest.mark.parametrize(("step", "outer", "inner"), [("proj", 1280, 1280), ("fc2", 1280, 5120), ("qkv", 3840, 1280)])
def test_our_product_has_no_more_parts_than_fill_the_gpu_once(step: str, rows: int, outer: int, inner: int) -> None:
    ways = gemm.candidates(step, rows, outer, inner, 132, quack=False)
    assert ways
    for way in ways:
        assert isinstance(way, Multiply)
        tiles, steps = -(-rows // way.rows) * outer // way.columns, inner // way.inner
        assert way.parts == 1 or tiles * way.parts <= 132
        assert (way.parts - 1) * -(-steps // way.parts) < steps  # none is empty
        assert step != "qkv" or way.parts == 1
    assert gemm.candidates(step, rows, outer + 1, inner, 132, quack=False) == ()
    assert gemm.candidates(step, rows, outer, inner + 8, 132, quack=False) == ()


@pytest.mark.parametrize(("several", "one", "wins"), [(0.5, 3.0, False), (3.0, 0.5, False), (0.25, 3.0, True)])
def test_one_sequence_and_several_count_alike(
    blocks: Any, monkeypatch: pytest.MonkeyPatch, several: float, one: float, wins: bool
) -> None:
    """Costs of the kernel against vLLM's attention, on several sequences and on one."""
    offsets = offsets_of(0, 24, 48)

    def cost(way: Any) -> float:
        if isinstance(way, int):
            return -0.25  # the other steps, and what `with_times` adds, come to nothing
        return 1.0 if way is None else several if int(offsets[1]) < ROWS else one

    with_times(monkeypatch, cost)
    assert (chosen_by(blocks, offsets).attention is not None) == wins


def test_more_slots_than_rows_are_tried_with_a_row_each(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs for videos have; sequences of no rows would say nothing, and nothing would seem right."""
    with_times(monkeypatch, lambda way: 0.5 if way == TILES[1] else 1.0)
    offsets = offsets_of(0, *[ROWS] * (2 * ROWS))
    assert chosen_by(blocks, offsets).attention == TILES[1]


def test_what_lies_behind_the_sequences_does_not_count(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, lambda way: 0.5 if way == TILES[0] else 1.0)
    offsets = offsets_of(*[0] * 7, ROWS)  # seven sequences of six rows

    def unset(_: Any, rows: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        made = torch.full_like(context, float("nan"))
        dataflow.attend(rows, offsets, ROWS, SIZE**-0.5, made, TILES[0])
        return made

    assert chosen_by(blocks, offsets, vllm=unset).attention == TILES[0]


def test_an_attention_that_is_wrong_is_never_chosen(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = offsets_of(0, 24, 48)
    with_times(monkeypatch, lambda way: 1.0 if way is None else 0.1)
    for wrong in (1.05, float("nan")):

        def attend(*given: Any, by: float = wrong) -> None:
            dataflow.attend(*given)
            given[4].mul_(by)

        assert chosen_by(blocks, offsets, with_attention(attend)).attention is None


def test_an_attention_that_leaves_rows_as_they_were_is_never_chosen(
    blocks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands there is vLLM's result, where its attention wrote to the same place."""
    with_times(monkeypatch, lambda way: 1.0 if way is None else 0.1)

    def attend(*given: Any) -> None:
        kept = given[4][ROWS // 2 :].clone()
        dataflow.attend(*given)
        given[4][ROWS // 2 :] = kept

    chosen = chosen_by(blocks, offsets_of(0, 24, 48), with_attention(attend))
    assert chosen.attention is None
    assert chosen.refused == tuple(f"attention by {tile}: another result" for tile in TILES)


def with_attention(attend: Callable[..., None]) -> Any:
    return SimpleNamespace(attend=attend)


@pytest.mark.parametrize(("dtype", "chosen"), [(torch.bfloat16, True), (torch.float32, False)])
def test_rounding_is_allowed_as_the_dtype_rounds(
    blocks: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chosen: bool
) -> None:
    """A thousandth apart is less than bfloat16 rounds, and what TF32 makes of float32."""
    with_times(monkeypatch, lambda way: 1.0 if way is None else 0.1)
    for block in blocks:
        for module in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2, block.norm1, block.norm2):
            module.to(dtype)
    offsets = offsets_of(0, 24, 48)

    def attend(rows: torch.Tensor, offsets: torch.Tensor, *given: Any) -> None:
        dataflow.attend(rows, offsets, *given)
        given[2].mul_(1.001 if dtype == torch.float32 else 1.004)

    assert (chosen_by(blocks, offsets, with_attention(attend)).attention is not None) == chosen


def test_steps_are_timed_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def stream(device: torch.device) -> object:
        made.append(device)
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    recipe._side.cache_clear()
    assert recipe._side(torch.device("cuda:0")) is recipe._side(torch.device("cuda:0"))
    assert recipe._side(torch.device("cuda:1")) is not recipe._side(torch.device("cuda:0"))
    assert made == [torch.device("cuda:0"), torch.device("cuda:1")]
    recipe._side.cache_clear()


class Graph:
    """Of `torch.cuda.CUDAGraph`, which memory it is captured into: a pool that no graph holds is refused."""

    holders: dict[int, int] = {}  # graphs by pool
    used: list[int] = []
    replayed: list["Graph"] = []

    def __init__(self) -> None:
        self.holders = Graph.holders  # of this test

    def capture_begin(self, pool: int | None = None) -> None:
        assert pool is None or self.holders[pool] > 0
        self._pool = len(self.holders) if pool is None else pool
        self.holders[self._pool] = self.holders.get(self._pool, 0) + 1
        self.used.append(self._pool)

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        self.replayed.append(self)

    def pool(self) -> int:
        return self._pool

    def __del__(self) -> None:
        self.holders[self._pool] -= 1


@pytest.fixture
def bench(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose time stands still."""
    event = SimpleNamespace(record=lambda _: None, synchronize=lambda: None, elapsed_time=lambda _: 1.0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(recipe, "_side", lambda _: None)
    monkeypatch.setattr(Graph, "holders", {})
    monkeypatch.setattr(Graph, "used", [])
    monkeypatch.setattr(Graph, "replayed", [])
    offsets = offsets_of(0, 24, 48)
    return recipe._Bench(blocks, dataflow, ROWS, ways_of(offsets), offsets)


def test_graphs_that_are_timed_share_their_memory(bench: Any) -> None:
    """Memory of its own would stay reserved after each."""
    for one in (Recipe(), Recipe(fc1=1), Recipe(fc1=2)):
        bench.captured(one)
    assert Graph.used == [0, 0, 0]


def test_graphs_are_timed_in_turn(bench: Any) -> None:
    """Forwards and backwards, from the same rows, so that none has the cooler GPU."""
    graphs = {way: bench.captured(Recipe(fc1=way)) for way in (0, 1, 2)}
    bench.stream.hidden.fill_(7)
    assert bench.times(graphs) == {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}
    assert torch.equal(bench.stream.hidden, bench.narrow)
    order = [way for replay in Graph.replayed[::3] for way, graph in graphs.items() if graph is replay]
    assert order == [2, 1, 0, 0, 1, 2] * ((recipe._ROUNDS + 1) // 2)


def test_the_bench_itself_finds_a_recipe(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the GPU: one that takes less time for parts than for anything else."""
    monkeypatch.setattr(gemm, "linear", in_torch)
    made: dict[int, Recipe] = {}
    captured = bench.captured

    def noted(one: Recipe) -> Any:
        graph = captured(one)
        made[id(graph)] = one
        return graph

    def elapsed(_: Any) -> float:
        one = made[id(Graph.replayed[-1])]
        return 10.0 - (one.fc2 == 2) - (one.qkv == QUACK) - (one.attention == TILES[0])

    monkeypatch.setattr(bench, "captured", noted)
    event = SimpleNamespace(record=lambda _: None, synchronize=lambda: None, elapsed_time=elapsed)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    found = bench.chosen(MORE)
    assert found == Recipe(qkv=QUACK, fc2=2, attention=TILES[0])
    assert found.refused == ()
    assert set(Graph.used) == {0}


def test_after_a_capture_that_failed_memory_is_not_shared(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(made: Recipe, blocks: Any) -> None:
        if len(blocks) > 1:
            raise RuntimeError("not while capturing")

    bench.captured(Recipe())
    with monkeypatch.context() as patched:
        patched.setattr(bench, "run", run)
        with pytest.raises(RuntimeError, match="not while capturing"):
            bench.captured(Recipe(fc1=1))
    for one in (Recipe(fc1=2), Recipe(fc2=1)):
        bench.captured(one)
    assert Graph.used == [0, 0, 1, 1]


def test_large_graphs_keep_their_products_whole(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "MOST_ROWS", ROWS - 1)
    monkeypatch.setattr(gemm, "linear", in_torch)
    with_times(monkeypatch, lambda way: 0.5 if way == QUACK else 1.0 if way in (0, None) else 0.1)
    offsets = offsets_of(0, 48)
    ways: dict[Any, Any] = {None: partial(plain, offsets)}
    gemms: dict[str, Any] = {"qkv": (QUACK,), "fc1": (QUACK,), "proj": (), "fc2": ()}
    assert choose(blocks, dataflow, ROWS, ways, gemms, offsets) == Recipe(qkv=QUACK, fc1=QUACK)


def test_quantised_layers_keep_their_own_product(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, lambda way: 5.0 if way == 0 else 1.0)
    for block in blocks:
        block.attn.proj.weight = torch.nn.Parameter(block.attn.proj.weight.to(torch.float64), requires_grad=False)
        monkeypatch.setattr(block.attn.proj, "forward", lambda x: (x.clone(), None))
    offsets = offsets_of(0, 48)
    chosen = chosen_by(blocks, offsets)
    assert (chosen.proj, chosen.fc1) == (0, 1)


class Stored(torch.nn.Module):
    """A layer of quantised weights, called `name` and [inner, outer], as vLLM's fp8 and GPTQ layers keep them."""

    def __init__(self, plain: Linear, name: str) -> None:
        super().__init__()
        self.name, self.bias = name, plain.bias
        self.register_buffer(name, plain.weight.t().to(torch.float8_e4m3fn))

    def forward(self, x: torch.Tensor) -> Any:
        return x @ getattr(self, self.name).to(x.dtype) + self.bias, None


@pytest.mark.parametrize("name", ["weight", "qweight"])
def test_layers_whose_weights_are_stored_otherwise_keep_their_own_product(
    blocks: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with_times(monkeypatch, lambda way: 5.0 if way == 0 else 1.0)
    for block in blocks:
        block.attn.qkv, block.mlp.fc2 = (Stored(layer, name) for layer in (block.attn.qkv, block.mlp.fc2))
    chosen = chosen_by(blocks, offsets_of(0, 48), more=MORE)
    assert (chosen.qkv, chosen.proj, chosen.fc2) == (0, 1, 0)
    assert not [why for why in chosen.refused if "qkv" in why or "fc2" in why]
