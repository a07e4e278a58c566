"""Stores for swapped bytes: a file behind worker threads, or pinned memory on side streams; and the ones a plan needs.

On the CPU the host tier is the file. On CUDA the host tier is pinned memory, and the disk tier is the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.link import STAGING_BYTES, Tier
from ckptplan.core.plan import Plan
from ckptplan.runtime.swap.stores.base import NULL_STORES, Store, Ticket
from ckptplan.runtime.swap.stores.disk import DISK_BLOCK_BYTES, DiskStore
from ckptplan.runtime.swap.stores.pinned import PinnedStore, keep_pinned_memory
from ckptplan.tensors.accelerator import is_accelerator

__all__ = ["NULL_STORES", "Store", "SwapOptions", "Ticket", "keep_pinned_memory", "make_store", "make_stores"]


@dataclass(frozen=True, slots=True)
class SwapOptions:
    """The most bytes of pinned host memory and of the swap file (None: no limit), and `Store.synchronous`."""

    host_bytes: int | None = None
    disk_bytes: int | None = None
    synchronous: bool = False


def make_store(
    device: torch.device,
    *,
    capacity_bytes: int,
    directory: str | Path | None,
    limit_bytes: int | None,
    tier: Tier = "host",
) -> Store:
    """Return a store of `tier` for tensors on `device`: pinned memory for CUDA's host tier, otherwise a file."""
    if is_accelerator(device) and tier == "host":
        return PinnedStore(device, capacity_bytes=capacity_bytes, limit_bytes=limit_bytes)
    return DiskStore(directory, capacity_bytes=capacity_bytes, limit_bytes=limit_bytes, device=device)


def make_stores(
    device: torch.device, plan: Plan, directory: str | Path | None = None, options: SwapOptions | None = None
) -> dict[Tier, Store]:
    """Return a store for every tier that `plan` moves storages to, with room for the bytes of one step.

    Raises
    ------
    InvalidInputError
        If a tier doesn't exist on the device or can't have that size. No store is left open then.
    """
    waiting = plan.waiting_bytes
    tiers: dict[Tier, None] = dict.fromkeys(choice.tier for choice in plan.choices if choice.moves)
    if waiting:
        tiers["host"] = None
    host_bytes = plan.host_bytes + sum(waiting)
    options = options or SwapOptions()
    host_limit_bytes, disk_limit_bytes = options.host_bytes, options.disk_bytes
    if not is_accelerator(device):
        if "disk" in tiers:
            raise InvalidInputError(
                "the plan moves storages to the disk tier, which doesn't exist on the CPU, where the host tier is the "
                "swap file itself; solve again on this device"
            )
        host_bytes += DISK_BLOCK_BYTES * (len(waiting) + sum(len(choice.moves) for choice in plan.choices))
        host_limit_bytes = disk_limit_bytes
    elif "disk" in tiers and host_limit_bytes is not None:
        host_limit_bytes = max(host_limit_bytes - STAGING_BYTES, 0)  # the staging of the disk tier is pinned memory too
    stores: dict[Tier, Store] = {}
    try:
        for tier in tiers:
            capacity, limit = (plan.disk_bytes, disk_limit_bytes) if tier == "disk" else (host_bytes, host_limit_bytes)
            stores[tier] = make_store(
                device, capacity_bytes=capacity, directory=directory, limit_bytes=limit, tier=tier
            )
            stores[tier].synchronous = options.synchronous
    except BaseException:
        close_all(stores)
        raise
    return stores


@contextlib.contextmanager
def handing_over(stores: Mapping[Tier, Store]) -> Iterator[None]:
    """Let new stores within the block share the host memory of `stores`, which use it until they are closed."""
    with keep_pinned_memory():
        for store in stores.values():
            store.lend()
        yield


def close_all(stores: Mapping[Tier, Store]) -> None:
    """Close all `stores`."""
    for store in stores.values():
        store.close()
