"""Selective recompute: outputs of some operations are saved in forward and returned in the recompute, not recomputed.

NOTE [Numbering]
Within one run of a stage's forward, every operation that reaches a dispatch mode (every operation below autograd) gets
the next number, starting from 0. Operations that may occur in one run but not in another get no number:

1. Views. For example, autograd calls `aten.detach` when it saves a result and no hook is active; a frame calls it when
   its stage runs again; and after an in-place write to a view, autograd makes the view again on fake tensors only.
2. Queries of a fake tensor's metadata, such as its device or layout.
3. Casts of parameters, since autocast's cache may have the cast from an earlier call.

A recompute makes the same numbered calls in the same order.

Example: `torch.relu(torch.mm(x.t(), w)) * 2` makes four calls: `t` is a view and gets no number, `mm` gets 0, `relu`
gets 1 and `mul` gets 2. A plan with `ops=(0,)` saves the product; the recompute returns it for number 0, and computes
`relu` and `mul` again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from ckptplan.core.errors import PlanMismatchError
from ckptplan.runtime.guard.check import StageCheck, StageSpots
from ckptplan.runtime.guard.digests import Digest
from ckptplan.runtime.swap.packing import Held
from ckptplan.tensors.positions import has_position
from ckptplan.tensors.private import TorchDispatchMode
from ckptplan.tensors.storages import tensors_in

_CAST = torch.ops.aten._to_copy.default
_ASKING = {torch.ops.prim.device.default, torch.ops.prim.layout.default, *FunctionalTensor.metadata_fns}


class NumberedOps(TorchDispatchMode):
    """Dispatch mode that numbers operations (NOTE [Numbering]); each time it is entered, it counts from 0.

    Parameters
    ----------
    run : callable
        `run(number, func, args, kwargs)` returns the operation's result; operations that it calls aren't numbered.

    Attributes
    ----------
    count : int
        Numbers given since the mode was entered.
    """

    def __init__(self, run: Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._run = run
        self.count = 0

    def __enter__(self) -> NumberedOps:
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_numbered(func, args):
            return func(*args, **(kwargs or {}))
        number = self.count
        self.count += 1
        return self._run(number, func, args, kwargs or {})


def is_numbered(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of an operation gets a number (NOTE [Numbering])."""
    return _counts(func) and not (func is _CAST and _casts_parameter(args))


@functools.cache
def _counts(func: Any) -> bool:
    return func not in _ASKING and not getattr(func, "is_view", False) and not is_mark(func)


def is_mark(func: Any) -> bool:
    """Whether an operation only marks a place for PyTorch's profiler (`torch.profiler.record_function`)."""
    return getattr(func, "namespace", "") == "profiler"


@functools.cache
def is_random(func: Any) -> bool:
    """Whether an operation advances a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@functools.cache
def _makes_memory(func: Any) -> bool:
    """Whether an operation returns memory without values, which a later one fills."""
    return str(getattr(func, "_opname", "")).startswith(("empty", "new_empty"))


def can_be_saved(func: Any) -> bool:
    """Whether an operation's output may be saved: the operation returns no view and writes to no argument."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return all(result.alias_info is None for result in schema.returns)


def _operands(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments, including those in lists and tuples."""
    found: list[torch.Tensor] = []
    for x in values:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += _operands(x)
    return found


def _operation(func: Any, operands: list[torch.Tensor]) -> Hashable:
    """Return what identifies an operation in a comparison: its function, and its operands' shapes and dtypes."""
    return func, tuple([(t.shape, t.dtype) for t in operands])


def _casts_parameter(args: tuple[Any, ...]) -> bool:
    """Whether a cast with these arguments is one of a parameter, which autocast's cache may omit in another run."""
    return bool(args) and isinstance(args[0], torch.nn.Parameter) and args[0].requires_grad


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor with the same memory and version counter.

    Autograd's data are added to an operation's result only after the dispatch mode, so each use needs its own object.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # share the version
        return tensor.detach()


@dataclass(slots=True)
class _SavedOutput:
    """The saved output of one operation."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    digests: list[Digest | None]

    def value(self) -> Any:
        """Return the output with new tensor objects each time, as autograd requires of a result."""
        leaves = [alias(x.tensor()) if isinstance(x, Held) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


class SavedOutputs:
    """The operations of one run of a stage whose outputs are saved in forward and returned in the recompute.

    Parameters
    ----------
    ops : iterable of int
        The numbers of the operations.
    pack : callable, optional
        Holds a tensor; by default the tensor itself is held, with a check that nothing writes to it.
    name : str
        The stage's name, for messages.
    planned : sequence of int, optional
        Planned bytes of the saved storages, in order; further entries may follow. If they are given, a first run that
        can't save the planned outputs, or would save more bytes, saves nothing: the stage is then recomputed
        completely, which holds the fewest bytes. If not, this is an error.
    check : StageCheck or StageSpots, optional
        Compares each returned output with the one that was saved.

    Attributes
    ----------
    gave_up : bool
        Whether the first run saved nothing for that reason.
    """

    def __init__(
        self,
        ops: Iterable[int],
        pack: Callable[[torch.Tensor], Held] | None = None,
        name: str = "",
        planned: Sequence[int] | None = None,
        check: StageCheck | StageSpots | None = None,
    ) -> None:
        self._planned = planned
        self._check_outputs = check
        self.gave_up = False
        self._ops = tuple(sorted(set(ops)))
        self._last = self._ops[-1]
        self._pack = pack
        self._name = name
        self._made: list[Hashable] = []  # operations up to the last saved
        self._random: list[int] = []
        self._saved: dict[int, _SavedOutput] = {}
        self._next = 0
        self._forward_ran = False

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` wrapped: its first run saves the outputs, and later runs return them.

        Only the stage's own code runs under the mode, so the copies of buffers before and after it get no numbers.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._forward_ran:
                self._next = 0
                with NumberedOps(self._recompute):
                    return forward(*args, **kwargs)
            with NumberedOps(self._forward) as mode:
                result = forward(*args, **kwargs)
            self._check(mode.count)
            self._forward_ran = True
            if self.gave_up or not self._within():
                self.gave_up = True
                self._saved.clear()
            return result

        return run

    def _check(self, count: int) -> None:
        """Raise `PlanMismatchError`, or give up, if the saved outputs can't be used in a recompute.

        They can't if one is missing, or if a random operation is recomputed after one that is not: it would then draw
        other numbers than in forward.
        """
        missing = [n for n in self._ops if n not in self._saved]
        first = next((n for n in self._random if n in self._saved), count)
        replayed = next((n for n in self._random if n > first and n not in self._saved), None)
        if self._planned is not None:
            self.gave_up |= bool(missing) or replayed is not None
        elif missing:
            raise PlanMismatchError(
                f"stage {self._name!r} ran {count} operations and the plan saves the output of number "
                f"{missing[0]}: its forward took another path than the one profiled; solve again with such inputs"
            )
        elif replayed is not None:
            raise PlanMismatchError(
                f"stage {self._name!r}: the plan saves the random operation number {first} and replays number "
                f"{replayed}, which would draw other numbers; save all random operations from {first} on, or none"
            )

    def _within(self) -> bool:
        """Whether the saved outputs weren't written to since, and are no larger than planned."""
        if self._planned is None:
            return True
        held = [x for saved in self._saved.values() for x in saved.leaves if isinstance(x, Held)]
        sizes: dict[int, int] = {}
        for packed in held:
            try:
                tensor = packed.tensor()
            except RuntimeError:  # written to since: this operation now makes a buffer that is filled later
                return False
            if has_position(tensor):
                storage = tensor.untyped_storage()
                sizes.setdefault(storage._cdata, storage.nbytes())
        return len(sizes) <= len(self._planned) and all(
            size <= planned for size, planned in zip(sizes.values(), self._planned, strict=False)
        )

    def _forward(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_random(func):
            self._random.append(number)
        if number > self._last:
            return func(*args, **kwargs)
        operands = _operands((*args, *kwargs.values()))
        self._made.append(_operation(func, operands))
        if number not in self._ops:
            return func(*args, **kwargs)
        if self._check_outputs is not None:
            self._check_outputs.returned()
        inputs = {t.untyped_storage()._cdata for t in operands}
        result = func(*args, **kwargs)
        made = tensors_in(result)
        if not can_be_saved(func) or not made or any(t.untyped_storage()._cdata in inputs for t in made):
            if self._planned is not None:
                return result
            raise PlanMismatchError(
                f"stage {self._name!r}: the plan saves the output of operation number {number}, {func}, which is a "
                "view of its input, writes to it, or makes no tensor; name the operation that made the memory instead"
            )
        leaves, spec = pytree.tree_flatten(result)
        digests: list[Digest | None] = []
        if isinstance(self._check_outputs, StageCheck) and not _makes_memory(func):
            digests = [self._check_outputs.by.take(t) for t in made]
        self._saved[number] = _SavedOutput(
            [self._held(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec, digests
        )
        return result

    def _held(self, tensor: torch.Tensor) -> Held:
        detached = alias(tensor)
        if self._pack is None:
            return Held(detached)
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return self._pack(detached)

    def _recompute(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._next > self._last:
            return func(*args, **kwargs)
        found = _operation(func, _operands((*args, *kwargs.values())))
        if found != self._made[self._next]:
            raise PlanMismatchError(
                f"stage {self._name!r}: operation number {self._next} was {_describe(self._made[self._next])} in "
                f"forward and is {_describe(found)} in the recompute: what the plan saves belongs to another path; "
                "the forward depends on something that changed in between"
            )
        at = self._next
        self._next += 1
        saved = self._saved.get(at)
        if saved is None:
            return func(*args, **kwargs)
        value = saved.value()
        if isinstance(self._check_outputs, StageCheck) and saved.digests:
            self._check_outputs.compare_outputs(at, saved.digests, tensors_in(value))
        return value


def _describe(operation: Any) -> str:
    func, operands = operation
    return f"{func} of {', '.join(f'{dtype} {list(shape)}'.removeprefix('torch.') for shape, dtype in operands)}"
