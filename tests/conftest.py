from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# No deadline: how long an example takes says more about the machine than about the code.
settings.register_profile("ckptplan", deadline=None)
settings.load_profile("ckptplan")

# The models are tiny: threads only wait for each other, on a busy machine many times as long as the work takes.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
