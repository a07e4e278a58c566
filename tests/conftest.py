from __future__ import annotations

import pytest
from hypothesis import settings

# No deadline: how long an example takes says more about the machine than about the code.
settings.register_profile("ckptplan", deadline=None)
settings.load_profile("ckptplan")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
