"""Stores around a store, for finding faults: one that compares checksums, one without any overlap."""

from __future__ import annotations

import weakref
import zlib

import torch

from ckptplan.core.errors import SwapError
from ckptplan.core.units import format_bytes
from ckptplan.runtime.meter import OnCopy
from ckptplan.runtime.stores.base import Store, Ticket

_PIECE_BYTES = 16 << 20
"""What is brought to the host at once for its checksum."""


class Around:
    """Does what `inner` does."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def on_copy(self) -> OnCopy | None:
        """As of the store inside."""
        return self.inner.on_copy

    @on_copy.setter
    def on_copy(self, tell: OnCopy | None) -> None:
        self.inner.on_copy = tell

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def reserved_bytes(self) -> int:
        return self.inner.reserved_bytes

    @property
    def used_bytes(self) -> int:
        return self.inner.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self.inner.peak_bytes

    def start_out(self, source: torch.Tensor) -> Ticket:
        return self.inner.start_out(source)

    def finish_out(self, ticket: Ticket) -> None:
        self.inner.finish_out(ticket)

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None:
        self.inner.start_in(ticket, target)

    def finish_in(self, ticket: Ticket) -> None:
        self.inner.finish_in(ticket)

    def free(self, ticket: Ticket) -> None:
        self.inner.free(ticket)

    def close(self) -> None:
        self.inner.close()


class SynchronousStore(Around):
    """Waits for every copy where it is issued, on the host."""

    def __init__(self, inner: Store, device: torch.device) -> None:
        super().__init__(inner)
        self._device = device

    def start_out(self, source: torch.Tensor) -> Ticket:
        ticket = self.inner.start_out(source)
        try:
            self.inner.finish_out(ticket)
            self._synchronize()
        except BaseException:
            self.inner.free(ticket)
            raise
        return ticket

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None:
        self.inner.start_in(ticket, target)
        self.inner.finish_in(ticket)
        self._synchronize()

    def _synchronize(self) -> None:
        torch.get_device_module(self._device).synchronize(self._device)


class ChecksumStore(Around):
    """Compares what comes back with what left, on the device's own bytes: damage anywhere on the way shows.

    The checksum is CRC-32 (zlib): it finds every burst of up to 32 wrong bits, and one of 2**32 other damages passes.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._left: weakref.WeakKeyDictionary[Ticket, int] = weakref.WeakKeyDictionary()
        self._targets: weakref.WeakKeyDictionary[Ticket, torch.Tensor] = weakref.WeakKeyDictionary()

    def start_out(self, source: torch.Tensor) -> Ticket:
        checksum = _checksum(source)
        ticket = self.inner.start_out(source)
        self._left[ticket] = checksum
        return ticket

    def start_in(self, ticket: Ticket, target: torch.Tensor) -> None:
        self.inner.start_in(ticket, target)
        self._targets[ticket] = target

    def finish_in(self, ticket: Ticket) -> None:
        self.inner.finish_in(ticket)
        target = self._targets.get(ticket)
        if target is None:
            return
        # A target that is wrong is kept for whoever asks again: he gets the same error.
        if (found := _checksum(target)) != self._left[ticket]:
            raise SwapError(
                f"{format_bytes(ticket.nbytes)} at byte {ticket.offset} of {self.name} came back damaged: checksum "
                f"{found:08x} instead of {self._left[ticket]:08x}; discard this step's gradients, and look at the disk "
                "and the memory of this machine"
            )
        del self._targets[ticket]

    def free(self, ticket: Ticket) -> None:
        self._targets.pop(ticket, None)
        self.inner.free(ticket)


def _checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes, after all that was computed on the current stream so far."""
    data, found = tensor.view(torch.uint8), 0
    for at in range(0, data.numel(), _PIECE_BYTES):
        found = zlib.crc32(memoryview(data[at : at + _PIECE_BYTES].cpu().numpy()), found)  # type: ignore[arg-type]
    return found
