"""Bandwidth of the way to a tier and back, through the store that will be used, while compute is busy."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from ckptplan.core.chain import Link, Tier
from ckptplan.runtime.stores import make_store

_BLOCKS = 4
_ROUNDS = 4


def measure_link(
    device: torch.device, block_bytes: int, swap_dir: str | Path | None = None, tier: Tier = "host"
) -> Link:
    """Measure each direction with blocks of `block_bytes`, as a step uses them: out in forward, in in backward.

    Raises
    ------
    InvalidInputError
        If the swap directory can't be written or has no room.
    """
    return measure_links(device, block_bytes, swap_dir, tier)[0]


def measure_links(
    device: torch.device, block_bytes: int, swap_dir: str | Path | None = None, tier: Tier = "host"
) -> tuple[Link, Link]:
    """Each direction alone, and both at once.

    The first round warms the area up: pages of a new file and registered memory are slow at first touch.

    Returns
    -------
    Link
        Each direction while the other rests.
    Link
        Both while both are at work, by the time until both are done: links, and disks above all, are shared.
    """
    # What is read while others are written lies beside them.
    store = make_store(
        device, capacity_bytes=2 * _BLOCKS * block_bytes, directory=swap_dir, limit_bytes=None, tier=tier
    )
    side = 4096 if device.type == "cuda" else 256
    busy = torch.ones(side, side, device=device)
    product = torch.empty_like(busy)
    try:
        source = torch.ones(block_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        out_s, in_s, both_s = [], [], []
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
            more = []
            for ticket in tickets:
                more.append(store.start_out(source))
                store.start_in(ticket, target)
            torch.mm(busy, busy, out=product)
            for ticket, written in zip(tickets, more, strict=True):
                store.finish_in(ticket)
                store.finish_out(written)
            both_s.append(_now(device) - end)
            for ticket in (*tickets, *more):
                store.free(ticket)
            out_s.append(middle - begin)
            in_s.append(end - middle)
    finally:
        store.close()
    total = _BLOCKS * block_bytes
    out_rate, in_rate, both_rate = (total / statistics.median(times[1:]) for times in (out_s, in_s, both_s))
    return Link(out_rate, in_rate), Link(both_rate, both_rate)


def sharing_note(tier: Tier, alone: Link, together: Link) -> str | None:
    """What a person should know where the two directions get in each other's way."""
    share = min(together.out_bytes_per_s / alone.out_bytes_per_s, together.in_bytes_per_s / alone.in_bytes_per_s)
    if share >= 0.8:  # full-duplex links lose up to about a tenth each way
        return None
    return (
        f"copies to and from the {tier} tier at once run at {share:.0%} of their speed alone, which is what plans "
        "count with: graphs of several steps alive, or others on the same link, make steps longer than predicted"
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
