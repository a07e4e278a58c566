"""Repeatable calls of stages: a recompute gets the same inputs and state as forward, and changes no state itself."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.plan import Decision
from ckptplan.runtime.guard.digests import undisturbed
from ckptplan.runtime.guard.paths import Paths
from ckptplan.runtime.guard.spots import Sinks
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.observe.meter import KINDS, RECOMPUTE
from ckptplan.runtime.recompute.module_tables import ModuleTables
from ckptplan.state.cells import Snapshot, Tables, alone
from ckptplan.state.generators import Generators
from ckptplan.state.put_back import Steps, enter, put_back
from ckptplan.state.surroundings import Surroundings
from ckptplan.tensors.modules import below
from ckptplan.tensors.private import FakeTensor, NormBase, is_traceable_wrapper_subclass
from ckptplan.tensors.storages import storages_of
from ckptplan.tensors.views import Geometry, modified_error, version_of, whole_storage

_LEAVES = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, type(None), torch.dtype, torch.device})
"""Types of arguments that contain no further values."""


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage of a model, the decision on it, and where its runs are counted.

    Parameters
    ----------
    module : nn.Module
    choice : Decision
    device : torch.device
        The device on which the plan runs: its random generator is restored wherever the arguments are.
    counters : Counters
        Count the stage's runs.
    index : int
        The stage's position in the plan.
    name : str
        Its name, for messages.
    planned_bytes : sequence of int, optional
        Planned bytes of each storage that it saves, in order; None: not known.
    paths : Paths, optional
        Notes what it saves on other paths than the profiled one.
    sinks : Sinks, optional
        Which of the tensors that it saves are compared in each pass.
    """

    module: nn.Module
    choice: Decision
    device: torch.device
    counters: Counters
    index: int = 0
    name: str = ""
    planned_bytes: Sequence[int] | None = None
    paths: Paths | None = None
    sinks: Sinks = field(default_factory=Sinks)


class NotRepeatableError(UnsupportedModelError):
    """A call that can't run again, found before its first run."""


class Call:
    """A call of a stage that can be repeated: its arguments without the tensors, and the state that it ran with.

    The tensors are passed at each run, so that the owner of the call decides how they are held.

    Parameters
    ----------
    stage : PlannedStage
    original : callable
        The forward of the stage's module, without the plan.
    whole : callable, optional
        Returns a context in which the module has all of its parameters, for runs outside of its own backward.

    Attributes
    ----------
    others : list
        The arguments, and values in containers among them, that are neither tensors nor of the types `_LEAVES`.
    """

    def __init__(
        self,
        stage: PlannedStage,
        original: Callable[..., Any],
        whole: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        self.stage = stage
        self._module, self._original = stage.module, original
        self._counters, self._device, self._index = stage.counters, stage.device, stage.index
        self._whole = whole
        self._rest: list[Any] = []
        self._where: list[tuple[int, ...]] = []
        self._form: pytree.TreeSpec | tuple[int, tuple[str, ...]] | None = None
        self._surroundings: Surroundings | None = None
        self._state: _State | None = None
        self._caches = 0  # number of `parametrize.cached()` contexts around the call
        self._tables: ModuleTables | None = None
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.others: list[Any] = []
        self._containers: set[int] = set()
        self._named: list[tuple[int, dict[str, Any]]] = []

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Store the arguments without the tensors in them, and return these tensors in order, each once.

        A tensor that is given twice is also one object in a recompute, since a stage may test whether two arguments are
        the same, as attention does (`query is key`).

        Raises
        ------
        NotRepeatableError
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
                raise NotRepeatableError(
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
        """Run the stage on `tensors`, in the order of `split`.

        The first run finds the state as it is and records it; later runs restore the recorded state and undo their own
        changes.

        Raises
        ------
        NotRepeatableError
            If the first run would use state that can't be restored.
        UnsupportedModelError
            If it has written to a tensor attribute.
        """
        if self._first is not None:
            # The first run gets the caller's own lists and dictionaries, since the stage may add to them.
            (args, kwargs), self._first = self._first, None
            self._surroundings = Surroundings(self._device, tensors)
            modules = below(self._module)
            self._tables = ModuleTables(modules, tensors)
            del tensors
            self._caches = parametrize._cache_enabled
            if self._caches and cached_weights(self._module):
                raise NotRepeatableError(
                    f"a {type(self._module).__name__} that is to run again takes parametrized weights that "
                    "parametrize.cached() has kept from an earlier call, and would compute them again; enter cached() "
                    "for each forward separately, or keep or swap this stage"
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
            return self._surroundings.variables.run(self._original, *args, **kwargs)
        finally:
            put_back(undo)

    def _arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with `tensors` in their places."""
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
        state = _State(modules, self.others)
        if not self._containers.isdisjoint(state.cells):
            raise NotRepeatableError(
                f"a {type(self._module).__name__} that is to run again gets a container which is also one of its "
                "attributes, and whose contents can't be restored for that run; pass it a copy, or keep this stage"
            )
        self._counters.runs[self._index] += 1
        result = self._original(*args, **kwargs)
        state.forward_done()
        assert self._surroundings is not None
        self._surroundings.variables.forward_done()
        self._state = state
        self._counters.copied_bytes[self._index] = state.copied_bytes
        return result


def _containers(values: Iterable[Any]) -> Iterator[int]:
    """Yield the identities of lists, dictionaries and deques among arguments, which a recompute gets as new objects."""
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
    """Set the number of entered `parametrize.cached()` contexts, with an empty cache; `undo` restores both."""
    undo.append(functools.partial(_set_caches, parametrize._cache_enabled, parametrize._cache))
    _set_caches(caches, {})


@contextlib.contextmanager
def caching(caches: int) -> Iterator[None]:
    """Act like `caches` nested `parametrize.cached()` contexts with an empty cache; like none if it is 0."""
    undo: Steps = []
    _cache_anew(caches, undo)
    try:
        yield
    finally:
        put_back(undo)


def _set_caches(caches: int, cache: dict[Any, Any]) -> None:
    parametrize._cache_enabled, parametrize._cache = caches, cache


def shares_containers(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a list, dictionary or deque is both an argument of a stage and part of the stage's own state."""
    given = set(_containers((*args, *kwargs.values())))
    return bool(given) and not given.isdisjoint(Snapshot(below(module)).cells)


class _State:
    """State that a stage's forward reads besides its inputs: parameters, buffers, attributes, random generators.

    Constructed before the first run, which ends with `forward_done`; `put` restores the state for a recompute.

    Parameters
    ----------
    modules : list of nn.Module
        The stage and all its submodules, as `below` returns them.
    arguments : iterable
        The stage's arguments that aren't tensors: generators among them are restored.
    """

    def __init__(self, modules: list[nn.Module], arguments: Iterable[Any] = ()) -> None:
        self._writes = _writes(modules[0])
        self._cells = Snapshot(modules, arguments)
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
        # All buffers are copied, since only after forward is it known which it updates; the other copies go then.
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
        """Identities of the containers that are attributes of the stage's modules."""
        return self._cells.cells

    def forward_done(self) -> None:
        """Find the buffers that the forward updated (running statistics, load counters); drop the others' copies.

        Raises
        ------
        UnsupportedModelError
            If the forward wrote to a tensor attribute that isn't a buffer.
        """
        updated: set[int] = set()  # storages
        for m, name, buffer, version in self._before:
            # Batch norm's kernels update running statistics without raising the version.
            if (
                m._buffers.get(name) is not buffer
                or version_of(buffer) != version
                or isinstance(m, NormBase)
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
        """Whether a forward was seen to write to a buffer without raising its version, for example through `.data`."""
        known = self._writes.buffers.get(m, ())
        compared = self._writes.compared or buffer.is_cpu  # elsewhere the host would have to wait
        if name in known or not compared or type(buffer) is FakeTensor or buffer.is_meta:
            return name in known
        if buffer.layout is not torch.strided:
            return False
        with undisturbed():  # while a step is traced, small constants are no fake tensors
            if torch.equal(self._copies[id(buffer)], buffer):
                return False
        self._writes.buffers.setdefault(m, set()).add(name)
        return True

    @property
    def copied_bytes(self) -> tuple[int, ...]:
        """Bytes of each copy of a buffer that the forward updates."""
        storages = {_storage_key(copy): copy for copy in self._copies.values()}
        return tuple(_nbytes(copy) for copy in storages.values())

    def put(self, undo: Steps) -> None:
        """Restore the state that the forward found, and append steps to `undo` that restore the present state.

        Updates that the recompute makes to this state are dropped. In place of updated buffers the module gets copies;
        the originals aren't written to, since graphs may hold them. Parameters that were replaced since forward are put
        back during the recompute.

        Raises
        ------
        RuntimeError
            If a parameter, or a buffer or attribute that the forward only read, was written to since: the recompute
            would give another result.
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
            # A sharded unit replaces its parameters: if it gathered or freed them since, the present ones are right.
            present = m._parameters.get(name)
            if present is not p and is_traceable_wrapper_subclass(present) == is_traceable_wrapper_subclass(p):
                undo.append(functools.partial(m._parameters.__setitem__, name, present))
                m._parameters[name] = p


@dataclass(slots=True)
class _Writes:
    """Buffers that a stage's forward was seen to write to without a new version; lives as long as the stage's module.

    Attributes
    ----------
    calls : int
        Calls so far.
    buffers : mapping
        Module -> names of these buffers.
    """

    calls: int = 0
    buffers: weakref.WeakKeyDictionary[nn.Module, set[str]] = field(default_factory=weakref.WeakKeyDictionary)

    @property
    def compared(self) -> bool:
        """Whether values are compared in this call on any device: in the first three, and every hundredth."""
        return self.calls <= 3 or not self.calls % 100


_WRITES: weakref.WeakKeyDictionary[nn.Module, _Writes] = weakref.WeakKeyDictionary()


def _writes(stage: nn.Module) -> _Writes:
    """Return the record of a stage's module, and count this call."""
    found = _WRITES.setdefault(stage, _Writes())
    found.calls += 1
    return found


def _storage_key(tensor: torch.Tensor) -> int:
    """Return a key of the tensor's storage, valid while it is alive; of the tensor itself if it isn't strided."""
    if tensor.layout is torch.strided and (type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor)):
        return tensor.untyped_storage()._cdata
    return id(tensor)


def _nbytes(tensor: torch.Tensor) -> int:
    return sum(storage.nbytes() for storage in storages_of(tensor))


def _copies(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return copies by the identity of the original; copies of tensors that share a storage share one, too."""
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
    """Return copies of `copies` with the same keys."""
    if not copies:
        return {}
    again = _copies(copies.values())
    return {key: again[id(copy)] for key, copy in copies.items()}


def _mark(parameter: torch.Tensor) -> tuple[int, Any]:
    """Return a parameter's version and weak references to its storages.

    Two such references are equal only if they refer to the same storage and it is still alive.
    """
    version = 0 if parameter.is_inference() else parameter._version
    if type(parameter) is nn.Parameter:
        return version, weakref.ref(parameter.untyped_storage())
    return version, [weakref.ref(storage) for storage in storages_of(parameter)]


def _other_parameter(m: nn.Module, name: str, p: torch.Tensor, mark: tuple[int, Any]) -> RuntimeError:
    """Return the error for a parameter whose version or storage differs from `mark`."""
    if version_of(p) != mark[0]:
        return modified_error(
            p.shape,
            mark[0],
            version_of(p),
            f". It is parameter {name!r} of a {type(m).__name__}, which backward runs again: step the "
            "optimizer after backward has ended, not in its hooks, or keep or swap this stage",
        )
    return RuntimeError(
        f"the data of parameter {name!r} {list(p.shape)} was replaced between forward and backward, which "
        "runs this stage again with it: the gradient would be wrong; write to .data between steps only"
    )
