"""Ways in which PyTorch's users save activation memory today, as functions of one interface.

A rival is entered with a model and a function that runs its forward and loss; it yields the function to call instead.
Leaving it puts the model back. `compare_real.py` and `experiments/gpu` measure them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint_sequential

from ckptplan.tensors.accelerator import is_accelerator, own_module

Forward = Callable[[], Any]
Enter = Callable[[nn.Module, Forward], AbstractContextManager[Forward]]

LEAST_BYTES = 1 << 20
STASH = 5


class NotHere(Exception):
    """The rival needs a package or a feature that is not installed."""


@dataclass(frozen=True, slots=True)
class Rival:
    """One way to train.

    Attributes
    ----------
    name : str
    what : str
        What it does, in words.
    enter : callable
        Model, function that runs forward and loss -> context manager that yields the function to call instead.
    compiles : bool
        Compiles the whole model, so it takes one whose layers aren't compiled already.
    """

    name: str
    what: str
    enter: Enter
    compiles: bool = False


@contextlib.contextmanager
def keep(model: nn.Module, forward: Forward) -> Iterator[Forward]:
    yield forward


@contextlib.contextmanager
def hugging_face(
    model: nn.Module, forward: Forward, *, every: int = 1, is_offloaded: bool = False
) -> Iterator[Forward]:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise NotHere(f"{type(model).__name__} does not support gradient checkpointing")
    if is_offloaded and not torch.accelerator.is_available():
        raise NotHere("offload=True needs pinned memory, which there is beside an accelerator alone")
    extra: dict[str, Any] = {"every_n_layers": every} if every > 1 else {}
    extra |= {"offload": True} if is_offloaded else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in new releases; the old name works in all
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}, **extra)
    try:
        yield forward
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_disable()


CARRIED = {"T5Block": (1, 4)}
"""Class of blocks that return more than hidden states -> for each of the other results, the index of the argument that
takes it in the next block, counted behind the hidden states (of T5: position bias, and that of cross-attention)."""


class Segmented(nn.Module):
    """Stands in for a list of blocks: the same ones, through `checkpoint_sequential`."""

    def __init__(self, blocks: Sequence[nn.Module], segments: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.segments = segments
        self.carried = CARRIED.get(type(self.blocks[0]).__name__, ())

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert all(index < len(args) for index in self.carried)

        def call(block: nn.Module) -> Callable[[Any], Any]:
            def run(given: Any) -> Any:
                hidden, *rest = given if isinstance(given, tuple) else (given,)
                others = dict(enumerate(args)) | dict(zip(self.carried, rest, strict=False))
                return block(hidden, *others.values(), **kwargs)

            return run

        return checkpoint_sequential([call(b) for b in self.blocks], self.segments, hidden, use_reentrant=False)


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    """Set the submodule at `path`."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def blocks_in(found: nn.Module) -> list[nn.Module]:
    """The blocks of a list of them, or of a list of stages, each with a list of blocks."""
    blocks: list[Any] = list(found.children())
    if all(hasattr(block, "layers") for block in blocks):
        blocks = [layer for stage in blocks for layer in stage.layers]
    return blocks


def named_blocks(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """All blocks of a model: those in the list at `path`, and others of the same class, as of a decoder."""
    kind = type(blocks_in(model.get_submodule(path))[0])
    return {name: module for name, module in model.named_modules() if type(module) is kind}


@contextlib.contextmanager
def selective(model: nn.Module, forward: Forward, *, path: str) -> Iterator[Forward]:
    module = _installed("torchtitan.distributed.activation_checkpoint")

    class SavesAttention(module.SelectiveAC):  # type: ignore[misc, name-defined]
        def get_save_ops(self) -> set[Any]:
            return {*super().get_save_ops(), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}

    policy = SavesAttention(module.SelectiveAC.Config())
    blocks = named_blocks(model, path)
    for name, block in blocks.items():
        replace(model, name, policy._wrap_block(block, base_fqn=name))
    try:
        yield forward
    finally:
        for name, block in blocks.items():
            replace(model, name, block)


@contextlib.contextmanager
def rematerialized(
    model: nn.Module, forward: Forward, *, path: str, saves_attention: bool = False
) -> Iterator[Forward]:
    remat = _installed("torch_remat")

    def attention(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        saved = remat.region(run, name, recompute=False)

        @functools.wraps(run)
        def attend(*args: Any, **kwargs: Any) -> Any:
            found = saved(*args, **kwargs)
            for tensor in found if isinstance(found, tuple) else (found,):
                if isinstance(tensor, Tensor):
                    remat.recompute_needs_tensor(tensor)
            return found

        return attend

    def tensors_alone(run: Callable[..., Any], region: Callable[..., Any]) -> Callable[..., Any]:
        """`run` in a region, which has only tensors among its results: others are put back behind it."""

        @functools.wraps(run)
        def whole(*args: Any, **kwargs: Any) -> Any:
            others: list[Any] = []

            def inside(*args: Any, **kwargs: Any) -> Any:
                flat, spec = pytree.tree_flatten(run(*args, **kwargs))
                others[:] = [[(True, None) if isinstance(leaf, Tensor) else (False, leaf) for leaf in flat], spec]
                return tuple(leaf for leaf in flat if isinstance(leaf, Tensor))

            found = iter(region(inside)(*args, **kwargs))
            return pytree.tree_unflatten([next(found) if there else leaf for there, leaf in others[0]], others[1])

        return whole

    with contextlib.ExitStack() as undo:
        for name, block in named_blocks(model, path).items():
            inside = {n: m for n, m in block.named_modules() if type(m).__name__.endswith("Attention")}
            outer = [n for n in inside if saves_attention and not any(n.startswith(f"{m}.") for m in inside)]
            if saves_attention and not outer:
                raise NotHere(f"{type(block).__name__} has no attention")
            for each in outer:
                inside[each].forward = attention(each, inside[each].forward)
                undo.callback(vars(inside[each]).pop, "forward")
            block.forward = tensors_alone(block.forward, remat.checkpoint(region_name=name))
            undo.callback(vars(block).pop, "forward")
        yield forward


def _installed(name: str) -> Any:
    """A module of a package that isn't installed with the tests."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotHere(f"{name} can't be imported: {error}") from error


@contextlib.contextmanager
def sequential(model: nn.Module, forward: Forward, *, path: str, segments: int) -> Iterator[Forward]:
    before = model.get_submodule(path)
    blocks = blocks_in(before)
    if segments > len(blocks):
        raise ValueError(f"{len(blocks)} blocks can't make {segments} segments")
    replace(model, path, nn.ModuleList([Segmented(blocks, segments)]))
    try:
        yield forward
    finally:
        replace(model, path, before)


@contextlib.contextmanager
def saved_on_cpu(model: nn.Module, forward: Forward) -> Iterator[Forward]:
    def run() -> Any:
        with save_on_cpu(pin_memory=True):
            return forward()

    yield run


@contextlib.contextmanager
def trl_offload(model: nn.Module, forward: Forward) -> Iterator[Forward]:
    module = _installed("trl.models.activation_offloading")

    def run() -> Any:
        with offload:
            return forward()

    offload = module.get_act_offloading_ctx_manager(model)
    yield run


@contextlib.contextmanager
def compiled(model: nn.Module, forward: Forward, *, ratio: float) -> Iterator[Forward]:
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    # A backend of its own: else a copy would reuse the code compiled for another copy's ratio.
    def backend(graph: Any, examples: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=ratio):
            return compile_fx(graph, examples)

    model.compile(backend=backend, dynamic=False, fullgraph=True)
    try:
        yield forward
    finally:
        model._compiled_call_impl = None


# --- an asynchronous offloader ---


class Saved:
    """One storage that left the device: its bytes on the host, and where it is on its way.

    Aliases share it. It lives as long as a graph refers to it. Its host memory goes back to the pool with it, to be
    written only behind the copy that touched it last; device memory that a copy still writes is freed behind that copy.
    """

    def __init__(self, offloader: Offloader, tensor: Tensor) -> None:
        self.offloader = offloader
        self.key = (tensor.untyped_storage()._cdata, tensor._version)
        self.nbytes = tensor.untyped_storage().nbytes()
        self.source: Tensor | None = tensor  # until compute has waited for the copy out
        self.returned: Tensor | None = None  # from the beginning of the copy in to the first use
        self.used: weakref.ref[Tensor] | None = None  # on the device again, as long as a user holds it
        self.left: Any = None
        self.arrived: Any = None
        self.host, self.touched = offloader.take(self.nbytes)

    def __del__(self) -> None:
        self.offloader.wait(self.arrived if self.returned is not None else None)
        self.offloader.give(self.host, self.touched)


@dataclass(frozen=True, slots=True)
class View:
    """What a graph holds in a tensor's place."""

    saved: Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Stays:
    """A tensor that is not worth the way, with the version it was saved at."""

    tensor: Tensor
    version: int


class Offloader:
    """Sends what autograd saves to pinned host memory on one stream and brings it back on another.

    As in TRL and torchtune: tensors from 1 MiB, a stash of five storages whose copies out may be under way while
    compute goes on, and as many brought back ahead of their use. Otherwise than there, a returning buffer is allocated
    on the compute stream, aliases share one copy, pinned memory is pooled, and PyTorch's check for tensors that were
    changed in place is kept.

    On the CPU it copies where it stands, which lowers no peak.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, least_bytes: int = LEAST_BYTES) -> None:
        self.model, self.device, self.least_bytes = model, device, least_bytes
        self.asynchronous = is_accelerator(device)
        self.module = own_module(device)
        if self.asynchronous:
            self.out, self.into = self.module.Stream(device), self.module.Stream(device)
        self.pool: dict[int, list[tuple[Tensor, Any]]] = {}
        self.begin()

    def begin(self) -> None:
        """A new forward, with the parameters where they are now."""
        self.stash: list[weakref.ref[Saved]] = []
        self.order: list[weakref.ref[Saved]] = []
        self.known: dict[tuple[int, int], weakref.ref[Saved]] = {}
        self.own = {t.untyped_storage()._cdata for t in [*self.model.parameters(), *self.model.buffers()]}

    def hooks(self) -> saved_tensors_hooks:
        self.begin()
        return saved_tensors_hooks(self.pack, self.unpack)

    def settle(self) -> None:
        """Wait for every copy, and let the pool's memory go."""
        if self.asynchronous:
            self.module.synchronize(self.device)
        self.pool.clear()

    def take(self, nbytes: int) -> tuple[Tensor, Any]:
        """Host memory, and the event behind which it may be written."""
        free = self.pool.get(nbytes)
        if free:
            return free.pop(0)  # the one that was touched longest ago
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self.asynchronous), None

    def give(self, host: Tensor, touched: Any) -> None:
        self.pool.setdefault(host.numel(), []).append((host, touched))

    def wait(self, event: Any) -> None:
        """Let the stream that computes now wait."""
        if event is not None:
            self.module.current_stream(self.device).wait_event(event)

    def worth_it(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return (
            type(tensor) is Tensor
            and tensor.device.type == self.device.type
            and tensor.nbytes >= self.least_bytes
            and storage.nbytes() <= 4 * tensor.nbytes  # never a large base for a small view
            and storage._cdata not in self.own
        )

    def pack(self, tensor: Tensor) -> View | Stays:
        if not self.worth_it(tensor):
            return Stays(tensor, tensor._version)
        known = self.known.get((tensor.untyped_storage()._cdata, tensor._version))
        saved = None if known is None else known()
        if saved is None:
            saved = Saved(self, tensor)
            self.send(saved, tensor)
        return View(saved, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def send(self, saved: Saved, tensor: Tensor) -> None:
        """Begin the copy out; the oldest of a full stash leaves the device."""
        whole = _bytes_of(tensor)
        if self.asynchronous:
            self.out.wait_stream(self.module.current_stream(self.device))
            if saved.touched is not None:
                self.out.wait_event(saved.touched)
            with self.module.stream(self.out):
                saved.host.copy_(whole, non_blocking=True)
            saved.left = saved.touched = self.out.record_event()
        else:
            saved.host.copy_(whole)
        mine = weakref.ref(saved)
        self.known[saved.key] = mine
        self.order.append(mine)
        self.stash.append(mine)
        if len(self.stash) > STASH:
            oldest = self.stash.pop(0)()
            if oldest is not None:
                _require_unchanged(oldest.source, oldest.key[1])
                self.wait(oldest.left)
                del self.known[oldest.key]  # the storage goes, and its address may be another's soon
                oldest.source = None

    def unpack(self, held: View | Stays) -> Tensor:
        if isinstance(held, Stays):
            _require_unchanged(held.tensor, held.version)
            return held.tensor
        saved = held.saved
        base = saved.source
        if base is not None:
            _require_unchanged(base, saved.key[1])
        else:
            base = None if saved.used is None else saved.used()
            if base is None:
                self.fetch(saved)
                base, saved.returned = saved.returned, None
                assert base is not None
                saved.used = weakref.ref(base)
            self.wait(saved.arrived)
        self.fetch_ahead(saved)
        view = base.new_empty(0, dtype=held.dtype).set_(base.untyped_storage(), held.offset, held.size, held.stride)
        view._base_on_device = base  # type: ignore[attr-defined] # so that an alias finds it while this one is used
        return view

    def fetch_ahead(self, saved: Saved) -> None:
        """Begin the copies of those that were saved just before it."""
        while self.order and self.order[-1]() is not saved:
            self.order.pop()
        waiting = (ref() for ref in reversed(self.order[:-1]))
        ahead = (other for other in waiting if other is not None and other.source is None and other.used is None)
        for other in itertools.islice(ahead, STASH):
            self.fetch(other)

    def fetch(self, saved: Saved) -> None:
        """Begin the copy in, unless it is under way."""
        if saved.returned is not None:
            return
        target = torch.empty(saved.nbytes, dtype=torch.uint8, device=self.device)
        if self.asynchronous:
            self.into.wait_stream(self.module.current_stream(self.device))
            self.into.wait_event(saved.left)
            with self.module.stream(self.into):
                target.copy_(saved.host, non_blocking=True)
            saved.arrived = saved.touched = self.into.record_event()
        else:
            target.copy_(saved.host)
        saved.returned = target


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage behind `tensor`."""
    storage = tensor.untyped_storage()
    return tensor.new_empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _require_unchanged(tensor: Tensor | None, version: int) -> None:
    if tensor is not None and tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: it is at "
            f"version {tensor._version}, and was saved at version {version}"
        )


@contextlib.contextmanager
def offloaded(model: nn.Module, forward: Forward, *, least_bytes: int = LEAST_BYTES) -> Iterator[Forward]:
    offloader = Offloader(model, next(model.parameters()).device, least_bytes=least_bytes)

    def run() -> Any:
        with offloader.hooks():
            return forward()

    try:
        yield run
    finally:
        offloader.settle()


# --- the list ---


def rivals(
    *, ratios: Sequence[float] = (), path: str | None = None, segments: Sequence[int] = (), every: Sequence[int] = (1,)
) -> dict[str, Rival]:
    """All of them by name.

    Parameters
    ----------
    ratios : sequence of float
        Values of `activation_memory_budget`; 1 is plain compiled training.
    path : str, optional
        The model's list of blocks, for the rivals that change blocks.
    segments : sequence of int
        Of `sequential`.
    every : sequence of int
        Which layers Hugging Face's switch recomputes: all, every second one.
    """
    found = [Rival("keep", "everything kept", keep)]
    for n in every:
        name = "hf" if n == 1 else f"hf/every{n}"
        what = "Hugging Face's gradient_checkpointing_enable with use_reentrant=False: every block recomputed"
        found.append(Rival(name, what if n == 1 else f"{what} of {n}", functools.partial(hugging_face, every=n)))
    what = "the same, with what is saved for the recompute in pinned host memory"
    found.append(Rival("hf/offload", what, functools.partial(hugging_face, is_offloaded=True)))
    if path is not None:
        what = (
            "torchtitan's selective checkpointing by block: saves attention, products with a bias, every second other"
        )
        found.append(Rival("selective", what, functools.partial(selective, path=path)))
        what = "torch_remat.checkpoint by block"
        found.append(Rival("remat", what, functools.partial(rematerialized, path=path)))
        what = "the same, with attention a region that is saved"
        found.append(Rival("remat/attention", what, functools.partial(rematerialized, path=path, saves_attention=True)))
    for n in segments:
        assert path is not None
        what = "checkpoint_sequential over the blocks in so many segments, the last kept"
        found.append(Rival(f"sequential/{n}", what, functools.partial(sequential, path=path, segments=n)))
    found += [
        Rival("offload", "asynchronous offloading: pinned memory, two streams, a stash of five", offloaded),
        Rival("trl", "TRL's activation offloading with its defaults", trl_offload),
        Rival("save_on_cpu", "torch.autograd.graph.save_on_cpu(pin_memory=True)", saved_on_cpu),
    ]
    for ratio in ratios:
        what = "torch.compile(fullgraph=True) with this activation_memory_budget; 1 is plain compiled training"
        found.append(Rival(f"compiled/{ratio:g}", what, functools.partial(compiled, ratio=ratio), compiles=True))
    return {rival.name: rival for rival in found}
