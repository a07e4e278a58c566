"""Workspaces: bytes that an operation allocates besides its results, measured by running it once on the device.

Fake tensors show results, not the temporaries inside a kernel (layout changes of a convolution, partial sums of a
reduction). Each distinct operation of the trace runs alone on made-up values of the same shapes and strides, which
takes no more memory than the operation takes within the step.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from ckptplan.profiling.bytes.operations import TensorSpec
from ckptplan.profiling.bytes.storages import new_storages
from ckptplan.profiling.times.stopwatch import Stopwatch
from ckptplan.tensors.accelerator import allocated_by, is_accelerator
from ckptplan.training.measure import peaks_within, recorded_allocations

_LEAST_TIME_RUNS = 3
_TIME_S = 2e-3  # an operation that has taken this long in all isn't timed any more
_MOST_TIME_RUNS = 9


def measure_workspaces(
    keys: Iterable[Hashable], device: torch.device
) -> tuple[dict[Hashable, int], list[str], dict[Hashable, tuple[int, ...]]]:
    """Most bytes that each operation allocates at once, its results included, by running it on `device`.

    Returns
    -------
    dict
        Operation key -> bytes; views and operations without a tensor that has elements are left out.
    list of str
        Operations that could not be run alone.
    dict
        Operation key -> bytes of the storages that it made for its results, in order.
    """
    wanted = [key for key in dict.fromkeys(keys) if key is not None and _allocates(key)]
    failed: list[str] = []
    storages: dict[Hashable, tuple[int, ...]] = {}
    peaks: dict[Hashable, int] = {}

    def run_all() -> None:
        for index, key in enumerate(wanted):
            peak = _run(key, device, failed, storages, label=f"ckptplan {index}")
            if peak is not None:
                peaks[key] = peak

    if is_accelerator(device):
        run_all()
    else:
        events, spans = recorded_allocations(run_all)
        done = {key: spans[f"ckptplan {index}"] for index, key in enumerate(wanted) if key in peaks}
        peaks = peaks_within(events, done)
    return peaks, failed, storages


def cuda_workspaces(keys: Iterable[Any]) -> dict[Hashable, int]:
    """Most bytes that each operation allocates at once on a CUDA device, its results included, by rule.

    Flash attention's backward sums the query's gradient in float32 beside a row of float32 sums per query (Dao, 2023,
    "FlashAttention-2"); the backward of an embedding sorts its indices. cuDNN's workspaces are not counted, since they
    depend on the algorithm that it chooses at run time.

    Returns
    -------
    dict
        Operation key -> bytes; operations that aren't in it allocate their results alone.
    """
    out: dict[Hashable, int] = {}
    for key in dict.fromkeys(keys):
        if key is None:
            continue
        func, leaves, _ = key
        specs = [x for x in leaves if isinstance(x, TensorSpec)]
        if func in _ATTENTION_BACKWARD:
            results = sum(math.prod(spec.size) * spec.dtype.itemsize for spec in specs[1:4])
            batch, heads, rows, head = specs[1].size
            out[key] = results + 4 * batch * heads * rows * (head + 1)
        elif func is torch.ops.aten.embedding_dense_backward.default:
            # The indices sorted and their former places, and the same again for the sort.
            rows = next(x for x in leaves if isinstance(x, int))
            result = rows * specs[0].size[-1] * specs[0].dtype.itemsize
            out[key] = result + 4 * 8 * math.prod(specs[1].size)
    return out


_ATTENTION_BACKWARD = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default,
}


def measure_times(keys: Iterable[Hashable], device: torch.device) -> dict[Hashable, float]:
    """Seconds that each distinct operation takes alone on `device`: the median of a few runs after a first one.

    Views take 0. Operations that can't be run alone on made-up values are left out.
    """
    out: dict[Hashable, float] = {}
    for key in dict.fromkeys(keys):
        if key is not None:
            with contextlib.suppress(Exception), torch.enable_grad():  # as in _run
                out[key] = _median_s(key, device) if _allocates(key) else 0.0
    return out


def _median_s(key: Any, device: torch.device) -> float:
    args, kwargs = _operands(key, device)
    watch = Stopwatch(device)
    seconds: list[float] = []
    for run in range(_MOST_TIME_RUNS + 1):
        span = watch.begin()
        key[0](*args, **kwargs)
        took = watch.end(span)
        if run:
            seconds.append(took.compute_s)
        if run >= _LEAST_TIME_RUNS and sum(seconds) >= _TIME_S:
            break
    return statistics.median(seconds)


def _allocates(key: Any) -> bool:
    """Whether an operation may allocate anything: it is no view, and has an operand with elements."""
    func, leaves, _ = key
    if getattr(func, "is_view", False) or func in _ALLOCATE_NOTHING:
        return False
    return any(isinstance(x, TensorSpec) and x.span for x in leaves)


_ALLOCATE_NOTHING = {torch.ops.aten.detach.default, torch.ops.aten.set_.source_Storage_storage_offset}
"""Operations that allocate nothing though `is_view` isn't set."""


def _make(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    where = device if spec.device == device.type else spec.device  # some operations take lengths on the host alone
    flat = torch.empty(max(spec.span, 1), dtype=spec.dtype, device=where)
    # Valid for any operation: indices 0 are in range, masks select everything, 0.5 doesn't overflow.
    flat.fill_(0.5 if spec.dtype.is_floating_point else spec.dtype == torch.bool)
    return flat.as_strided(spec.size, spec.stride)


def _operands(key: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Made-up operands for one operation."""
    func, leaves, spec = key
    made = [_make(x, device) if isinstance(x, TensorSpec) else x for x in leaves]
    args, kwargs = pytree.tree_unflatten(made, spec)
    _with_masks(func, args)
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" in names and "backward" in func.name():
        # With dropout, attention's backward reads its seed on the host, and the made-up seed lies on the device.
        where = names.index("dropout_p")
        if where < len(args):
            args = (*args[:where], 0.0, *args[where + 1 :])
        else:
            kwargs = {**kwargs, "dropout_p": 0.0}
    return args, kwargs


def _with_masks(func: Any, args: tuple[Any, ...]) -> None:
    """Let masks among the operands select as many elements as there are values, instead of all."""
    name = func.name().partition("::")[2].partition(".")[0].rstrip("_").lstrip("_")
    if name == "masked_scatter":
        _select(args[1], args[2].numel())
    if name in ("index_put", "unsafe_index_put", "index_put_impl"):
        masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
        values = args[2]
        if len(masks) == 1 and masks[0].is_contiguous() and values.dim() and values.shape[0] > 1:
            _select(masks[0], values.shape[0])


def _select(mask: torch.Tensor, count: int) -> None:
    if count < mask.numel() and mask.is_contiguous():
        mask.view(-1)[count:] = False


def _run(
    key: Any, device: torch.device, failed: list[str], storages: dict[Hashable, tuple[int, ...]], *, label: str
) -> int | None:
    """Run one operation alone; return its peak, 0 on the CPU, where it is recorded under `label`; None if it fails."""
    func = key[0]
    try:
        with torch.enable_grad():
            args, kwargs = _operands(key, device)
            if is_accelerator(device):
                # A first run is for memory that a library allocates once and keeps (32 MiB for cuBLAS on recent
                # devices).
                func(*args, **kwargs)
                del args, kwargs  # an operation may have written to them; two sets would be more than the step holds
                args, kwargs = _operands(key, device)
                result, peak = allocated_by(device, func, *args, **kwargs)
            else:
                with record_function(label):
                    result, peak = func(*args, **kwargs), 0
            made = new_storages((args, kwargs), result)
            storages[key] = tuple(t.untyped_storage().nbytes() for t in made)
            del made, result
            return peak
    except Exception:  # an operation may raise on made-up values; the trace counts its results anyway
        failed.append(str(func))
        return None
