"""The model that a notebook explains: named by an environment variable, or picked from a list in JupyterLab.

    from workbench.views.subject import choose_model

    facts = choose_model(["ernie45_vl", "glm4_1v"])  # the one that WORKBENCH_MODEL names, else the first

A picked model counts for the cells that are run afterwards.
"""

import os
from collections.abc import Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.models import ModelFacts, model_facts
from workbench.views.theme import say

MODEL_VARIABLE = "WORKBENCH_MODEL"
# Jupyter servers set it for the kernel of a notebook that a person opened; nbclient, nbval and nbconvert do not.
_OPENED = "JPY_SESSION_NAME"


def live() -> bool:
    """Whether this kernel serves a notebook that somebody has open, so that widgets can move."""
    return _OPENED in os.environ


def choose_model(offered: Sequence[str]) -> ModelFacts:
    """Say which model a notebook explains and which others it could, and return its facts.

    Args:
        offered: keys of the models for which the notebook has something to show; the first is the default.

    Raises:
        WorkbenchError: WORKBENCH_MODEL names a model that is not offered.
    """
    key = os.environ.get(MODEL_VARIABLE) or offered[0]
    if key not in offered:
        raise WorkbenchError(f"{MODEL_VARIABLE} is {key!r}, for which nothing is here; use {' or '.join(offered)}")
    chosen = model_facts(key)
    others = [model_facts(other) for other in offered if other != key]
    if others:
        listed = ", ".join(f"`{MODEL_VARIABLE}={other.key}` for {other.title}" for other in others)
        say(f"This notebook explains **{chosen.title}**. Start it with {listed}.")
        if live():
            from IPython.display import display

            display(dropdown(key, offered))  # type: ignore[no-untyped-call]
    return chosen


def dropdown(key: str, offered: Sequence[str]) -> Any:
    """Return the widget that sets WORKBENCH_MODEL in this kernel, and says that the cells are to be run again."""
    import ipywidgets as ipw

    choice = ipw.Dropdown(options=[(model_facts(one).title, one) for one in offered], value=key, description="model")
    told = ipw.Label()

    def pick(change: Any) -> None:
        os.environ[MODEL_VARIABLE] = change["new"]
        told.value = "Run all cells again." if change["new"] != key else ""

    choice.observe(pick, "value")
    return ipw.HBox([choice, told])
