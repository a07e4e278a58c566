"""Compiled modules: noted once in a real run on the device, then played on fake tensors.

Compiled code fuses operations and doesn't run on fake tensors, so a trace can't look inside. In the trace, a call of a
compiled module is one operation that makes its outputs and its saved tensors, and has one backward.

NOTE [Compiled calls]

1. The step runs for real once, saving nothing. Each distinct call of a compiled module (same module, sizes, data types,
   gradients wanted) is made three times more on the spot, on the same inputs: once to note its outputs, saved tensors
   and gradients, with all of them held so that no address is used twice; then to measure its peaks, with its outputs
   dropped before backward and with its outputs held.
2. A tensor is noted as the storage that it lies in (an input's, the model's own, the call's n-th new one) and its
   layout there. Of the new ones those of outputs come first.
3. In a replay the call makes the new storages and for a moment a block that raises the live bytes to the measured peak.
   It saves the same tensors in the same order, so positions in a plan mean the same as in the real run.
4. Its backward fetches all saved tensors at once, as compiled code does, raises the live bytes by what was measured
   above the start of the real one, and only then drops the saved tensors and makes the gradients. An incoming gradient
   whose strides aren't its output's is copied first, and one with other references can't be dropped midway. If an
   output has other references, as the model's own output has in the program, the peak with the outputs held counts.
5. Bytes that compiled code holds until backward besides autograd's saved tensors count as one more block, which no hook
   sees.

Example: a call with an input of 4 KiB makes an output of 4 KiB, saves it and the input, holds 1 KiB more, and its
forward peaks 12 KiB above the start. A replay makes storages of 4 KiB and 1 KiB and, for a moment, a block of 7 KiB.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.profiling.values.answers import VALUES_LIMIT, Layout, StandIn
from ckptplan.profiling.values.cut import fresh
from ckptplan.runtime.patching import installed
from ckptplan.runtime.swap.users_hooks import OwnHooks
from ckptplan.state.restore import random_state
from ckptplan.tensors import accelerator
from ckptplan.tensors.objects import tensors_in_objects
from ckptplan.tensors.private import disable_current_modes
from ckptplan.tensors.storages import tensors_in
from ckptplan.training.compiled import compiled_modules, out_of_sight, owner_of
from ckptplan.training.measure import no_cycles_collected, recorded_allocations
from ckptplan.training.step import TrainingStep
from ckptplan.training.variants import RATIO

if TYPE_CHECKING:
    from ckptplan.profiling.bytes.fake import FakeWorld
    from ckptplan.profiling.target import Target

Origin = Literal["input", "own", "new", "gradient"]


@dataclass(frozen=True, slots=True)
class Lies:
    """A tensor without its values: the storage that it lies in, and its layout there.

    Attributes
    ----------
    origin : str
        "input": an input of the call; "own": a parameter or buffer of the module; "new": made by the call; "gradient":
        an incoming gradient of backward.
    number : int
        Its number among these; for a gradient, that of the output leaf that it belongs to.
    """

    origin: Origin
    number: int
    layout: Layout


class Output(NamedTuple):
    """An output of a compiled call: where it lies, and whether it needs gradients."""

    lies: Lies
    requires_grad: bool

    @property
    def is_new(self) -> bool:
        """Whether it lies in a storage that the call made."""
        return self.lies.origin == "new"


@dataclass(frozen=True, slots=True)
class Noted:
    """One call of a compiled module, as seen in a real run (NOTE [Compiled calls]).

    Attributes
    ----------
    kind : str
        Equal for calls that do the same and take the same time.
    new : tuple of Layout
        Per storage that forward makes, the layout of the first tensor on it.
    outputs : tuple
        Per leaf of the output: an `Output` for a tensor that has no values in a replay, otherwise the value itself.
    spec : TreeSpec
        Tree of the output.
    saved : tuple of Lies
        Tensors that autograd saves, in order.
    hidden_bytes : int
        Bytes held after forward besides outputs and saved tensors.
    forward_bytes, backward_bytes : int
        Most bytes above those present when the direction begins; in backward these include the saved tensors.
    backward_held_bytes : int
        `backward_bytes` if the outputs are held elsewhere.
    updated, replaced : tuple of str
        Buffers that forward writes to, and those that it replaces by other tensors.
    made : tuple of Layout
        Storages that backward makes, each with the layout of the first tensor on it.
    gradients : tuple of Lies or None
        Per tensor that may need one: the inputs, then the module's parameters. "new" are forward's storages here, and
        from len(new) on backward's.
    """

    kind: str
    new: tuple[Layout, ...]
    outputs: tuple[Output | Any, ...]
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

    @property
    def outputs_made(self) -> int:
        """The number of storages that forward makes for its outputs: the first ones of `new`."""
        return len({o.lies.number for o in self.outputs if isinstance(o, Output) and o.is_new})

    @property
    def saved_bytes(self) -> int:
        """Bytes that it saves of what forward makes."""
        own = {lies.number for lies in self.saved if lies.origin == "new"}
        return _bytes(tuple(self.new[n] for n in own)) + self.hidden_bytes

    def does_as(self, other: Noted) -> bool:
        """Whether a call returns and writes the same as another, in storages of the same numbers."""
        mine, theirs = ((n.outputs_made, n.new[: n.outputs_made], n.spec, n.updated, n.replaced) for n in (self, other))
        pairs = zip(self.outputs, other.outputs, strict=True)
        return mine == theirs and all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
            for a, b in pairs
        )


@dataclass
class _Storages:
    """Finds the storages that tensors lie in; holds every tensor it is given, so that addresses stay distinct."""

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


def distinct_tensors(tree: Any) -> list[torch.Tensor]:
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
    """Run `step` for real, saving nothing, and note the calls of its compiled modules in `target.answers`.

    Raises
    ------
    UnsupportedModelError
        If the device isn't in this machine, or a compiled module does something that can't be played.
    """
    found = compiled_modules(step.model)
    if target.answers is None or target.spec is not None or not target.answers.has_values:
        raise UnsupportedModelError(
            f"module {next(iter(found))!r} is compiled, and what compiled code takes is known only from running it; "
            "plan on the device where it is to run, or plan the uncompiled model"
        )
    noted = target.answers.compiled
    device = target.device

    def note(call: Call) -> None:
        key = call_key(call)
        if key not in noted:
            noted[key] = note_call(call, device, key)

    run_for_real(step, found, note)


class ForwardDifferentiatesError(UnsupportedModelError):
    """Forward runs backward through what it has computed."""


class Call(NamedTuple):
    """A call of a module in a real run: what it runs, without the patch around it, and the arguments."""

    name: str
    module: nn.Module
    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        """Make the call."""
        return self.original(*self.args, **self.kwargs)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The distinct tensors among the arguments."""
        return distinct_tensors((self.args, self.kwargs))

    def cut(self) -> Call:
        """The call on inputs cut from their graphs."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, fresh([], {}), (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs)


def run_for_real(step: TrainingStep, modules: dict[str, nn.Module], before: Callable[[Call], None]) -> None:
    """Run the step, saving nothing, and call `before` with each call of these modules before it is made.

    Raises
    ------
    ForwardDifferentiatesError
        If forward needs what it saves.
    """

    def needed(nothing: Any) -> Any:
        raise ForwardDifferentiatesError(
            "the step's forward runs a backward of its own, and compiled code has no second derivatives"
        )

    def runner(name: str, module: nn.Module) -> Callable[..., Any]:
        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Autograd saves tensors as usual, whichever hooks are installed around.
            with OwnHooks(lambda tensor: tensor, lambda tensor: tensor):
                before(Call(name, module, original, args, kwargs))
            return original(*args, **kwargs)

        return run

    with _patched(modules, runner), OwnHooks(lambda tensor: None, needed):
        step.forward()


@contextlib.contextmanager
def _patched(modules: dict[str, nn.Module], runner: Callable[[str, nn.Module], Callable[..., Any]]) -> Iterator[None]:
    _lone_owners()  # cached now: it can't be measured inside a backward
    with installed([StandIn(module, runner(name, module)) for name, module in modules.items()]):
        yield


def call_key(call: Call) -> tuple[Any, ...]:
    """Key of a call; calls with equal keys run the same compiled code with the same layouts. Its ratio is the last."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))

    def described(leaf: Any) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
        if leaf is None or isinstance(leaf, (int, float, bool, str, torch.dtype)):
            return leaf
        kind: type = type(leaf)
        return kind

    kinds = [kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind)]
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    inputs = tuple(map(described, leaves))
    return call.name, torch.is_grad_enabled(), call.module.training, autocast, spec, inputs, RATIO.get()


class _Given(torch.autograd.Function):
    """A loss of the outputs of a call; its backward makes their gradients and keeps no reference to them."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        ctx.device = tensors[0].device
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # With the strides of the outputs: a gradient with others is copied first (rule 4).
        return tuple(torch.ones_like(t, device=ctx.device) for t in ctx.like)


def note_call(call: Call, device: torch.device, key: tuple[Any, ...]) -> Noted:
    """Run a call as rule 1 says, and describe it."""
    restore, module, trial = random_state(), call.module, call.cut()
    described = _described(trial)
    wanting = [*trial.inputs, *module.parameters()]
    forward_peak, forward_end, backward_peak = _measured(trial, wanting, device, held=False)
    _, _, held_peak = _measured(trial, wanting, device, held=True)
    restore()
    values = [leaf for leaf in described["outputs"] if isinstance(leaf, torch.Tensor)]
    explained_bytes = _bytes(described["new"]) + sum(value.untyped_storage().nbytes() for value in values)
    parameters = [(tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()]
    same = (type(module).__qualname__, repr(module), parameters, key[1:], described["saved"], described["gradients"])
    return Noted(
        **described,
        kind=hashlib.sha256(repr(same).encode()).hexdigest()[:16],
        hidden_bytes=max(forward_end - explained_bytes, 0),
        forward_bytes=forward_peak,
        backward_bytes=backward_peak,
        backward_held_bytes=max(held_peak, backward_peak),
    )


def _described(trial: Call) -> dict[str, Any]:
    """The fields of `Noted` for a call, but for its bytes and its kind."""
    name, module, inputs = trial.name, trial.module, trial.inputs
    buffers = _buffers(module)
    versions = [t._version for t in inputs]
    storages = _Storages()
    storages.add("input", inputs)
    storages.add("own", _own(module))
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor

    with OwnHooks(out_of_sight(pack), lambda tensor: tensor):
        output = trial()
    if [t._version for t in inputs] != versions:
        raise UnsupportedModelError(
            f"compiled module {name!r} writes to its inputs, whose memory can't be planned; let it return a new "
            "tensor, or leave this module uncompiled"
        )
    leaves, spec = pytree.tree_flatten(output)
    if why := unplayable(trial, inputs, leaves):
        raise UnsupportedModelError(f"compiled module {name!r} {why}; leave this module uncompiled")
    outputs = tuple(_described_leaf(name, leaf, storages) for leaf in leaves)
    now = _buffers(module)
    replaced = tuple(key for key, (_, _, buffer, _) in buffers.items() if now[key][2] is not buffer)
    updated = tuple(key for key, (_, _, b, version) in buffers.items() if key not in replaced and b._version != version)
    lying = tuple(map(storages.find, saved))
    new = tuple(storages.new)
    gradients = _described_gradients(leaves, [*inputs, *module.parameters()], storages)
    return {
        "new": new,
        "outputs": outputs,
        "spec": spec,
        "saved": lying,
        "updated": updated,
        "replaced": replaced,
        "made": tuple(storages.new[len(new) :]),
        "gradients": gradients,
    }


def unplayable(call: Call, inputs: Sequence[torch.Tensor], leaves: Iterable[Any]) -> str | None:
    """Why a replay can't play a call with this output, before which its arguments held `inputs`; None if it can."""
    if opaque := next((leaf for leaf in leaves if tensors_in_objects([leaf])), None):
        return f"returns a {type(opaque).__name__} with tensors in it, which is no tuple, dict or registered pytree"
    return None if {id(t) for t in call.inputs} <= {id(t) for t in inputs} else "puts tensors into its arguments"


def _described_leaf(name: str, leaf: Any, storages: _Storages) -> Any:
    """An entry of `Noted.outputs`."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point() or leaf.is_complex():
        return Output(storages.find(leaf), leaf.requires_grad)
    if leaf.numel() > VALUES_LIMIT:
        raise UnsupportedModelError(
            f"compiled module {name!r} returns {leaf.numel()} integers; at most {VALUES_LIMIT} are kept; "
            "leave this module uncompiled"
        )
    return leaf.detach().clone()


def _described_gradients(
    leaves: list[Any], wanting: list[torch.Tensor], storages: _Storages
) -> tuple[Lies | None, ...]:
    """`Noted.gradients`, by a backward of the output with these leaves."""
    differentiable = [t for t in distinct_tensors(leaves) if t.requires_grad]
    if not differentiable:
        return (None,) * len(wanting)
    given = [torch.ones_like(t) for t in differentiable]
    first = {id(leaf): n for n, leaf in reversed(list(enumerate(leaves)))}
    for tensor, gradient in zip(differentiable, given, strict=True):
        storages.known[_address(gradient)] = ("gradient", first[id(tensor)])
    sought = [t for t in wanting if t.requires_grad]
    found = torch.autograd.grad(differentiable, sought, given, allow_unused=True)
    where = {id(t): None if g is None else storages.find(g) for t, g in zip(sought, found, strict=True)}
    return tuple(where.get(id(t)) for t in wanting)


def _measured(trial: Call, wanting: list[torch.Tensor], device: torch.device, *, held: bool) -> tuple[int, int, int]:
    """Run forward and backward and measure them; with `held`, the outputs are held until the end.

    Returns
    -------
    int, int, int
        Peak of forward, bytes at its end, and peak of backward, above the level at the start of the direction.
    """
    meter = _Meter(device)
    alive: list[Any] = []

    def run() -> None:
        meter.mark()
        output = trial()
        meter.mark()
        differentiable = [t for t in distinct_tensors(output) if t.requires_grad]
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
    return *forward, backward[0]


class _Meter:
    """Meter of live bytes between marks, from the allocator's events on the CPU and its counters on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._levels: list[tuple[int, int]] = []
        self._count = 0

    def mark(self) -> None:
        """End a span and begin the next."""
        if accelerator.is_accelerator(self._device):
            accelerator.synchronize(self._device)
            now, peak = accelerator.device_bytes(self._device), accelerator.device_bytes(self._device, "peak")
            self._levels.append((now.allocated_bytes, peak.allocated_bytes))
            accelerator.reset_peaks(self._device)
            return
        with record_function(f"ckptplan mark {self._count}"):
            self._count += 1

    def spans(self, run: Callable[[], None]) -> list[tuple[int, int]]:
        """Call `run`; per span between the marks that it sets, the peak above its start, and the change to its end."""
        if accelerator.is_accelerator(self._device):
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
    """Run compiled modules without the dispatch modes around them, which compiled code doesn't support."""

    def runner(name: str, module: nn.Module) -> Callable[..., Any]:
        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with disable_current_modes():
                return original(*args, **kwargs)

        return run

    with _patched(compiled_modules(model), runner):
        yield


# --- the replays ---


class NeedsVariantError(Exception):
    """A replay plays variants that aren't noted, of the ratio in `args`."""


@contextlib.contextmanager
def compiled_as_noted(model: nn.Module, world: FakeWorld) -> Iterator[None]:
    """Play the calls of compiled modules within the block as they were noted."""

    def runner(name: str, module: nn.Module) -> Callable[..., Any]:
        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if world.runs_uncompiled:
                return owner_of(module)._call_impl(*args, **kwargs)
            noted = world.compiled_calls.get(call_key(Call(name, module, original, args, kwargs)))
            if noted is None and RATIO.get() and RATIO.get() not in world.noted_ratios:
                raise NeedsVariantError(RATIO.get())
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
    inputs = distinct_tensors((args, kwargs))
    own = _own(module)
    world.runs_compiled(noted.kind)
    world.plays_compiled = True
    try:
        made = _Played.apply(noted, world, len(inputs), *inputs, *own)
    finally:
        world.plays_compiled = False
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
        if not isinstance(leaf, Output):
            return leaf
        if leaf.is_new:
            return waiting.pop(0)
        lies = leaf.lies
        whole = inputs[lies.number] if lies.origin == "input" else own[lies.number]
        if whole.shape == lies.layout.size and whole.stride() == lies.layout.stride:
            return whole.view_as(whole)
        return whole.as_strided(lies.layout.size, lies.layout.stride, lies.layout.offset)

    return pytree.tree_unflatten([output(leaf) for leaf in noted.outputs], noted.spec)


def _on(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tensor of this layout on the storage of `tensor`."""
    tensor = tensor.detach()
    if tensor.dtype != layout.dtype:
        tensor = tensor.view(layout.dtype)
    if (tensor.shape, tensor.stride(), tensor.storage_offset()) == (layout.size, layout.stride, layout.offset):
        return tensor
    return tensor.as_strided(layout.size, layout.stride, layout.offset)


def _block(nbytes: int, like: torch.Tensor | None) -> torch.Tensor | None:
    """A block of that many bytes on the device of `like`; where it isn't kept, it raises the peak alone."""
    device = "cpu" if like is None else like.device
    return torch.empty(nbytes, dtype=torch.uint8, device=device) if nbytes > 0 else None


class _Played(torch.autograd.Function):
    """A noted call of a compiled module, played on fake tensors (NOTE [Compiled calls], rules 3 to 5)."""

    @staticmethod
    def forward(ctx: Any, noted: Noted, world: FakeWorld, inputs: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        like = tensors[0] if tensors else None
        own = noted.outputs_made
        storages = [layout.make() for layout in noted.new[:own]]
        world.name_apart(RATIO.get())
        storages += [layout.make() for layout in noted.new[own:]]
        ctx.hidden = _block(noted.hidden_bytes, like)
        _block(noted.forward_bytes - _bytes(noted.new) - noted.hidden_bytes, like)
        ctx.noted = noted
        returned, fixed, ctx.leaves = [], [], []
        for n, leaf in enumerate(noted.outputs):
            if isinstance(leaf, Output) and leaf.is_new:
                returned.append(_on(storages[leaf.lies.number], leaf.lies.layout))
                ctx.leaves.append(n)
                if not leaf.requires_grad:
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
            if gradient is None:  # compiled code makes zeros in its place
                more_bytes += _bytes((noted.outputs[n].lies.layout,)) if noted.outputs[n].requires_grad else 0
                continue
            if gradient.stride() == noted.outputs[n].lies.layout.stride:
                there["gradient", n] = gradient
            else:
                more_bytes += gradient.numel() * gradient.element_size()
            if gradient._use_count() > _lone_owners():  # type: ignore[attr-defined]
                more_bytes += gradient.numel() * gradient.element_size()
        _block(noted.backward_bytes + more_bytes, like)
        # Compiled code may write gradients into storages that it alone had saved.
        returned = {(lies.origin, lies.number) for lies in noted.gradients if lies is not None}
        for lies, tensor in zip(noted.saved, saved, strict=True):
            if (lies.origin, lies.number) in returned:
                there[lies.origin, lies.number] = tensor
        outputs = {leaf.lies.number for leaf in noted.outputs if isinstance(leaf, Output) and leaf.is_new}
        # Not by `StorageWeakRef`: see `Record.is_gone` in runtime/swap/record.py.
        dropped = {
            (lies.origin, lies.number): (weakref.ref(t.untyped_storage()), t.untyped_storage().nbytes())
            for lies, t in zip(noted.saved, saved, strict=True)
        }
        tensor = None
        del saved
        if any(origin == "new" and n in outputs and ref() is not None for (origin, n), (ref, _) in dropped.items()):
            gone_bytes = sum(nbytes for ref, nbytes in dropped.values() if ref() is None)
            _block(noted.backward_held_bytes + more_bytes + gone_bytes, like)
        ctx.hidden = None
        for number, layout in enumerate(noted.made, len(noted.new)):
            there["new", number] = layout.make()

        def gradient_of(lies: Lies | None, needed: bool) -> torch.Tensor | None:
            if lies is None or not needed:
                return None
            whole = there.get((lies.origin, lies.number))
            return lies.layout.make() if whole is None else _on(whole, lies.layout)

        needed = ctx.needs_input_grad[3:]
        gradients = [gradient_of(lies, n) for lies, n in zip(noted.gradients, needed, strict=False)]
        return (None, None, None, *gradients, *(None for _ in needed[len(gradients) :]))


class _Counting(torch.autograd.Function):
    """Counts the references to its incoming gradient."""

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
    """References to a gradient that only the autograd engine holds, counted in a backward as in `_Played`."""
    counts: list[int] = []
    with disable_current_modes(), torch.enable_grad():
        x = torch.ones(4, requires_grad=True)
        (_Counting.apply(x, counts) * 2).sum().backward()
    return counts[0]


def _saved(lies: Lies, places: Any) -> torch.Tensor:
    tensor: torch.Tensor = places[lies.origin][lies.number]
    if lies.origin != "new" and (tensor.shape, tensor.stride()) == (lies.layout.size, lies.layout.stride):
        return tensor
    return _on(tensor, lies.layout)
