"""Digests of tensors: numbers that differ if the tensors' bits do, computed on the device without waiting.

NOTE [Digests]
1. A digest is computed from a tensor's bits, read as integers, so NaNs and the signs of zeros count. The tensor is
   split into blocks of at most `_LONGEST` by `_LONGEST` integers. In each block the integers are summed along each
   dimension, with overflow wrapping around. Each sum is mixed, multiplied by an odd random weight of its position, and
   the products are added up. So order counts: a digest changes if elements change places, or signs.
2. It is computed on the tensor's device, on the current stream, without waiting. The digests of a step are read
   together, at the end of the backward that compared them.
3. It allocates no memory during a step: views of the tensor are summed into memory that was allocated when the plan was
   applied (`Bench`). CUDA's sum kernels may allocate some workspace, which is far smaller.
4. No digest is taken of scalars and unsigned 64-bit integers (attention's seeds, which kernels may leave unwritten), of
   one-dimensional tensors of bytes (workspaces of libraries, whose padding is never written), and of anything that
   isn't a plain strided tensor.

Example: the block `[[1, 2], [3, 4]]` has the sums 3 and 7 (rows) and 4 and 6 (columns). If 2 and 3 change places, the
sums are 4 and 6, and 3 and 7. The total is 20 in both cases, but with the weights 3, 5, 7 and 11 the digests are 138
and 140.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptplan.runtime.guard.spots import INTEGERS, dimensions
from ckptplan.tensors import accelerator
from ckptplan.tensors.private import (
    DisableTorchFunction,
    dispatch_modes,
    function_modes,
    neg_view,
)

_LONGEST = 1 << 11
"""Largest size of a block's dimension: blocks of 32 MiB need few kernels, and their sums fit in a bench."""
_SUMS = 3 * _LONGEST
_DIGESTS = 1 << 13  # most unread digests; one more makes all of them be read
_STREAMS = 4  # on CUDA: most streams with digests under way at once
BENCH_BYTES = (8 * _DIGESTS, 8 * _STREAMS * 2 * _SUMS, 8 * _SUMS, 8)
"""Bytes of the tensors of a `Bench` on CUDA."""
PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(eq=False, slots=True)
class Digest:
    """The digest of one tensor.

    Attributes
    ----------
    strides : tuple of int
        The tensor's strides: only digests with equal strides can be compared.
    values : list of int or None
        The digest, of one or more numbers; None until it is read from the device.
    """

    strides: tuple[int, ...]
    values: list[int] | None = None

    def is_like(self, other: Digest) -> bool:
        """Whether the values are equal."""
        return self.values == other.values


class Bench:
    """Memory for the digests of one device, allocated once.

    `_scratch` has two rows of sums for each stream; `_slots` has the digests that haven't been read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.inference_mode(False), torch.no_grad():
            memory = functools.partial(torch.empty, dtype=torch.int64, device=device)
            self._slots = memory(_DIGESTS)
            self._scratch = memory(_STREAMS if accelerator.is_accelerator(device) else 1, 2, _SUMS)
            rng = random.Random(0)
            weights = [rng.getrandbits(63) * 2 + 1 - (1 << 63) for _ in range(_SUMS)]
            self._weights = torch.tensor(weights, dtype=torch.int64).to(device)
            self._half = torch.full((), 32, dtype=torch.int64, device=device)
        self._rows: dict[Any, torch.Tensor] = {}
        self._unread: list[Digest] = []

    def take(self, tensor: torch.Tensor) -> Digest:
        """Start the digest of a plain strided tensor; `read` gives it its values."""
        digest = Digest(tensor.stride())
        sums, spare = self._row()
        count = 0
        for block in _blocks(tensor):
            needed = sum(block.shape)  # number of sums
            if count + needed > _SUMS:
                self._close(digest, sums[:count], spare[:count])
                count = 0
            _sum_up(block, sums[count : count + needed], spare)
            count += needed
        self._close(digest, sums[:count], spare[:count])
        return digest

    def read(self) -> None:
        """Give every digest its values; waits for the device."""
        if self._unread:
            accelerator.synchronize(self.device)
            for digest, value in zip(self._unread, self._slots[: len(self._unread)].tolist(), strict=True):
                digest.values = [*(digest.values or ()), value]
            self._unread.clear()

    def _row(self) -> torch.Tensor:
        stream = accelerator.current_stream(self.device)
        row = self._rows.get(stream)
        if row is None:
            if len(self._rows) == len(self._scratch):
                accelerator.synchronize(self.device)
                self._rows.clear()
            row = self._rows[stream] = self._scratch[len(self._rows)]
        return row

    def _close(self, digest: Digest, sums: torch.Tensor, spare: torch.Tensor) -> None:
        """Mix `sums`, multiply them by their weights, and add the products up as a value of `digest`."""
        if len(self._unread) == _DIGESTS:
            self.read()
        # A product passes changes to higher bits only: without mixing, high bits (signs) would have little effect.
        torch.bitwise_right_shift(sums, self._half, out=spare)
        sums.bitwise_xor_(spare)
        sums.mul_(self._weights[: len(sums)])
        torch.sum(sums, 0, out=self._slots[len(self._unread)])
        self._unread.append(digest)


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of a tensor's bits as integers, of eight bytes where aligned; no dimension exceeds `_LONGEST`."""
    plain = tensor.detach()
    if plain.is_conj():
        plain = plain.conj()
    if plain.is_neg():
        plain = neg_view(plain)
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.numel() == 0:
        return
    ratio, begin = 8 // plain.itemsize, int(plain.storage_offset())
    integers = plain.view(INTEGERS[plain.itemsize])
    wide: torch.Tensor | None = None
    for block in _layout(ratio, plain.shape, plain.stride(), begin % ratio):
        first = begin + block.first
        if not block.wide:
            yield integers.as_strided(block.size, block.stride, first)
            continue
        if wide is None:
            wide = integers.as_strided((ratio,), (1,), first).view(torch.int64)
        yield wide.as_strided(block.size, block.stride, first // ratio)


class _StridedBlock(NamedTuple):
    """A block of a tensor: its shape, its strides and its first element.

    Sizes and strides count elements of the tensor, or 64-bit integers if `wide`; `first` always counts elements.
    """

    wide: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int


@functools.lru_cache(maxsize=1 << 12)
def _layout(ratio: int, shape: Sequence[int], strides: Sequence[int], skew: int) -> tuple[_StridedBlock, ...]:
    """Return the blocks of a tensor whose first element lies `skew` elements behind an eight-byte boundary.

    `ratio` is the number of elements in eight bytes.
    """
    dims = dimensions(shape, strides)
    *outer, (inner, step) = dims or [(1, 1)]
    if ratio > 1 and (step != 1 or any(stride % ratio for _, stride in outer)):
        return tuple(_split(dims, 0, 1, wide=False))
    front = min(-skew % ratio, inner)
    body = (inner - front) // ratio
    behind = front + body * ratio
    outside = [(size, stride // ratio) for size, stride in outer]
    return (
        *_split([*outer, (front, step)], 0, 1, wide=ratio == 1),
        *_split([*outside, (body, step)], front, ratio, wide=True),
        *_split([*outer, (inner - behind, step)], behind, 1, wide=False),
    )


def _split(dims: list[tuple[int, int]], first: int, unit: int, *, wide: bool) -> Iterator[_StridedBlock]:
    """Yield the blocks of an array of integers, each of `unit` elements, that begins at element `first`."""
    waiting = [(dims, first)]
    while waiting:
        dims, first = waiting.pop()
        d = next((i for i, (size, _) in enumerate(dims) if size > _LONGEST), None)
        if d is None:
            if all(size for size, _ in dims):
                yield _StridedBlock(wide, tuple(size for size, _ in dims), tuple(stride for _, stride in dims), first)
            continue
        size, stride = dims[d]
        columns = min(math.isqrt(size) | 1, _LONGEST - 1)
        while size % columns == 0:  # rows of the tensor mustn't align: permutations would get equal sums
            columns -= 2
        rows = min(size // columns, _LONGEST)
        done = rows * columns
        waiting.append(([*dims[:d], (size - done, stride), *dims[d + 1 :]], first + done * stride * unit))
        waiting.append(([*dims[:d], (rows, columns * stride), (columns, stride), *dims[d + 1 :]], first))


def _sum_up(block: torch.Tensor, sums: torch.Tensor, spare: torch.Tensor) -> None:
    """Write the sums along each dimension of `block` to `sums`.

    The sums are computed in the block's dtype, since another one would need a converted copy of the block.
    """
    if block.dim() == 1:
        sums.copy_(block)
        return
    first = 0
    for d, size in enumerate(block.shape):
        others = [i for i in range(block.dim()) if i != d]
        out = sums[first : first + size]
        if block.dtype is torch.int64:
            torch.sum(block, others, out=out)
        else:
            narrow = spare.view(block.dtype)[:size]
            torch.sum(block, others, dtype=block.dtype, out=narrow)
            out.copy_(narrow)
        first += size


def undisturbed() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no function mode or dispatch mode sees operations."""
    if not dispatch_modes() and not function_modes():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch._C._DisableTorchDispatch())
    stack.enter_context(DisableTorchFunction())
    return stack


def can_be_digested(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain, strided, unquantized tensor with memory on the CPU or an accelerator."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and (tensor.is_cpu or accelerator.is_accelerator(tensor.device))
        and not tensor.is_quantized
        and tensor.untyped_storage().nbytes() > 0
    )
