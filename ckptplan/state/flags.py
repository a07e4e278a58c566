"""Process-wide and thread-local switches of PyTorch that affect results or the choice of kernels."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from ckptplan.tensors import accelerator

Getter = Callable[[], Any]
Setter = Callable[[Any], Any]


_UNREADABLE = "unreadable"
"""Stands for a flag that PyTorch refuses to read because its old and its new interface were both used, and for the
order of attention's kernels before it is chosen (`accelerator.choose_attention`)."""

_PLAIN = (
    "mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled", "cpu_allow_fp16_reduced_precision_reduction",
    "math_sdp_allow_fp16_bf16_reduction", "deterministic_fill_uninitialized_memory", "torch_function_state",
)  # fmt: skip
"""Flags with a `_get_<name>` and a `_set_<name>` in `torch._C`."""

_OF_CUDA = (
    "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_depthwise_kernel", "miopen_immediate",
    "cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation", "blas_preferred_backend", "linalg_preferred_backend",
    "rocm_fa_preferred_backend", "sm_carveout_experimental",
)  # fmt: skip
"""Flags of the same form that have no effect where PyTorch was built without CUDA."""

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
"""Kernels of scaled dot product attention that can be switched off."""

_TINY = 5e-324
"""A denormal number: compares equal to zero in a thread that flushes denormals."""


def _spread(setter: Callable[..., Any]) -> Setter:
    """Return a setter with one argument, the value that the getter returned; a tuple is passed on as arguments."""
    return lambda value: setter(*value) if isinstance(value, tuple) else setter(value)


def _precisions() -> dict[str, tuple[Getter, Setter]]:
    """Return the precisions of float32 operations: general ones first, since unset specific ones follow them."""
    ops = ("all", "matmul", "conv", "rnn")
    # The old interface reads the matmul precisions of both backends, even in a build without CUDA.
    of_cuda = ops if accelerator.IS_BUILT else ("matmul",)
    places = [("generic", "all"), *(("cuda", op) for op in of_cuda), *(("mkldnn", op) for op in ops)]
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return {
        f"{backend}.{op}.fp32_precision": (functools.partial(get, backend, op), functools.partial(put, backend, op))
        for backend, op in places
    }


def _threads() -> int:
    """Return the number of threads of a CPU operation; 0 (leave as it is) if CUDA's backward may run.

    Backward on CUDA runs in a thread of its own, which may have another number. Setting the number there would change
    it for all other threads.
    """
    return 0 if accelerator.module.is_initialized() else torch.get_num_threads()


_chosen = False
"""Whether PyTorch has chosen the order of attention's kernels, as it does at a process's first attention on CUDA."""


def _attention_order() -> Any:
    return torch._C._get_sdp_priority_order() if _chosen or not accelerator.IS_BUILT else _UNREADABLE


def _found() -> dict[str, tuple[Getter, Setter]]:
    """Return the flags of this version and build of PyTorch by name, in the order in which they are set."""
    c = torch._C
    einsum: Any = torch.backends.opt_einsum.m  # type: ignore[attr-defined]
    found: dict[str, tuple[Getter, Setter]] = {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "deterministic algorithms": (
            lambda: (c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only()),
            lambda value: c._set_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "opt_einsum": (
            functools.partial(operator.attrgetter("enabled", "strategy"), einsum),
            lambda value: einsum.__dict__.update(enabled=value[0], strategy=value[1]),
        ),
        "number of threads": (
            _threads if accelerator.IS_BUILT else torch.get_num_threads,
            lambda value: torch.set_num_threads(value) if value else None,
        ),
        "flush denormal": (functools.partial(operator.eq, _TINY, 0.0), torch.set_flush_denormal),
    }
    names = (*_PLAIN, *_OF_CUDA) if accelerator.IS_BUILT else _PLAIN
    pairs = [(name, f"_get_{name}", f"_set_{name}") for name in names]
    pairs += [(f"{name} attention", f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in _ATTENTION]
    for name, get, put in pairs:
        if hasattr(c, get) and hasattr(c, put):
            found[name] = getattr(c, get), _spread(getattr(c, put))
    if hasattr(c, "_get_sdp_priority_order"):
        found["sdp_priority_order"] = _attention_order, c._set_sdp_priority_order
    if hasattr(c, "_cuda_getDevice"):
        found["current CUDA device"] = accelerator.current_index, lambda index: accelerator.module.set_device(index)
    return found


_FORMER: dict[str, tuple[Getter, Setter]] = {
    "float32 matmul precision": (torch._C._get_float32_matmul_precision, torch._C._set_float32_matmul_precision),
}
"""The old interface to precisions.

Setting one of these flags sets the precisions above; reading one raises if the precisions match none of its values.
"""
if accelerator.IS_BUILT:
    _FORMER["cudnn.allow_tf32"] = torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32
_PRECISIONS = _precisions()
_OTHERS = _found()
FLAGS = {**_FORMER, **_PRECISIONS, **_OTHERS}
"""Getter and setter of each flag, in the order in which the flags are set."""
_former = tuple(get for get, _ in _FORMER.values())
_precision = tuple(get for get, _ in _PRECISIONS.values())
_other = tuple(get for get, _ in _OTHERS.values())
_contradicting: set[tuple[str, ...]] = set()
"""Precisions with which reading the old interface has raised: it isn't read again, since the exception takes long."""


def flags() -> list[Any]:
    """Return the present values of all flags, in the order of `FLAGS`."""
    global _chosen
    if accelerator.IS_BUILT and not _chosen and accelerator.module.is_initialized():
        accelerator.choose_attention()
        _chosen = True
    precisions = tuple([get() for get in _precision])
    former = [_UNREADABLE] * len(_former)
    if precisions not in _contradicting:
        try:
            former = [get() for get in _former]
        except RuntimeError:
            _contradicting.add(precisions)
    return [*former, *precisions, *[get() for get in _other]]


def set_flags(wanted: list[Any]) -> None:
    """Set the flags that differ from `wanted`."""
    for value, now, (get, put) in zip(wanted, flags(), FLAGS.values(), strict=True):
        if value is not _UNREADABLE and (now is _UNREADABLE or get() != value):
            put(value)
