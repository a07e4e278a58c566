"""Stores that wrap a store, to find faults: one compares checksums, one waits for every copy."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ckptplan.core.errors import SwapError
from ckptplan.core.units import format_bytes
from ckptplan.runtime.accelerator import synchronize
from ckptplan.runtime.swap.stores.base import Store, Ticket, bytes_of

_Returns = tuple[Any, dict[int, torch.Tensor]]
"""Copies in that aren't compared yet: their completion, and the targets by part."""
_PIECE_BYTES = 16 << 20
"""Most bytes copied to the host at a time for their checksum."""


class Around:
    """A store that passes on to `inner` what it doesn't do itself."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "on_copy":
            self.inner.on_copy = value
        else:
            super().__setattr__(name, value)


class SynchronousStore(Around):
    """Waits on the host for every copy as soon as it is issued."""

    def __init__(self, inner: Store, device: torch.device) -> None:
        super().__init__(inner)
        self._device = device

    def start_out(self, *sources: torch.Tensor, place: Hashable = None) -> Ticket:
        ticket = self.inner.start_out(*sources, place=place)
        try:
            self.inner.finish_out(ticket)
            synchronize(self._device)
        except BaseException:
            self.inner.free(ticket)
            raise
        return ticket

    def start_in(self, ticket: Ticket, *targets: torch.Tensor, parts: Sequence[int] | None = None) -> Any:
        done = self.inner.start_in(ticket, *targets, parts=parts)
        self.inner.finish_in(ticket, done)
        synchronize(self._device)
        return done


class ChecksumStore(Around):
    """Compares checksums of the device's bytes before they leave and after they return: finds damage on any tier.

    The checksum is CRC-32 (zlib). It finds every burst of up to 32 wrong bits; of other damage, one case in 2**32
    passes unnoticed.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._left: weakref.WeakKeyDictionary[Ticket, list[int]] = weakref.WeakKeyDictionary()
        self._targets: weakref.WeakKeyDictionary[Ticket, list[_Returns]] = weakref.WeakKeyDictionary()

    def start_out(self, *sources: torch.Tensor, place: Hashable = None) -> Ticket:
        checksums = [_checksum(source) for source in sources]
        ticket = self.inner.start_out(*sources, place=place)
        self._left[ticket] = checksums
        return ticket

    def start_in(self, ticket: Ticket, *targets: torch.Tensor, parts: Sequence[int] | None = None) -> Any:
        done = self.inner.start_in(ticket, *targets, parts=parts)
        numbers = range(len(targets)) if parts is None else parts
        self._targets.setdefault(ticket, []).append((done, dict(zip(numbers, targets, strict=True))))
        return done

    def finish_in(self, ticket: Ticket, done: Any = None) -> None:
        self.inner.finish_in(ticket, done)
        waiting = self._targets.get(ticket, [])
        done = waiting[-1][0] if done is None and waiting else done
        for issued, targets in waiting:
            # Keep damaged targets, so that a second wait for them fails in the same way.
            for part, target in targets.items() if issued is done else ():
                if (found := _checksum(target)) != self._left[ticket][part]:
                    raise SwapError(
                        f"{format_bytes(ticket.sizes[part])} at byte {ticket.offset + ticket.offsets[part]} of "
                        f"{self.name} came back damaged: checksum {found:08x} instead of "
                        f"{self._left[ticket][part]:08x}; discard this step's gradients, and look at the disk and the "
                        "memory of this machine"
                    )
        self._targets[ticket] = [returns for returns in waiting if returns[0] is not done]

    def free(self, ticket: Ticket) -> None:
        self._targets.pop(ticket, None)
        self.inner.free(ticket)


def _checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes, after all work issued to the current stream so far."""
    data, found = bytes_of(tensor), 0
    for at in range(0, data.numel(), _PIECE_BYTES):
        found = zlib.crc32(memoryview(data[at : at + _PIECE_BYTES].cpu().numpy()), found)  # type: ignore[arg-type]
    return found
