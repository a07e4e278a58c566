"""Models in `DistributedDataParallel`: the memory that it holds, and steps without its reduction.

NOTE [Replicated models]
A plan is for the model inside the wrapper, and may be applied on either side of it. What the wrapper adds:

1. Buckets, as large as all gradients, which exist from its construction on, and copies in which buffers are broadcast
   before a forward. Gloo frees these in a thread of its own, some time later. Both count as resident.
2. With `gradient_as_bucket_view`, gradients that backward makes are copied into the buckets, one by one, and freed. So
   a step takes the memory of one that starts with gradients, and is planned as such (`TrainingStep.accumulates`). Not
   with `static_graph`, whose first step copies them when backward is over.
3. Copies of the outputs, where it looks for unused parameters (`find_unused_parameters`, and `static_graph` in the
   first step): the program gets these, and what the model's last operation saves lies beside them.
4. Collectives. Code that runs the model and undoes its effects (`restored`) runs it without them: forward goes past the
   wrapper, and real backwards run on parameters of their own (`apart`), since those of the model have hooks that count.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from ckptplan.core.ddp import DDP
from ckptplan.core.device import Device
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.profile import Profile
from ckptplan.distributed.parallel import Parallel, T
from ckptplan.distributed.rates import Links, Unit, ring_s


def is_distributed() -> bool:
    """Return whether this process is one of a group; a fake one (PyTorch's backend "fake") has no others."""
    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`, or `model` itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def runs_replicated() -> bool:
    """Whether a forward of `DistributedDataParallel` runs now."""
    return DistributedDataParallel._active_ddp_module is not None


def _settings(wrapper: DistributedDataParallel) -> DDP:
    """Return the settings of a wrapper.

    Raises
    ------
    UnsupportedModelError
        If it makes tensors of which plans don't know: casts to another precision, or buffers of a communication hook.
    """
    why = None
    if wrapper.mixed_precision is not None:
        why = "its mixed_precision= casts parameters and inputs by itself; use torch.autocast"
    elif wrapper._comm_hooks:
        name = getattr(wrapper._comm_hooks[0][0], "__name__", "")
        why = f"its communication hook {name!r} makes tensors of its own; plan and train without register_comm_hook"
    if why is not None:
        raise UnsupportedModelError(f"the model is in DistributedDataParallel, and plans don't support it: {why}")
    most, first = wrapper.bucket_bytes_cap, dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    return DDP(
        most / 2**20,
        (first if wrapper.bucket_bytes_cap_default else most) / 2**20,
        wrapper.gradient_as_bucket_view and not wrapper.static_graph,
        wrapper.broadcast_buffers,
        _copies_outputs(wrapper),
    )


def _copies_outputs(wrapper: DistributedDataParallel) -> bool:
    return (wrapper.find_unused_parameters or wrapper.static_graph) and getattr(wrapper, "_ddp_sink_clone", True)


class Replicated(Parallel):
    """A model that is or will be in `DistributedDataParallel`.

    Parameters
    ----------
    model : nn.Module
        With its wrapper or without.
    settings : DDP, optional
        Default: the wrapper's.
    """

    def __init__(self, model: nn.Module, settings: DDP | None = None) -> None:
        super().__init__(unwrapped(model))
        self.ddp: DDP = _settings(model) if settings is None else settings  # type: ignore[arg-type]
        self.gradients_in_buckets = self.ddp.gradient_as_bucket_view
        self._group = model.process_group if isinstance(model, DistributedDataParallel) else None

    @property
    def kind(self) -> str:
        return self.ddp.kind

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._group) if is_distributed() else []

    def returned(self, output: T) -> T:
        """Return copies where the wrapper makes them (NOTE, item 3)."""
        return copied(output) if self.ddp.find_unused_parameters else output

    def _buckets(self) -> list[int]:
        ignored = set(getattr(self.model, "_ddp_params_and_buffers_to_ignore", ()))
        return self.ddp.buckets(p for name, p in self.model.named_parameters() if name not in ignored)

    def blocks(self) -> list[tuple[int, str, str]]:
        """Return the buckets, and the copies in which buffers are broadcast."""
        found = [(nbytes, "gradients", f"DDP bucket {n}") for n, nbytes in enumerate(self._buckets())]
        copies = sum(b.nbytes for b in self.model.buffers()) if self.ddp.broadcast_buffers else 0
        return [*found, *([(copies, "buffers", "copies in which DDP broadcasts buffers")] if copies else [])]

    def unseen_bytes(self) -> int:
        """Return the bytes of buckets in which no gradient lies now."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None and self.gradients_in_buckets]
        inside = {s._cdata: s.nbytes() for s in (g.untyped_storage() for g in gradients)}
        return max(sum(self._buckets()) - sum(inside.values()), 0)

    def counted_ranks(self, profile: Profile, *, here: bool) -> int:
        """Return the number of ranks, if they are here and the step reduces: those that accumulate may do so later."""
        return len(self.ranks) if here and not profile.fingerprint.accumulates else 0

    def largest_gather(self) -> tuple[Any, int]:
        """Return the wrapper's group, and a rank's part of a bucket."""
        most = min(int(self.ddp.bucket_cap_mb * 2**20) // 4, sum(p.numel() for p in self.model.parameters()))
        return self._group or dist.group.WORLD, most // len(self.ranks)

    def units(self, profile: Profile, links: Links | Device) -> list[Unit]:
        """Return one unit per stage, which reduces its gradients while the next stages run backward."""
        modules = dict(self.model.named_modules())
        counted: set[int] = set()
        units = []
        for name in dict.fromkeys(s.name.partition("#")[0] for s in profile.stages if not s.is_glue):
            own = [p for p in modules[name].parameters() if p.requires_grad and id(p) not in counted]
            counted.update(map(id, own))
            units.append(Unit((name,), 0.0, 0.0, 2 * ring_s(sum(p.nbytes for p in own), len(self.ranks), links)))
        return units


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


@contextlib.contextmanager
def apart(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Replace the parameters of a model that may be replicated, and its optimizer's, by twins in the same memory.

    Gradients of the twins don't run the hooks by which `DistributedDataParallel` counts and reduces: it would wait for
    other ranks, or take the next step for one that has begun. The block's end puts the parameters back.
    """
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)] if is_distributed() else []
    places = [(m, name, p) for m in modules for name, p in m._parameters.items() if type(p) is nn.Parameter]
    twins = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for _, _, p in places}
    for _, _, p in places:
        twins[id(p)].grad = p.grad
    try:
        for module, name, p in places:
            setattr(module, name, twins[id(p)])  # a recurrent module keeps a list of them, too
        _exchange(optimizer, twins)
        yield
    finally:
        for module, name, p in places:
            setattr(module, name, p)
        _exchange(optimizer, {id(twins[id(p)]): p for _, _, p in places})


def _exchange(optimizer: torch.optim.Optimizer | None, instead: dict[int, nn.Parameter]) -> None:
    """Replace an optimizer's parameters by those in `instead`, by their `id`."""
    if optimizer is None or not instead:
        return
    for group in optimizer.param_groups:
        group["params"] = [instead.get(id(p), p) for p in group["params"]]
    states = [(instead.get(id(key), key), state) for key, state in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(states)


@contextlib.contextmanager
def without_reduction() -> Iterator[None]:
    """Run replicated models without communication within the block, in this thread (NOTE, item 4)."""
    here, forward = threading.get_ident(), DistributedDataParallel.forward

    def alone(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return forward(self, *args, **kwargs)
        output = self.module(*args, **kwargs)
        return copied(output) if _copies_outputs(self) else output

    with mock.patch.object(DistributedDataParallel, "forward", alone):
        yield
