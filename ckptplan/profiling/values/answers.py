"""Results of a real run, for operations whose results don't follow from fake operands.

A step is traced on fake tensors, which have no values. An operation that reads values (`item`, `nonzero`, indexing
with a mask), or has no fake kernel, fails there. Then the step runs once for real (`real_run.py`) and the result of
each such operation, its *answer*, is noted; the fake replays get the answers, call by call. So they take the path that
the real step took, with the sizes that it had, and none of them needs memory for values.

NOTE [Answers]

1. There is one queue of answers per phase (forward, backward, and inference: the forward without gradients), operation
   and place in the program that calls it. A call takes the next answer of its queue, whether or not its operands have
   values in the replay: the real run can't tell. Places are kept apart because PyTorch itself may read values, of real
   tensors alone (`one_hot` looks for numbers out of range).
2. A stage that runs again takes the answers that it took in forward, from the first on.
3. Random operations whose results have values in the replay (a drawn number, a permutation) have answers too: a replay
   draws less than the real step, whose dropout moves the generator, and would draw other numbers. So if a replay
   without answers has drawn such a result and then reads any values, the step runs for real as well.
4. The answer for packed sequences includes the values of their lengths, which recurrent kernels read without any
   operation that a dispatch mode sees.
5. An answer holds for operands of the sizes in the real run. Other sizes mean that the step doesn't do the same each
   time it runs, and are an error.

Example: forward indexes 8 rows with a mask, `x[mask]`, in `model.py:12`. On a fake `x` the number of rows isn't known.
The real run notes 5 rows for (forward, index, model.py:12); in the replay `x[mask]` then returns a fake tensor of 5
rows, and another one when the stage is recomputed.
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
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.version import PACKAGE_FOLDER
from ckptplan.runtime.patching import PatchedForward, installed
from ckptplan.runtime.recompute.selective import is_random
from ckptplan.tensors.private import disable_current_modes, is_fake
from ckptplan.tensors.storages import tensors_in

Phase = Literal["forward", "backward", "inference"]

READ_ARRAY = "Tensor.numpy"
"""Name for the reading of a whole tensor as an array, which is no operation."""

VALUES_LIMIT = 1 << 24
"""Most elements of a tensor with real values in a replay or in an answer: 128 MiB of 64-bit integers."""

PACK = torch.ops.aten._pack_padded_sequence.default
"""Packs sequences of given lengths (NOTE [Answers], rule 4)."""

_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_INDEXING = {torch.ops.aten.index.Tensor}


class NeedsValues(RuntimeError):
    """An operation can't run on fake operands, and has no answer of a real run.

    Parameters
    ----------
    func : operation
    phase : str
    refused : bool
        Its fake kernel raised an error about these operands, which the real one may raise as well.
    """

    def __init__(self, func: Any, phase: Phase, *, refused: bool = False) -> None:
        super().__init__(f"{func} needs the values of its operands")
        self.func, self.phase, self.refused = func, phase, refused


@dataclass(frozen=True, slots=True)
class Question:
    """Key of one queue of answers: an operation, its phase, and the place in the program that calls it.

    Parameters
    ----------
    phase : str
    func : operation
    code, place : code object, tuple
        Code of the innermost Python function outside of PyTorch's dispatch and of this package, and the lines and
        columns of the expression there. The instruction's number wouldn't do: it changes once Python has specialised
        the instruction.
    line : str
        File and line, for messages.
    """

    phase: Phase
    func: Any
    code: types.CodeType | None
    place: tuple[int | None, ...]
    line: str

    @classmethod
    def now(cls, phase: Phase, func: Any) -> Question:
        """The question of a call of `func` that runs now."""
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
_BETWEEN = (
    *(os.path.join(PACKAGE_FOLDER, folder, "") for folder in ("tensors", "training", "profiling", "memory")),
    os.path.join(PACKAGE_FOLDER, "runtime", "recompute", "selective.py"),
    *(os.path.join(_TORCH, *path) for path in (("_subclasses",), ("_dynamo",), ("_compile.py",), ("_ops.py",))),
    pytree.__file__,
    contextlib.__file__,
)
"""Code between a call in the program and the dispatch mode that sees it, on real tensors or on fake ones."""


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
        """A tensor of this layout, with arbitrary values."""
        flat = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        if self.offset == 0 and flat.stride() == self.stride and flat.shape == self.size:
            return flat
        return flat.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Same:
    """In an answer: the operation returned this operand."""

    operand: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one call of an operation in the real run.

    Parameters
    ----------
    sizes : tuple
        Sizes of its tensor operands.
    result : tree
        Numbers themselves, and a `Layout` or `Same` for each tensor.
    values : tree or None
        The tensors themselves, where they have values in a replay.
    peak_bytes : int
        Most bytes that it allocated at once, its results included.
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
        """The result with tensors made anew; under a fake mode, these are fake."""
        return pytree.tree_map(
            lambda x: x.make() if isinstance(x, Layout) else operands[x.operand] if isinstance(x, Same) else x,
            self.result,
            is_leaf=lambda x: isinstance(x, (Layout, Same)),
        )

    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of the tensors that it made."""
        leaves = pytree.tree_leaves(self.result, is_leaf=lambda x: isinstance(x, (Layout, Same)))
        return tuple(x for x in leaves if isinstance(x, Layout))


@dataclass
class Answers:
    """The answers of one step (NOTE [Answers]).

    Attributes
    ----------
    failed : set
        Operations that failed on fake operands, beyond those whose tags say that they do.
    step : object
        The step that they belong to.
    has_values : bool
        The step can run for real: no tensor of it lies on `meta`.
    phases : set of str
        Phases in which operations failed; if any did, "forward" is one of them.
    used : dict
        Questions whose answers a replay needed because it had no values of its own, in order, as keys.
    queues : dict
        Question -> its answers, in order of the calls.
    compiled : dict
        Key of a call of a compiled module -> the `Noted` of it (compiled.py).
    ratios : dict or None
        Name of a compiled stage -> the ratios of its variants, falling (variants.py); None: they aren't noted yet.
    noted_ratios : set of float
        Ratios for which variants were noted because a replay needed them.
    notes : list of str
        What a reader must know about them.
    draws : bool
        Forward was seen to draw numbers from Python's or numpy's generators.
    storages : dict
        Key of an operation whose results have larger storages on the device than traced -> their bytes, in order.
    """

    failed: set[Any] = field(default_factory=set)
    step: object = None
    has_values: bool = True
    phases: set[Phase] = field(default_factory=set)
    used: dict[Question, None] = field(default_factory=dict)
    queues: dict[Question, list[Answer]] = field(default_factory=dict)
    compiled: dict[Hashable, Any] = field(default_factory=dict)
    ratios: dict[str, tuple[float, ...]] | None = None
    noted_ratios: set[float] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    storages: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    draws: bool = False

    @property
    def path_is_drawn(self) -> bool:
        """Whether numbers that were drawn, and that the program can read, may decide which operations run."""
        return self.draws or any(is_random(question.func) for question in self.queues)

    def belong_to(self, step: object, *, has_values: bool) -> None:
        """Forget all answers if they are those of another step."""
        self.has_values = has_values
        if step is not self.step:
            for known in (self.failed, self.phases, self.used, self.queues, self.compiled, self.storages, self.notes):
                known.clear()
            self.noted_ratios.clear()
            self.ratios = None
            self.draws = False
            self.step = step

    def wants(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a call with such operands takes an answer, as far as its result isn't needed to tell."""
        if func in self.failed:
            return True
        if not reads_values(func):
            return False
        return func not in _INDEXING or any(
            isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )

    @staticmethod
    def wants_drawn(func: Any, result: Any) -> bool:
        """Whether `func` is random and its result has values in replays."""
        return is_random(func) and all_readable(result)

    def take(self, question: Question, number: int, operands: Any) -> Answer:
        """The answer for call `number`, from 0 on, of a question.

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
                f"the model reads values, so its step ran for real to learn them; but call {number + 1} of {question} "
                f"in {question.phase}, on operands of {list(sizes)}, has no match: the real run had {seen} there. "
                "So the step doesn't do the same each time it runs; take what changes it (counters, time, a random "
                "generator of its own) out of it"
            )
        return queue[number]

    @property
    def note(self) -> str:
        """A note on the operations that needed values, and how these were found; empty if none did."""
        if not self.used:
            return ""
        first: dict[Any, Question] = {}
        for question in self.used:
            first.setdefault(question.func, question)
        return (
            f"values are needed by {', '.join(map(str, first.values()))}: "
            "the step was run for real, one stage at a time, to learn them, and then traced without memory. "
            "The memory figures hold for steps that take the same path with the same sizes; "
            "stages with such operations have no options inside"
        )


def reads_values(func: Any) -> bool:
    """Whether an operation's result, or its size, depends on the values of its operands."""
    return any(tag in _BY_VALUE for tag in getattr(func, "tags", ()))


def readable(tensor: torch.Tensor) -> bool:
    """Whether programs read the values of such tensors: integers, and single numbers such as a count of steps."""
    return not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dim() == 0


def all_readable(result: Any) -> bool:
    """Whether an operation returned tensors, all of them readable and of at most `VALUES_LIMIT` elements."""
    made = tensors_in(result)
    return bool(made) and all(readable(t) and t.numel() <= VALUES_LIMIT for t in made)


def sizes_of(tree: Any) -> tuple[tuple[int, ...], ...]:
    """Sizes of the tensors in `tree`."""
    return tuple(tuple(t.shape) for t in tensors_in(tree))


@contextlib.contextmanager
def reading_watched(
    read: Callable[[torch.Tensor], np.ndarray[Any, Any] | None], *, by_item: Callable[[], bool]
) -> Iterator[None]:
    """Watch the reading of whole tensors in this thread within the block, and allow it to be replaced.

    `tolist` reads number by number through `item`, which is an operation, and so do texts that are made with a fake
    number, and tensors that are made from lists of numbers, such as `torch.tensor([x.argmax(), y.argmax()])`, which
    PyTorch itself reads below all dispatch modes; `numpy` goes through `read`.

    Parameters
    ----------
    read : callable
        `read(tensor)` returns the array, or None for the tensor's own.
    by_item : callable
        Returns whether `tolist`, texts and lists of real tensors are to go through `item` now.
    """
    here = threading.get_ident()
    plain_list, plain_array, plain_text = torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__format__
    plain_tensor, plain_new = torch.tensor, torch.Tensor.new_tensor

    def items(tensor: torch.Tensor) -> Any:
        return tensor.detach().item() if tensor.dim() == 0 else [items(part) for part in tensor]

    def tolist(tensor: torch.Tensor) -> Any:
        return items(tensor) if threading.get_ident() == here and by_item() else plain_list(tensor)

    def numpy(tensor: torch.Tensor, **kwargs: Any) -> Any:
        array = read(tensor) if threading.get_ident() == here else None
        return plain_array(tensor, **kwargs) if array is None else array

    def text(tensor: torch.Tensor, spec: str) -> str:
        single = threading.get_ident() == here and tensor.dim() == 0
        if single and (is_fake(tensor) or by_item()):
            return format(tensor.detach().item(), spec)
        return plain_text(tensor, spec)

    def reading(make: Callable[..., Any], at: int = 0) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            args += tuple(kwargs.pop(name) for name in ("data", "obj") if name in kwargs)
            given = args[at] if len(args) > at and threading.get_ident() == here else None
            numbers = tensors_in(given) if isinstance(given, list | tuple) else []
            if not numbers or not (by_item() or any(is_fake(t) for t in numbers)):
                return make(*args, **kwargs)
            if make is not plain_new and kwargs.get("dtype") is None:
                with disable_current_modes():
                    like = pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros((), dtype=t.dtype), given)
                    kwargs["dtype"] = plain_tensor(like).dtype
            return make(*args[:at], pytree.tree_map_only(torch.Tensor, items, given), **kwargs)

        return made

    makers: dict[str, Any] = {name: reading(getattr(torch, name)) for name in ("tensor", "as_tensor", "asarray")}
    methods: dict[str, Any] = {
        "tolist": tolist,
        "numpy": numpy,
        "__format__": text,
        "new_tensor": reading(plain_new, 1),
    }
    with mock.patch.multiple(torch.Tensor, **methods), mock.patch.multiple(torch, **makers):
        yield


class StandIn(PatchedForward):
    """A patch below those of a plan, of another class so that it isn't taken for one of them."""


def around_forwards(
    modules: Iterable[nn.Module], around: Callable[[], contextlib.AbstractContextManager[None]]
) -> contextlib.AbstractContextManager[None]:
    """Run each forward of these modules in a context of `around` within the block, below any later patch."""

    def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with around():
            return original(*args, **kwargs)

    return installed([StandIn(module, run) for module in dict.fromkeys(modules)])


@dataclass(frozen=True, slots=True)
class Seen:
    """Part of an operation's key: what it made and allocated in the real run, which its operands' sizes don't tell."""

    made: tuple[Layout, ...]
    peak_bytes: int


def with_seen(key: Hashable, answer: Answer) -> Hashable:
    """An operation's key with the answer's layouts and bytes, so that calls with other results have other keys."""
    made: Any = key
    func, leaves, spec = made
    return func, (*leaves, Seen(answer.layouts(), answer.peak_bytes)), spec


def seen_in(key: Hashable) -> Seen | None:
    """The part of a key that `with_seen` added, if any."""
    leaves = key[1] if isinstance(key, tuple) else ()
    return leaves[-1] if leaves and isinstance(leaves[-1], Seen) else None


def without_seen(key: Hashable) -> Hashable:
    """The key before `with_seen`."""
    return key if seen_in(key) is None else (key[0], key[1][:-1], key[2])  # type: ignore[index]
