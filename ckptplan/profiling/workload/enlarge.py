"""Inputs larger than those seen so far, tiled from real ones, so that a plan made for them holds for many batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.stage import InputTensor
from ckptplan.profiling.bytes.fake import FakeWorld, fake_parameters
from ckptplan.profiling.target import Target
from ckptplan.tensors.private import TorchDispatchMode, no_dispatch
from ckptplan.training.inputs import tensors_at
from ckptplan.training.step import TrainingStep

Call = tuple[tuple[Any, ...], dict[str, Any]]
_Sizes = dict[tuple[int, int], int]
"""(Identity of a tensor, dimension) -> the size to tile it to."""


def enlarged_calls(
    call: Call, named: Call, present: Sequence[InputTensor], known: Sequence[Sequence[InputTensor]]
) -> Iterator[Call]:
    """Enlarged calls to make a plan for, the largest first, and `call` itself last.

    A size that grew is extended to 1.25 times the largest smaller size of a known plan, so that slowly growing sizes
    need at most one plan per factor of 1.25. Example: with plans for lengths 64 and 80, length 90 is extended to 100.
    A size that shrank is extended to that of the present plan, so that one plan, if there is any, holds for batches of
    many short and of few long samples in turn.

    Parameters
    ----------
    call, named : (tuple, dict)
        Positional arguments and keywords, as given, and under the names used in `present` and `known`.
    present : sequence of InputTensor
        Inputs that the present plan holds for.
    known : sequence of sequences of InputTensor
        Inputs that each known plan holds for.
    """
    done = [_sizes(named, present, known, covers=False, grows=False)]
    for covers, grows in ((True, True), (True, False), (False, True)):
        sizes = _sizes(named, present, known, covers=covers, grows=grows)
        if sizes not in done:
            done.append(sizes)
            yield tiled(call, sizes)
    yield call


def _sizes(
    named: Call,
    present: Sequence[InputTensor],
    known: Sequence[Sequence[InputTensor]],
    *,
    covers: bool,
    grows: bool,
) -> _Sizes:
    shapes = {t.path: t.shape for t in present}
    sizes: _Sizes = {}
    # Tensors of one call share batch and length: equal sizes in one dimension are extended to one size.
    shared: dict[tuple[int, int], int] = {}
    given = tensors_at(named)
    for path, tensor in given:
        old = shapes.get(path)
        if old is None or len(old) != tensor.dim():
            continue
        for dim, (n, was) in enumerate(zip(tensor.shape, old, strict=True)):
            to = n
            if n > was and grows:
                same = [t.shape[dim] for plan in known for t in plan if t.path == path and len(t.shape) == len(old)]
                to = max(n, -(-5 * max(size for size in (was, *same) if size < n) // 4))
            elif n < was and covers:
                to = was
            if n == was:
                sizes[id(tensor), dim] = n
            else:
                shared[dim, n] = max(to, shared.get((dim, n), 0))
    for _, tensor in given:
        for dim, n in enumerate(tensor.shape):
            sizes.setdefault((id(tensor), dim), shared.get((dim, n), n))
    return sizes


def tiled(call: Call, sizes: _Sizes) -> Call:
    """`call` with its tensors repeated along their dimensions up to `sizes`, so that all values are real ones."""
    made: dict[int, torch.Tensor] = {}  # an argument given twice stays one tensor

    def tile(tensor: torch.Tensor) -> torch.Tensor:
        wanted = {dim: sizes.get((id(tensor), dim), n) for dim, n in enumerate(tensor.shape) if n}
        if id(tensor) in made or all(to == tensor.shape[dim] for dim, to in wanted.items()):
            return made.get(id(tensor), tensor)
        out = tensor.detach()
        for dim, to in wanted.items():
            if to != out.shape[dim]:
                out = out.index_select(dim, torch.arange(to, device=out.device) % out.shape[dim])
        made[id(tensor)] = out = out.requires_grad_(tensor.requires_grad)
        return out

    with torch.no_grad():
        result: Call = pytree.tree_map_only(torch.Tensor, tile, call)
    return result


def tiled_to(call: Call, largest: Mapping[str, tuple[int, ...]]) -> Call:
    """`call` with its tensors repeated up to the sizes in `largest`, by path."""
    sizes = {
        (id(tensor), dim): max(n, to)
        for path, tensor in tensors_at(call)
        if len(largest.get(path, ())) == tensor.dim()
        for dim, (n, to) in enumerate(zip(tensor.shape, largest[path], strict=True))
    }
    return tiled(call, sizes)


_LOOKUPS = {torch.ops.aten.embedding.default: (0, 1, 0), torch.ops.aten.index_select.default: (0, 2, 1)}
"""Operation -> positions of its table, of its row numbers and of its dimension (0: none, the first dimension)."""


class _InRange(TorchDispatchMode):
    """Dispatch mode that raises if an operation looks up a row that its table, which may be fake, doesn't have."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKUPS:
            table, rows, along = _LOOKUPS[func]
            dim = args[along] if along else 0
            numbers, there_are = args[rows], args[table].shape[dim]
            if type(numbers) is torch.Tensor and numbers.numel():
                with no_dispatch():  # it is no read of the model's
                    last = int(numbers.max())
                if last >= there_are:
                    raise InvalidInputError(f"row {last} is looked up in a table of {there_are} rows")
        return func(*args, **(kwargs or {}))


def in_range() -> AbstractContextManager[Any]:
    """Raise within the block where an operation would look up a row that its table doesn't have."""
    return _InRange()  # type: ignore[no-untyped-call]


def require_in_range(step: TrainingStep, target: Target) -> None:
    """Raise if `step` looks up rows that its tables, such as those of positions, don't have.

    On CUDA the process can't use the device any more after such an error; here the step runs on fake tensors.

    Raises
    ------
    InvalidInputError
    NeedsValues
        If the step has to run for real, which `in_range` makes as safe.
    """
    world = FakeWorld(target)
    world.runs_uncompiled = True
    with fake_parameters(step.model, world, step.reached()), target.choices(), world, in_range():
        step.forward()
