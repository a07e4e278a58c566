"""The part of conftest.py that needs PyTorch: a plugin, registered where PyTorch can be imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks, ranks

from ckptplan.profiling.times import timing

# The models are tiny: threads only wait for each other, on a busy machine many times as long as the work takes.
torch.set_num_threads(1)
# No test needs exact times, and each profile would take so much longer.
timing._LEAST_RUNS, timing._MORE_S = 1, 0.0


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """A group of two processes, one for all tests: they take longer to start than most tests to run."""
    with ranks(2) as found:
        yield found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
