"""Compiled modules: noted once on the device, then played without memory.

Compiled code fuses operations and doesn't run on fake tensors, so a trace can't look inside. To the trace a call of a
compiled module is one operation: it makes its outputs and what it saves, and one backward.

NOTE [Compiled calls]

1. The step runs for real once, saving nothing. Each distinct call of a compiled module (same module, sizes, data types,
   gradients wanted) is made twice more on the spot, on the inputs that it got: once to see what its outputs, saved
   tensors and gradients are, with everything held so that no address is used twice; once to measure its peaks.
2. A tensor is noted by the storage that it lies in (an input's, the model's own, the call's n-th new one) and how.
3. In a replay the call makes the new storages and for a moment a block that lifts the level to the measured peak.
   It saves the same tensors in the same order, so positions in a plan mean the same as in the real run.
4. Its backward asks for all saved tensors at once, as compiled code does, lifts the level by what was measured above
   the start of the real one, and only then drops what was saved and makes the gradients. A gradient that it is given
   with other strides than its output has is copied first, and one that others hold can't be dropped midway. Where
   others hold an output, as the program does the model's own, what counts was measured with the outputs held.
5. What compiled code holds past autograd's saved tensors counts as one more block, which no hook sees.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.profiling.values.answers import VALUES_LIMIT, Layout
from ckptplan.runtime.observe.measure import no_cycles_collected, recorded_allocations, tensors_in
from ckptplan.runtime.patching import PatchedForward, installed
from ckptplan.runtime.state.compiled import compiled_modules, out_of_sight
from ckptplan.runtime.state.restore import random_state
from ckptplan.runtime.step import TrainingStep

if TYPE_CHECKING:
    from ckptplan.profiling.bytes.fake import FakeWorld
    from ckptplan.profiling.target import Target

Origin = Literal["input", "own", "new", "gradient"]


@dataclass(frozen=True, slots=True)
class Lies:
    """A tensor without its values: in which storage it lies, and how.

    Attributes
    ----------
    origin : str
        "input": the call's; "own": the module's parameter or buffer; "new": made by the call; "gradient": what backward
        is given.
    number : int
        Which of these; of gradients, the leaf of the output that it belongs to.
    """

    origin: Origin
    number: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Noted:
    """What one call of a compiled module does (NOTE [Compiled calls]).

    Attributes
    ----------
    kind : str
        Equal for calls that do the same and take the same time.
    new : tuple of Layout
        Per storage that forward makes, how the first tensor on it lies.
    outputs : tuple
        Per leaf of the output: `Lies` with whether it needs gradients, or the value itself.
    spec : TreeSpec
    saved : tuple of Lies
        What autograd saves, in order.
    hidden_bytes : int
        Held after forward besides outputs and saved tensors.
    forward_bytes, backward_bytes : int
        Most bytes above what is there when the direction begins; in backward that includes what was saved.
    backward_held_bytes : int
        The latter while others hold the outputs.
    updated, replaced : tuple of str
        Buffers that forward writes to, and those in whose place it puts others.
    made : tuple of Layout
        Storages that backward makes.
    gradients : tuple of Lies or None
        Per tensor that may need one: the inputs, then the module's parameters. "new" are forward's storages here, and
        from len(new) on backward's.
    """

    kind: str
    new: tuple[Layout, ...]
    outputs: tuple[tuple[Lies, bool] | Any, ...]
    spec: pytree.TreeSpec
    saved: tuple[Lies, ...]
    hidden_bytes: int
    forward_bytes: int
    backward_bytes: int
    backward_held_bytes: int
    updated: tuple[str, ...]
    replaced: tuple[str, ...]
    made: tuple[Layout, ...]
    gradients: tuple[Lies | None, ...]


@dataclass
class _Storages:
    """Finds where tensors lie; keeps what it has met alive, so that addresses stay distinct."""

    known: dict[int, tuple[Origin, int]] = field(default_factory=dict)
    new: list[Layout] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)

    def add(self, origin: Origin, tensors: list[torch.Tensor]) -> None:
        for number, tensor in enumerate(tensors):
            self.known.setdefault(_address(tensor), (origin, number))

    def find(self, tensor: torch.Tensor) -> Lies:
        self.held.append(tensor.detach())
        layout = Layout.of(tensor)
        if _address(tensor) not in self.known:
            self.known[_address(tensor)] = ("new", len(self.new))
            self.new.append(layout)
        return Lies(*self.known[_address(tensor)], layout)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(layouts: tuple[Layout, ...]) -> int:
    return sum(layout.elements * layout.dtype.itemsize for layout in layouts)


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The distinct tensors in `tree`, in order."""
    return list({id(t): t for t in tensors_in(tree)}.values())


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str, torch.Tensor, int]]:
    return {
        f"{prefix}.{name}": (owner, name, buffer, buffer._version)
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    }


# --- the real run ---


def note_compiled(step: TrainingStep, target: Target) -> None:
    """Run `step` for real, saving nothing, and note into `target.answers` what its compiled modules do.

    Raises
    ------
    UnsupportedModelError
        If the device isn't here, or a compiled module does what can't be played.
    """
    found = compiled_modules(step.model)
    on_meta = any(t.is_meta for t in (*step.model.parameters(), *step.model.buffers(), *step.tensors()))
    if target.answers is None or target.spec is not None or on_meta:
        raise UnsupportedModelError(
            f"module {next(iter(found))!r} is compiled, and what compiled code takes is known only from running it; "
            "plan on the device where it is to run, or plan the uncompiled model"
        )
    noted = target.answers.compiled
    device = target.device

    def runner(name: str, module: nn.Module) -> Callable[..., Any]:
        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            key = _key(name, module, args, kwargs)
            if key not in noted:
                with _passed_through():
                    noted[key] = _note(name, module, original, args, kwargs, device, key)
            return original(*args, **kwargs)

        return run

    with (
        _patched(found, runner),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing),
    ):
        step.forward()


def _passed_through() -> Any:
    """Inside, autograd saves, whatever hooks are around."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class _StandIn(PatchedForward):
    """Below the patches of a plan, and no sign of one."""


@contextlib.contextmanager
def _patched(modules: dict[str, nn.Module], runner: Callable[[str, nn.Module], Callable[..., Any]]) -> Iterator[None]:
    _lone_owners()  # found now: inside a backward it would be in its own way
    with installed([_StandIn(module, runner(name, module)) for name, module in modules.items()]):
        yield


def _key(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Equal for calls that compiled code does the same way."""
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def told(leaf: Any) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
        if leaf is None or isinstance(leaf, (int, float, bool, str, torch.dtype)):
            return leaf
        kind: type = type(leaf)
        return kind

    kinds = [kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind)]
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return name, torch.is_grad_enabled(), module.training, autocast, spec, tuple(told(leaf) for leaf in leaves)


class _Given(torch.autograd.Function):
    """Ends a graph at what a stage returned; its backward makes the gradients, which nobody else holds then."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        ctx.device = tensors[0].device
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # As the outputs lie: a gradient that lies otherwise is copied first (rule 4).
        return tuple(torch.ones_like(t, device=ctx.device) for t in ctx.like)


class _Input(torch.autograd.Function):
    """A tensor without its graph and with a new one, fit to be modified in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Trial:
    """A call of a compiled module on inputs cut from their graphs."""

    def __init__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._original = original
        cut: dict[int, torch.Tensor] = {}

        def fresh(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in cut:
                if tensor.requires_grad:
                    anchor = torch.zeros((), device=tensor.device, requires_grad=True)
                    cut[id(tensor)] = _Input.apply(tensor.data, anchor)
                else:
                    cut[id(tensor)] = tensor.detach()
            return cut[id(tensor)]

        self.args, self.kwargs = pytree.tree_map_only(torch.Tensor, fresh, (args, kwargs))

    def __call__(self) -> Any:
        return self._original(*self.args, **self.kwargs)


def _note(
    name: str,
    module: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    key: Hashable,
) -> Noted:
    restore = random_state()
    trial = _Trial(original, args, kwargs)
    del args, kwargs
    noted = _described(name, module, trial)
    wanting = [*_tensors((trial.args, trial.kwargs)), *module.parameters()]
    measured, held = (_measured(trial, wanting, device, held=held) for held in (False, True))
    restore()
    values = [leaf for leaf in noted.outputs if isinstance(leaf, torch.Tensor)]
    explained_bytes = _bytes(noted.new) + sum(value.untyped_storage().nbytes() for value in values)
    noted = dataclasses.replace(
        noted,
        hidden_bytes=max(measured.forward_end - explained_bytes, 0),
        forward_bytes=measured.forward_peak,
        backward_bytes=measured.backward_peak,
        backward_held_bytes=max(held.backward_peak, measured.backward_peak),
    )
    return _with_kind(noted, module, key)


def _described(name: str, module: nn.Module, trial: _Trial) -> Noted:
    """What a call makes, saves and gives gradients to, its bytes left open."""
    inputs = _tensors((trial.args, trial.kwargs))
    wanting = [*inputs, *module.parameters()]
    buffers = _buffers(module)
    versions = [t._version for t in inputs]
    storages = _Storages()
    storages.add("input", inputs)
    storages.add("own", _own(module))
    saved: list[Lies] = []
    values: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(storages.find(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(out_of_sight(pack), lambda tensor: tensor):
        output = trial()
    if [t._version for t in inputs] != versions:
        raise UnsupportedModelError(
            f"compiled module {name!r} writes to its inputs, whose memory can't be planned; let it return a new "
            "tensor, or leave this module uncompiled"
        )
    leaves, spec = pytree.tree_flatten(output)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex()):
            if leaf.numel() > VALUES_LIMIT:
                raise UnsupportedModelError(
                    f"compiled module {name!r} returns {leaf.numel()} whole numbers; at most {VALUES_LIMIT} are kept; "
                    "leave this module uncompiled"
                )
            values[number] = leaf.detach().clone()
    outputs = tuple(
        values.get(n, (storages.find(leaf), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf)
        for n, leaf in enumerate(leaves)
    )
    now = _buffers(module)
    replaced = tuple(key for key, (_, _, buffer, _) in buffers.items() if now[key][2] is not buffer)
    updated = tuple(key for key, (_, _, b, version) in buffers.items() if key not in replaced and b._version != version)
    new = tuple(storages.new)
    differentiable = [t for t in _tensors(output) if t.requires_grad]
    gradients: list[Lies | None] = [None] * len(wanting)
    made: tuple[Layout, ...] = ()
    if differentiable:
        given = [torch.ones_like(t) for t in differentiable]
        first = {id(leaf): n for n, leaf in reversed(list(enumerate(leaves)))}
        for tensor, gradient in zip(differentiable, given, strict=True):
            storages.known[_address(gradient)] = ("gradient", first[id(tensor)])
        sought = [t for t in wanting if t.requires_grad]
        found = torch.autograd.grad(differentiable, sought, given, allow_unused=True)
        where = {id(t): None if g is None else storages.find(g) for t, g in zip(sought, found, strict=True)}
        gradients = [where.get(id(t)) for t in wanting]
        made = tuple(storages.new[len(new) :])
        del given, found, sought
    return Noted(
        kind="",
        new=new,
        outputs=outputs,
        spec=spec,
        saved=tuple(saved),
        hidden_bytes=0,
        forward_bytes=0,
        backward_bytes=0,
        backward_held_bytes=0,
        updated=updated,
        replaced=replaced,
        made=made,
        gradients=tuple(gradients),
    )


def _with_kind(noted: Noted, module: nn.Module, key: Any) -> Noted:
    parameters = [(tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()]
    what = (type(module).__qualname__, repr(module), parameters, key[1:], noted.saved, noted.gradients)
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return dataclasses.replace(noted, kind=digest)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Bytes above the level at the start of each direction."""

    forward_peak: int
    forward_end: int
    backward_peak: int


def _measured(trial: _Trial, wanting: list[torch.Tensor], device: torch.device, *, held: bool) -> _Measured:
    """Run forward and backward; `held`: what forward returned lives until the end."""
    meter = _Meter(device)
    alive: list[Any] = []

    def run() -> None:
        meter.mark()
        output = trial()
        meter.mark()
        differentiable = [t for t in _tensors(output) if t.requires_grad]
        if not differentiable:
            meter.mark()
            meter.mark()
            return
        nodes = {t.grad_fn for t in differentiable}
        begun: list[None] = []

        def begin(_: Any) -> None:
            if not begun:
                begun.append(None)
                meter.mark()

        for node in nodes:
            node.register_prehook(begin)  # type: ignore[union-attr]
        loss = _Given.apply(*differentiable)
        if held:
            alive.append(output)
        del differentiable, nodes, output
        gradients = torch.autograd.grad(loss, [t for t in wanting if t.requires_grad], allow_unused=True)
        meter.mark()
        del gradients
        alive.clear()

    forward, _, backward = meter.spans(run)
    return _Measured(forward[0], forward[1], backward[0])


class _Meter:
    """Live bytes between marks: by the allocator's events on the CPU, by its counters on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._levels: list[tuple[int, int]] = []
        self._count = 0

    def mark(self) -> None:
        """A span ends here and the next begins."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._levels.append(
                (torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device))
            )
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with record_function(f"ckptplan mark {self._count}"):
            self._count += 1

    def spans(self, run: Callable[[], None]) -> list[tuple[int, int]]:
        """Between the marks that `run` sets: the peak above each span's start, and the change to its end."""
        if self._device.type == "cuda":
            with no_cycles_collected():
                run()
            pairs = itertools.pairwise(self._levels)
            return [(peak - start, end - start) for (start, _), (end, peak) in pairs]
        events, marks = recorded_allocations(run)
        times = [marks[f"ckptplan mark {n}"][0] for n in range(self._count)]
        out = []
        for begin, end in itertools.pairwise(times):
            level = peak = 0
            for at, nbytes in events:
                if begin <= at < end:
                    level += nbytes
                    peak = max(peak, level)
            out.append((peak, level))
        return out


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, compiled modules run as ever under dispatch modes, which compiled code wouldn't heed or bear."""

    def runner(name: str, module: nn.Module) -> Callable[..., Any]:
        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with _disable_current_modes():
                return original(*args, **kwargs)

        return run

    with _patched(compiled_modules(model), runner):
        yield


# --- the replays ---


@contextlib.contextmanager
def compiled_as_noted(model: nn.Module, world: FakeWorld) -> Iterator[None]:
    """Inside, compiled modules do without memory what was noted of them."""

    def runner(name: str, module: nn.Module) -> Callable[..., Any]:
        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            noted = world.compiled_calls.get(_key(name, module, args, kwargs))
            if noted is None:
                raise UnsupportedModelError(
                    f"compiled module {name!r} is called on inputs that it didn't get when the step ran for real: the "
                    "step doesn't do the same each time it runs, or only on fake tensors; leave this module uncompiled"
                )
            return _play(noted, module, world, args, kwargs)

        return run

    with _patched(compiled_modules(model), runner):
        yield


def _play(noted: Noted, module: nn.Module, world: FakeWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = _tensors((args, kwargs))
    own = _own(module)
    world.runs_compiled(noted.kind)
    made = _Played.apply(noted, len(inputs), *inputs, *own)
    buffers = _buffers(module)
    for key in noted.updated:
        torch.autograd.graph.increment_version(buffers[key][2])
    for key in noted.replaced:
        owner, name, buffer, _ = buffers[key]
        owner._buffers[name] = buffer.detach().clone()
    waiting = list(made)

    def output(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone()
        if not (isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[0], Lies)):
            return leaf
        lies = leaf[0]
        if lies.origin == "new":
            return waiting.pop(0)
        whole = inputs[lies.number] if lies.origin == "input" else own[lies.number]
        if whole.shape == lies.layout.size and whole.stride() == lies.layout.stride:
            return whole.view_as(whole)
        return whole.as_strided(lies.layout.size, lies.layout.stride, lies.layout.offset)

    return pytree.tree_unflatten([output(leaf) for leaf in noted.outputs], noted.spec)


def _on(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor of this layout on the storage of `tensor`."""
    tensor = tensor.detach()
    if tensor.dtype != layout.dtype:
        tensor = tensor.view(layout.dtype)
    if (tensor.shape, tensor.stride(), tensor.storage_offset()) == (layout.size, layout.stride, layout.offset):
        return tensor
    return tensor.as_strided(layout.size, layout.stride, layout.offset)


def _lift(nbytes: int, like: torch.Tensor | None) -> None:
    """Have so many more bytes for a moment."""
    if nbytes > 0:
        torch.empty(nbytes, dtype=torch.uint8, device="cpu" if like is None else like.device)


class _Played(torch.autograd.Function):
    """One call of a compiled module without memory (NOTE [Compiled calls], rules 3 to 5)."""

    @staticmethod
    def forward(ctx: Any, noted: Noted, inputs: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        like = tensors[0] if tensors else None
        storages = [layout.make() for layout in noted.new]
        ctx.hidden = (
            None
            if not noted.hidden_bytes
            else torch.empty(noted.hidden_bytes, dtype=torch.uint8, device="cpu" if like is None else like.device)
        )
        _lift(noted.forward_bytes - _bytes(noted.new) - noted.hidden_bytes, like)
        ctx.noted = noted
        returned, fixed, ctx.leaves = [], [], []
        for n, leaf in enumerate(noted.outputs):
            if _is_new(leaf):
                returned.append(_on(storages[leaf[0].number], leaf[0].layout))
                ctx.leaves.append(n)
                if not leaf[1]:
                    fixed.append(returned[-1])
        places = {"input": tensors[:inputs], "own": tensors[inputs:], "new": storages}
        ctx.save_for_backward(*(_saved(lies, places) for lies in noted.saved))
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return tuple(returned)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        noted: Noted = ctx.noted
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        like = next((t for t in (*given, *saved) if t is not None), None)
        there: dict[tuple[Origin, int], torch.Tensor] = {}
        more_bytes = 0
        for n, gradient in zip(ctx.leaves, given, strict=True):
            if gradient is None:
                continue
            if gradient.stride() == noted.outputs[n][0].layout.stride:
                there["gradient", n] = gradient
            else:
                more_bytes += gradient.numel() * gradient.element_size()
            if gradient._use_count() > _lone_owners():  # type: ignore[attr-defined]
                more_bytes += gradient.numel() * gradient.element_size()
        _lift(noted.backward_bytes + more_bytes, like)
        # Compiled code may write gradients over what only it had saved.
        returned = {(lies.origin, lies.number) for lies in noted.gradients if lies is not None}
        for lies, tensor in zip(noted.saved, saved, strict=True):
            if (lies.origin, lies.number) in returned:
                there[lies.origin, lies.number] = tensor
        outputs = {leaf[0].number for leaf in noted.outputs if _is_new(leaf)}
        # Not by `StorageWeakRef`: see `Record.is_gone` in runtime/swap/session.py.
        dropped = {
            (lies.origin, lies.number): (weakref.ref(t.untyped_storage()), t.untyped_storage().nbytes())
            for lies, t in zip(noted.saved, saved, strict=True)
        }
        tensor = None
        del saved
        if any(origin == "new" and n in outputs and ref() is not None for (origin, n), (ref, _) in dropped.items()):
            gone_bytes = sum(nbytes for ref, nbytes in dropped.values() if ref() is None)
            _lift(noted.backward_held_bytes + more_bytes + gone_bytes, like)
        ctx.hidden = None
        for number, layout in enumerate(noted.made, len(noted.new)):
            there["new", number] = layout.make()

        def gradient_of(lies: Lies | None, needed: bool) -> torch.Tensor | None:
            if lies is None or not needed:
                return None
            whole = there.get((lies.origin, lies.number))
            return lies.layout.make() if whole is None else _on(whole, lies.layout)

        needed = ctx.needs_input_grad[2:]
        gradients = [gradient_of(lies, n) for lies, n in zip(noted.gradients, needed, strict=False)]
        return (None, None, *gradients, *(None for _ in needed[len(gradients) :]))


class _Counting(torch.autograd.Function):
    """Counts who holds the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.counts = counts
        ctx.set_materialize_grads(False)
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        for gradient in given:
            if gradient is not None:
                ctx.counts.append(gradient._use_count())  # type: ignore[attr-defined]
        return given[0], None


@functools.cache
def _lone_owners() -> int:
    """References to a gradient that only the autograd engine holds, seen where `_Played` looks."""
    counts: list[int] = []
    with _disable_current_modes(), torch.enable_grad():
        x = torch.ones(4, requires_grad=True)
        (_Counting.apply(x, counts) * 2).sum().backward()
    return counts[0]


def _is_new(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[0], Lies) and leaf[0].origin == "new"


def _saved(lies: Lies, places: Any) -> torch.Tensor:
    tensor: torch.Tensor = places[lies.origin][lies.number]
    if lies.origin != "new" and (tensor.shape, tensor.stride()) == (lies.layout.size, lies.layout.stride):
        return tensor
    return _on(tensor, lies.layout)
