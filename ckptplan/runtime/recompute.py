"""Recompute: a stage run under torch.utils.checkpoint, its inputs all visible, its buffers updated once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ckptplan.runtime.swap import Counters


def run_recomputed(
    module: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    counters: Counters,
) -> Any:
    """Call `original(*args, **kwargs)` so that backward recomputes what it saves.

    Tensors anywhere in the arguments are passed to `checkpoint` positionally: it holds those, and those alone, through
    autograd, where hooks and the in-place check see them.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    rest = [None if i in set(where) else leaf for i, leaf in enumerate(leaves)]
    tensors = [leaves[i] for i in where]
    del leaves, args, kwargs
    versions: dict[str, int] = {}
    first = True

    def call(*given: torch.Tensor) -> Any:
        nonlocal first
        full = list(rest)
        for i, tensor in zip(where, given, strict=True):
            full[i] = tensor
        call_args, call_kwargs = pytree.tree_unflatten(full, spec)
        if first:
            first = False
            before = {name: buffer._version for name, buffer in module.named_buffers()}
            result = original(*call_args, **call_kwargs)
            versions.update({n: v for n, b in module.named_buffers() if (v := before.get(n, -1)) != b._version})
            return result
        counters.recomputed_stages += 1
        with _buffers_guarded(module, versions):
            return original(*call_args, **call_kwargs)

    return checkpoint(call, *tensors, use_reentrant=False, preserve_rng_state=True)


@contextlib.contextmanager
def _buffers_guarded(module: nn.Module, names: dict[str, int]) -> Iterator[None]:
    """Let the recompute update copies of the buffers that forward updated (running statistics, load counters).

    Copies take the originals' place, rather than the originals being restored, since the graph may hold the originals.
    """
    owners = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        buffer = owner._buffers[leaf]
        if buffer is not None:
            owners.append((owner, leaf, buffer))
            owner._buffers[leaf] = buffer.clone()
    try:
        yield
    finally:
        for owner, leaf, buffer in owners:
            owner._buffers[leaf] = buffer
