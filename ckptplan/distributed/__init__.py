"""Training on several ranks: DDP and FSDP2, and the calls that all ranks make together.

Other folders use these engines only through `Parallel`. NOTE [Replicated models] and NOTE [Sharded models] say what
each engine changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from ckptplan.core.ddp import DDP
from ckptplan.core.plan import Plan
from ckptplan.distributed.parallel import Parallel
from ckptplan.distributed.replicated import (
    Replicated,
    apart,
    is_distributed,
    runs_replicated,
    unwrapped,
    without_reduction,
)

__all__ = [
    "apart",
    "ddp_under",
    "is_distributed",
    "parallel_of",
    "runs_replicated",
    "unwrapped",
    "without_communication",
]


def parallel_of(model: nn.Module, ddp: DDP | bool | None = None) -> Parallel:
    """Return how a model is trained.

    Parameters
    ----------
    ddp : DDP or bool, optional
        As in `Training`.

    Raises
    ------
    UnsupportedModelError
        If it is replicated by a wrapper that plans don't support.
    """
    if isinstance(ddp, DDP):
        return Replicated(model, ddp)
    if ddp is not False and unwrapped(model) is not model:
        return Replicated(model)
    return Replicated(model, DDP()) if ddp else Parallel(unwrapped(model))


def ddp_under(model: nn.Module, plan: Plan) -> DDP | None:
    """Return the settings by which a model is replicated; the plan's settings if it isn't wrapped yet."""
    wrapped = unwrapped(model) is not model
    return parallel_of(model).ddp if wrapped else DDP.of_kind(plan.fingerprint.parallel)


@contextlib.contextmanager
def without_communication(model: nn.Module) -> Iterator[None]:
    """Run a model, and wrappers around it, without communication within the block, in this thread."""
    with parallel_of(model).quiet(), without_reduction():
        yield
