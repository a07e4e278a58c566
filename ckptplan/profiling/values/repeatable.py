"""Operations that may give other bits when they run again on the same values: a stage must not recompute them.

PyTorch has a tag for it, which custom operations may carry; none of its own does. Its own are listed in the
documentation of `torch.use_deterministic_algorithms`; `kthvalue` and `index_reduce` warn in their code. Here are those
whose *forward* is meant, which is all that a recompute runs, and of those only the calls that can differ: writes to
places of which none is named twice, or of a single value, always end alike, whatever the order. Transposed convolutions
are cuDNN's gradients of convolutions, some of whose algorithms aren't reproducible (cuDNN developer guide,
"Reproducibility").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Rule = Callable[[tuple[Any, ...], dict[str, Any]], bool]


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _argument(position: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _is_floating(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Sums of integers are the same in any order."""
    first = args[0] if args else kwargs.get("self")
    return isinstance(first, torch.Tensor) and (first.is_floating_point() or first.is_complex())


def _with_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return _argument(1, "weights", args, kwargs, None) is not None


def _with_places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Which of several equal elements is named."""
    return len(args) > 1 or "dim" in kwargs


def _scattered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Values of a tensor go to places that may be named twice; one value for all always ends alike."""
    source = args[3] if len(args) > 3 else kwargs.get("src", kwargs.get("value"))
    return isinstance(source, torch.Tensor) and source.numel() > 1


def _placed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The last of the values that go to one place stays; a mask names each place once."""
    if _argument(3, "accumulate", args, kwargs, False):
        return False
    indices, values = _argument(1, "indices", args, kwargs, ()), _argument(2, "values", args, kwargs, None)
    masks = all(i is None or i.dtype in (torch.bool, torch.uint8) for i in indices)
    return not masks and not (isinstance(values, torch.Tensor) and values.numel() == 1)


def _added_by_threads(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """On the CPU, values added up at one place by several threads."""
    accumulates = _argument(3, "accumulate", args, kwargs, False)
    return bool(accumulates) and _is_floating(args, kwargs) and torch.get_num_threads() > 1


def _transposed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(_argument(6, "transposed", args, kwargs, False)) and not torch.backends.cudnn.deterministic


_CUDA: dict[str, Rule] = {
    "index_add": _is_floating,
    "scatter_add": _is_floating,
    "scatter_reduce": _is_floating,
    "index_reduce": _is_floating,
    "scatter": _scattered,
    "index_put": _placed,
    "_index_put_impl": _placed,
    "_unsafe_index_put": _placed,
    "index_copy": _always,
    "put": _always,
    "cumsum": _is_floating,
    "histc": _always,
    "bincount": _with_weights,
    "median": _with_places,
    "nanmedian": _with_places,
    "kthvalue": _always,
    "max_unpool2d": _always,
    "max_unpool3d": _always,
    "nll_loss2d_forward": _always,
    "_cudnn_ctc_loss": _always,
    "convolution": _transposed,
}
_CPU: dict[str, Rule] = {
    "index_put": _added_by_threads,
    "_index_put_impl": _added_by_threads,
    "_unsafe_index_put": _added_by_threads,
}


def is_repeatable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_cuda: bool) -> bool:
    """Whether an operation gives the same bits again, as all of PyTorch's do under `use_deterministic_algorithms`.

    Parameters
    ----------
    func : OpOverload
    on_cuda : bool
        Whether it is to run on CUDA.
    """
    if torch.Tag.nondeterministic_bitwise in getattr(func, "tags", ()):
        return False
    if getattr(func, "namespace", "") != "aten":
        return True
    # warn_only goes on with the other algorithms where there are none that repeat.
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return True
    rule = (_CUDA if on_cuda else _CPU).get(func._schema.name.removeprefix("aten::").rstrip("_"))
    return rule is None or not rule(args, kwargs)
