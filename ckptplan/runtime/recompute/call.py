"""Recompute: a stage's call that can be made again, its inputs all visible, its buffers updated once."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.runtime.observe.meter import KINDS, RECOMPUTE
from ckptplan.runtime.recompute.put_back import Steps, enter, put_back
from ckptplan.runtime.state.cells import Snapshot, Tables, alone, below, changing
from ckptplan.runtime.state.code import read_by
from ckptplan.runtime.state.generators import Generators
from ckptplan.runtime.state.module_tables import ModuleTables
from ckptplan.runtime.state.surroundings import Surroundings
from ckptplan.runtime.swap.own import storages_of
from ckptplan.runtime.swap.session import Counters, Geometry, modified_error, version_of, whole_storage

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
    whole : callable, optional
        A context in which the module's parameters are all there, for runs outside of its own backward.

    Attributes
    ----------
    others : list
        Objects among its arguments that aren't tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        counters: Counters,
        device: torch.device,
        index: int = 0,
        whole: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        self._module, self._original = module, original
        self._counters, self._device, self._index = counters, device, index
        self._whole = whole
        self._rest: list[Any] = []
        self._where: list[tuple[int, ...]] = []
        self._form: pytree.TreeSpec | tuple[int, tuple[str, ...]] | None = None
        self._surroundings: Surroundings | None = None
        self._state: _State | None = None
        self._caches = 0  # how many `parametrize.cached()` are around it
        self._tables: ModuleTables | None = None
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.others: list[Any] = []
        self._containers: set[int] = set()
        self._named: list[tuple[int, dict[str, Any]]] = []

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
            self.others = [leaf for leaf in leaves if type(leaf) not in _LEAVES and not isinstance(leaf, torch.Tensor)]
            self._containers = set(_containers((*args, *kwargs.values())))
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
        self._named = [
            (i, {name: alone(value) for name, value in vars(t).items()})
            for i, t in enumerate(tensors)
            if type(t) is torch.Tensor and vars(t)
        ]
        self._rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tensors

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run the stage on `tensors`, in the order of `split`: the first time as it is, then as it was."""
        if self._first is not None:
            # The caller's own lists and dictionaries, since the stage may add to them.
            (args, kwargs), self._first = self._first, None
            self._surroundings = Surroundings(self._device, tensors)
            modules = below(self._module)
            self._tables = ModuleTables(modules, tensors)
            del tensors
            self._caches = parametrize._cache_enabled
            if self._caches and cached_weights(self._module):
                raise UnsupportedModelError(
                    f"a {type(self._module).__name__} that is to run again takes parametrized weights that "
                    "parametrize.cached() has kept from an earlier call, and would make them anew; enter cached() for "
                    "each forward by itself, or keep or swap this stage"
                )
            return self._run_first(modules, args, kwargs)
        assert self._surroundings is not None
        assert self._tables is not None
        assert self._state is not None
        self._counters.runs[self._index] += 1
        self._counters.recomputed_stages += 1
        meter = self._counters.meter
        undo: Steps = [functools.partial(meter.mark, meter.mark(self._index * KINDS + RECOMPUTE))]
        try:
            self._surroundings.put(undo, tensors)
            if self._whole is not None:
                enter(self._whole(), undo)
            self._state.put(undo)
            self._tables.put(undo)
            _cache_anew(self._caches, undo)
            args, kwargs = self._arguments(tensors)
            del tensors
            return self._surroundings.run(self._original, *args, **kwargs)
        finally:
            put_back(undo)

    def _arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `tensors` in their places."""
        for i, attributes in self._named:
            vars(tensors[i]).update(attributes)
        leaves = list(self._rest)
        for same, tensor in zip(self._where, tensors, strict=True):
            for i in same:
                leaves[i] = tensor
        if isinstance(self._form, tuple):
            count, names = self._form
            return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))
        assert self._form is not None
        args, kwargs = pytree.tree_unflatten(leaves, self._form)
        return args, kwargs

    def _run_first(self, modules: list[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._counters.runs[self._index] += 1
        state = _State(modules, self.others)
        if not self._containers.isdisjoint(state.cells):
            raise UnsupportedModelError(
                f"a {type(self._module).__name__} that is to run again gets a container which is also one of its "
                "attributes, and which it couldn't be given again as it was; pass it a copy, or keep this stage"
            )
        result = self._original(*args, **kwargs)
        state.forward_done()
        self._state = state
        self._counters.copied_bytes[self._index] = state.copied_bytes
        return result


def _containers(values: Iterable[Any]) -> Iterator[int]:
    """Identities of the lists, dictionaries and the like among arguments, which are made anew for another run."""
    for value in values:
        if isinstance(value, (list, dict, collections.deque)):
            yield id(value)
        if isinstance(value, (list, tuple, dict, collections.deque)):
            yield from _containers(value.values() if isinstance(value, dict) else value)


def cached_weights(module: nn.Module) -> bool:
    """Whether `parametrize.cached()` holds any of a module's parametrized tensors."""
    held = {key[0] for key, value in parametrize._cache.items() if value is not None}
    return bool(held) and any(id(m) in held for m in module.modules())


def _cache_anew(caches: int, undo: Steps) -> None:
    """Have as many `parametrize.cached()` entered, with an empty cache; none where it is 0."""
    undo.append(functools.partial(_set_caches, parametrize._cache_enabled, parametrize._cache))
    _set_caches(caches, {})


@contextlib.contextmanager
def caching(caches: int) -> Iterator[None]:
    """Inside, as many `parametrize.cached()` are entered, whose cache is empty."""
    undo: Steps = []
    _cache_anew(caches, undo)
    try:
        yield
    finally:
        put_back(undo)


def _set_caches(caches: int, cache: dict[Any, Any]) -> None:
    parametrize._cache_enabled, parametrize._cache = caches, cache


def shares_containers(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a list, a dictionary or the like is an argument of a stage and an attribute of it too."""
    given = set(_containers((*args, *kwargs.values())))
    return bool(given) and not given.isdisjoint(Snapshot(below(module), changing=changing(module)).cells)


class _State:
    """What a stage's forward reads besides its inputs: parameters, buffers, attributes, random generators.

    Parameters
    ----------
    modules : list of nn.Module
        The stage and all below it, as `below` gives them.
    arguments : iterable
        Objects among the stage's arguments that it may change.
    """

    def __init__(self, modules: list[nn.Module], arguments: Iterable[Any] = ()) -> None:
        self._changing = changing(modules[0])
        self._searches = self._changing.searches(modules)
        read = read_by(modules)[2] if self._searches else ()
        self._cells = Snapshot(modules, arguments, self._changing, self._searches, read=read)
        modules = self._cells.modules
        self._tables = Tables(modules)
        self._generators = Generators(self._cells.generators)
        self._parameters = [
            (m, name, p, _mark(p))
            for m in modules
            if m._parameters
            for name, p in m._parameters.items()
            if p is not None
        ]
        self._counts = [(m, len(m._parameters)) for m in modules]
        # Copies, since only after the forward is it known which buffers it updates; the others' go at once then.
        self._before = [
            (m, name, buffer, version_of(buffer))
            for m in modules
            if m._buffers
            for name, buffer in m._buffers.items()
            if buffer is not None
        ]
        self._copies = _copies([buffer for _, _, buffer, _ in self._before])
        own = {id(buffer) for _, _, buffer, _ in self._before}
        self._tensors = [(name, t, version_of(t)) for name, t in self._cells.tensors if id(t) not in own]
        self._untouched: list[tuple[torch.Tensor, int]] = []

    @property
    def cells(self) -> set[int]:
        """Identities of the containers and objects that the stage's modules and arguments lead to."""
        return self._cells.cells

    def forward_done(self) -> None:
        """Tell the buffers that the forward updated (running statistics, load counters) from the others."""
        if self._searches:
            self._cells.note_changes()
        updated: set[int] = set()  # storages
        for m, name, buffer, version in self._before:
            # Batch norm's kernels update running statistics without a new version.
            if (
                m._buffers.get(name) is not buffer
                or version_of(buffer) != version
                or isinstance(m, _NormBase)
                or self._was_seen_written(m, name, buffer)
            ):
                updated.add(_storage_key(buffer))
        for _, _, buffer, version in self._before:
            if _storage_key(buffer) not in updated:
                self._untouched.append((buffer, version))
                self._copies.pop(id(buffer), None)
        self._before = []
        self._generators.settle()
        for name, tensor, version in self._tensors:
            if version_of(tensor) != version:
                raise UnsupportedModelError(
                    f"a stage that is to run again writes to its tensor attribute {name!r}, of which no copy is "
                    "kept; register it as a buffer, or keep this stage"
                )

    def _was_seen_written(self, m: nn.Module, name: str, buffer: torch.Tensor) -> bool:
        """Whether a forward has been seen to write to a buffer without a new version: through `.data`, say."""
        known = self._changing.buffers.get(m, ())
        if name in known or not self._searches or type(buffer) is FakeTensor or buffer.is_meta:
            return name in known
        copy = self._copies[id(buffer)]
        if buffer.layout is not torch.strided or torch.equal(copy, buffer):
            return False
        self._changing.buffers.setdefault(m, set()).add(name)
        return True

    @property
    def copied_bytes(self) -> tuple[int, ...]:
        """Sizes of the copies of buffers that the forward updates."""
        storages = {_storage_key(copy): copy for copy in self._copies.values()}
        return tuple(_nbytes(copy) for copy in storages.values())

    def put(self, undo: Steps) -> None:
        """The state as the forward found it; what the recompute updates in it is dropped.

        Copies take the place of updated buffers, rather than the originals being written, since graphs may hold those.
        Parameters that were replaced since are back meanwhile.

        Raises
        ------
        RuntimeError
            If a parameter, or a buffer or an attribute that the forward only read, was written to since: the recompute
            would differ.
        """
        for m, name, p, mark in self._parameters:
            if _mark(p) != mark:
                raise _other_parameter(m, name, p, mark)
        for buffer, version in self._untouched:
            if version_of(buffer) != version:
                raise modified_error(buffer.shape, version, version_of(buffer))
        for _, tensor, version in self._tensors:
            if version_of(tensor) != version:
                raise modified_error(tensor.shape, version, version_of(tensor))
        instead = _cloned(self._copies)
        undo.append(self._tables.put(instead))
        self._put_parameters(undo)
        undo.append(self._generators.put())
        undo.append(self._cells.put(instead))

    def _put_parameters(self, undo: Steps) -> None:
        for m, count in self._counts:
            if len(m._parameters) > count:  # the forward has registered more
                for name in list(m._parameters)[count:]:
                    undo.append(functools.partial(m._parameters.__setitem__, name, m._parameters.pop(name)))
        for m, name, p, _ in self._parameters:
            # Parameters are a sharded unit's to replace: where it has gathered or freed them since, others are right.
            present = m._parameters.get(name)
            if present is not p and is_traceable_wrapper_subclass(present) == is_traceable_wrapper_subclass(p):
                undo.append(functools.partial(m._parameters.__setitem__, name, present))
                m._parameters[name] = p


def _storage_key(tensor: torch.Tensor) -> int:
    """A tensor's storage, as long as it is alive; the tensor itself where it has none of its own."""
    if tensor.layout is torch.strided and (type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor)):
        return tensor.untyped_storage()._cdata
    return id(tensor)


def _nbytes(tensor: torch.Tensor) -> int:
    return sum(storage.nbytes() for storage in storages_of(tensor))


def _copies(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies by the identity of the original; those that share memory go on sharing it."""
    sharing: dict[int, list[torch.Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        sharing.setdefault(_storage_key(tensor), []).append(tensor)
    found: dict[int, torch.Tensor] = {}
    for same in sharing.values():
        if len(same) == 1:
            found[id(same[0])] = same[0].detach().clone()
            continue
        whole = whole_storage(same[0]).clone()
        found.update((id(tensor), Geometry.of(tensor).on(whole)) for tensor in same)
    return found


def _cloned(copies: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """`copies` anew, by the same keys."""
    if not copies:
        return {}
    again = _copies(copies.values())
    return {key: again[id(copy)] for key, copy in copies.items()}


def _mark(parameter: torch.Tensor) -> tuple[int, Any]:
    """A parameter's version and where its values are.

    Weak references are equal for one storage that is alive, and for no others.
    """
    version = 0 if parameter.is_inference() else parameter._version
    if type(parameter) is nn.Parameter:
        return version, weakref.ref(parameter.untyped_storage())
    return version, [weakref.ref(storage) for storage in storages_of(parameter)]


def _other_parameter(m: nn.Module, name: str, p: torch.Tensor, mark: tuple[int, Any]) -> RuntimeError:
    """What to raise for a parameter that is no longer as `mark` has it."""
    if version_of(p) != mark[0]:
        return modified_error(
            p.shape,
            mark[0],
            version_of(p),
            f". It is parameter {name!r} of a {type(m).__name__}, which backward runs again: step the "
            "optimizer when the backward is over, not in its hooks, or keep or swap this stage",
        )
    return RuntimeError(
        f"the data of parameter {name!r} {list(p.shape)} was replaced between forward and backward, which "
        "runs this stage again with it: the gradient would be another; write to .data between steps"
    )
