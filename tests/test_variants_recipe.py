"""How variant `fused` chooses between ways to compute a step, on the CPU: what is equal, what is refused, who wins."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from workbench.encoder.variants import dataflow, recipe
from workbench.encoder.variants.recipe import TILES, Recipe, can_be_cut, choose, product

WIDTH, HEADS, SIZE, ROWS = 64, 2, 32, 48


class Linear(torch.nn.Linear):
    """Returns what vLLM's linear layers return."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def a_block() -> Any:
    attn = SimpleNamespace(
        proj=Linear(WIDTH, WIDTH), attn=SimpleNamespace(scale=SIZE**-0.5), num_attention_heads_per_partition=HEADS,
        hidden_size_per_attention_head=SIZE,
    )  # fmt: skip
    mlp = SimpleNamespace(fc1=Linear(WIDTH, 2 * WIDTH), fc2=Linear(2 * WIDTH, WIDTH))
    return SimpleNamespace(attn=attn, mlp=mlp, norm1=torch.nn.LayerNorm(WIDTH))


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


def with_times(monkeypatch: pytest.MonkeyPatch, cost: Callable[[Any], float]) -> None:
    """Let a step cost what its first argument, parts or tile, costs; vLLM's attention has none."""
    monkeypatch.setattr(
        recipe._Bench, "time", lambda _, step: cost(step.args[0] if isinstance(step, partial) else None)
    )


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


def test_the_fastest_way_of_each_step_wins(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {0: 5.0, 1: 4.0, 2: 1.0, 4: 3.0, TILES[0]: 2.0, TILES[1]: 1.5, None: 3.0}
    with_times(monkeypatch, costs.__getitem__)
    offsets = offsets_of(0, 10, 20, 20)
    chosen = choose(blocks, dataflow, ROWS, partial(plain, offsets), offsets, ROWS)
    assert chosen == Recipe(proj=2, fc1=2, fc2=2, tile=TILES[1])
    assert offsets.tolist() == [0, 10, 20, 20]  # as they were
    assert (
        str(chosen) == "attention by the kernel for short sequences; products in parts: proj in 2, fc1 in 2, fc2 in 2"
    )


@pytest.mark.parametrize(("several", "one", "wins"), [(0.5, 3.0, False), (3.0, 0.5, False), (0.25, 3.0, True)])
def test_one_sequence_and_several_count_alike(
    blocks: Any, monkeypatch: pytest.MonkeyPatch, several: float, one: float, wins: bool
) -> None:
    """Costs of the kernel against vLLM's attention, on several sequences and on one."""
    offsets = offsets_of(0, 24, 48)

    def cost(way: Any) -> float:
        return 1.0 if way is None or isinstance(way, int) else several if int(offsets[1]) < ROWS else one

    with_times(monkeypatch, cost)
    tile = choose(blocks, dataflow, ROWS, partial(plain, offsets), offsets, ROWS).tile
    assert (tile is not None) == wins


def test_more_slots_than_rows_are_tried_with_a_row_each(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs for videos have; sequences of no rows would say nothing, and nothing would seem right."""
    with_times(monkeypatch, lambda way: 0.5 if way == TILES[1] else 1.0)
    offsets = offsets_of(0, *[ROWS] * (2 * ROWS))
    assert choose(blocks, dataflow, ROWS, partial(plain, offsets), offsets, ROWS).tile == TILES[1]


def test_what_lies_behind_the_sequences_does_not_count(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, lambda way: 0.5 if way == TILES[0] else 1.0)
    offsets = offsets_of(*[0] * 7, ROWS)  # seven sequences of six rows

    def unset(_: Any, rows: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        made = torch.full_like(context, float("nan"))
        dataflow.attend(rows, offsets, ROWS, SIZE**-0.5, made, TILES[0])
        return made

    assert choose(blocks, dataflow, ROWS, unset, offsets, ROWS).tile == TILES[0]


def test_an_attention_that_is_wrong_is_never_chosen(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = offsets_of(0, 24, 48)
    with_times(monkeypatch, lambda way: 1.0 if way is None else 0.1)
    for wrong in (1.05, float("nan")):

        def attend(*given: Any, by: float = wrong) -> None:
            dataflow.attend(*given)
            given[4].mul_(by)

        assert choose(blocks, with_attention(attend), ROWS, partial(plain, offsets), offsets, ROWS).tile is None


def with_attention(attend: Callable[..., None], **more: Any) -> Any:
    """The functions of `dataflow`, but for attention."""
    own = {name: getattr(dataflow, name) for name in dataflow.KERNELS}
    return SimpleNamespace(**own | {"attend": attend} | more)


@pytest.mark.parametrize(("dtype", "chosen"), [(torch.bfloat16, True), (torch.float32, False)])
def test_rounding_is_allowed_as_the_dtype_rounds(
    blocks: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chosen: bool
) -> None:
    """A thousandth apart is less than bfloat16 rounds, and what TF32 makes of float32."""
    with_times(monkeypatch, lambda way: 1.0 if way is None else 0.1)
    for block in blocks:
        for module in (block.attn.proj, block.mlp.fc1, block.mlp.fc2, block.norm1):
            module.to(dtype)
    offsets = offsets_of(0, 24, 48)

    def attend(rows: torch.Tensor, offsets: torch.Tensor, *given: Any) -> None:
        dataflow.attend(rows, offsets, *given)
        given[2].mul_(1.001 if dtype == torch.float32 else 1.004)

    recipe = choose(blocks, with_attention(attend), ROWS, partial(plain, offsets), offsets, ROWS)
    assert (recipe.tile is not None) == chosen


def test_a_tile_without_room_on_this_gpu_is_left_out(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfResourcesError(Exception):
        pass

    def attend(*given: Any) -> None:
        if given[5] == TILES[0]:
            raise OutOfResourcesError
        dataflow.attend(*given)

    with_times(monkeypatch, lambda way: {None: 1.0, TILES[0]: 0.1, TILES[1]: 0.5}.get(way, 1.0))
    offsets = offsets_of(0, 24, 48)
    kernels = with_attention(attend, REFUSED=OutOfResourcesError)
    assert choose(blocks, kernels, ROWS, partial(plain, offsets), offsets, ROWS).tile == TILES[1]
    kernels = with_attention(attend, REFUSED=ZeroDivisionError)
    with pytest.raises(OutOfResourcesError):  # what else goes wrong is no reason to do without
        choose(blocks, kernels, ROWS, partial(plain, offsets), offsets, ROWS)
    assert offsets.tolist() == [0, 24, 48]


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


def test_large_graphs_are_not_measured(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "MOST_ROWS", ROWS - 1)
    offsets = offsets_of(0, 48)
    assert choose(blocks, dataflow, ROWS, partial(plain, offsets), offsets, ROWS) == Recipe()


def test_quantised_layers_keep_their_own_product(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, lambda way: 5.0 if way == 0 else 1.0)
    for block in blocks:
        block.attn.proj.weight = torch.nn.Parameter(block.attn.proj.weight.to(torch.float64), requires_grad=False)
        monkeypatch.setattr(block.attn.proj, "forward", lambda x: (x.clone(), None))
    offsets = offsets_of(0, 48)
    chosen = choose(blocks, dataflow, ROWS, partial(plain, offsets), offsets, ROWS)
    assert (chosen.proj, chosen.fc1) == (0, 1)
