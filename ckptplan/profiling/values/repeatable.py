"""Operations that may give other bits when they run again on the same values: a stage must not recompute them.

PyTorch has a tag for such operations, which custom ones may carry; none of its own does. Its own are listed in the
documentation of `torch.use_deterministic_algorithms`; `kthvalue` and `index_reduce` warn in their code. Of these, the
tables below have the operations whose *forward* is meant, since a recompute runs nothing else, each with a rule for the
calls that can differ: the order of writes doesn't matter if no place is written twice, or all writes have one value.
Transposed convolutions are cuDNN's gradients of convolutions, some of whose algorithms aren't reproducible (cuDNN
developer guide, "Reproducibility").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ckptplan.profiling.bytes.operations import by_name

Rule = Callable[[dict[str, Any]], bool]
"""A call's operands by name -> whether it may give other bits."""


def _always(given: dict[str, Any]) -> bool:
    return True


def _sums(given: dict[str, Any]) -> bool:
    """Sums of integers are the same in any order."""
    return given["self"].is_floating_point() or given["self"].is_complex()


def _names_places(given: dict[str, Any]) -> bool:
    """Returns which of several equal elements it took."""
    return "dim" in given


def _scatters(given: dict[str, Any]) -> bool:
    """Values of a tensor go to places that may be named twice; a single value leaves the same result in any order."""
    source = given.get("src", given.get("value"))
    return isinstance(source, torch.Tensor) and source.numel() > 1


def _puts(given: dict[str, Any]) -> bool:
    """Of the values written to one place, the last one stays; a mask names each place once."""
    masks = all(i is None or i.dtype in (torch.bool, torch.uint8) for i in given["indices"])
    return not given.get("accumulate") and not masks and given["values"].numel() != 1


def _adds_in_threads(given: dict[str, Any]) -> bool:
    """On the CPU, several threads add values at one place."""
    return bool(given.get("accumulate")) and _sums(given) and torch.get_num_threads() > 1


_CUDA: dict[str, Rule] = {
    "index_add": _sums,
    "scatter_add": _sums,
    "scatter_reduce": _sums,
    "index_reduce": _sums,
    "scatter": _scatters,
    "index_put": _puts,
    "_index_put_impl": _puts,
    "_unsafe_index_put": _puts,
    "index_copy": _always,
    "put": _always,
    "cumsum": _sums,
    "histc": _always,
    "bincount": lambda given: given.get("weights") is not None,
    "median": _names_places,
    "nanmedian": _names_places,
    "kthvalue": _always,
    "max_unpool2d": _always,
    "max_unpool3d": _always,
    "nll_loss2d_forward": _always,
    "_cudnn_ctc_loss": _always,
    "convolution": lambda given: given["transposed"] and not torch.backends.cudnn.deterministic,
}
_CPU: dict[str, Rule] = {
    "index_put": _adds_in_threads,
    "_index_put_impl": _adds_in_threads,
    "_unsafe_index_put": _adds_in_threads,
}


def is_repeatable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_cuda: bool) -> bool:
    """Whether a call gives the same bits again, as all of PyTorch's do under `use_deterministic_algorithms`.

    Parameters
    ----------
    func : OpOverload
    on_cuda : bool
        Whether the step is to run on CUDA.
    """
    if _is_tagged(func):
        return False
    rule = _rule(func, on_cuda)
    if rule is None:
        return True
    # With warn_only, operations without a deterministic algorithm run another one.
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return True
    return not rule(by_name(func, args, kwargs))


@functools.cache
def _is_tagged(func: Any) -> bool:
    return torch.Tag.nondeterministic_bitwise in getattr(func, "tags", ())


@functools.cache
def _rule(func: Any, on_cuda: bool) -> Rule | None:
    """The rule for calls of an operation; None if all of them give the same bits again."""
    if getattr(func, "namespace", "") != "aten":
        return None
    return (_CUDA if on_cuda else _CPU).get(func._schema.name.removeprefix("aten::").rstrip("_"))
