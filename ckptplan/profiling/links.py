"""Bandwidth of the way to the host tier and back, through the store that will be used, while compute is busy."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from ckptplan.core.chain import Link
from ckptplan.runtime.stores import make_store

_BLOCKS = 4
_ROUNDS = 4


def measure_link(device: torch.device, block_bytes: int, swap_dir: str | Path | None = None) -> Link:
    """Measure both directions with blocks of `block_bytes`.

    The first round warms the area up: pages of a new file and registered memory are slow at first touch.

    Raises
    ------
    InvalidInputError
        If the swap directory can't be written or has no room.
    """
    store = make_store(device, capacity_bytes=_BLOCKS * block_bytes, directory=swap_dir, limit_bytes=None)
    side = 4096 if device.type == "cuda" else 256
    busy = torch.ones(side, side, device=device)
    product = torch.empty_like(busy)
    try:
        source = torch.ones(block_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        out_s, in_s = [], []
        for _ in range(_ROUNDS):
            begin = _now(device)
            tickets = [store.start_out(source) for _ in range(_BLOCKS)]
            torch.mm(busy, busy, out=product)
            for ticket in tickets:
                store.finish_out(ticket)
            middle = _now(device)
            for ticket in tickets:
                store.start_in(ticket, target)
            torch.mm(busy, busy, out=product)
            for ticket in tickets:
                store.finish_in(ticket)
            end = _now(device)
            for ticket in tickets:
                store.free(ticket)
            out_s.append(middle - begin)
            in_s.append(end - middle)
    finally:
        store.close()
    total = _BLOCKS * block_bytes
    return Link(total / statistics.median(out_s[1:]), total / statistics.median(in_s[1:]))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
