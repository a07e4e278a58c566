"""The peak of one training step, from the allocator's events, without what gloo holds to communicate.

Gloo copies what it gathers into buffers of its own, and a thread of its own lets go of these, and of the tensors that
it was given, some time later. The buffers are told apart, and each collective waits until its tensors are let go of.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.profiler import record_function

from ckptplan.distributed import is_distributed, parallel_of
from ckptplan.distributed.parallel import unreduced
from ckptplan.tensors.storages import tensors_in, unique_bytes
from ckptplan.training.measure import optimizer_tensors, recorded_blocks

_STAGING = "staging of gloo "
_GATHERS = ("all_gather_single", "all_gather_into_tensor")
_COLLECTIVES = (*_GATHERS, "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")

_MOST_S = 1.0


def _owners(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


_calls: list[str] = []


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, whose allocations don't count: each call is a span of the profiler with a name of its own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _calls.append(f"{_STAGING}{len(_calls)}")
        with record_function(_calls[-1]):
            return function(*args, **kwargs)

    return run


class Peak(int):
    """Bytes; `staging` are the most that gloo held at once, which don't count, and `gathers` the step's all-gathers."""

    staging = 0
    gathers = 0


def measured(
    step: Callable[[], Any], model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], inputs: Any
) -> tuple[Any, Peak]:
    """Run `step`; return what it returns, and the most bytes of model, gradients, state, inputs and the step itself.

    Gradients are copied when the recording begins, since memory that was taken before isn't seen to go.
    """
    states = [tensor for optimizer in optimizers for tensor in optimizer_tensors(optimizer)]
    held = unique_bytes([*model.parameters(), *model.buffers(), *states, *tensors_in(inputs)])
    del states
    found: list[Any] = []

    def run() -> None:
        copies: dict[int, torch.Tensor] = {}
        for p in model.parameters():
            p.grad = None if p.grad is None else _copied(p.grad, copies)
        del copies
        for p in getattr(parallel_of(model), "parameters", ()):
            for owner, name in unreduced(p):
                setattr(owner, name, getattr(owner, name).clone())
        found.append(step())

    gathers: list[None] = []
    with _marked(gathers):
        events, spans = recorded_blocks(run)
    own, staged = _apart(events, [span for name, span in spans.items() if name.startswith(_STAGING)])
    peak = Peak(held + max(itertools.accumulate(own, initial=0)))
    peak.staging = max(itertools.accumulate(staged, initial=0))
    peak.gathers = len(gathers)
    return found[0], peak


def _copied(gradient: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """A copy; gradients of a sharded unit, which lie in one storage, lie in one copy."""
    local = getattr(gradient, "_local_tensor", None)
    if local is None:
        return gradient.clone()
    storage = local.untyped_storage()
    flat = copies.get(storage._cdata)
    if flat is None:
        count = storage.nbytes() // local.itemsize
        flat = copies[storage._cdata] = local.as_strided((count,), (1,), 0).clone()
    other = gradient.detach()
    other._local_tensor = flat.as_strided(local.shape, local.stride(), local.storage_offset())  # type: ignore[attr-defined]
    return other


@contextlib.contextmanager
def _marked(gathers: list[None]) -> Iterator[None]:
    """Inside, what a group's collectives allocate doesn't count; `gathers` grows by each all-gather."""
    if not is_distributed():
        yield
        return

    def spanned(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @apart
        def run(*args: Any, **kwargs: Any) -> Any:
            gathers.extend([None] * (name in _GATHERS))
            given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            before = [_owners(t) for t in given]
            work = original(*args, **kwargs)
            until = time.monotonic() + _MOST_S
            while work is None and [_owners(t) for t in given] != before and time.monotonic() < until:
                time.sleep(1e-5)
            return work

        return run

    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            if hasattr(torch.distributed, name):
                original = getattr(torch.distributed, name)
                stack.enter_context(mock.patch.object(torch.distributed, name, spanned(name, original)))
        yield


def _apart(events: list[tuple[int, int, int]], spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The step's own changes of bytes, and those of what was allocated inside `spans`."""
    spans = sorted(spans)
    begins = [begin for begin, _ in spans]
    own, staged = [], []
    held: set[int] = set()  # addresses of gloo's blocks
    for at, nbytes, address in events:
        place = bisect.bisect_right(begins, at) - 1
        if nbytes > 0 and place >= 0 and at <= spans[place][1]:
            held.add(address)
        (staged if address in held else own).append(nbytes)
        if nbytes < 0:
            held.discard(address)
    return own, staged
