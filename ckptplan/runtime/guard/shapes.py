"""Which inputs a plan holds for: tensors that are nowhere larger than those it was made for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from ckptplan.core.errors import PlanMismatchError
from ckptplan.core.plan import Plan
from ckptplan.core.stage import InputTensor
from ckptplan.core.units import format_seconds

_NO_TENSOR = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def input_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[InputTensor, ...]:
    """The tensors among the arguments of a call."""
    return tuple(described(path, tensor) for path, tensor in tensors_at((args, kwargs)))


def described(path: str, tensor: torch.Tensor) -> InputTensor:
    """`tensor`, which is at `path`, as plans know it."""
    return InputTensor(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensors_at(tree: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Every tensor of a tree with its path as `keystr` writes it; PyTorch's own way takes several times as long."""
    found: list[tuple[str, torch.Tensor]] = []
    _add_tensors(tree, path, found)
    return found


def _add_tensors(tree: Any, path: str, found: list[tuple[str, torch.Tensor]]) -> None:
    kind = type(tree)  # asked first: `isinstance` with a tensor's class takes long where the answer is no
    if kind is torch.Tensor:
        found.append((path, tree))
    elif kind in _NO_TENSOR:
        return
    elif kind is tuple or kind is list:
        for i, item in enumerate(tree):
            _add_tensors(item, f"{path}[{i}]", found)
    elif kind is dict:
        for key, item in tree.items():
            _add_tensors(item, f"{path}[{key!r}]", found)
    elif isinstance(tree, torch.Tensor):
        found.append((path, _measurable(tree)))
    else:
        for below, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, torch.Tensor):
                found.append((path + pytree.keystr(below), _measurable(leaf)))


def _measurable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with sizes that are numbers: of a nested one its values, all rows together."""
    return tensor.values() if tensor.is_nested else tensor


class Limits:
    """What one stage, or a model, may be called with.

    Compared anew at each call, which takes as long as finding a former call in a table, and no table grows.

    Parameters
    ----------
    planned : sequence of InputTensor or None
        None: anything.
    """

    def __init__(self, planned: Sequence[InputTensor] | None) -> None:
        self._planned = (
            None if planned is None else {t.path: (t, len(t.shape), t.shape, _itemsize(t.dtype)) for t in planned}
        )
        only = planned[0] if planned is not None and len(planned) == 1 else None
        self._only = (only.shape, getattr(torch, only.dtype)) if only is not None and only.path == "[0][0]" else None

    def first_beyond(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[InputTensor, InputTensor | None] | None:
        """The first tensor that is somewhere larger than planned, with what was planned in its place; None: all fit.

        By every dimension, since bytes alone say little: attention over one long sequence holds far more than over many
        short ones of as many tokens.
        """
        planned = self._planned
        if planned is None:
            return None
        if self._only is not None and len(args) == 1 and not kwargs:  # most stages, and this runs before each
            only = args[0]
            if type(only) is torch.Tensor and (only.shape, only.dtype) == self._only:
                return None
        for path, tensor in tensors_at((args, kwargs)):
            limit = planned.get(path)
            if limit is None:
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

    def check(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise unless the plan holds for these arguments of `stage`.

        Raises
        ------
        PlanMismatchError
        """
        beyond = self.first_beyond(args, kwargs)
        if beyond is not None:
            tensor, limit = beyond
            holds = "no tensor there" if limit is None else f"up to {limit}"
            raise PlanMismatchError(
                f"stage {stage!r} got {tensor}; the plan holds for {holds}; solve again with the largest shapes"
            )


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


class ByName:
    """A model's arguments by the names of its parameters: the same call in another form has the same paths.

    Parameters
    ----------
    forward : callable
        The model's own, unpatched.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        known = inspect.signature(forward).parameters.values()
        self.names = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments without a name, and all others by name."""
        return args[len(self.names) :], {**dict(zip(self.names, args, strict=False)), **kwargs}

    def planned(self, text: str) -> tuple[InputTensor, ...]:
        """The tensors that a fingerprint's text names, at their paths in what a call of this gives."""
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


def read_inputs(text: str) -> tuple[InputTensor, ...]:
    """The tensors of `", ".join(map(str, tensors))`, the form in which a fingerprint has them."""
    found = re.findall(r"(?:^|, )(\S.*?) (\w+)\[([\d, ]*)\](?=, |$)", text)
    return tuple(InputTensor(p, dtype, tuple(map(int, filter(None, dims.split(", "))))) for p, dtype, dims in found)


@dataclass(frozen=True, slots=True)
class Larger:
    """Why a plan took another's place: a forward's inputs went beyond it.

    Attributes
    ----------
    given : InputTensor
        The first tensor that did.
    planned : InputTensor or None
        What the plan held for in its place; None: no tensor.
    now : tuple of InputTensor
        What the new plan holds for.
    took_s : float
        Profiling and solving.
    """

    given: InputTensor
    planned: InputTensor | None
    now: tuple[InputTensor, ...]
    took_s: float

    def __str__(self) -> str:
        was = "none" if self.planned is None else f"{list(self.planned.shape)} {self.planned.dtype}"
        now = next((f"{list(t.shape)} {t.dtype}" for t in self.now if t.path == self.given.path), "it")
        return (
            f"input {self.given} goes beyond the plan, which held for {was}; planned again for {now} "
            f"in {format_seconds(self.took_s)}"
        )


class OnLarger(Protocol):
    """What the runtime asks of those who can profile and solve, before a forward with larger inputs."""

    def beyond(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the inputs of a forward are larger than `plan` holds for."""

    def enlarged(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Larger | None]:
        """A plan that holds for these inputs; None: one that was made before. The model has no plan on it meanwhile."""
