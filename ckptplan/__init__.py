"""The fastest way to train within a memory budget: keep, swap or recompute each stage, with a proven bound."""

from ckptplan.api import apply, explain, frontier, solve, trace
from ckptplan.core.device import Device
from ckptplan.core.errors import (
    CkptPlanError,
    InfeasibleBudgetError,
    InvalidInputError,
    OutOfMemoryError,
    PlanMismatchError,
    SwapError,
    UnsupportedModelError,
)
from ckptplan.core.estimate import Estimate
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.trace import Trace
from ckptplan.fit import BatchFit, max_batch_size
from ckptplan.memory.allocator_settings import AllocatorSettings
from ckptplan.memory.estimate import DDP, estimate
from ckptplan.profiling.inputs import record_forward
from ckptplan.profiling.profiler import profile
from ckptplan.referee import simulate, validate
from ckptplan.runtime.verify import verify

__version__ = "0.1.0"

__all__ = [
    "DDP",
    "AllocatorSettings",
    "BatchFit",
    "CkptPlanError",
    "Decision",
    "Device",
    "Estimate",
    "InfeasibleBudgetError",
    "InvalidInputError",
    "OutOfMemoryError",
    "Plan",
    "PlanMismatchError",
    "Profile",
    "SwapError",
    "Trace",
    "UnsupportedModelError",
    "apply",
    "estimate",
    "explain",
    "frontier",
    "max_batch_size",
    "profile",
    "record_forward",
    "simulate",
    "solve",
    "trace",
    "validate",
    "verify",
]
