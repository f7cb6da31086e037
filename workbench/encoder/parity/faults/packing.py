"""Faults of the plan of a call: which items share a replay, in which budget."""

from collections.abc import Iterator
from typing import Any

import torch

from workbench.encoder.instruments import wrapped
from workbench.encoder.parity.faults.planting import fault
from workbench.encoder.parity.lab import Lab


@fault("largest budget for every batch", "budget")
def budget_largest(lab: Lab) -> Iterator[None]:
    """Outputs are right and time is wasted."""

    def wrap(original: Any) -> Any:
        def find(total: int, budgets: list[int] | None = None) -> int | None:
            return None if original(total, budgets) is None else max(budgets or lab.manager.token_budgets)

        return find

    with wrapped(lab.manager, "_find_smallest_fitting_budget_given_tokens", wrap):
        yield


@fault("a budget smaller than the batch", "budget")
def budget_too_small(lab: Lab) -> Iterator[None]:
    """The next smaller budget is chosen where there is one."""

    def wrap(original: Any) -> Any:
        def find(total: int, budgets: list[int] | None = None) -> int | None:
            found = original(total, budgets)
            smaller = [budget for budget in budgets or lab.manager.token_budgets if found is None or budget < found]
            return max(smaller) if found is not None and smaller else found

        return find

    with wrapped(lab.manager, "_find_smallest_fitting_budget_given_tokens", wrap):
        yield


@fault("graphs never used", "budget")
def graphs_never_used(lab: Lab) -> Iterator[None]:
    """Every call runs eagerly: outputs are right, and only the batches show it."""

    def wrap(_original: Any) -> Any:
        def execute(mm_kwargs: Any) -> list[torch.Tensor]:
            if not len(lab.model.get_encoder_cudagraph_item_specs(mm_kwargs)):
                return []
            return list(lab.model.embed_multimodal(**mm_kwargs))

        return execute

    with wrapped(lab.manager, "_execute_local", wrap):
        yield


@fault("pixel rows of the items in another order than their grids", "selection")
def items_swapped(lab: Lab) -> Iterator[None]:
    """Rows are gathered back to front."""

    def wrap(original: Any) -> Any:
        def select(mm_kwargs: Any, indices: list[int]) -> Any:
            result = dict(original(mm_kwargs, indices))
            if len(indices) > 1:
                key = next(key for key in result if key.startswith("pixel_values"))
                result[key] = original(mm_kwargs, indices[::-1])[key]
            return result

        return select

    with wrapped(lab.model, "select_encoder_cudagraph_items", wrap):
        yield


@fault("an item of the call encoded twice, another never", "selection")
def item_repeated(lab: Lab) -> Iterator[None]:
    """The first item's rows stand in for the last one's."""

    def wrap(original: Any) -> Any:
        def select(mm_kwargs: Any, indices: list[int]) -> Any:
            return original(mm_kwargs, [*indices[:-1], indices[0]])

        return select

    with wrapped(lab.model, "select_encoder_cudagraph_items", wrap):
        yield
