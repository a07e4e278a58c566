"""Recompute: a stage run under torch.utils.checkpoint, its inputs all visible, its buffers updated once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ckptplan.runtime.swap import Counters, modified_error


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
    state: _State | None = None

    def call(*given: torch.Tensor) -> Any:
        nonlocal state
        full = list(rest)
        for i, tensor in zip(where, given, strict=True):
            full[i] = tensor
        call_args, call_kwargs = pytree.tree_unflatten(full, spec)
        if state is None:
            state = _State(module)
            result = original(*call_args, **call_kwargs)
            state.forward_done()
            return result
        counters.recomputed_stages += 1
        with state.as_in_forward():
            return original(*call_args, **call_kwargs)

    return checkpoint(call, *tensors, use_reentrant=False, preserve_rng_state=True)


class _State:
    """What a stage's forward reads besides its inputs: buffers, training flags, the versions of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._flags = [(m, m.training) for m in module.modules()]
        self._parameters = [(p, p._version) for p in module.parameters()]
        # Copies, since only after the forward is it known which buffers it updates; the others' go at once then.
        self._before = [
            (m, name, buffer, buffer._version, buffer.detach().clone())
            for m in module.modules()
            for name, buffer in m._buffers.items()
            if buffer is not None
        ]
        self._updated: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._untouched: list[tuple[nn.Module, str, torch.Tensor, int]] = []

    def forward_done(self) -> None:
        """Tell the buffers that the forward updated (running statistics, load counters) from the others."""
        for m, name, buffer, version, copy in self._before:
            # Batch norm's kernels update running statistics without a new version.
            if m._buffers.get(name) is not buffer or buffer._version != version or isinstance(m, _NormBase):
                self._updated.append((m, name, copy))
            else:
                self._untouched.append((m, name, buffer, version))
        self._before = []

    @contextlib.contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """The state as the forward found it; what the recompute updates in it is dropped.

        Copies take the place of updated buffers, rather than the originals being written, since graphs may hold those.

        Raises
        ------
        RuntimeError
            If a parameter, or a buffer that the forward only read, was written to since: the recompute would differ.
        """
        for p, version in self._parameters:
            if p._version != version:
                raise modified_error(p.shape, version, p._version)
        for _, _, buffer, version in self._untouched:
            if buffer._version != version:
                raise modified_error(buffer.shape, version, buffer._version)
        now = [(m, dict(m._buffers)) for m in {m for m, _, _ in self._updated} | {m for m, _, _, _ in self._untouched}]
        flags = [(m, m.training) for m, _ in self._flags]
        for m, name, copy in self._updated:
            m._buffers[name] = copy.clone()
        for m, name, buffer, _ in self._untouched:
            m._buffers[name] = buffer
        for m, training in self._flags:
            m.training = training
        try:
            yield
        finally:
            for m, buffers in now:
                m._buffers.update(buffers)
            for m, training in flags:
                m.training = training
