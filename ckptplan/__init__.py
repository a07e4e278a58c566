"""Train within a memory budget: keep, swap or recompute each stage, as fast as possible within a proven bound.

The public names are loaded when they are first used (PEP 562), so `import ckptplan` takes no time, and planning from a
`Profile` loads no PyTorch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptplan.api import explain, frontier, solve
    from ckptplan.core.allocator_settings import AllocatorSettings
    from ckptplan.core.ddp import DDP
    from ckptplan.core.device import Device
    from ckptplan.core.display import progress
    from ckptplan.core.errors import (
        CheckError,
        CkptPlanError,
        InfeasibleBudgetError,
        InvalidInputError,
        PlanMismatchError,
        RankError,
        SwapError,
        UnsupportedModelError,
    )
    from ckptplan.core.estimate import Estimate
    from ckptplan.core.frontier import Frontier
    from ckptplan.core.fsdp import FSDP
    from ckptplan.core.plan import Decision, Plan, Transfer
    from ckptplan.core.profile import Profile
    from ckptplan.core.trace import Trace
    from ckptplan.core.version import __version__ as __version__
    from ckptplan.fitting.batch import BatchFit, max_batch_size
    from ckptplan.memory.estimate import estimate
    from ckptplan.planning.applying import apply, trace
    from ckptplan.profiling.profiler import profile
    from ckptplan.profiling.workload.inputs import record_forward
    from ckptplan.referee import simulate, validate
    from ckptplan.runtime.handle import remove
    from ckptplan.runtime.swap.stores.pinned import keep_pinned_memory
    from ckptplan.runtime.verify import verify

__all__ = [
    "DDP",
    "FSDP",
    "AllocatorSettings",
    "BatchFit",
    "CheckError",
    "CkptPlanError",
    "Decision",
    "Device",
    "Estimate",
    "Frontier",
    "InfeasibleBudgetError",
    "InvalidInputError",
    "Plan",
    "PlanMismatchError",
    "Profile",
    "RankError",
    "SwapError",
    "Trace",
    "Transfer",
    "UnsupportedModelError",
    "apply",
    "estimate",
    "explain",
    "frontier",
    "keep_pinned_memory",
    "max_batch_size",
    "profile",
    "progress",
    "record_forward",
    "remove",
    "simulate",
    "solve",
    "trace",
    "validate",
    "verify",
]

_NAMES = {
    "api": "explain frontier solve",
    "core.allocator_settings": "AllocatorSettings",
    "core.ddp": "DDP",
    "core.frontier": "Frontier",
    "core.fsdp": "FSDP",
    "core.device": "Device",
    "core.display": "progress",
    "core.errors": "CheckError CkptPlanError InfeasibleBudgetError InvalidInputError "
    "PlanMismatchError RankError SwapError UnsupportedModelError",
    "core.estimate": "Estimate",
    "core.plan": "Decision Plan Transfer",
    "core.profile": "Profile",
    "core.trace": "Trace",
    "core.version": "__version__",
    "fitting.batch": "BatchFit max_batch_size",
    "memory.estimate": "estimate",
    "planning.applying": "apply trace",
    "profiling.profiler": "profile",
    "profiling.workload.inputs": "record_forward",
    "referee": "simulate validate",
    "runtime.handle": "remove",
    "runtime.swap.stores.pinned": "keep_pinned_memory",
    "runtime.verify": "verify",
}
_MODULES = {name: f"ckptplan.{module}" for module, names in _NAMES.items() for name in names.split()}
"""Where each public name is defined. No public name may equal that of a module or package in `ckptplan`."""


if not TYPE_CHECKING:  # or a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        random = sys.modules.get("random")  # some packages draw from it when they are imported
        state = None if random is None else random.getstate()
        found = getattr(importlib.import_module(_MODULES[name]), name)
        if random is not None:
            random.setstate(state)
        globals()[name] = found  # the next access finds it there
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
