"""Models in `DistributedDataParallel`: what it holds, and steps without its reduction.

NOTE [Replicated models]
A plan is for the model inside the wrapper, and may be applied on either side of it. What the wrapper adds:

1. Buckets, as large as all gradients, which exist from its construction on, and copies in which buffers are broadcast
   before a forward. Gloo frees these in a thread of its own, some time later. Both count as resident.
2. With `gradient_as_bucket_view`, gradients that backward makes are copied into the buckets, one by one, and freed. So
   a step takes the memory of one that starts with gradients, and is planned as such (`TrainingStep.accumulates`). Not
   with `static_graph`, whose first step copies them when backward is over.
3. Copies of the outputs, where it looks for unused parameters (`find_unused_parameters`, and `static_graph` in the
   first step): the program gets these, and what the model's last operation saves lies beside them.
4. Collectives. Whatever runs the model and undoes what it did (`restored`) runs it without them: forward goes past the
   wrapper, and real backwards run on parameters of their own (`apart`), since those of the model have hooks that count.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from ckptplan.core.ddp import DDP
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.plan import Plan
from ckptplan.runtime.guard.gradients import existing_gradient_bytes


def is_distributed() -> bool:
    """Return whether this process is one of a group; a fake one (PyTorch's backend "fake") has no others."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_backend() != "fake"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`, or `model` itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def ddp_of(model: nn.Module) -> DDP | None:
    """Return the settings of the `DistributedDataParallel` that `model` is; None if it is none.

    Raises
    ------
    UnsupportedModelError
        If it makes tensors of which plans don't know: casts to another precision, or buffers of a communication hook.
    """
    if not isinstance(model, DistributedDataParallel):
        return None
    why = None
    if model.mixed_precision is not None:
        why = "its mixed_precision= casts parameters and inputs by itself; use torch.autocast"
    elif model._comm_hooks:
        name = getattr(model._comm_hooks[0][0], "__name__", "")
        why = f"its communication hook {name!r} makes tensors of its own; plan and train without register_comm_hook"
    if why is not None:
        raise UnsupportedModelError(f"the model is in DistributedDataParallel, and plans can't go with it: {why}")
    most, first = model.bucket_bytes_cap, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    return DDP(
        most / 2**20,
        (first if model.bucket_bytes_cap_default else most) / 2**20,
        model.gradient_as_bucket_view and not model.static_graph,
        model.broadcast_buffers,
        _copies_outputs(model),
    )


def _copies_outputs(wrapper: DistributedDataParallel) -> bool:
    return (wrapper.find_unused_parameters or wrapper.static_graph) and getattr(wrapper, "_ddp_sink_clone", True)


def buckets(model: nn.Module, ddp: DDP) -> list[int]:
    """Return the bytes of each bucket for the gradients of `model`."""
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return ddp.buckets(p for name, p in model.named_parameters() if name not in ignored)


def broadcast_bytes(model: nn.Module, ddp: DDP | None) -> int:
    """Return the bytes of the copies in which buffers are broadcast."""
    return sum(b.nbytes for b in model.buffers()) if ddp is not None and ddp.broadcast_buffers else 0


def added_bytes(model: nn.Module, ddp: DDP | None, round_to: int = 1) -> int:
    """Return the bytes of the buckets that gradients don't lie in, and of the broadcast copies.

    Each is rounded up to `round_to` bytes.
    """
    beside = [] if ddp is None or ddp.gradient_as_bucket_view else buckets(model, ddp)
    return sum(-(-nbytes // round_to) * round_to for nbytes in (*beside, broadcast_bytes(model, ddp)))


class _Copies(torch.autograd.Function):
    """Copies of tensors; their gradients go on when all are there."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def copied(output: Any) -> Any:
    """Return copies of a model's outputs as its wrapper makes them (NOTE, item 3)."""
    leaves, structure = pytree.tree_flatten(output)
    copies = zip(leaves, _Copies.apply(*leaves), strict=True)
    return pytree.tree_unflatten(
        [copy if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None else leaf for leaf, copy in copies],
        structure,
    )


def unseen_bucket_bytes(model: nn.Module, ddp: DDP | None) -> int:
    """Return the bytes of buckets that no gradient of the model lies in now."""
    if ddp is None:
        return 0
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    inside = existing_gradient_bytes(gradients) if ddp.gradient_as_bucket_view else 0
    return max(sum(buckets(model, ddp)) - inside, 0)


def ddp_under(model: nn.Module, plan: Plan) -> DDP | None:
    """Return `ddp_of` a model that a plan is applied to; what the plan was made for if it isn't wrapped yet."""
    return ddp_of(model) if isinstance(model, DistributedDataParallel) else DDP.of_kind(plan.fingerprint.parallel)


@contextlib.contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    """Inside, the model has other parameters in the memory of its own ones, where it may be replicated.

    Gradients made for these run into none of the hooks by which `DistributedDataParallel` counts and reduces: it would
    wait for others, or take the next step for one that has begun.
    """
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    twins: dict[int, nn.Parameter] = {}
    if is_distributed():
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                own = module._parameters.items()
                places += [(module, name, p) for name, p in own if type(p) is nn.Parameter]
    for _, _, p in places:
        if id(p) not in twins:
            twins[id(p)] = nn.Parameter(p.data, requires_grad=p.requires_grad)
            twins[id(p)].grad = p.grad
    try:
        for module, name, p in places:
            setattr(module, name, twins[id(p)])  # a recurrent module keeps a list of them, too
        yield
    finally:
        for module, name, p in places:
            setattr(module, name, p)


@contextlib.contextmanager
def without_reduction() -> Iterator[None]:
    """Inside, in this thread, forwards and backwards of replicated models don't communicate (NOTE, item 4)."""
    here, forward = threading.get_ident(), DistributedDataParallel.forward

    def alone(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return forward(self, *args, **kwargs)
        output = self.module(*args, **kwargs)
        return copied(output) if _copies_outputs(self) else output

    with mock.patch.object(DistributedDataParallel, "forward", alone):
        yield
