"""An optimizer's update on fake tensors: bytes of its state and of its temporaries."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ckptplan.core.errors import InvalidInputError, UnsupportedModelError
from ckptplan.profiling.bytes.tracker import Tracker
from ckptplan.profiling.target import Target

OptimizerLike = torch.optim.Optimizer | type[torch.optim.Optimizer] | str | Callable[..., torch.optim.Optimizer]
"""An optimizer, its class or a callable that makes it from parameters, or a name in `NAMED`."""

NAMED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


def make_optimizer(optimizer: OptimizerLike, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer for `parameters`; an instance is returned as it is.

    Raises
    ------
    InvalidInputError
        If the name is unknown, or the call doesn't return an optimizer.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    make: Any = optimizer
    if isinstance(optimizer, str):
        make = NAMED.get(optimizer.lower())
        if make is None:
            raise InvalidInputError(
                f"optimizer={optimizer!r} is not known by name; known are {', '.join(NAMED)}; pass an optimizer, its "
                "class, or a function from parameters to an optimizer for any other"
            )
    if not callable(make):
        raise InvalidInputError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}; pass an optimizer, its class, a function from "
            f"parameters to an optimizer, or one of {', '.join(NAMED)}"
        )
    try:
        made = make([p for p in parameters if p.requires_grad])
    except TypeError as error:
        raise InvalidInputError(
            f"{optimizer!r} can't be made from parameters alone ({error}); pass an instance"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidInputError(f"{optimizer!r} gave a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def fake_optimizer(
    optimizer: torch.optim.Optimizer, tracker: Tracker, target: Target, has_gradient: Callable[[torch.Tensor], bool]
) -> torch.optim.Optimizer:
    """A twin of `optimizer` without state, on fake twins of its parameters and of their gradients.

    For a CUDA device that isn't in this machine it updates lists of tensors (`foreach`), the default on CUDA.
    """
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        fakes = []
        for p in group["params"]:
            fake = tracker.fake(p.detach()).requires_grad_(p.requires_grad)
            tracker.outside(fake)
            if has_gradient(p):
                fake.grad = tracker.fake(p.detach()).detach()
                tracker.outside(fake.grad)
            fakes.append(fake)
        new = {**group, "params": fakes}
        on_lists = group.get("foreach", False) is None and not group.get("fused")
        if target.is_cuda and target.spec is not None and on_lists:
            new["foreach"] = True
        twin.param_groups.append(new)
    return twin


def trace_updates(
    optimizer: torch.optim.Optimizer,
    tracker: Tracker,
    target: Target,
    between: Callable[[], None] = lambda: None,
    has_gradient: Callable[[torch.Tensor], bool] = lambda p: p.requires_grad,
) -> torch.optim.Optimizer:
    """Run two updates of a twin of `optimizer` under `tracker`: the first makes the state.

    Parameters
    ----------
    between : callable
        Called between the updates.
    has_gradient : callable
        Whether backward gives a parameter a gradient; the others are left out and get no state.

    Returns
    -------
    Optimizer
        The twin that ran, with its state.

    Raises
    ------
    UnsupportedModelError
        If the update can't run on fake tensors.
    """
    try:
        twin = fake_optimizer(optimizer, tracker, target, has_gradient)
        # Counts of steps lie on the host, unless the update runs as one kernel or is captured.
        tracker.numbers_on_host = not any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
        tracker.number_read = 1.0  # an update may read a norm to scale by it; any value leads to the same operations
        with tracker, torch.no_grad():
            if isinstance(optimizer, torch.optim.Adagrad):
                _make_state(optimizer, twin)
            twin.step()
            between()
            twin.step()
        return twin
    except Exception as error:
        raise UnsupportedModelError(
            f"the update of {type(optimizer).__name__} can't be traced ({error}); "
            "leave optimizer= out and lower the budget by its state"
        ) from error


def _make_state(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer) -> None:
    """Give `twin` a state like that of `optimizer`.

    Adagrad makes its state on construction, up to torch 2.11 at least, and its update requires it.
    """
    for group, fakes in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for p, fake in zip(group["params"], fakes["params"], strict=True):
            for name, value in optimizer.state.get(p, {}).items():
                if value.dim() or group.get("fused"):
                    made = torch.empty(value.shape, dtype=value.dtype, device=fake.device)
                else:
                    made = torch.tensor(0.0, dtype=value.dtype)
                twin.state[fake][name] = made
