"""Which inputs a plan holds for: tensors that are nowhere larger than those it was made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckptplan.core.chain import InputTensor
from ckptplan.core.errors import PlanMismatchError


def input_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[InputTensor, ...]:
    """The tensors among the arguments of a call."""
    leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
    return tuple(
        InputTensor(pytree.keystr(path), str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for path, t in leaves
        if isinstance(t, torch.Tensor)
    )


def too_large(
    given: Sequence[InputTensor], planned: Sequence[InputTensor]
) -> tuple[InputTensor, InputTensor | None] | None:
    """The first of `given` that is somewhere larger than planned, with what was planned in its place; None: all fit.

    By every dimension, since bytes alone say little: attention over one long sequence holds far more than over many
    short ones of as many tokens.
    """
    limits = {tensor.path: tensor for tensor in planned}
    for tensor in given:
        limit = limits.get(tensor.path)
        fits = (
            limit is not None
            and len(tensor.shape) == len(limit.shape)
            and all(a <= b for a, b in zip(tensor.shape, limit.shape, strict=True))
            and getattr(torch, tensor.dtype).itemsize <= getattr(torch, limit.dtype).itemsize
        )
        if not fits:
            return tensor, limit
    return None


class Limits:
    """What one stage may be called with.

    Parameters
    ----------
    stage : str
    planned : sequence of InputTensor or None
        None: anything.
    """

    def __init__(self, stage: str, planned: Sequence[InputTensor] | None) -> None:
        self._stage = stage
        self._planned = planned
        self._accepted: set[Any] = set()

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise unless the plan holds for these arguments.

        Raises
        ------
        PlanMismatchError
        """
        if self._planned is None:
            return
        # Paths take long to make; most calls are like one before.
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = str(structure), *((t.shape, t.dtype) if isinstance(t, torch.Tensor) else None for t in leaves)
        if key in self._accepted:
            return
        wrong = too_large(input_tensors(args, kwargs), self._planned)
        if wrong is not None:
            tensor, limit = wrong
            holds = "no tensor there" if limit is None else f"up to {limit}"
            raise PlanMismatchError(
                f"stage {self._stage!r} got {tensor}; the plan holds for {holds}; solve again with the largest shapes"
            )
        self._accepted.add(key)
