"""Positions: the numbers by which a plan names the storages that a stage saves.

NOTE [Positions]

A plan names the storages that move by their positions among the storages that a stage saves. The profile's fake run and
the real step must number them alike, whatever the batch size, the kernel and the device of a tensor:

1. Sizes play no part, since they change with the batch.
2. Devices play no part. A fake kernel may return a tensor on the device where the real kernel returns it on the host. A
   storage on another device has a position and stays where it is.
3. Two kinds have no position: numbers (storages of one element, saved as tensors without dimensions) and unsigned
   64-bit integers. They are attention's seeds and offsets and Python's numbers, which differ between kernels that may
   replace one another: flash attention saves a random state of two elements and an unused number, the memory-efficient
   kernel two numbers on the host, cuDNN's two on the device.
4. The model's own storages (parameters and buffers) have no position.

Example: an attention stage saves, in order, its weight, `q`, `k`, a view of `q`, a seed (a number) and its output. The
weight and the seed have no position, and the view shares the storage of `q`. So `q` is position 0, `k` is 1 and the
output is 2, and `moves=(0, 2)` sends `q` and the output away.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ckptplan.tensors.views import ITEMSIZES, plain_storage

_POSITIONED = {dtype: itemsize for dtype, itemsize in ITEMSIZES.items() if dtype != torch.uint64}


def positioned(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int] | None:
    """Return the storage and its bytes if it has a position by NOTE [Positions], rules 1 to 3; otherwise None."""
    found = plain_storage(tensor, _POSITIONED)
    if found is None or (found[1] == tensor.itemsize and tensor.dim() == 0):
        return None
    return found


def has_position(tensor: torch.Tensor, never: Callable[[torch.UntypedStorage], bool] = lambda storage: False) -> bool:
    """Whether the storage of a saved tensor has a position (NOTE [Positions]); `never` is True for the model's own."""
    found = positioned(tensor)
    return found is not None and not never(found[0])
