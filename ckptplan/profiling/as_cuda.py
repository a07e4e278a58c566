"""Run a model on fake CPU tensors with the operations that it would run on a CUDA device.

PyTorch chooses some operations by the device: dropout keeps a mask of one byte an element on CUDA and one of the input's
type on the CPU, attention has other kernels that save other things, autocast casts other operations. A build without CUDA
can't run backward on fake CUDA tensors, so the tensors stay on the CPU and the choices are CUDA's: composite operations get
a kernel of ours (`torch.library`) for as long as a context is open, which takes CUDA's way in the thread that opened it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256
_FLASH_CAPABILITY = (8, 0)

_AUTOCAST_TO_FLOAT32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "nuclear_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
]
_AUTOCAST_SET_TYPE = [
    "softmax.int",
    "log_softmax.int",
    "sum",
    "sum.dim_IntList",
    "prod",
    "prod.dim_int",
    "cumsum",
    "cumprod",
]
"""What autocast runs in float32 on CUDA (PyTorch, "Automatic Mixed Precision package", CUDA op reference)."""

_active = threading.local()


@contextlib.contextmanager
def as_cuda(compute_capability: tuple[int, int]) -> Iterator[None]:
    """In this thread, CPU tensors run the operations that CUDA tensors would on a device of that capability."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        if _exists(name):
            for key in ("AutogradCPU", "CPU"):
                library.impl(name, _where_active(name, kernel), key)
    for name in (*_AUTOCAST_TO_FLOAT32, *_AUTOCAST_SET_TYPE):
        # The CPU's own autocast has a kernel for some of them, which does the same.
        if _exists(name) and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
            library.impl(name, _in_float32(_overload(name)), "AutocastCPU")
    _active.capability = compute_capability
    try:
        yield
    finally:
        _active.capability = None
        library._destroy()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _exists(name: str) -> bool:
    packet, _, overload = name.partition(".")
    return hasattr(aten, packet) and (overload or "default") in getattr(aten, packet).overloads()


def _where_active(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` in the thread that asked for it; PyTorch's own where it didn't, or where the kernel passes."""
    overload = _overload(name)

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        capability = getattr(_active, "capability", None)
        result = NotImplemented if capability is None else kernel(capability, *args, **kwargs)
        return overload.decompose(*args, **kwargs) if result is NotImplemented else result

    return run


def _in_float32(overload: Any) -> Callable[..., Any]:
    """The kernel that casts half-precision operands up, as CUDA's autocast does for this operation."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def up(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.float() if x.dtype in _HALF else x
        return type(x)(map(up, x)) if isinstance(x, (list, tuple)) else x

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            if getattr(_active, "capability", None) is not None and kwargs.get("dtype") is None:
                args = tuple(map(up, args))
            return overload(*args, **kwargs)

    return run


def _dropout(capability: tuple[int, int], x: torch.Tensor, p: float, train: bool) -> Any:
    if not train or not 0 < p < 1 or x.numel() == 0:
        return NotImplemented
    return aten.native_dropout.default(x, p, train)[0]


def _softmax(
    capability: tuple[int, int], x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, log: bool = False
) -> Any:
    """Half in, float32 out is one kernel on CUDA."""
    if (x.dtype is not torch.float16 and x.dtype is not torch.bfloat16) or dtype is not torch.float32:
        return NotImplemented
    return (aten._log_softmax if log else aten._softmax).default(x, dim, True)


def _rms_norm(
    capability: tuple[int, int],
    x: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if not hasattr(aten, "_fused_rms_norm") or (weight is not None and weight.dtype != x.dtype):
        return NotImplemented
    return aten._fused_rms_norm.default(x, normalized_shape, weight, eps)[0]


def _attention(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Flash attention where its conditions hold, else the memory-efficient kernel, else plain operations.

    The conditions are those of PyTorch's `sdp_utils.cpp` for CUDA as far as shapes and types go; cuDNN's attention, which
    newer devices may choose, saves the same.
    """
    if query.dim() != 4 or any(t.dtype != query.dtype for t in (key, value)) or 0 in (*query.shape, *key.shape):
        return NotImplemented
    head = query.shape[-1]
    same_head = head == key.shape[-1] == value.shape[-1]
    padded = -head % 8
    # Its default scale is that of the head before padding.
    scale = head**-0.5 if scale is None and padded else scale
    if (
        query.dtype in _HALF
        and attn_mask is None
        and same_head
        and capability >= _FLASH_CAPABILITY
        and head <= _FLASH_HEAD
    ):
        if padded:
            query, key, value = (torch.nn.functional.pad(t, (0, padded)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return out[0][..., :head] if padded else out[0]
    equal_heads = query.shape[1] == key.shape[1] == value.shape[1]
    aligned = 8 if query.dtype in _HALF and capability >= _FLASH_CAPABILITY else 4
    efficient = (
        query.dtype in (*_HALF, torch.float32)
        and (query.dtype is not torch.bfloat16 or capability >= _FLASH_CAPABILITY)
        and capability >= (5, 0)
        and head % aligned == value.shape[-1] % aligned == 0
        and equal_heads
        and (attn_mask is None or not attn_mask.requires_grad)
    )
    if not efficient:
        return NotImplemented
    mask = None if attn_mask is None else _bias(attn_mask, query, key)
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return aten._scaled_dot_product_efficient_attention.default(
        query, key, value, mask, saves, dropout_p, is_causal, scale=scale
    )[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as the memory-efficient kernel wants it: of the query's type, rows padded to a multiple of 16 elements."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    columns = mask.shape[-1]
    if columns % 16:
        mask = torch.nn.functional.pad(mask, (0, -columns % 16))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


_KERNELS: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "softmax.int": _softmax,
    "log_softmax.int": functools.partial(_softmax, log=True),
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
}
