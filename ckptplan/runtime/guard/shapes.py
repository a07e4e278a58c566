"""Limits of a plan's inputs: no dimension and no item size may be larger than planned."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ckptplan.core.plan import Plan
from ckptplan.core.stage import InputTensor
from ckptplan.core.units import format_seconds
from ckptplan.training.inputs import IN_OBJECT, described, read_inputs, tensors_at, tensors_in_objects_at


class InputLimits:
    """The largest arguments with which a stage, or a model, may be called.

    Every call is compared. A cache of earlier calls would be no faster, and would grow.

    Parameters
    ----------
    planned : sequence of InputTensor or None
        The planned tensors; None: any arguments are allowed.
    """

    def __init__(self, planned: Sequence[InputTensor] | None) -> None:
        self._planned = (
            None if planned is None else {t.path: (t, len(t.shape), t.shape, _itemsize(t.dtype)) for t in planned}
        )
        only = planned[0] if planned is not None and len(planned) == 1 else None
        self._only = (only.shape, getattr(torch, only.dtype)) if only is not None and only.path == "[0][0]" else None
        self._objects = any(IN_OBJECT in t.path for t in planned or ())

    def first_beyond(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[InputTensor, InputTensor | None] | None:
        """Return the first tensor that is larger than planned and the tensor planned in its place; None if all fit.

        Every dimension is compared, since bytes alone aren't enough: attention over one sequence of 4096 tokens may
        hold 64 times as much as over 64 sequences of 64 tokens each.
        """
        planned = self._planned
        if planned is None:
            return None
        if self._only is not None and len(args) == 1 and not kwargs:  # fast path: most stages take one tensor
            only = args[0]
            if type(only) is torch.Tensor and (only.shape, only.dtype) == self._only:
                return None
        given = tensors_at((args, kwargs))
        if self._objects:  # of these, what wasn't there when it was planned is not compared
            given += [(path, t) for path, t in tensors_in_objects_at((args, kwargs)) if path in planned]
        for path, tensor in given:
            limit = planned.get(path)
            if limit is None:
                if not tensor.shape:
                    continue  # a number, such as a count of tokens that a training loop adds
                return described(path, tensor), None
            whole, ndim, most, itemsize = limit
            shape = tensor.shape
            if shape == most and tensor.dtype.itemsize <= itemsize:
                continue
            if len(shape) != ndim or tensor.dtype.itemsize > itemsize:
                return described(path, tensor), whole
            for size, limit_size in zip(shape, most, strict=True):
                if size > limit_size:
                    return described(path, tensor), whole
        return None

    def beyond(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return a text on the first of these arguments of `stage` for which the plan doesn't hold; None: it holds."""
        beyond = self.first_beyond(args, kwargs)
        if beyond is None:
            return None
        tensor, limit = beyond
        if limit is None:
            holds, remedy = "no tensor there", "solve again with the inputs of this step, all of them"
        else:
            holds, remedy = f"up to {limit}", "solve again with the largest shapes"
            if IN_OBJECT not in limit.path:  # the model's inputs tell of it, too
                remedy += ", or apply on_larger='replan'"
        return f"stage {stage!r} got {tensor}; the plan holds for {holds}; {remedy}"


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


class ByName:
    """Converter of positional to keyword arguments of a model, so that `model(x)` and `model(x=x)` compare equal.

    Parameters
    ----------
    forward : callable
        The model's own forward, unpatched.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        known = inspect.signature(forward).parameters.values()
        self.names = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional arguments that have no name, and all others by name."""
        return args[len(self.names) :], {**dict(zip(self.names, args, strict=False)), **kwargs}

    def planned(self, text: str) -> tuple[InputTensor, ...]:
        """Return the tensors listed in a fingerprint's text, with their paths in the result of `__call__`."""
        out = []
        for tensor in read_inputs(text):
            first = re.match(r"\[0\]\[(\d+)\]", tensor.path)
            path = tensor.path
            if first is not None:
                place, rest = int(first[1]), path[first.end() :]
                n = len(self.names)
                path = f"[1][{self.names[place]!r}]{rest}" if place < n else f"[0][{place - n}]{rest}"
            out.append(InputTensor(path, tensor.dtype, tensor.shape))
        return tuple(out)


@dataclass(frozen=True, slots=True)
class Larger:
    """The reason for replacing a plan: larger inputs than planned, or steps that differed from the planned one.

    Attributes
    ----------
    given : InputTensor or None
        The first tensor that was larger; None if none was.
    planned : InputTensor or None
        The tensor that was planned in its place; None if there was none.
    now : tuple of InputTensor
        The largest inputs for which the new plan holds.
    took_s : float
        Seconds for profiling and solving.
    kinds : tuple of str
        Kinds of differences that steps had shown under the former plan (NOTE [Differences]).
    """

    given: InputTensor | None
    planned: InputTensor | None
    now: tuple[InputTensor, ...]
    took_s: float
    kinds: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.given is None:
            return (
                f"steps differ from the planned one ({', '.join(self.kinds)}); planned again for them in "
                f"{format_seconds(self.took_s)}"
            )
        was = "none" if self.planned is None else f"{list(self.planned.shape)} {self.planned.dtype}"
        path = self.given.path
        now = next((f"{list(t.shape)} {t.dtype}" for t in self.now if t.path == path), "it")
        return (
            f"input {self.given} goes beyond the plan, which held for {was}; planned again for {now} "
            f"in {format_seconds(self.took_s)}"
        )


class OnLarger(Protocol):
    """Interface of a planner that the runtime calls before forwards, to replace a plan that steps differ from.

    `differences` are the kinds that steps have shown under the present plan (NOTE [Differences]).
    """

    def beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any], differences: Set[str]) -> bool:
        """Whether another plan is needed: the inputs of a forward are larger than planned, or steps differed."""

    def enlarged(
        self,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        differences: Set[str],
        updates: weakref.ref[torch.optim.Optimizer] | None = None,
    ) -> tuple[Plan, Larger | None]:
        """Return a plan that holds for these inputs, and the reason; None as reason if the plan was made before.

        For the difference "state" it counts the state of `updates`, which has updated the model, and so do later ones.

        No plan is applied to the model during the call.
        """
