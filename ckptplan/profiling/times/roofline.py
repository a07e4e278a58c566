"""Roofline model: seconds of an operation on a device, from its floating-point operations and its bytes.

An operation takes the longer of two times: that of its floating-point operations at the device's rate for the data
type, and that of its bytes at the bandwidth of the device's memory, each at the share of the peak that operations of
its class reach. It takes no less than the time from the start of one operation to the start of the next. Example: a
product of two float32 matrices of 1024 x 1024 has 2.1e9 operations and 12.6e6 bytes; at 10e12 operations and 1e12 bytes
a second it takes max(0.21 ms, 0.013 ms).

The model leaves out caches (an operand that the previous operation has just written is read from memory again), shapes
that suit a kernel badly, clocks that fall under load, and layout changes inside a kernel. Depthwise convolutions count
as convolutions, though kernels for them reach a smaller share of the peak than for dense ones.

Reference
---------
S. Williams, A. Waterman, D. Patterson: Roofline: an insightful visual performance model for multicore architectures.
Communications of the ACM 52 (4), 2009.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from ckptplan.core.device import Device
from ckptplan.profiling.bytes.operations import TensorSpec, by_name
from ckptplan.tensors.private import FakeTensorMode
from ckptplan.tensors.storages import tensors_in

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OpCost:
    """Work of one operation, the same on any device.

    Attributes
    ----------
    kind : str
        Its class, one of `ckptplan.core.device.OP_CLASSES`.
    flops : int
        Floating-point operations of matrix products, a multiplication and an addition counting as two; 0 for others.
    nbytes : int
        Bytes read and written, every operand and result once.
    dtype : torch.dtype or None
        Data type of the products.
    tensors : int
        Kernels launched on a device without kernels for lists of tensors; 0 if nothing runs.
    """

    kind: str
    flops: int
    nbytes: int
    dtype: torch.dtype | None = None
    tensors: int = 1


NOTHING = OpCost("other", 0, 0, None, 0)
"""Cost of views, empty tensors and queries: they run nothing on the device."""


def op_seconds(key: Hashable, device: Device, *, tf32: bool | None = None) -> float:
    """Seconds of one operation on a device.

    Parameters
    ----------
    key : hashable
        As `op_key` makes it; None, for a sum of gradients in place, takes 0.
    device : Device
        Classes missing in its `efficiency` reach the peak.
    tf32 : bool, optional
        Whether products of float32 may use TF32 where the device has it; None: products as
        `torch.backends.cuda.matmul` says now, convolutions as `torch.backends.cudnn` does.

    Returns
    -------
    float
        0 for operations that run nothing on the device.
    """
    cost = op_cost(key)
    if cost.tensors == 0:
        return 0.0
    share = device.efficiency
    # Products that are bound by memory reach the bandwidth that elementwise operations reach.
    streaming = share.get("elementwise" if cost.kind in _COMPUTING else cost.kind, 1.0)
    seconds = cost.nbytes / (device.bytes_per_s * streaming)
    if cost.flops:
        tf32 = _uses_tf32(cost.kind) if tf32 is None else tf32
        seconds = max(seconds, cost.flops / flops_rate(device, cost.dtype, cost.kind, tf32=tf32))
    return max(seconds, device.launch_s * (1 if device.is_cuda else cost.tensors))


_COMPUTING = ("matmul", "convolution", "attention")


def flops_rate(device: Device, dtype: torch.dtype | None, kind: str = "matmul", *, tf32: bool = False) -> float:
    """Floating-point operations a second that products of `dtype` reach in operations of class `kind`.

    For a type missing in the device's `flops_per_s`, float8 types take the rate of "float8", then "float16"; all other
    types, bfloat16, float64 and integers included, that of "float32", to which a device without units for the type at
    best converts them. Complex products count as four real ones of their parts.
    """
    rates, share = device.flops_per_s, device.efficiency
    name = str(dtype).removeprefix("torch.")
    parts = 4 if name in _PARTS else 1
    name = _PARTS.get(name, name)
    row = [name, "float32"]
    if name.startswith("float8"):
        row = [name, "float8", "float16", "float32"]
    elif name == "float32" and tf32:
        row = ["tf32", "float32"]
    name = next(found for found in row if found in rates)
    return rates[name] * share.get(f"{kind}.{name}", share.get(kind, 1.0)) / parts


_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def _uses_tf32(kind: str) -> bool:
    """Whether PyTorch's settings now let float32 products of this class use TF32."""
    # The older settings (allow_tf32, set_float32_matmul_precision) change these too, but can't be read once these are
    # set.
    backends: Any = torch.backends
    backend = backends.cudnn.conv if kind == "convolution" else backends.cuda.matmul
    return bool(backend.fp32_precision == "tf32")


@functools.lru_cache(maxsize=1 << 16)
def op_cost(key: Hashable) -> OpCost:
    """The work of an operation.

    Its results' sizes come from running it on fake tensors. If that fails (an operation without a fake kernel, operands
    that the key leaves out), the results count as many bytes as the largest operand, and products whose formula needs
    them count as memory traffic alone.
    """
    if key is None:
        return NOTHING
    made: Any = key
    func, leaves, spec = made
    if _runs_nothing(func):
        return NOTHING
    specs = [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]
    try:
        arguments = by_name(func, *pytree.tree_unflatten(list(leaves), spec))
    except (ValueError, TypeError):  # a random generator was among the operands, which keys leave out
        arguments = {}
    result = _fake_result(func, leaves, spec)
    results = [_bytes(out) for out in result] if result is not None else [max(map(_bytes, specs), default=0)]
    kind, flops = _kind(func), _flops(func, arguments, leaves, spec)
    floating = [s.dtype for s in specs if s.dtype.is_floating_point or s.dtype.is_complex]
    dtype = next(iter(floating or [s.dtype for s in specs]), None)
    nbytes = _read(func, arguments, specs, sum(results)) + _written(func, arguments, sum(results))
    lists = [len(value) for value in arguments.values() if isinstance(value, (list, tuple)) and _specs(value)]
    name = func._schema.name.removeprefix("aten::")
    return OpCost(kind, flops, nbytes, dtype, max([1, *lists]) if name.startswith("_foreach") else 1)


# fmt: off
_NOTHING_RUNS = frozenset((
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "lift_fresh", "is_same_size",
    "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "resize_", "set_", "alias", "_unsafe_view",
    "_reshape_alias", "_nested_tensor_size",
))
# fmt: on


def _runs_nothing(func: Any) -> bool:
    namespace, _, name = func._schema.name.partition("::")
    return bool(func.is_view) or namespace in ("prim", "profiler") or name in _NOTHING_RUNS


# --- bytes ---


def _bytes(spec: TensorSpec) -> int:
    """Bytes of the distinct elements: a dimension of stride 0 has one, and overlapping elements count once."""
    apart = math.prod(n for n, step in zip(spec.size, spec.stride, strict=True) if step)
    return min(apart, spec.span) * spec.dtype.itemsize


def _specs(value: Any) -> list[TensorSpec]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, TensorSpec)]


_PICKED = {
    "embedding": "weight",
    "index": "self",
    "index_select": "self",
    "gather": "self",
    "take": "self",
    "nll_loss_forward": "self",
    "nll_loss_backward": "self",
    "nll_loss2d_forward": "self",
    "nll_loss2d_backward": "self",
    "_unsafe_index": "self",
}
"""Operation -> the operand of which it reads only the elements that an index points to."""

# fmt: off
_INTO = frozenset((
    "index_put_", "index_put", "index_add_", "index_copy_", "index_fill_", "scatter_", "scatter_add_",
    "_index_put_impl_", "scatter_reduce_",
))
# fmt: on
"""Operations that read and write no more bytes of `self` than their other operands have."""

# fmt: off
_OVERWRITES = frozenset((
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_",
    "_foreach_copy_", "_foreach_zero_",
))
# fmt: on
"""In-place operations that don't read what they write."""


def _read(func: Any, arguments: dict[str, Any], specs: list[TensorSpec], result_bytes: int) -> int:
    name = func._schema.name.partition("::")[2]
    if not arguments:
        return sum(map(_bytes, specs))
    total = 0
    for argument, value in arguments.items():
        nbytes = sum(map(_bytes, _specs(value)))
        if _PICKED.get(name) == argument:
            indices = arguments.get("target")
            picked = result_bytes
            if isinstance(indices, TensorSpec):  # a loss: one value per target
                picked = math.prod(indices.size) * _specs(value)[0].dtype.itemsize
            nbytes = min(nbytes, picked)
        elif name in _INTO and argument == "self":
            nbytes = min(nbytes, _others(arguments))
        elif argument == "out" or (
            argument == "self" and (name in _OVERWRITES or name.endswith("_like") or "new_" in name)
        ):
            nbytes = 0
        total += nbytes
    return total


def _others(arguments: dict[str, Any]) -> int:
    return sum(_bytes(s) for argument, value in arguments.items() if argument != "self" for s in _specs(value))


def _written(func: Any, arguments: dict[str, Any], result_bytes: int) -> int:
    """Bytes of the operands that the schema says are written to, and of results that are none of the operands."""
    name = func._schema.name.partition("::")[2]
    into = 0
    for argument in func._schema.arguments:
        # Fused optimizers write to gradients too, but only where a GradScaler leaves it to them.
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
            nbytes = sum(map(_bytes, _specs(arguments.get(argument.name))))
            into += min(nbytes, _others(arguments)) if name in _INTO else nbytes
    fresh = not into and any(out.alias_info is None for out in func._schema.returns)
    return into + (result_bytes if fresh else 0)


# --- results ---


def _fake_operands(leaves: tuple[Any, ...], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operands without memory; to be called, and used, within a FakeTensorMode."""

    def make(leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            return torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device="cpu")
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    args, kwargs = pytree.tree_unflatten([make(leaf) for leaf in leaves], spec)
    return args, kwargs


def _fake_result(func: Any, leaves: tuple[Any, ...], spec: Any) -> list[TensorSpec] | None:
    try:
        with torch.no_grad(), FakeTensorMode():
            args, kwargs = _fake_operands(leaves, spec)
            result = func(*args, **kwargs)
    except Exception:  # an operation may raise anything on operands without values; the caller falls back
        return None
    return [TensorSpec.of(t) for t in tensors_in(result)]


# --- floating-point operations ---


def _flops(func: Any, arguments: dict[str, Any], leaves: tuple[Any, ...], spec: Any) -> int:
    """Floating-point operations, by the formulas in `_OWN` or PyTorch's; `_OWN` has those missing or too high there."""
    name = func._schema.name.partition("::")[2]
    try:
        if name in _OWN:
            return _OWN[name](arguments)
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            return 0
        with torch.no_grad(), FakeTensorMode():
            args, kwargs = _fake_operands(leaves, spec)
            flops = int(formula(*args, **kwargs, out_val=func(*args, **kwargs)))
    except Exception:  # formulas check shapes by assertions, and the operation may not run on fake tensors
        return 0
    return _causal(arguments, flops) if "attention" in name else flops


def _convolution(arguments: dict[str, Any]) -> int:
    """Each element of the smaller grid is multiplied with the whole kernel, whose size accounts for groups."""
    x, weight = arguments["input"], arguments["weight"]
    if arguments["transposed"]:
        grid = x.size[2:]
    elif "grad_output" in arguments:
        grid = arguments["grad_output"].size[2:]
    else:
        grid = tuple(
            (n + 2 * pad - gap * (k - 1) - 1) // step + 1
            for n, k, pad, gap, step in zip(
                x.size[2:],
                weight.size[2:],
                *(_each(arguments[what], len(weight.size) - 2) for what in ("padding", "dilation", "stride")),
                strict=True,
            )
        )
    return 2 * x.size[0] * math.prod(grid) * math.prod(weight.size)


def _each(value: Any, count: int) -> list[int]:
    return list(value) * count if len(value) == 1 else list(value)


def _convolution_backward(arguments: dict[str, Any]) -> int:
    # PyTorch's own formula counts the gradient of a grouped kernel once per group.
    return _convolution(arguments) * sum(map(bool, arguments["output_mask"][:2]))


def _attention(arguments: dict[str, Any]) -> int:
    """Scores and their product with the values (Korthikanti et al. 2022, appendix A, counts the same)."""
    query, key, value = (arguments[what].size for what in ("query", "key", "value"))
    flops = 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return _causal(arguments, flops)


def _attention_backward(arguments: dict[str, Any]) -> int:
    """Scores again, and the gradients of scores, values, queries and keys: five products where forward has two."""
    query, key, value = (arguments[what].size for what in ("query", "key", "value"))
    flops = 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])
    return _causal(arguments, flops)


def _causal(arguments: dict[str, Any], flops: int) -> int:
    """`flops` without those above the diagonal, which causal kernels skip and PyTorch's counter includes."""
    if not arguments.get("is_causal") or not isinstance(arguments.get("query"), TensorSpec):
        return flops
    rows, columns = arguments["query"].size[-2], arguments["key"].size[-2]
    least = min(rows, columns)
    pairs = least * (least + 1) // 2 + (rows - least) * columns  # row i has the first i + 1 columns
    return flops * pairs // (rows * columns)


def _grouped(arguments: dict[str, Any]) -> int:
    """Groups split the rows, columns or inner elements of one dimension, so all of them together count once."""
    a, b = arguments["self"].size, arguments["mat2"].size
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


def _linear(arguments: dict[str, Any]) -> int:
    return 2 * math.prod(arguments["input"].size) * arguments["weight"].size[0]


def _recurrent(arguments: dict[str, Any]) -> int:
    """Each weight matrix is applied at every time step of every sequence."""
    given = arguments["input"].size
    weights = [s for what, value in arguments.items() if what.startswith("weight") for s in _specs(value)]
    return 2 * math.prod(given[:-1]) * sum(math.prod(s.size) for s in weights if len(s.size) == 2)


def _recurrent_backward(arguments: dict[str, Any]) -> int:
    return 2 * _recurrent(arguments)


_OWN: dict[str, Any] = {
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "linear": _linear,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
}


# --- classes ---

_REDUCING = ("norm", "softmax", "loss", "pool", "logsumexp", "_stats", "var", "mean", "sum", "bias_add")
# fmt: off
_STREAMING = frozenset((
    "clone", "_to_copy", "copy_", "fill", "fill_", "zero_", "zeros", "zeros_like", "ones", "ones_like", "full",
    "full_like", "new_zeros", "new_ones", "new_full", "cat", "stack", "native_dropout", "native_dropout_backward",
    "constant_pad_nd", "slice_backward", "select_backward", "slice_scatter", "select_scatter", "tril", "triu",
    "arange", "scalar_tensor",
))
# fmt: on


_REDUCTION_TAG = getattr(torch.Tag, "reduction", None)
"""Missing in PyTorch 2.9."""
# fmt: off
_REDUCTIONS = frozenset((
    "all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "max", "min", "prod", "std",
    "std_mean",
))
# fmt: on
"""Reductions in PyTorch 2.9 whose names contain none of `_REDUCING`."""


def _kind(func: Any) -> str:
    name = func._schema.name.partition("::")[2]
    if "attention" in name:
        return "attention"
    if "conv" in name and not name.startswith("_convert"):
        return "convolution"
    if name in _OWN or func._overloadpacket in flop_registry:
        return "matmul"
    if name in _REDUCTIONS or _REDUCTION_TAG in func.tags or any(part in name for part in _REDUCING):
        return "elementwise" if name.startswith(("_foreach", "_fused")) else "reduction"
    if torch.Tag.pointwise in func.tags or name in _STREAMING or name.startswith(("_foreach", "_fused")):
        return "elementwise"
    # In-place twins of pointwise operations don't all carry the tag.
    twin = getattr(_aten, name.removesuffix("_"), None)
    if name.endswith("_") and twin is not None and any(torch.Tag.pointwise in t.tags for t in _overloads(twin)):
        return "elementwise"
    return "other"


def _overloads(packet: Any) -> Iterator[Any]:
    return (getattr(packet, overload) for overload in packet.overloads())
