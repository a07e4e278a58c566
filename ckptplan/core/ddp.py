"""The memory of distributed data parallel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptplan.core.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

_REPLICATED, _IN_BUCKETS, _COPIED = "ddp", ", gradients in buckets", ", outputs copied"


@dataclass(frozen=True, slots=True)
class DDP:
    """Memory of distributed data parallel (Li et al., VLDB 2020).

    Gradients are copied into buckets or, with `gradient_as_bucket_view`, are views of buckets from the start. The
    buckets are there from the construction of `torch.nn.parallel.DistributedDataParallel` on. NCCL's own memory is
    outside PyTorch's allocator and not counted. To find unused parameters, outputs of the forward are copied, and the
    program gets the copies.

    Parameters
    ----------
    bucket_cap_mb, first_bucket_mb : float
        Size of a full bucket and of the first one, in units of 2**20 bytes.
    gradient_as_bucket_view, broadcast_buffers : bool
        As in `torch.nn.parallel.DistributedDataParallel`. Buffers are broadcast before each forward in copies.
    find_unused_parameters : bool
        As there; also for `static_graph=True`, which finds them in the first step. A `step` has to call the model in
        its wrapper for that: copies of what it gets from the model inside aren't counted.
    """

    bucket_cap_mb: float = 25.0
    first_bucket_mb: float = 1.0
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "first_bucket_mb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 20:
                raise InvalidInputError(f"ddp: {name}={value!r} must be a number above 0, in units of 2**20 bytes")

    def buckets(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Return the bytes of each bucket: gradients in reverse order, by data type, until a bucket is full."""
        sizes: list[int] = []
        filling: dict[torch.dtype, int] = {}
        for p in reversed([p for p in parameters if p.requires_grad]):
            filling[p.dtype] = filling.get(p.dtype, 0) + p.numel() * p.element_size()
            if filling[p.dtype] >= (self.bucket_cap_mb if sizes else self.first_bucket_mb) * 2**20:
                sizes.append(filling.pop(p.dtype))
        return [*sizes, *filling.values()]

    @property
    def kind(self) -> str:
        """What plans are bound to: whether gradients lie beside the buckets, or in them, and outputs are copied."""
        return _REPLICATED + _IN_BUCKETS * self.gradient_as_bucket_view + _COPIED * self.find_unused_parameters

    @classmethod
    def of_kind(cls, kind: str) -> DDP | None:
        """Return settings of a `kind`, which tell the bytes of all buckets, not their sizes; None for another one."""
        settings = (
            cls(gradient_as_bucket_view=view, find_unused_parameters=find)
            for view in (False, True)
            for find in (False, True)
        )
        return next((found for found in settings if found.kind == kind), None)
