"""An account of a device's memory, kept by our model of the caching allocator for tensors on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ckptplan.core.device import library_workspaces
from ckptplan.memory.allocator import CachingAllocator
from ckptplan.tensors import accelerator

DEVICE = torch.device("cuda", 0)
WORKSPACES = tuple(filter(None, library_workspaces((8, 0), torch.__version__)))
"""What a cuBLAS handle takes on an A100, and cuBLASLt where it has one of its own."""
WORKSPACE_BYTES = 2 * sum(WORKSPACES)
"""Of the two handles, one in the thread that runs backward."""


class FakeMemory(TorchDispatchMode):
    """Every tensor made inside, and those that it is told of, are blocks of the device; copies to the host aren't.

    The first product of matrices in forward, and that in backward, has cuBLAS take workspaces, which are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocator = CachingAllocator()
        self.pool_id = (0, 0)
        self._numbers = itertools.count()
        self._alive: set[int] = set()
        self._workspaces: dict[bool, list[int]] = {}

    def allocate(self, nbytes: int) -> int:
        """A block; `self.allocator.free` frees it."""
        number = next(self._numbers)
        self.allocator.allocate(number, nbytes)
        return number

    def hold(self, *tensors: torch.Tensor) -> None:
        """These are on the device, as long as they are alive."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) not in self._alive:
                self._alive.add(id(storage))
                weakref.finalize(storage, self._freed, id(storage), self.allocate(storage.nbytes()))

    def _freed(self, key: int, number: int) -> None:
        self._alive.discard(key)
        self.allocator.free(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        backward = torch._C._current_autograd_node() is not None
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and backward not in self._workspaces:
            self._workspaces[backward] = [self.allocate(nbytes) for nbytes in WORKSPACES]
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._to_copy.default:
            self.hold(*(t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)))
        return result

    # --- PyTorch's module for the device ---

    def memory_stats(self, device: Any) -> dict[str, int]:
        a = self.allocator
        return {
            f"{kind}_bytes.all.{when}": getattr(a, f"{'peak_' if when == 'peak' else ''}{kind}_bytes")
            for kind in ("requested", "allocated", "reserved")
            for when in ("current", "peak")
        }

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.allocator.reset_peaks()

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def synchronize(self, device: Any) -> None:
        """All is done."""

    def is_initialized(self) -> bool:
        return False

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [{"device": DEVICE.index, "segment_pool_id": self.pool_id}]

    def clear_workspaces(self) -> None:
        for number in (n for numbers in self._workspaces.values() for n in numbers):
            self.allocator.free(number)
        self._workspaces.clear()

    @contextlib.contextmanager
    def installed(self) -> Iterator[FakeMemory]:
        """The package's accelerator is it inside, and tensors are its blocks."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accelerator, "module", self)
            patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear_workspaces, raising=False)
            with self:
                yield self
