"""Whole training steps on the emulated device: operations as late kernels, a device generator, autograd's streams.

Models are ordinary ones on "cuda:0" (CPU tensors in the arena of `fake_cuda`). A dispatch mode issues each operation on
the stream that computes now and returns at once, its result being written when the stream gets there, into memory that
is known by its address alone. In backward, as in PyTorch's engine, a node runs on the stream of its forward, which
waits for the nodes whose gradients it takes, and the allocator is told of gradients that go from stream to stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeEvent, FakeStream
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ckptplan.runtime.guard import check
from ckptplan.runtime.swap import weights

aten = torch.ops.aten
_READING = {aten._local_scalar_dense.default, aten.equal.default}
"""Operations whose result the host waits for."""
_SUMS = {aten.add.Tensor, aten.add_.Tensor}
_NODE = torch._C._current_autograd_node
_TASK = torch._C._current_graph_task_id
_SEQUENCE = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies, by address."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements from the start of the storage
    nbytes: int  # of the storage


@dataclass(slots=True)
class _Backward:
    """One call of the engine."""

    before: dict[Any, list[Any]]  # node: those whose gradients it takes
    begin: FakeEvent
    caller: FakeStream
    node: Any = None
    ended: dict[Any, FakeEvent] = field(default_factory=dict)
    streams: set[FakeStream] = field(default_factory=set)


class Device(FakeCuda):
    """A device that runs operations.

    Attributes
    ----------
    generator : torch.Generator
        The device's.
    """

    def __init__(self, seed: int, arena_bytes: int = 1 << 24) -> None:
        super().__init__(seed, arena_bytes)
        self.poison = True
        self.generator = torch.Generator().manual_seed(seed)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._bytes = torch.frombuffer(self._arena, dtype=torch.uint8)
        self._stream_of: dict[int, FakeStream] = {}  # of a node, by its number
        self._backward: _Backward | None = None
        self._gradients: dict[int, FakeStream] = {}  # block, by offset: who wrote it last

    @classmethod
    def prompt(cls, seed: int) -> Device:
        """One that does at once what it is given."""
        gpu = cls(seed)
        gpu._eager = 1.0
        return gpu

    # tensors

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the device, there at once."""
        out = self.empty(max(tensor.numel(), 1), tensor.dtype)[: tensor.numel()].view(tensor.shape)
        self.synchronize()
        self._view(self._place(out), out).copy_(tensor.detach())
        return out

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a device tensor on the host, once the device is done."""
        self.synchronize()
        with _disable_current_modes():
            return tensor.detach().clone()

    def _place(self, tensor: torch.Tensor) -> Place:
        storage = tensor.untyped_storage()
        return Place(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), storage.nbytes())

    def _view(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        return self._at(tensor.untyped_storage().data_ptr() - self._base, place)

    def _at(self, offset: int, place: Place) -> torch.Tensor:
        """The tensor of `place` in a storage at `offset` of the arena; it holds nothing."""
        skew = -self._base % 8  # what is between the arena's start and a whole element of any type
        typed = self._typed.get(place.dtype)
        if typed is None:
            whole = self._bytes[skew : skew + (len(self._bytes) - skew) // 8 * 8]
            typed = self._typed[place.dtype] = whole.view(place.dtype)
        first = (offset - skew) // place.dtype.itemsize
        return typed.as_strided(place.size, place.stride, first + place.offset)

    # operations

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Issue an operation on the stream that computes now."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        on_device = [isinstance(x, torch.Tensor) and self.is_device(x) for x in leaves]
        made_here = getattr(kwargs.get("device"), "type", None) == "cuda"
        if not any(on_device) and not made_here:
            return func(*args, **kwargs)
        if func.is_view or func is aten.set_.source_Storage_storage_offset:  # changes no bytes
            self._stream_of.setdefault(_SEQUENCE() - 1, self.current_stream())
            return func(*args, **kwargs)
        leaves_device = kwargs.get("device") is not None and not made_here
        if func in _READING or leaves_device:
            self.current_stream().synchronize()
            return func(*args, **kwargs)
        if func is aten.copy_.default and not on_device[0]:
            self.current_stream().synchronize()
            return func(*args, **kwargs)
        stream = self._compute(func, leaves, on_device)
        # Host tensors are read now, as from pageable memory.
        leaves = [
            x.clone() if isinstance(x, torch.Tensor) and not there and x.numel() else x
            for x, there in zip(leaves, on_device, strict=True)
        ]
        leaves = [torch.device("cpu") if isinstance(x, torch.device) else x for x in leaves]
        places: list[tuple[int, int, Place]] = []
        template = list(leaves)
        for i, there in enumerate(on_device):
            if there:
                x = leaves[i]
                places.append((i, x.untyped_storage().data_ptr() - self._base, self._place(x)))
                template[i] = None
        written = [r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns]
        seed: int | None = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            seed = int(torch.randint(1 << 62, (), generator=self.generator, dtype=torch.int64))

        def call(lookup: Callable[[int, Place], torch.Tensor]) -> Any:
            again = list(template)
            for i, offset, place in places:
                again[i] = lookup(offset, place)
            inner, named = pytree.tree_unflatten(again, spec)
            named.pop("pin_memory", None)
            state = None if seed is None else torch.get_rng_state()
            with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
                try:
                    if seed is not None:
                        torch.default_generator.manual_seed(seed)
                    return func(*inner, **named)
                finally:
                    if state is not None:
                        torch.set_rng_state(state)

        if any(written) or not func._schema.returns:
            self._issue(stream, call, [])
            return self._written(func, args, kwargs)
        key = (
            func,
            repr([x for x in template if not isinstance(x, torch.Tensor)]),
            tuple((i, p) for i, _, p in places),
        )
        made = _shapes(key, call)
        if made is None:  # a view under another name
            return func(*args, **kwargs)
        results, out_spec = made
        outs = [self._new(place) if isinstance(place, Place) else place for place in results]
        targets = [
            (i, x.untyped_storage().data_ptr() - self._base, place)
            for i, (x, place) in enumerate(zip(outs, results, strict=True))
            if isinstance(place, Place) and x.numel()
        ]
        self._issue(stream, call, targets)
        return pytree.tree_unflatten(outs, out_spec)

    def _new(self, place: Place) -> torch.Tensor:
        if not place.nbytes:
            return torch.empty_strided(place.size, place.stride, dtype=place.dtype)
        whole = torch.frombuffer(self.take(place.nbytes), dtype=place.dtype)
        block = self.block(whole)
        if self._backward is not None and not torch.is_grad_enabled():
            self._gradients[block.offset] = block.stream
        else:
            self._gradients.pop(block.offset, None)
        return whole.as_strided(place.size, place.stride, place.offset)

    def _issue(self, stream: FakeStream, call: Callable[..., Any], targets: list[tuple[int, int, Place]]) -> None:
        def kernel() -> None:
            result = call(self._at)
            leaves = pytree.tree_leaves(result) if targets else []
            for i, offset, place in targets:
                self._at(offset, place).copy_(leaves[i].detach())

        def quietly() -> None:
            with _disable_current_modes(), torch.no_grad():
                kernel()

        stream.issue("work", quietly)

    @staticmethod
    def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation that writes to its operands returns: those of the names that its schema gives."""
        known = {
            frozenset(argument.alias_info.before_set): args[i] if i < len(args) else kwargs[argument.name]
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None
        }
        out = [known[frozenset(result.alias_info.before_set)] for result in func._schema.returns]
        return None if not out else out[0] if len(out) == 1 else tuple(out)

    # autograd

    def _compute(self, func: Any, leaves: list[Any], on_device: list[bool]) -> FakeStream:
        """The stream to issue an operation on."""
        here = self.current_stream()
        self._stream_of.setdefault(_SEQUENCE() - 1, here)
        if self._backward is None or torch.is_grad_enabled():
            return here
        for x, there in zip(leaves, on_device, strict=True):
            block = self.block(x) if there and x.numel() else None
            if block is not None and block.offset in self._gradients and self._gradients[block.offset] is not here:
                block.users |= {here} - {block.stream}
                if func in _SUMS:  # two gradients of one tensor: the engine waits for both
                    here.wait_stream(self._gradients[block.offset])
        if func is aten.add_.Tensor and self.block(leaves[0]).offset in self._gradients:
            self._gradients[self.block(leaves[0]).offset] = here
        return here

    def current_stream(self, device: Any = None) -> FakeStream:
        backward = self._backward
        if backward is not None and _TASK() != -1:
            node = _NODE()
            if node is not backward.node:
                self._enter(backward, node)
        return super().current_stream(device)

    def _enter(self, backward: _Backward, node: Any) -> None:
        if backward.node is not None:
            backward.ended[backward.node] = super().current_stream().record_event()
        backward.node = node
        if node is None:
            return
        stream = self._node_stream(backward, node)
        self._current.stream = stream
        backward.streams.add(stream)
        waiting, seen = list(backward.before.get(node, ())), set()
        if not waiting:
            stream.wait_event(backward.begin)
        while waiting:
            maker = waiting.pop()
            if maker in seen:
                continue
            seen.add(maker)
            if maker in backward.ended:
                if backward.ended[maker].stream is not stream:
                    stream.wait_event(backward.ended[maker])
            elif backward.before.get(maker):
                waiting += backward.before[maker]
            else:
                stream.wait_event(backward.begin)

    def _node_stream(self, backward: _Backward, node: Any) -> FakeStream:
        number = node._sequence_nr()
        if number not in self._stream_of and backward.before.get(node):  # a leaf's: that of its first use
            number = min(maker._sequence_nr() for maker in backward.before[node])
        return self._stream_of.get(number, backward.caller)

    def _run_backward(self, real: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
        before: dict[Any, list[Any]] = {root.grad_fn: [] for root in roots if root.grad_fn is not None}
        waiting = list(before)
        while waiting:
            node = waiting.pop()
            for after, _ in node.next_functions:
                if after is None:
                    continue
                if after not in before:
                    before[after] = []
                    waiting.append(after)
                before[after].append(node)
        caller = self.current_stream()
        self._backward = _Backward(before, caller.record_event(), caller)
        try:
            return real(roots, *args, **kwargs)
        finally:
            done, self._backward = self._backward, None
            self._current.stream = caller
            for stream in done.streams - {caller}:
                caller.wait_stream(stream)

    @contextlib.contextmanager
    def _only_kernels(self) -> Iterator[None]:
        """`undisturbed`, on this device."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), _Kernels(self):
            yield

    # PyTorch's module for the device

    def is_initialized(self) -> bool:
        return True

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(name="emulated")

    def get_rng_state(self, device: Any) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any) -> None:
        self.generator.set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.generator.get_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.generator.set_state(states[0])

    def is_current_stream_capturing(self) -> bool:
        return False

    def memory_stats(self, device: Any) -> dict[str, int]:
        counted = ("requested_bytes", "allocated_bytes", "reserved_bytes")
        return {f"{name}.all.{when}": self.in_use for name in counted for when in ("current", "peak")}

    def reset_peak_memory_stats(self, device: Any) -> None:
        """Its peaks are what is held."""

    def empty_cache(self) -> None:
        """It has none."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[Device]:
        real = torch.autograd._engine_run_backward
        with super().installed(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)  # called where an operation is given the device
            patch.setattr(torch.autograd, "_engine_run_backward", functools.partial(self._run_backward, real))
            patch.setattr(check, "undisturbed", self._only_kernels)
            patch.setattr(weights, "undisturbed", self._only_kernels)
            with _Kernels(self):
                yield self
                self.synchronize()


class _Kernels(TorchDispatchMode):
    def __init__(self, gpu: Device) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.run(func, args, kwargs or {})


_SHAPES: dict[Any, Any] = {}


def _shapes(key: Any, call: Callable[..., Any]) -> tuple[list[Any], pytree.TreeSpec] | None:
    """What an operation returns, tensors as places; None if they are views of its operands."""
    if key not in _SHAPES:
        operands: set[int] = set()

        def zeros(offset: int, place: Place) -> torch.Tensor:
            whole = torch.zeros(place.nbytes // place.dtype.itemsize, dtype=place.dtype)
            operands.add(whole.untyped_storage()._cdata)
            return whole.as_strided(place.size, place.stride, place.offset)

        with torch.no_grad(), _disable_current_modes():
            leaves, spec = pytree.tree_flatten(call(zeros))
        views = any(isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in operands for x in leaves)
        results = [
            Place(x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), x.untyped_storage().nbytes())
            if isinstance(x, torch.Tensor)
            else x
            for x in leaves
        ]
        _SHAPES[key] = None if views else (results, spec)
    return _SHAPES[key]
