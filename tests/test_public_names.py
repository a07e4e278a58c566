"""Public names, those that need PyTorch among them; test_without_torch.py has what planning needs of them."""

from __future__ import annotations

import importlib

import ckptplan


def test_every_public_name_is_that_of_its_module() -> None:
    for name in ckptplan.__all__:
        assert getattr(ckptplan, name) is getattr(importlib.import_module(ckptplan._MODULES[name]), name)


def test_importing_submodules_hides_no_public_name() -> None:
    import ckptplan.fitting.batch
    import ckptplan.memory.estimate
    import ckptplan.profiling.profiler
    from ckptplan import estimate, profile

    assert profile is ckptplan.profile is ckptplan.profiling.profiler.profile
    assert estimate is ckptplan.estimate is ckptplan.memory.estimate.estimate
    assert ckptplan.fitting.batch.max_batch_size is ckptplan.max_batch_size
