from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# No deadline: how long an example takes says more about the machine than about the code.
settings.register_profile("ckptplan", deadline=None)
settings.load_profile("ckptplan")

# The models are tiny: threads only wait for each other, on a busy machine many times as long as the work takes.
torch.set_num_threads(1)


@pytest.fixture
def no_leak() -> Iterator[None]:
    """No thread and no file outlives a test, whatever it did."""

    def left() -> list[str]:
        threads = [t.name for t in threading.enumerate() if t.name.startswith("ckptplan")]
        links = [os.readlink(p) for fd in os.listdir("/proc/self/fd") if os.path.islink(p := f"/proc/self/fd/{fd}")]
        return sorted([*threads, *(link for link in links if "(deleted)" in link)])

    before = left()
    yield
    if left() != before:
        gc.collect()
    assert left() == before


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # once, for all processes that run tests
        folder = tempfile.TemporaryDirectory(prefix="ckptplan-profiles-")
        os.environ["CKPTPLAN_TEST_PROFILES"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_finish() -> None:
    """Take what the imports made out of garbage collection, which would walk through all of it in every test."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
