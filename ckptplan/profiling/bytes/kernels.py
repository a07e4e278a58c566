"""Kernels for fake tensors that run the same operations as real tensors would on the device of the step.

PyTorch chooses some operations by the device: dropout keeps a mask of one byte an element on CUDA and one of the
input's type on the CPU, attention has other kernels that save other tensors, autocast casts other operations. A build
without CUDA can't run backward on fake CUDA tensors. So fake tensors of a device that isn't in this machine lie on the
CPU, and these kernels make CUDA's choices for them. PyTorch also does some things in place on real tensors and out of
place on subclasses such as fake tensors.

While a context of `real_choices` is open, composite operations have kernels (`torch.library`) that act on fake tensors
alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ckptplan.tensors.private import is_fake

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
# When PyTorch chooses flash attention and cuDNN's attention (`sdp_utils.cpp`).
_FLASH_MOST_HEAD = 256
_FLASH_LEAST_CAPABILITY = (8, 0)
_CUDNN_MOST_HEAD = 128  # some versions take more in some cases; flash attention, the next choice, saves the same
_CUDNN_MAJOR_CAPABILITIES = (9, 10)
_CUDNN_LEAST_TORCH = "2.11"
_CUDNN_LEAST_VERSION = 91501

# fmt: off
_AUTOCAST_TO_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "pow.Scalar", "reciprocal", "rsqrt", "sinh", "tan", "softplus", "layer_norm",
    "native_layer_norm", "group_norm", "norm.Scalar", "norm.ScalarOpt_dim", "nuclear_norm", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp",
    # These take a result type, and are cast if none is given.
    "softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "prod", "prod.dim_int", "cumsum", "cumprod",
)
# fmt: on
"""Operations that autocast runs in float32 on CUDA (PyTorch, "Automatic Mixed Precision package", CUDA reference)."""


@contextlib.contextmanager
def real_choices(
    device_type: str, planned_capability: tuple[int, int] | None, *, numbered: bool = True
) -> Iterator[None]:
    """Let fake tensors on `device_type` run the operations that real ones would.

    Parameters
    ----------
    planned_capability : (int, int) or None
        Compute capability of a CUDA device that isn't in this machine: run that device's operations.
    numbered : bool
        The real step runs under a dispatch mode that numbers operations (NOTE [Numbering] in
        runtime/recompute/selective.py), where PyTorch doesn't add a bias in place either.
    """
    library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {} if numbered else {"linear": _linear}
    if planned_capability is not None:
        kernels |= {name: functools.partial(kernel, planned_capability) for name, kernel in _ON_CUDA.items()}
    backend = device_type.upper()
    for name, kernel in kernels.items():
        if (overload := _overload(name)) is not None:
            for key in (f"Autograd{backend}", backend):
                library.impl(name, _on_fakes(overload, kernel), key)
    for name in _AUTOCAST_TO_FLOAT32 if planned_capability is not None else ():
        # The CPU's own autocast has a kernel for some of them, which does the same.
        own = f"aten::{name}", "AutocastCPU"
        if (overload := _overload(name)) is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(*own):
            library.impl(name, _in_float32(overload), "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


def _overload(name: str) -> Any:
    """The operation of that name; None where this version of PyTorch doesn't have it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


def _on_fakes(overload: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` for fake tensors; PyTorch's own for real ones, and where `kernel` returns `NotImplemented`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs) if any(is_fake(x) for x in args) else NotImplemented
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
            if kwargs.get("dtype") is None and any(is_fake(x) for x in args):
                args = tuple(map(up, args))
            return overload(*args, **kwargs)

    return run


_FILL = {"index_add", "index_put", "masked_scatter", "put", "scatter", "scatter_add"}
"""Operations that backward runs in place on zeros that it has just made, unless a tensor is of a subclass."""

_IN_PLACE = {
    "BinaryCrossEntropyBackward0": {"mul"},
    "BinaryCrossEntropyWithLogitsBackward0": {"mul", "sub"},
    "ClampBackward0": {"masked_fill"} if torch.__version__ >= "2.14" else {"logical_and", "logical_or"},
    "CumprodBackward0": {"div", "mul"},
    "TraceBackward0": {"index_fill"},
    # from PyTorch 2.14 on
    "ClampMaxBackward1": {"masked_fill"},
    "ClampMinBackward1": {"masked_fill"},
    "FmaxBackward0": {"masked_fill"},
    "FminBackward0": {"masked_fill"},
    "MaximumBackward0": {"masked_fill"},
    "MinimumBackward0": {"masked_fill"},
}
"""Backward node -> operations that it runs in place on results of its own, unless a tensor is of a subclass.

From PyTorch's `FunctionsManual.cpp`, where formulas call `areAnyTensorSubclassLike`.
"""

REDUCED_TO_ONE = {"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"}
"""Backward nodes that share a gradient out evenly: on the CPU with other operations for real tensors."""


def in_place(func: Any, node: str, *, fills: bool) -> Any:
    """The operation in place of `func` that a backward formula runs on real tensors; None if it is none of those.

    Parameters
    ----------
    node : str
        Name of the autograd node that runs it, on a tensor that it has made.
    fills : bool
        The operation before made this tensor, of zeros.
    """
    name = func._opname
    if func.namespace != "aten" or name not in (_FILL if fills else _IN_PLACE.get(node, ())):
        return None
    return _overload(f"{name}_.{func._overloadname}")


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Add the bias in place if product and sum aren't one operation, which PyTorch doesn't for subclasses."""
    fused = x.dim() == 2 or (x.dim() == 3 and x.is_contiguous())
    if bias is None or fused:
        return NotImplemented
    return torch.matmul(x, weight.t()).add_(bias)


def _dropout(capability: tuple[int, int], x: torch.Tensor, p: float, train: bool) -> Any:
    if not train or not 0 < p < 1 or x.numel() == 0:
        return NotImplemented
    return aten.native_dropout.default(x, p, train)[0]


def _softmax(
    capability: tuple[int, int], x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, log: bool = False
) -> Any:
    """From half precision to float32 in one kernel, as on CUDA."""
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


@dataclass(frozen=True, slots=True)
class _Attention:
    """A call of `scaled_dot_product_attention` on a CUDA device of this compute capability.

    It runs the first kernel that takes the operands: cuDNN's, flash, memory-efficient, or single steps. The conditions
    are those of PyTorch's `sdp_utils.cpp` for CUDA as far as shapes, types and switches go.
    """

    capability: tuple[int, int]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def run(self) -> Any:
        """Return the result; `NotImplemented`: in single steps."""
        query, key = self.query, self.key
        if (
            query.dim() != 4
            or any(t.dtype != query.dtype for t in (key, self.value))
            or 0 in (*query.shape, *key.shape)
        ):
            return NotImplemented
        # Its default scale is that of the head before padding.
        scale = self._head**-0.5 if self.scale is None and self._head % 8 else self.scale
        given = query, key, self.value
        dropout = self.dropout_p, self.is_causal
        saves = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        if self._is_for_cudnn:
            kernel = aten._scaled_dot_product_cudnn_attention.default
            return kernel(*given, self._bias(), saves, *dropout, False, scale=scale)[0]
        if self._is_for_flash:
            padded = [torch.nn.functional.pad(t, (0, -self._head % 8)) if self._head % 8 else t for t in given]
            out = aten._scaled_dot_product_flash_attention.default(*padded, *dropout, False, scale=scale)[0]
            return out[..., : self._head] if self._head % 8 else out
        if self._is_for_efficient:
            mask = self._bias()
            mask = None if mask is None else _padded(mask, query, key)
            kernel = aten._scaled_dot_product_efficient_attention.default
            return kernel(*given, mask, saves, *dropout, scale=scale)[0]
        return NotImplemented

    def _bias(self) -> torch.Tensor | None:
        """The mask in the form that is added to the scores, in the query's data type."""
        mask = self.attn_mask
        if mask is None or mask.dtype is not torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=self.query.dtype).masked_fill_(mask.logical_not(), float("-inf"))

    @property
    def _head(self) -> int:
        return self.query.shape[-1]

    @property
    def _has_equal_heads(self) -> bool:
        return self.query.shape[1] == self.key.shape[1] == self.value.shape[1]

    @property
    def _trains_mask(self) -> bool:
        return self.attn_mask is not None and self.attn_mask.requires_grad

    @property
    def _is_for_cudnn(self) -> bool:
        return (
            _prefers_cudnn(self.capability)
            and self.query.dtype in _HALF
            and all(size <= _CUDNN_MOST_HEAD and size % 8 == 0 for size in (self._head, self.value.shape[-1]))
            and self.key.shape[2] > 1
            and (self.enable_gqa or self._has_equal_heads)
            and not self._trains_mask
            and (self.dropout_p == 0 or ((16 * self.dropout_p).is_integer() and self.query.shape[2] > 1))
        )

    @property
    def _is_for_flash(self) -> bool:
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and self.query.dtype in _HALF
            and self.attn_mask is None
            and self._head == self.key.shape[-1] == self.value.shape[-1]
            and self.capability >= _FLASH_LEAST_CAPABILITY
            and self._head <= _FLASH_MOST_HEAD
        )

    @property
    def _is_for_efficient(self) -> bool:
        dtype, capability = self.query.dtype, self.capability
        aligned = 8 if dtype in _HALF and capability >= _FLASH_LEAST_CAPABILITY else 4
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and dtype in (*_HALF, torch.float32)
            and (dtype is not torch.bfloat16 or capability >= _FLASH_LEAST_CAPABILITY)
            and capability >= (5, 0)
            and self._head % aligned == self.value.shape[-1] % aligned == 0
            and self._has_equal_heads
            and not self._trains_mask
        )


def _attention(capability: tuple[int, int], *args: Any, **kwargs: Any) -> Any:
    return _Attention(capability, *args, **kwargs).run()


def _prefers_cudnn(capability: tuple[int, int]) -> bool:
    """Whether PyTorch tries cuDNN's attention first: on Hopper and on Blackwell for data centres, in recent versions.

    It isn't deterministic. A build for the CPU doesn't know the version of cuDNN, which is taken to be recent enough.
    """
    version = torch.backends.cudnn.version()
    exact = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return (
        capability[0] in _CUDNN_MAJOR_CAPABILITIES
        and torch.__version__ >= _CUDNN_LEAST_TORCH
        and (version is None or version >= _CUDNN_LEAST_VERSION)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
        and not exact
    )


def _padded(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask for the memory-efficient kernel: rows padded to a multiple of 16 elements."""
    columns = mask.shape[-1]
    if columns % 16:
        mask = torch.nn.functional.pad(mask, (0, -columns % 16))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


_ON_CUDA: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "softmax.int": _softmax,
    "log_softmax.int": functools.partial(_softmax, log=True),
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
}
