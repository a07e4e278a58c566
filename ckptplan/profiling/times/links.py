"""Measure the link to a tier through the store that plans will use: rates while compute is busy, cost of a copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ckptplan.core.link import Link, Tier
from ckptplan.runtime.swap.stores import make_store
from ckptplan.tensors.accelerator import synchronize

_BLOCKS = 4  # copied in each direction in a round, so that a queue forms
_ROUNDS = 4
# Blocks of `measure_costs`: a page, whose copy takes hardly more than its latency; how many more of them are copied
# together; and one large block, for the rate.
_SMALL_BYTES = 4096
_SMALL_COUNT = 64
_LARGE_BYTES = 4 << 20
_MOST_SIDE = 8192  # a product of two such matrices takes a fast device some milliseconds
_MOST_PRODUCTS = 64


def measure_links(
    device: torch.device,
    block_bytes: int,
    swap_dir: str | Path | None = None,
    tier: Tier = "host",
    *,
    together: bool = True,
) -> tuple[Link, Link]:
    """Measure each direction alone with blocks of `block_bytes`, out in forward and in in backward, and both at once.

    The first round is a warm-up without compute: pages of a new file and registered memory are slow at first touch. In
    the others, compute is busy for the time that the first one took.

    Parameters
    ----------
    together : bool
        Whether to measure both directions at once; if not, they count as independent.

    Returns
    -------
    Link
        Rate of each direction while the other is idle.
    Link
        Rate of both at once, from the time until both are done. Links, and above all disks, are shared.

    Raises
    ------
    InvalidInputError
        If the swap directory can't be written or has no room.
    """
    # Twice the blocks: those that are read lie in the store beside those that are written.
    store = make_store(
        device, capacity_bytes=2 * _BLOCKS * block_bytes, directory=swap_dir, limit_bytes=None, tier=tier
    )
    compute: Callable[[], None] = _nothing
    try:
        source = torch.ones(block_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        out_s: list[float] = []
        in_s: list[float] = []
        both_s: list[float] = []
        for number in range(_ROUNDS):
            if number == 1:
                compute = busy_for(min(out_s[0], in_s[0]), device, block_bytes)
            begin = _now(device)
            tickets = [store.start_out(source) for _ in range(_BLOCKS)]
            compute()
            for ticket in tickets:
                store.finish_out(ticket)
            middle = _now(device)
            for ticket in tickets:
                store.start_in(ticket, target)
            compute()
            for ticket in tickets:
                store.finish_in(ticket)
            end = _now(device)
            more = []
            if together:
                for ticket in tickets:
                    more.append(store.start_out(source))
                    store.start_in(ticket, target)
                compute()
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
    out_rate, in_rate = (total / statistics.median(times[1:]) for times in (out_s, in_s))
    alone = Link(out_rate, in_rate)
    if not together:
        return alone, alone
    both_rate = total / statistics.median(both_s[1:])
    return alone, Link(both_rate, both_rate)


def busy_for(seconds: float, device: torch.device, most_bytes: int) -> Callable[[], None]:
    """Return a function that runs matrix products which take the device about `seconds`.

    Parameters
    ----------
    most_bytes : int
        Most bytes of each of a product's two tensors; if one product takes less than `seconds`, it is repeated.
    """
    side, took_s = 32, 0.0
    while took_s < seconds / 8 and 2 * side <= _MOST_SIDE and (2 * side) ** 2 * 4 <= max(most_bytes, 1 << 16):
        side *= 2
        factor = torch.ones(side, side, device=device)
        product = torch.empty_like(factor)
        torch.mm(factor, factor, out=product)  # the first of a size may choose its kernel
        begin = _now(device)
        torch.mm(factor, factor, out=product)
        took_s = _now(device) - begin
    count = min(max(round(seconds / took_s), 1), _MOST_PRODUCTS) if took_s else _MOST_PRODUCTS

    def compute() -> None:
        for _ in range(count):
            torch.mm(factor, factor, out=product)

    return compute


def _nothing() -> None: ...


def measure_costs(device: torch.device, swap_dir: str | Path | None = None) -> Link:
    """Measure the time of a transfer beyond its bytes (latency), and of each storage in it; the rate is a by-product.

    Uses three transfers to the host, each waited for: one small block, 65 small blocks together, one large block. The
    minimum over several rounds counts, since disturbances only add time.
    """
    groups = [[_SMALL_BYTES], [_SMALL_BYTES] * (_SMALL_COUNT + 1), [_LARGE_BYTES]]
    capacity_bytes = max(map(sum, groups))
    store = make_store(device, capacity_bytes=capacity_bytes, directory=swap_dir, limit_bytes=None)
    try:
        source = torch.ones(_LARGE_BYTES, dtype=torch.uint8, device=device)
        least_s = [float("inf")] * len(groups)
        for _ in range(_ROUNDS):
            for i, sizes in enumerate(groups):
                sources = [source[:nbytes] for nbytes in sizes]
                begin = _now(device)
                ticket = store.start_out(*sources)
                store.finish_out(ticket)
                least_s[i] = min(least_s[i], _now(device) - begin)
                store.free(ticket)
    finally:
        store.close()
    one_s, many_s, large_s = least_s
    rate = (_LARGE_BYTES - _SMALL_BYTES) / max(large_s - one_s, 1e-9)
    copy_s = max((many_s - one_s) / _SMALL_COUNT - _SMALL_BYTES / rate, 0.0)
    latency_s = max(one_s - copy_s - _SMALL_BYTES / rate, 0.0)
    return Link(rate, rate, latency_s, copy_s)


def sharing_note(tier: Tier, alone: Link, together: Link) -> str | None:
    """A note on directions that slow each other down; None if they hardly do."""
    share = min(together.out_bytes_per_s / alone.out_bytes_per_s, together.in_bytes_per_s / alone.in_bytes_per_s)
    if share >= 0.8:  # full-duplex links lose up to about a tenth each way
        return None
    return (
        f"copies to and from the {tier} tier at once run at {share:.0%} of their speed alone, which plans count with: "
        "graphs of several steps alive, or other users of the link, make steps longer than predicted"
    )


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()
