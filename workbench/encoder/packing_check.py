"""vLLM's manager run on a few calls: what it packs, pads and returns, beside what the planner said."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from workbench.budgets import Configuration, Resolved
from workbench.encoder.session import Grid, SessionOptions, open_session
from workbench.planner import plan
from workbench.profiler import equality

# Graph and eager outputs differ by the rounding of matrix products over other row counts, nothing more: bf16 has
# 8 significant bits, and the widest difference seen on the CPU and the H200 was 6e-5 of the outputs' RMS.
BOUND = 1e-2


def packing_check(
    options: SessionOptions, configuration: Configuration, calls: Sequence[Sequence[Grid]]
) -> pd.DataFrame:
    """Run `calls` (grids of images) through the real manager, and through eager as served.

    Returns:
        One row per batch that the manager ran: call, items, tokens, budget (0: eager fallback), fill, `as planned`
        (the planner said the same batch), `graph equals eager` (bit for bit, or within BOUND of the RMS).

    Raises:
        WorkbenchError: the machine cannot run the model, or vLLM refuses the configuration.
    """
    rows = []
    with open_session(options, configuration) as session:
        session.capture()
        manager = session.config_record
        resolved = Resolved(tuple(manager.budgets), manager.max_items, manager.max_frames)
        for number, grids in enumerate(calls):
            inputs = session.inputs(grids, "image", seed=number)
            with session.watch() as batches:
                graph = session.graph(inputs)
            found = equality(number, "eager_served", graph, session.eager_served(inputs))
            equal = found.bit_equal or (found.relative_rms is not None and found.relative_rms <= BOUND)
            tokens = np.array(inputs.tokens, dtype=np.int64)
            planned = plan(tokens, np.array([0, len(tokens)], dtype=np.int64), resolved).record()["calls"][0]["batches"]
            for index, batch in enumerate(batches):
                said = planned[index] if index < len(planned) else {}
                rows.append(
                    {
                        "call": number,
                        "items": ", ".join(map(str, batch.items)),
                        "tokens": batch.tokens,
                        "budget": batch.budget or 0,
                        "fill": batch.tokens / batch.budget if batch.budget else None,
                        "as planned": (said.get("items"), said.get("budget")) == (batch.items, batch.budget),
                        "graph equals eager": equal,
                    }
                )
    return pd.DataFrame(rows)
