"""Spots: a few elements of saved tensors that are compared in every pass.

NOTE [Spots]
1. A spot is up to `_COUNT` elements of a tensor, on a grid over its memory. A change to all elements is seen, one to a
   few of them only by chance. Distances on the grid are odd, so that it doesn't follow the columns of a matrix.
2. Reading one takes some ten µs in a real step, whose other work fills the caches. So of a stage only the tensors are
   compared on which no other compared one depends (`Sinks`): if a tensor differs, so do the results of the operation
   that saves it, and all that is computed from these. Autograd's graph tells what depends on what. Two kinds of
   operations may hide a difference, so what they save is compared: those whose results are returned in a recompute, and
   functions written in Python, whose backward may read what their forward doesn't.
3. On the host a spot is read at once, as Python numbers. On an accelerator one kernel copies it to a row of memory that
   was allocated when the plan was applied (`Sheet`). At the end of a backward all rows are copied to the host together,
   and are compared once they are there, which no code waits for.
4. No spot is taken of parameters and their views, which versions and addresses guard, and of what has no digest.

Example: a stage computes `b(relu(a(x)))` with two linear layers. It saves `x` for `a`, and the result of `relu` for
`relu` and for `b`. The result depends on `a`, and nothing that is saved depends on `b`. So the stage has one spot, of
the tensor that `b` saves. If that is a contiguous [64, 64], its elements 0, 273, 546, ..., 4095 are compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ckptplan.tensors import accelerator
from ckptplan.tensors.private import neg_view, next_sequence_number
from ckptplan.tensors.views import ITEMSIZES

_COUNT = 16
_ROWS = 1 << 12  # most spots of an accelerator that aren't read; for one more the host waits until all are
SHEET_BYTES = 8 * _COUNT * _ROWS
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Grid = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of the view of a tensor's spot, which begins at the tensor's first element."""


def is_written_whole(dtype: torch.dtype, dims: int) -> bool:
    """Whether kernels write every element of such a saved tensor (NOTE [Digests], rule 4)."""
    return dims > 0 and dtype is not torch.uint64 and (dtype is not torch.uint8 or dims > 1)


def dimensions(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return size and stride of a tensor's dimensions in memory order; contiguous ones are merged."""
    dims: list[tuple[int, int]] = []
    for stride, size in sorted(zip(strides, shape, strict=True), reverse=True):
        if size == 1 or stride == 0:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = dims[-1][0] * size, stride
        else:
            dims.append((size, stride))
    return dims


@functools.lru_cache(maxsize=1 << 12)
def _grid(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Grid | None:
    """Return the grid of such a tensor's spot; None if no spot is taken of it."""
    if dtype not in ITEMSIZES or not is_written_whole(dtype, len(shape)) or 0 in shape:
        return None
    dims = dimensions(shape, strides)
    counts = [1] * len(dims)
    while 2 * math.prod(counts) <= _COUNT:
        room = [d for d, (size, _) in enumerate(dims) if size >= 2 * counts[d]]
        if not room:
            break
        counts[min(room, key=lambda d: (counts[d], -dims[d][0]))] *= 2
    apart = [1 if n == 1 else ((size - 1) // (n - 1) - 1) | 1 for (size, _), n in zip(dims, counts, strict=True)]
    return tuple(counts), tuple(n * stride for (_, stride), n in zip(dims, apart, strict=True))


def spot_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """Return a plain tensor's strides and the view of its spot; None if no spot is taken of it."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return None
    strides = tensor.stride()
    grid = _grid(tensor.dtype, tensor.shape, strides)
    return None if grid is None else (strides, tensor.as_strided(*grid))


def has_spot(tensor: torch.Tensor) -> bool:
    """Whether `spot_of` would return one; no operation runs, which a mode could see."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    return _grid(tensor.dtype, tensor.shape, tensor.stride()) is not None


class Sinks:
    """The tensors saved by one stage that are compared in each pass (NOTE [Spots], rule 2).

    Attributes
    ----------
    numbers : set of int
        Their numbers in the order of saving, on any path that is known.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self._counts: set[int] = set()  # numbers of saved tensors on the paths that are known
        self._learns = True

    def recorder(self) -> Recorder | None:
        """Return a recorder for a call of the stage if its path is to be learned; all that it saves is compared."""
        return Recorder() if self._learns else None

    def ended(self, count: int, recorder: Recorder | None) -> None:
        """Note that a call has saved `count` tensors; if no known path does, the path of the next call is learned."""
        if recorder is not None:
            self._counts.add(count)
            self.numbers |= recorder.sinks()
        self._learns = count not in self._counts


class Recorder:
    """Records which operations save the tensors of one call of a stage, and on which operations these depend.

    It must not outlive the call, since it holds nodes of the graph.
    """

    def __init__(self) -> None:
        self._begin = _newest() + 1
        self._saved: list[tuple[int, Any, bool]] = []  # operation that saves, node that made the tensor, has a spot
        self._returned: set[int] = set()

    def save(self, tensor: torch.Tensor) -> None:
        """Record the tensor that is saved next, by the operation with the newest node."""
        of_parameter = tensor._is_view() and isinstance(tensor._base, nn.Parameter)
        self._saved.append((_newest(), tensor.grad_fn, not of_parameter and has_spot(tensor)))

    def returned(self) -> None:
        """Record that the result of the operation that runs is returned in a recompute, which doesn't run it."""
        self._returned.add(_newest())

    def sinks(self) -> set[int]:
        """Return the numbers of the tensors on whose operations no other tensor with a spot depends."""
        nodes = []
        results: dict[int, int] = {}  # operation: its last result that it saves itself
        for number, (operation, made_by, compared) in enumerate(self._saved):
            if made_by is None or not compared:
                continue
            if made_by._sequence_nr() != operation:
                nodes.append(made_by)
            elif operation not in self._returned and not isinstance(made_by, BackwardCFunction):
                results[operation] = number
                nodes += [node for node, _ in made_by.next_functions]
        seen: set[int] = set()
        shown: set[int] = set()
        while nodes:
            node = nodes.pop()
            number = -1 if node is None else node._sequence_nr()
            if not self._begin <= number <= _newest() or number in self._returned or number in seen:
                continue
            seen.add(number)
            if not isinstance(node, BackwardCFunction):
                shown.add(number)
            nodes += [following for following, _ in node.next_functions]
        return {
            number
            for number, (operation, _, compared) in enumerate(self._saved)
            if compared and operation not in shown and results.get(operation, number) == number
        }


def _newest() -> int:
    """Return the number of the node that was made last on this thread."""
    return next_sequence_number() - 1


@dataclass(eq=False, slots=True)
class Spot:
    """A spot's values, nested like its grid.

    Attributes
    ----------
    strides : tuple of int
        The tensor's strides: spots of tensors with other strides lie elsewhere, and aren't compared.
    values : sequence or None
        On an accelerator None until they are on the host.
    """

    strides: tuple[int, ...]
    values: Sequence[Any] | None = None

    def is_like(self, other: Spot) -> bool:
        """Whether the values are equal; as text, too, since a NaN as a number equals nothing."""
        return self.values == other.values or repr(self.values) == repr(other.values)


def read(strides: tuple[int, ...], view: torch.Tensor) -> Spot:
    """Return a spot of the host, of which `view` is the view."""
    try:
        return Spot(strides, view.tolist())
    except RuntimeError:  # a type without numbers, such as those of less than a byte
        return Spot(strides, view.view(INTEGERS[view.itemsize]).tolist())


class Sheet:
    """Memory for the spots of one accelerator, allocated once (NOTE [Spots], rule 2).

    Methods are called one at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None
        self._memory()
        self._unread: list[tuple[Spot, int]] = []  # with the number of values
        self._streams: list[Any] = []  # those that have written to rows
        self._sent: tuple[Any, list[tuple[Spot, int]]] | None = None

    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows, and what they are copied to on the host; allocated again if they were freed."""
        if self._made is None:
            with torch.inference_mode(False), torch.no_grad():
                rows = torch.empty((_ROWS, _COUNT), dtype=torch.int64, device=self._device)
                host = torch.empty((_ROWS, _COUNT), dtype=torch.int64, pin_memory=accelerator.IS_BUILT)
            self._made = rows, host
        return self._made

    def free(self) -> None:
        """Read all spots and free the memory; it is allocated again if graphs that are still alive need it."""
        self.read_all()
        self._made = None

    def take(self, strides: tuple[int, ...], view: torch.Tensor) -> Spot:
        """Start to read a spot on the current stream; its values are there once it has been read from the host."""
        if len(self._unread) == _ROWS:
            self.read_all()
        stream = accelerator.current_stream(self._device)
        if stream not in self._streams:
            self._streams.append(stream)
            if self._sent is not None:
                stream.wait_event(self._sent[0])  # the copy reads the rows that are written again
        view = view.real if view.is_complex() else view
        view = neg_view(view) if view.is_neg() else view
        row = self._memory()[0].as_strided((view.numel(),), (1,), len(self._unread) * _COUNT)
        row.view(view.shape).copy_(view.view(INTEGERS[view.itemsize]))
        spot = Spot(strides)
        self._unread.append((spot, view.numel()))
        return spot

    def send(self) -> None:
        """Start to copy the spots so far to the host, unless an earlier copy is under way."""
        if not self._unread or self._sent is not None:
            return
        current, count = accelerator.current_stream(self._device), len(self._unread)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)
        rows, host = self._memory()
        host[:count].copy_(rows[:count], non_blocking=True)
        event = accelerator.recorded_event(self._device)
        self._sent, self._unread, self._streams = (event, self._unread), [], []

    def arrived(self) -> None:
        """Read the spots that are on the host by now."""
        if self._sent is not None and self._sent[0].query():
            self._read()

    def read_all(self) -> None:
        """Read all spots; waits for the device."""
        self._read()
        self.send()
        self._read()

    def _read(self) -> None:
        if self._sent is not None:
            (event, spots), self._sent = self._sent, None
            event.synchronize()
            for (spot, count), values in zip(spots, self._memory()[1][: len(spots)].tolist(), strict=True):
                spot.values = values[:count]
