"""What operations answered when a step ran for real, for those whose results can't be told from fake operands.

A step is traced on fake tensors, which have no values. An operation that reads values (`item`, `nonzero`, indexing
with a mask), or has no fake kernel, fails there. Then the step runs once for real (`real_run.py`) and each such
operation's answer is written down; the fake replays get the answers, call by call. So they take the path that the real
step took, with the sizes that it had, and none of them needs memory for values.

NOTE [Answers]

1. Answers lie in one queue per phase (forward, backward, and inference: the forward without gradients), operation and
   place in the program that calls it. A call takes the next one of its queue, whether its operands have values in the
   replay or not, since the real run can't tell those apart. By place, because what PyTorch makes of one call may read
   values of real tensors alone (`one_hot` looks for numbers out of range).
2. A stage that runs again takes the answers that it took in forward, from the first on.
3. Random operations whose results the replay has for real (a drawn number, a permutation) are asked too: a replay draws
   less than the real step, whose dropout moves the generator, and would draw other numbers. So where a replay without
   answers has drawn such a result and then reads values, which may be it, the step runs for real as well.
4. The lengths of packed sequences are answered with their values, since recurrent kernels read them past any mode.
5. An answer is for operands of certain sizes. Others mean that the step doesn't do the same each time: an error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ckptplan
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.runtime.patching import entry_point
from ckptplan.runtime.recompute.selective import is_random

Phase = Literal["forward", "backward", "inference"]

READ_ARRAY = "Tensor.numpy"
"""Stands for the reading of a whole tensor as an array, which no dispatch mode sees."""

VALUES_LIMIT = 1 << 24
"""Largest number of elements that a replay has for real, or an answer keeps."""

PACK = torch.ops.aten._pack_padded_sequence.default
"""Packs sequences of given lengths; kernels read how many go on at each step past any mode."""

_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_INDEXING = {torch.ops.aten.index.Tensor}


class NeedsValues(RuntimeError):
    """An operation can't run on fake operands, and nothing is known of what it answered for real.

    Parameters
    ----------
    func : operation
    phase : str
    refused : bool
        Its fake kernel has something against these operands; the real one may as well.
    """

    def __init__(self, func: Any, phase: Phase, *, refused: bool = False) -> None:
        super().__init__(f"{func} needs the values of its operands")
        self.func, self.phase, self.refused = func, phase, refused


@dataclass(frozen=True, slots=True)
class Question:
    """A kind of call that is asked: one queue of answers.

    Parameters
    ----------
    phase : str
    func : operation
    code, place : code object, tuple
        Where the innermost Python code outside of PyTorch's dispatch and of ours calls it: the expression's lines and
        columns, since the instruction's number becomes another one once Python has specialised the instruction.
    line : str
        The same for people.
    """

    phase: Phase
    func: Any
    code: types.CodeType | None
    place: tuple[int | None, ...]
    line: str

    @classmethod
    def now(cls, phase: Phase, func: Any) -> Question:
        """The question that `func`, called now, is."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
            frame = frame.f_back
        if frame is None:
            return cls(phase, func, None, (), "")
        line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        return cls(phase, func, frame.f_code, _places(frame.f_code)[frame.f_lasti // 2], line)

    def __str__(self) -> str:
        return f"{str(self.func).removesuffix('.default')} ({self.line})"


@functools.lru_cache(maxsize=1 << 10)
def _places(code: types.CodeType) -> tuple[tuple[int | None, ...], ...]:
    """The lines and columns of each instruction."""
    return tuple(code.co_positions())


_TORCH = os.path.dirname(torch.__file__)
_OURS = os.path.dirname(os.path.abspath(ckptplan.__file__))
_BETWEEN = (
    *(os.path.join(_OURS, *path) for path in (("profiling", ""), ("memory", ""))),
    *(os.path.join(_OURS, "runtime", *path) for path in (("recompute", "selective.py"), ("observe", "measure.py"))),
    *(os.path.join(_TORCH, *path) for path in (("_subclasses",), ("_dynamo",), ("_compile.py",), ("_ops.py",))),
    contextlib.__file__,
)
"""Code that lies between a call in the program and what watches it, on real tensors or on fake ones."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor without its values; `elements` counts those of its whole storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    elements: int
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of `tensor`."""
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        device = tensor.device.type
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), elements, tensor.dtype, device)

    def make(self) -> torch.Tensor:
        """A tensor like it, of whatever values."""
        flat = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        if self.offset == 0 and flat.stride() == self.stride and flat.shape == self.size:
            return flat
        return flat.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Same:
    """In an answer: the operand of that number, returned."""

    operand: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call of an operation gave.

    Parameters
    ----------
    sizes : tuple
        Of its tensor operands.
    result : tree
        Numbers as they are, a `Layout` or `Same` for each tensor.
    values : tree or None
        The tensors themselves, where a replay has them for real.
    peak_bytes : int
        Most bytes it had allocated at once, its results included.
    """

    sizes: tuple[tuple[int, ...], ...]
    result: Any
    values: Any = None
    peak_bytes: int = 0

    @property
    def is_number(self) -> bool:
        """Whether the result has no tensor in it."""
        return not any(isinstance(x, (Layout, Same)) for x in pytree.tree_leaves(self.result))

    def made(self, operands: list[torch.Tensor]) -> Any:
        """The result without values; call it where operations run fake."""
        return pytree.tree_map(
            lambda x: x.make() if isinstance(x, Layout) else operands[x.operand] if isinstance(x, Same) else x,
            self.result,
            is_leaf=lambda x: isinstance(x, (Layout, Same)),
        )

    def layouts(self) -> tuple[Layout, ...]:
        """Of the tensors that it made."""
        leaves = pytree.tree_leaves(self.result, is_leaf=lambda x: isinstance(x, (Layout, Same)))
        return tuple(x for x in leaves if isinstance(x, Layout))


@dataclass
class Answers:
    """The answers of one step, none at first. See NOTE [Answers].

    Attributes
    ----------
    step : object
        The step they are of.
    has_values : bool
        It can run for real: nothing of it lies on `meta`.
    asked : set
        Operations that failed on fake operands, beyond those whose tags say that they would.
    phases : set of str
        In which any did; the forward always belongs to them.
    used : dict
        The questions that a replay had, for want of values of its own, in order; as keys.
    queues : dict
        Question -> its answers, in order of the calls.
    compiled : dict
        A call of a compiled module -> what it does (`Noted` in compiled.py).
    storages : dict
        Key of an operation whose results begin larger storages on the device than traced -> their bytes, in order.
    """

    asked: set[Any] = field(default_factory=set)
    step: object = None
    has_values: bool = True
    phases: set[Phase] = field(default_factory=set)
    used: dict[Question, None] = field(default_factory=dict)
    queues: dict[Question, list[Answer]] = field(default_factory=dict)
    compiled: dict[Hashable, Any] = field(default_factory=dict)
    storages: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)

    def belong_to(self, step: object, *, has_values: bool) -> None:
        """Forget the answers of another step."""
        self.has_values = has_values
        if step is not self.step:
            for known in (self.asked, self.phases, self.used, self.queues, self.compiled, self.storages):
                known.clear()
            self.step = step

    def wants(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether calls of an operation with such operands are asked, as far as can be told before its result."""
        if func in self.asked:
            return True
        if not any(tag in _BY_VALUE for tag in getattr(func, "tags", ())):
            return False
        return func not in _INDEXING or any(
            isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )

    @staticmethod
    def wants_drawn(func: Any, result: Any) -> bool:
        """Whether a random operation's result is one that replays have for real."""
        if not is_random(func):
            return False
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        return bool(made) and all(readable(t) and t.numel() <= VALUES_LIMIT for t in made)

    def take(self, question: Question, number: int, operands: Any) -> Answer:
        """The answer to a question's call of that number.

        Raises
        ------
        UnsupportedModelError
            If the real run had no such call.
        """
        queue = self.queues.get(question, [])
        sizes = sizes_of(operands)
        if number >= len(queue) or queue[number].sizes != sizes:
            seen = f"{len(queue)} calls" if number >= len(queue) else f"operands of {list(queue[number].sizes)}"
            raise UnsupportedModelError(
                f"the model reads values, so its step ran for real to learn them; but its call {number + 1} of "
                f"{question} in {question.phase}, on operands of {list(sizes)}, met a real run with {seen} there: "
                "the step doesn't do the same each time it runs; take what changes it (counters, time, a random "
                "generator of its own) out of it"
            )
        return queue[number]

    @property
    def note(self) -> str:
        """For people: what needed values, and how it got them. Empty where nothing did."""
        if not self.used:
            return ""
        first: dict[Any, Question] = {}
        for question in self.used:
            first.setdefault(question.func, question)
        return (
            f"values are needed by {', '.join(map(str, first.values()))}: "
            "the step was run for real, one stage at a time, to learn them, and then traced without memory. "
            "What is said of memory holds for steps that take the same path with the same sizes; "
            "stages with such operations have no options inside"
        )


def readable(tensor: torch.Tensor) -> bool:
    """Whether programs read such tensors' values: whole numbers, and single numbers such as a count of steps."""
    return not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dim() == 0


def sizes_of(tree: Any) -> tuple[tuple[int, ...], ...]:
    """Sizes of the tensors in `tree`."""
    return tuple(tuple(t.shape) for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))


class ReadingWatched:
    """While entered, in this thread: whole tensors are read by ways that can be watched.

    `tolist` goes number by number through `item`, an operation, as it does on fake tensors; `numpy` through `read`.

    Parameters
    ----------
    read : callable
        `read(tensor)` gives the array, None where the tensor's own will do.
    by_item : callable
        Tells whether `tolist` is watched now.
    """

    def __init__(
        self, read: Callable[[torch.Tensor], np.ndarray[Any, Any] | None], *, by_item: Callable[[], bool]
    ) -> None:
        self._read, self._by_item = read, by_item
        self._before: list[tuple[str, Any]] = []

    def __enter__(self) -> ReadingWatched:
        here = threading.get_ident()
        plain_list, plain_array = torch.Tensor.tolist, torch.Tensor.numpy
        read, by_item = self._read, self._by_item

        def tolist(tensor: torch.Tensor) -> Any:
            if threading.get_ident() != here or not by_item():
                return plain_list(tensor)
            if tensor.dim() == 0:
                return tensor.item()
            return [tolist(part) for part in tensor]

        def numpy(tensor: torch.Tensor, **kwargs: Any) -> Any:
            array = read(tensor) if threading.get_ident() == here else None
            return plain_array(tensor, **kwargs) if array is None else array

        own = torch.Tensor.__dict__
        for name, function in (("numpy", numpy), ("tolist", tolist)):
            self._before.append((name, own.get(name)))
            setattr(torch.Tensor, name, function)
        return self

    def __exit__(self, *error: Any) -> None:
        while self._before:
            name, function = self._before.pop()
            if function is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, function)


@contextlib.contextmanager
def around_forwards(
    modules: Iterable[nn.Module], around: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[None]:
    """Inside, these modules' forwards run in such a context, below what is patched on top of them later."""

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with around():
                return forward(*args, **kwargs)

        return run

    before = [(m, entry_point(m), m.__dict__.get(entry_point(m))) for m in dict.fromkeys(modules)]
    try:
        for module, attribute, _ in before:
            setattr(module, attribute, wrapped(getattr(module, attribute)))
        yield
    finally:
        for module, attribute, own in before:
            if own is None:
                module.__dict__.pop(attribute, None)
            else:
                setattr(module, attribute, own)


@dataclass(frozen=True, slots=True)
class Seen:
    """In an operation's key: what it made and allocated in the real run, since its operands' sizes don't tell."""

    made: tuple[Layout, ...]
    peak_bytes: int


def with_seen(key: Hashable, answer: Answer) -> Hashable:
    """An operation's key that tells calls with other results apart."""
    made: Any = key
    func, leaves, spec = made
    return func, (*leaves, Seen(answer.layouts(), answer.peak_bytes)), spec


def seen_in(key: Hashable) -> Seen | None:
    """What `with_seen` put into a key."""
    leaves = key[1] if isinstance(key, tuple) else ()
    return leaves[-1] if leaves and isinstance(leaves[-1], Seen) else None


def without_seen(key: Hashable) -> Hashable:
    """The key as it was before `with_seen`."""
    return key if seen_in(key) is None else (key[0], key[1][:-1], key[2])  # type: ignore[index]
