"""Recompute: a stage's call that can be made again, its inputs all visible, its buffers updated once."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.runtime.generators import Generators
from ckptplan.runtime.meter import KINDS, RECOMPUTE
from ckptplan.runtime.own import storages_of
from ckptplan.runtime.state import Attributes
from ckptplan.runtime.surroundings import Surroundings
from ckptplan.runtime.swap import Counters, modified_error, version_of

_LEAVES = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, type(None), torch.dtype, torch.device})
"""Types of arguments inside which nothing lies."""


class Call:
    """A call of a stage that can be made again, tensors left out: arguments, buffers, training flags.

    Parameters
    ----------
    device : torch.device
        Where the plan runs: its random generator is the stage's, whatever its arguments are.
    index : int
        The stage, for `counters`.
    whole : callable
        A context in which the module's parameters are all there, for runs outside of its own backward.
    """

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        counters: Counters,
        device: torch.device,
        index: int = 0,
        whole: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._module, self._original = module, original
        self._counters, self._device, self._index = counters, device, index
        self._whole = whole
        self._rest: list[Any] = []
        self._where: list[tuple[int, ...]] = []
        self._form: pytree.TreeSpec | tuple[int, tuple[str, ...]] | None = None
        self._surroundings: Surroundings | None = None
        self._state: _State | None = None
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Keep the arguments but for the tensors anywhere in them, each of which is returned once, in order.

        Once, since a stage may ask whether two of its arguments are the same, as attention does.

        Raises
        ------
        UnsupportedModelError
            If an argument is an iterator, which the first run uses up.
        """
        leaves: list[Any] = [*args, *kwargs.values()]
        if _LEAVES.issuperset(map(type, leaves)):
            self._form = len(args), tuple(kwargs)
        else:
            leaves, self._form = pytree.tree_flatten((args, kwargs))
            used_up = next((leaf for leaf in leaves if isinstance(leaf, Iterator)), None)
            if used_up is not None:
                raise UnsupportedModelError(
                    f"a {type(self._module).__name__} that is to run again gets a {type(used_up).__name__}, which its "
                    "first run uses up; pass it a list, or keep this stage"
                )
        self._first = args, kwargs
        places: dict[int, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                places.setdefault(id(leaf), []).append(i)
        self._where = [tuple(same) for same in places.values()]
        tensors = [leaves[same[0]] for same in self._where]
        self._rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tensors

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run the stage on `tensors`, in the order of `split`: the first time as it is, then as it was."""
        if self._first is not None:
            # The caller's own lists and dictionaries, since the stage may add to them.
            (args, kwargs), self._first = self._first, None
            self._surroundings = Surroundings(self._device, tensors)
            del tensors
            return self._run_first(args, kwargs)
        assert self._surroundings is not None
        as_it_was = self._surroundings.restored(tensors)
        leaves = list(self._rest)
        for same, tensor in zip(self._where, tensors, strict=True):
            for i in same:
                leaves[i] = tensor
        if isinstance(self._form, tuple):
            count, names = self._form
            args, kwargs = tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))
        else:
            assert self._form is not None
            args, kwargs = pytree.tree_unflatten(leaves, self._form)
        del leaves, tensors
        if self._state is None:  # a backward inside of the first run
            with as_it_was:
                return self._run_first(args, kwargs)
        self._counters.runs[self._index] += 1
        self._counters.recomputed_stages += 1
        before = self._counters.meter.mark(self._index * KINDS + RECOMPUTE)
        try:
            with as_it_was, self._whole(), self._state.as_in_forward():
                return self._original(*args, **kwargs)
        finally:
            self._counters.meter.mark(before)

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._counters.runs[self._index] += 1
        state = _State(self._module)
        result = self._original(*args, **kwargs)
        state.forward_done()
        self._state = state
        self._counters.copied_bytes[self._index] = state.copied_bytes
        return result


class _State:
    """What a stage's forward reads besides its inputs: parameters, buffers, attributes, random generators."""

    def __init__(self, module: nn.Module) -> None:
        modules = _modules(module)
        self._attributes = Attributes(modules)
        self._generators = Generators(self._attributes.generators)
        self._tensors = [(name, t, version_of(t)) for name, t in self._attributes.tensors]
        self._modules = modules
        self._children = [(m, m._modules.copy()) for m in modules if m._modules]
        self._parameters = [
            (m, name, p, version_of(p), _storages(p))
            for m in modules
            if m._parameters
            for name, p in m._parameters.items()
            if p is not None
        ]
        # Copies, since only after the forward is it known which buffers it updates; the others' go at once then.
        self._before = [
            (m, name, buffer, version_of(buffer), buffer.detach().clone())
            for m in modules
            if m._buffers
            for name, buffer in m._buffers.items()
            if buffer is not None
        ]
        self._updated: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._untouched: list[tuple[nn.Module, str, torch.Tensor, int]] = []

    def forward_done(self) -> None:
        """Tell the buffers that the forward updated (running statistics, load counters) from the others."""
        for m, name, buffer, version, copy in self._before:
            # Batch norm's kernels update running statistics without a new version.
            if m._buffers.get(name) is not buffer or version_of(buffer) != version or isinstance(m, _NormBase):
                self._updated.append((m, name, copy))
            else:
                self._untouched.append((m, name, buffer, version))
        self._before = []
        self._generators.settle()
        for name, tensor, version in self._tensors:
            if version_of(tensor) != version:
                raise UnsupportedModelError(
                    f"a stage that is to run again writes to its tensor attribute {name!r}, of which no copy is "
                    "kept; register it as a buffer, or keep this stage"
                )

    @property
    def copied_bytes(self) -> tuple[int, ...]:
        """Sizes of the buffers that the forward updates."""
        return tuple(copy.untyped_storage().nbytes() for _, _, copy in self._updated)

    @contextlib.contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """The state as the forward found it; what the recompute updates in it is dropped.

        Copies take the place of updated buffers, rather than the originals being written, since graphs may hold those.
        Parameters that were replaced since are back meanwhile.

        Raises
        ------
        RuntimeError
            If a parameter, or a buffer or an attribute that the forward only read, was written to since: the recompute
            would differ.
        """
        for _, name, p, version, storages in self._parameters:
            if version_of(p) != version:
                raise modified_error(p.shape, version, version_of(p))
            if _storages(p) != storages:
                raise RuntimeError(
                    f"the data of parameter {name!r} {list(p.shape)} was replaced between forward and backward, which "
                    "runs this stage again with it: the gradient would be another; write to .data between steps"
                )
        for _, _, buffer, version in self._untouched:
            if version_of(buffer) != version:
                raise modified_error(buffer.shape, version, version_of(buffer))
        for _, tensor, version in self._tensors:
            if version_of(tensor) != version:
                raise modified_error(tensor.shape, version, version_of(tensor))
        tables: list[dict[str, Any]] = [
            table
            for m in self._modules
            for table in (m._buffers, m._parameters, m._modules)  # type: ignore[list-item]
        ]
        now = [(table, table.copy()) for table in tables if table]
        for m, children in self._children:
            m._modules.update(children)
        for m, name, p, _, _ in self._parameters:
            # Parameters are a sharded unit's to replace: where it has gathered or freed them since, others are right.
            present = m._parameters.get(name)
            if present is not p and is_traceable_wrapper_subclass(present) == is_traceable_wrapper_subclass(p):
                m._parameters[name] = p
        for m, name, copy in self._updated:
            m._buffers[name] = copy.clone()
        for m, name, buffer, _ in self._untouched:
            m._buffers[name] = buffer
        back = self._generators.put()
        try:
            with self._attributes.restored():
                yield
        finally:
            back()
            for table, former in now:
                table.update(former)


def _modules(module: nn.Module) -> list[nn.Module]:
    """`module` and what lies below it, each once: `module.modules()` in a fraction of its time."""
    found = [module]
    known = {id(module)}
    for m in found:
        for child in m._modules.values():
            if child is not None and id(child) not in known:
                known.add(id(child))
                found.append(child)
    return found


def _storages(parameter: torch.Tensor) -> Any:
    """Where a parameter's values are; weak references, which are equal for one storage that is alive and no others."""
    if type(parameter) is nn.Parameter:
        return weakref.ref(parameter.untyped_storage())
    return [weakref.ref(storage) for storage in storages_of(parameter)]
