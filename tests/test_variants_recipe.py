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


def test_a_failing_product_leaves_the_layer_as_it_was(blocks: Any) -> None:
    layer = blocks[0].attn.proj
    with pytest.raises(RuntimeError):
        product(layer, torch.randn(7, WIDTH + 1), 1)
    assert "forward" not in vars(layer)


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


def test_one_sequence_and_several_count_alike(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is twice as fast on several sequences and three times as slow on one: it loses."""
    offsets = offsets_of(0, 24, 48)

    def cost(way: Any) -> float:
        several = int(offsets[1]) < ROWS
        return 1.0 if way is None or isinstance(way, int) else 0.5 if several else 3.0

    with_times(monkeypatch, cost)
    assert choose(blocks, dataflow, ROWS, partial(plain, offsets), offsets, ROWS).tile is None


def test_an_attention_that_is_wrong_is_never_chosen(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = offsets_of(0, 24, 48)
    with_times(monkeypatch, lambda way: 1.0 if way is None else 0.1)
    for wrong in (1.05, float("nan")):

        def attend(*given: Any, by: float = wrong) -> None:
            dataflow.attend(*given)
            given[4].mul_(by)

        kernels = SimpleNamespace(**{name: getattr(dataflow, name) for name in dataflow.KERNELS} | {"attend": attend})
        assert choose(blocks, kernels, ROWS, partial(plain, offsets), offsets, ROWS).tile is None


def test_large_graphs_are_not_measured(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "MOST_ROWS", ROWS - 1)
    offsets = offsets_of(0, 48)
    assert choose(blocks, dataflow, ROWS, partial(plain, offsets), offsets, ROWS) == Recipe()


def test_quantised_layers_keep_their_own_product(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, lambda way: 1.0)
    for block in blocks:
        block.attn.proj.weight = torch.nn.Parameter(block.attn.proj.weight.to(torch.float64), requires_grad=False)
        monkeypatch.setattr(block.attn.proj, "forward", lambda x: (x.clone(), None))
    offsets = offsets_of(0, 48)
    assert choose(blocks, dataflow, ROWS, partial(plain, offsets), offsets, ROWS).proj == 0
