"""What the swap state machine needs of a tier, and what its stores have in common.

A store moves bytes and says when it is done; it knows nothing of stages. The order of calls per ticket is
`start_out`, `finish_out`, `start_in`, `finish_in`, then `free`; the last three may be left out or, for `start_in` and
`finish_in`, come again. Only the calling thread allocates or frees device memory.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ckptplan.core.chain import Tier
from ckptplan.core.errors import SwapError


class Ticket:
    """One block on its way to, in, or back from a tier."""

    def __init__(self, nbytes: int, offset: int) -> None:
        self.nbytes = nbytes
        self.offset = offset
        self.out_done: Any = None
        self.in_done: Any = None


class Store(Protocol):
    """What the swap state machine needs of a tier."""

    @property
    def name(self) -> str:
        """Where the bytes are, for messages."""

    @property
    def reserved_bytes(self) -> int:
        """What the tier holds for swapped bytes now, used or not."""

    @property
    def peak_bytes(self) -> int:
        """The most of it that was in use at once."""

    def start_out(self, source: torch.Tensor) -> Ticket:
        """Begin to copy a one-dimensional contiguous tensor out; the caller keeps `source` until `finish_out`."""

    def finish_out(self, ticket: Ticket) -> None:
        """Make compute wait until the copy out is done."""

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None:
        """Begin to copy the bytes back into `target`, after the copy out is done."""

    def finish_in(self, ticket: Ticket) -> None:
        """Make compute wait until the copy in is done."""

    def free(self, ticket: Ticket) -> None:
        """Give the host bytes back once no copy touches them."""

    def close(self) -> None:
        """End threads, give memory and files back: now, or when the last block that is still in use is freed."""


class NullStore:
    """Moves nothing: for replays that only count bytes."""

    name = "nowhere"
    reserved_bytes = peak_bytes = 0

    def start_out(self, source: torch.Tensor) -> Ticket:
        return Ticket(source.nbytes, 0)

    def finish_out(self, ticket: Ticket) -> None: ...

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None: ...

    def finish_in(self, ticket: Ticket) -> None: ...

    def free(self, ticket: Ticket) -> None: ...

    def close(self) -> None: ...


NULL_STORES: Mapping[Tier, Store] = {"host": NullStore(), "disk": NullStore()}


class Extents:
    """Offsets in one linear host area: first fit in address order, neighbours merged when freed. Thread-safe.

    `give` takes no lock, since the garbage collector may call it in the middle of `take`: what is given waits
    in a queue for the next `take`.
    """

    def __init__(self, align: int) -> None:
        self.end = 0
        self.used = 0
        """Bytes taken, as of the last `take`."""
        self._align = align
        self._free: list[tuple[int, int]] = []  # (offset, size), by offset
        self._given: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def size(self, nbytes: int) -> int:
        """`nbytes` as they are taken."""
        return -(-nbytes // self._align) * self._align

    def take(self, nbytes: int) -> int:
        size = self.size(nbytes)
        with self._lock:
            while self._given:
                offset, given = self._given.popleft()
                self._merge(offset, given)
                self.used -= given
            self.used += size
            for i, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                    return offset
            offset, self.end = self.end, self.end + size
            return offset

    def cut(self, offset: int, nbytes: int, end: int) -> None:
        """Undo a `take` that reached past `end`: what lies before is free, and what lies behind was never there."""
        with self._lock:
            self.used -= self.size(nbytes)
            if offset < end:
                self._merge(offset, end - offset)
            self.end = end

    def give(self, offset: int, nbytes: int) -> None:
        if nbytes:
            self._given.append((offset, self.size(nbytes)))

    def _merge(self, offset: int, size: int) -> None:
        i = bisect.bisect(self._free, (offset, 0))
        if i < len(self._free) and self._free[i][0] == offset + size:
            size += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            before, room = self._free.pop(i - 1)
            offset, size, i = before, room + size, i - 1
        self._free.insert(i, (offset, size))


class Counted:
    """Closes when asked to and no ticket is left, in the process that made it alone."""

    def __init__(self, align: int) -> None:
        self._extents = Extents(align)
        self._peak = 0
        self._pid = os.getpid()
        # A set, not a count: `add` and `discard` are atomic, and records die in any thread, at any line.
        self._tickets: set[Ticket] = set()
        self._closing = False

    def _shut(self) -> None:
        raise NotImplementedError

    @property
    def peak_bytes(self) -> int:
        return self._peak

    @property
    def _foreign(self) -> bool:
        """Whether this is a copy in a forked process, whose bytes, threads and streams are the other's."""
        return os.getpid() != self._pid

    def _require_owner(self) -> None:
        if self._foreign:
            raise SwapError(
                f"the swap space belongs to process {self._pid}, and this is process {os.getpid()}, forked from it: "
                "call remove() on the handle before the fork, or apply the plan in the new process"
            )

    def _issued(self, ticket: Ticket) -> Ticket:
        self._tickets.add(ticket)
        self._peak = max(self._peak, self._extents.used)
        return ticket

    def _freed(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        if self._closing and not self._tickets:
            self._shut()

    def close(self) -> None:
        self._closing = True
        if not self._tickets:
            self._shut()
