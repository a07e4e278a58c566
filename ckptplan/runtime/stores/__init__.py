"""Where swapped bytes go: a file through worker threads (CPU tier), pinned memory on side streams (CUDA tier)."""

from __future__ import annotations

from pathlib import Path

import torch

from ckptplan.runtime.stores.base import Extents, NullStore, Store, Ticket
from ckptplan.runtime.stores.disk import DISK_BLOCK_BYTES, DiskStore
from ckptplan.runtime.stores.pinned import PinnedStore

__all__ = ["DISK_BLOCK_BYTES", "DiskStore", "Extents", "NullStore", "PinnedStore", "Store", "Ticket", "make_store"]


def make_store(
    device: torch.device, *, capacity_bytes: int, directory: str | Path | None, limit_bytes: int | None
) -> Store:
    """The store for tensors on `device`: pinned memory for CUDA, a file for the CPU."""
    if device.type == "cuda":
        return PinnedStore(device, capacity_bytes=capacity_bytes, limit_bytes=limit_bytes)
    return DiskStore(directory, capacity_bytes=capacity_bytes)
