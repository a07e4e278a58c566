"""Restore a model, and every random generator, to an earlier state."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptplan.distributed import without_communication
from ckptplan.state.cells import Snapshot
from ckptplan.state.code import hooks_of, kept_read
from ckptplan.state.generators import Generators, reseed
from ckptplan.state.process import Hooks, Leaves, Switches
from ckptplan.tensors.accelerator import keep_generators
from ckptplan.tensors.modules import below
from ckptplan.tensors.private import disable_current_modes, is_fake, is_traceable_wrapper_subclass
from ckptplan.tensors.storages import is_away, local_part
from ckptplan.tensors.views import Memory


def random_state(generators: Collection[Any] = ()) -> Callable[[], None]:
    """Record the states of random generators; return a function that restores them.

    These are PyTorch's (CPU and CUDA), Python's and numpy's global generators, and the given ones.
    """
    torch_state = torch.get_rng_state()
    put_accelerators = keep_generators()
    others = Generators(generators)

    def restore() -> None:
        torch.set_rng_state(torch_state)
        put_accelerators()
        others.put()

    return restore


def data_state(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Record the memory of tensors; return a function that gives it back to those that have other memory by then.

    A momentum encoder as published gives its parameters other memory in forward (`p.data = 0.9 * p.data + ...`).
    """
    own = {id(t): t for t in map(local_part, tensors) if not is_traceable_wrapper_subclass(t)}
    saved = [(tensor, Memory.of(tensor)) for tensor in own.values() if not is_fake(tensor)]

    def restore() -> None:
        for tensor, memory in saved:
            if not memory.is_of(tensor):
                tensor.data = memory.tensor()

    return restore


def tensor_state(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Copy the values of tensors to the host; return a function that restores them, with the memory they had.

    Versions are as before, too: a graph from before, such as that of a forward behind which a plan is made, may have
    saved the tensors, and runs backward with the values that it saved.
    """
    tensors = list(tensors)
    memory = data_state(tensors)
    saved = [
        (tensor, tensor.detach().to("cpu", copy=True))
        for tensor in {id(t): t for t in tensors}.values()
        if not tensor.is_meta and not is_fake(tensor)
    ]
    counted = tuple(tensor for tensor, _ in saved if not tensor.is_inference())
    versions = torch.autograd._unsafe_preserve_version_counter(counted)  # type: ignore[attr-defined]

    def restore() -> None:
        memory()
        with torch.no_grad():
            for tensor, value in saved:
                if not is_away(tensor) and not _equal(tensor.cpu(), value):  # one that is away has its values
                    tensor.copy_(value)
        versions.__exit__()

    return restore


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return a.shape == b.shape and torch.equal(a, b)


@contextlib.contextmanager
def kept(
    model: nn.Module, others: Iterable[Any] = (), *, graphs: bool = False
) -> Iterator[tuple[Snapshot, Callable[[], None]]]:
    """Restore everything but tensors' values at the end of the context: forward may change it inside.

    This includes attributes, containers, tables of parameters and submodules, hooks, flags, modes and globals.

    Parameters
    ----------
    others : iterable
        Further objects whose contents are restored.
    graphs : bool
        As for `Snapshot`.

    Yields
    ------
    Snapshot
        The state at the start.
    callable
        Restores tables, modules' hooks, flags and modes before the end. Forwards stay, since a plan may have been
        applied inside.
    """
    others = [*others, *hooks_of(model)]
    found = Snapshot(below(model), others, deep=True, graphs=graphs)
    put_read = kept_read([*found.modules, *others], graphs=graphs)
    switches, leaves, hooks = Switches(), Leaves(found.modules), Hooks(found.modules)
    # A put takes as long as the search, so there is none at the start where it would change nothing.
    ends: list[Callable[[], Any]] = [found.put(), found.put] if found.differs else [found.restore]

    def put() -> None:
        switches.put()
        hooks.put_tables()
        leaves.put()
        put_read()

    with contextlib.ExitStack() as stack:
        for undo in (*ends, hooks.put, put):  # the last runs first, and each even if others fail
            stack.callback(undo)
        yield found, put


@contextlib.contextmanager
def beside(model: nn.Module, others: Iterable[Any] = (), *, graphs: bool = False) -> Iterator[Snapshot]:
    """Restore random generators as well as everything that `kept` does: for an extra run of forward within a step."""
    with kept(model, others, graphs=graphs) as (found, _):
        generators = random_state(found.generators)
        try:
            yield found
        finally:
            generators()


def _tables(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [optimizer.state, *optimizer.state.values(), *optimizer.param_groups]


def optimizer_tables(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores what an optimizer's state and groups refer to, but not the tensors' values."""
    copies = [(table, dict(table)) for table in _tables(optimizer)]

    def restore() -> None:
        for table, contents in copies:
            table.clear()
            table.update(contents)

    return restore


@contextlib.contextmanager
def _stepped() -> Iterator[Callable[[], None]]:
    """Restore optimizers that step inside, called by hooks on gradients for example, and their parameters.

    Yields
    ------
    callable
        Restores them before the end, to their state before their first step.
    """
    found: dict[int, tuple[torch.optim.Optimizer, Callable[[], None], Callable[[], None]]] = {}

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        traced = any(is_fake(p) for group in optimizer.param_groups for p in group["params"])
        if id(optimizer) not in found and not traced:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            held = [v for table in _tables(optimizer) for v in table.values() if isinstance(v, torch.Tensor)]
            with disable_current_modes():  # an optimizer made before has real parameters, also while a step is traced
                found[id(optimizer)] = optimizer, optimizer_tables(optimizer), tensor_state([*parameters, *held])

    def put() -> None:
        for _, tables, values in found.values():
            tables()
            values()

    hook = register_optimizer_step_pre_hook(note)
    try:
        yield put
    finally:
        hook.remove()
        put()


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; of a sparse one, those of the dense tensor like it."""
    return tensor.numel() * tensor.element_size()


_LARGE_BYTES = 16 << 20  # copies of smaller tensors take no time to speak of

_ONE_AT_A_TIME = threading.RLock()
"""Held by `restored`: global hooks, kernels, PyTorch's profiler and random generators belong to the whole process."""


@contextlib.contextmanager
def restored(model: nn.Module, others: Iterable[Any] = (), *, runs: bool = True) -> Iterator[Callable[..., None]]:
    """Restore everything that `kept` does, and gradients, buffers and random states, whatever happens inside.

    Optimizers that step inside are restored, too, and the memory of parameters that get other data, but not the values
    of parameters that forward writes to (`ParameterState`).
    Replicated and sharded models don't communicate inside.
    Autograd is on inside. Only one thread may be inside; a second one waits until the first has left.

    Parameters
    ----------
    runs : bool
        Forward runs on real tensors inside. If it doesn't, large floating tensors aren't copied: fake ones take their
        places, and a real run for answers puts back what it writes to.

    Yields
    ------
    callable
        Rewinds buffers, attributes, flags, modes and random states to the start and drops gradients, so that every run
        starts alike. Given a number, it seeds the generators with it instead.
    """
    with (
        _ONE_AT_A_TIME, warnings.catch_warnings(), _collecting(), torch.inference_mode(False), torch.enable_grad(),
        without_communication(model), kept(model, others) as (found, put), _stepped() as put_optimizers,
    ):  # fmt: skip
        parameters = [p for m in found.modules for p in m._parameters.values() if p is not None]
        gradients = [(p, p.grad) for p in parameters if p.is_leaf]
        buffers = [buffer for m in found.modules for buffer in m._buffers.values() if buffer is not None]
        met = [t for _, t in found.tensors]
        tensors = [*buffers, *(t for t in met if not isinstance(t, nn.Parameter))]
        memory = data_state([*parameters, *buffers, *met])
        values = tensor_state(t for t in tensors if runs or not t.is_floating_point() or _size(t) < _LARGE_BYTES)
        generators = random_state(found.generators)

        def rewind(seed: int | None = None) -> None:
            for p, _ in gradients:
                p.grad = None
            put()
            put_optimizers()
            memory()
            values()
            generators()
            found.put()
            if seed is not None:
                reseed(found.generators, seed)

        def restore_gradients() -> None:
            for p, gradient in gradients:
                p.grad = gradient

        with contextlib.ExitStack() as stack:
            for undo in (restore_gradients, generators, values, memory, put):  # the last one runs first
                stack.callback(undo)
            yield rewind


@contextlib.contextmanager
def _collecting() -> Iterator[None]:
    """Restore whether the cyclic garbage collector is enabled at the end of the context."""
    enabled = gc.isenabled()
    try:
        yield
    finally:
        (gc.enable if enabled else gc.disable)()
