"""An optimizer's update on fake tensors: bytes of its state and of its temporaries."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import optimizer as module

from ckptplan.core.arguments import OptimizerLike
from ckptplan.core.errors import InvalidInputError, UnsupportedModelError
from ckptplan.profiling.bytes.tracker import Tracker
from ckptplan.profiling.target import Target
from ckptplan.profiling.workload.optimizer_names import NAMED, check_name
from ckptplan.profiling.workload.stand_ins import StandIns
from ckptplan.tensors.private import FakeTensor
from ckptplan.tensors.storages import local_part, plain_tensors, storages_of
from ckptplan.training.measure import no_cycles_collected


def make_optimizer(optimizer: OptimizerLike, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer for the parameters of `model`; an instance is returned as it is.

    Raises
    ------
    InvalidInputError
        If the name is unknown, or the call doesn't return an optimizer.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        return NAMED[check_name(optimizer)](model)
    make: Any = optimizer
    if not callable(make):
        raise InvalidInputError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}; pass an optimizer, its class, a function from "
            f"parameters to an optimizer, or one of {', '.join(NAMED)}"
        )
    try:
        made = make([p for p in model.parameters() if p.requires_grad])
    except TypeError as error:
        raise InvalidInputError(
            f"{optimizer!r} can't be made from parameters alone ({error}); pass an instance"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidInputError(f"{optimizer!r} returned a {type(made).__name__}; return a torch.optim.Optimizer")
    return made


@contextlib.contextmanager
def traced_updates(
    optimizer: torch.optim.Optimizer,
    tracker: Tracker,
    target: Target,
    *,
    own: Iterable[torch.Tensor] = (),
    begin: Callable[[str, StandIns], None] = lambda part, stand_ins: None,
    gradients: Sequence[Callable[[torch.Tensor], bool]] = (lambda p: p.requires_grad,) * 2,
    keeps_gradients: bool = False,
) -> Iterator[StandIns]:
    """Run updates of `optimizer`, two by default, under `tracker` with stand-ins for its tensors (NOTE [Stand-ins]).

    Parameters
    ----------
    own : iterable of tensors
        Tensors of the model and its inputs, which aren't the optimizer's even if it holds them.
    begin : callable
        Called at the beginning of each part: "held" (what the optimizer alone has before is counted), "weights" (so are
        the parameters of the model), then for n = 1, 2, ...
        "gradients n" (those of a backward are counted), "update n" and "dropped n" (`zero_grad`).
    gradients : sequence of callables
        For each update, whether backward gives a parameter a gradient; the others are left out and get no state.
    keeps_gradients : bool
        Whether gradients keep their memory from one step to the next.

    Yields
    ------
    StandIns
        After the last update, with all that it has left.

    Raises
    ------
    UnsupportedModelError
        If the update can't run on fake tensors.
    """
    _require_no_closure(optimizer)
    stand_ins = StandIns(optimizer, functools.partial(_fake_part, tracker))
    # Counts of steps lie on the host, unless the update runs as one kernel or is captured.
    tracker.numbers_on_host = not any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
    tracker.number_read = 1.0  # an update may read a norm to scale by it; any value leads to the same operations
    with no_cycles_collected(), stand_ins.in_place():
        try:
            begin("held", stand_ins)
            known = {storage._cdata for each in own for storage in storages_of(each)}
            for tensor, twin in stand_ins.held:
                for real, plain in zip(plain_tensors(local_part(tensor)), plain_tensors(twin), strict=True):
                    (tracker.outside if real.untyped_storage()._cdata in known else tracker.count)(plain)
            elsewhere = [local_part(p).untyped_storage()._cdata not in known for p, _ in stand_ins.parameters]
            for (_, twin), other in zip(stand_ins.parameters, elsewhere, strict=True):
                if other:
                    tracker.count(twin)
            begin("weights", stand_ins)
            for _, twin in stand_ins.parameters:
                tracker.count(twin)
            for n, has_gradient in enumerate(gradients, 1):
                begin(f"gradients {n}", stand_ins)
                for p, twin in stand_ins.parameters:
                    if twin.grad is None and has_gradient(p):
                        with tracker.fake_mode:
                            twin.grad = torch.empty_like(twin, requires_grad=False)
                        tracker.count(twin.grad)
                begin(f"update {n}", stand_ins)
                with as_on_device(target), torch.compiler.set_stance("force_eager"), tracker, torch.enable_grad():
                    optimizer.step()
                begin(f"dropped {n}", stand_ins)
                for _, twin in stand_ins.parameters if not keeps_gradients else ():
                    twin.grad = None
        except Exception as error:
            raise UnsupportedModelError(
                f"the update of {type(optimizer).__name__} can't be traced ({error}); "
                "leave optimizer= out and lower the budget by its state"
            ) from error
        yield stand_ins


def _fake_part(tracker: Tracker, tensor: torch.Tensor) -> torch.Tensor:
    """The fake twin of a tensor; of a distributed one, that of this rank's part, on which the update runs."""
    local = local_part(tensor)
    if local is tensor or not isinstance(tensor, nn.Parameter):
        return tracker.fake(local)
    return nn.Parameter(tracker.fake(local.detach()), tensor.requires_grad)


def _require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedModelError` if `step` needs arguments: it then runs forward and backward itself."""
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()  # a scheduler wraps the bound method
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise UnsupportedModelError(
            f"{type(optimizer).__name__}.step() needs {', '.join(needed)}: it runs forward and backward itself, any "
            "number of times, and holds copies meanwhile; leave optimizer= out and lower the budget by its state"
        )


@contextlib.contextmanager
def as_on_device(target: Target) -> Iterator[None]:
    """Let PyTorch's optimizers choose for fake tensors what they choose for real ones on the device.

    On CUDA they update lists of tensors (`foreach`) by default, and allow `capturable`, but look for the class of the
    parameters and for their device, which is the CPU if CUDA isn't in this machine.
    """
    with contextlib.ExitStack() as stack:
        if target.is_cuda:
            types = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(mock.patch.object(module, "_foreach_supported_types", types))
        if target.is_cuda and target.spec is not None:
            name = "_get_foreach_kernels_supported_devices"
            stack.enter_context(mock.patch.object(module, name, return_value=["cpu"]))
            for each in {sys.modules[kind.__module__] for kind in vars(torch.optim).values() if isinstance(kind, type)}:
                if hasattr(each, "_get_capturable_supported_devices"):
                    name = "_get_capturable_supported_devices"
                    stack.enter_context(mock.patch.object(each, name, return_value=["cpu"]))
        yield
