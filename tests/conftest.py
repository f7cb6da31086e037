"""Fixtures of the engine, and which marked tests a machine can run.

Tests that need an encoder share one process, where vLLM is imported once; small sessions open in half a second.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from workbench.encoder.session import EncoderSession

# The encoders of the tests are small: threads that wait for one another at each layer cost more than they save, above
# all beside other work. For torch in this process and in those that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs vLLM or CUDA where there is none."""
    if item.get_closest_marker("engine") and importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: install the extra cpu or gpu")
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module")
def ernie() -> Iterator["EncoderSession"]:
    """A captured ERNIE-4.5-VL of depth 2 and width 160 with budgets 64, 128, 256 and at most 4 items."""
    from workbench.budgets import Configuration
    from workbench.encoder.session import SessionOptions, open_session

    with open_session(SessionOptions(depth=2, width=160), Configuration((64, 128, 256), 4)) as session:
        session.capture()
        yield session


@pytest.fixture(scope="module")
def glm() -> Iterator["EncoderSession"]:
    """A captured GLM-4.1V of depth 2 and width 256 with budgets 64, 128, at most 4 items and 8 frames."""
    from workbench.budgets import Configuration
    from workbench.encoder.session import SessionOptions, open_session

    options = SessionOptions(model="glm4_1v", depth=2, width=256, video_limit=1)
    with open_session(options, Configuration((64, 128), 4, 8)) as session:
        session.capture()
        yield session
