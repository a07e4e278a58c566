"""A stand-in for a CUDA device: streams that run late and in any order their waits allow, and an allocator that reuses.

Code for CUDA runs on it as it is, with CPU tensors: it takes the place of `ckptplan.tensors.accelerator.module`, and
asynchronous copies are replaced. What is issued on a stream waits in its queue and runs when somebody waits on the
host, or by chance before; among streams that could go on, chance decides, and has its favourites. Device memory is one
arena. As with the caching allocator a freed block is handed out again at once on the stream that it was allocated on,
which is all it orders, and later if others were told of with `record_stream`. New memory is written over by its stream,
as by whoever had it last. So whoever leaves out a wait finds wrong bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptplan.tensors import accelerator

_device_of = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]
DEVICE = torch.device("cuda", 0)
ALIGN = 512


def pattern(value: int, nbytes: int) -> bytes:
    """`nbytes` of `value`, plus one after every kilobyte, so that no piece of a block passes for another."""
    return b"".join(bytes([(value + at // 1024) % 256]) * min(1024, nbytes - at) for at in range(0, nbytes, 1024))


class FakeEvent:
    """Happens when its stream has done what was issued there before `record`."""

    __module__ = "torch.cuda"  # as of what it stands for, which is no state of a model's

    def __init__(self, gpu: FakeCuda) -> None:
        self._gpu = gpu
        self.stream: FakeStream | None = None
        self.position = 0

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream = stream or self._gpu.current_stream()
        self.position = self.stream.issued

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.position

    def synchronize(self) -> None:
        self._gpu.run_until(self.query)

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0


class FakeStream:
    """First in, first out; each entry is work, or a condition to wait for."""

    __module__ = "torch.cuda"  # as of what it stands for, which is no state of a model's

    def __init__(self, gpu: FakeCuda) -> None:
        self._gpu = gpu
        self.device = DEVICE
        self.haste = gpu.rng.choice([1.0, 0.3, 0.03])
        self.queue: deque[tuple[str, Callable[[], Any]]] = deque()
        self.issued = 0
        self.done = 0

    def issue(self, kind: str, call: Callable[[], Any]) -> None:
        with self._gpu.lock:
            self.queue.append((kind, call))
            self.issued += 1
        self._gpu.run_some()

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        # As it was recorded by now; what it is recorded for later doesn't count.
        stream, position = event.stream, event.position
        if stream is not None:
            self.issue("wait", lambda: stream.done >= position)

    def wait_stream(self, stream: FakeStream) -> None:
        FakeStream.wait_event(self, stream.record_event())  # of the class: a test may replace the stream's own

    def synchronize(self) -> None:
        self.record_event().synchronize()


@dataclass(slots=True)
class Block:
    """A piece of the arena that is handed out."""

    offset: int
    size: int
    stream: FakeStream
    users: set[FakeStream] = field(default_factory=set)  # others, by `record_stream`


class FakeCuda:
    """The device; `installed` puts it in the place of PyTorch's module, whose names it has."""

    __module__ = "torch.cuda"  # as of what it stands for, which is no state of a model's

    def __init__(self, seed: int, arena_bytes: int = 1 << 20) -> None:
        self.rng = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.default = self.Stream()
        self._current = threading.local()
        self._eager = self.rng.choice([0.0, 0.3, 0.9])
        self._arena = (ctypes.c_char * (arena_bytes + ALIGN))()
        self._end = -ctypes.addressof(self._arena) % ALIGN
        self._base = ctypes.addressof(self._arena)
        self._free: dict[tuple[FakeStream, int], list[int]] = {}
        self._blocks: dict[int, Block] = {}
        self._leaving: list[tuple[Block, list[FakeEvent]]] = []  # freed, and still used by streams that were told of
        self._used = 0
        self.poison = False
        self._hosts: list[torch.Tensor] = []  # what is copied to and from stays until the end, as pinned memory does
        self.register_code = 0
        self.registered: dict[int, int] = {}  # address: bytes
        self.registrations = 0

    # PyTorch's module for the device

    def is_available(self) -> bool:
        return False  # devices without an index are the first

    def is_initialized(self) -> bool:
        return False

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def Stream(self, device: Any = None) -> FakeStream:
        stream = FakeStream(self)
        with self.lock:
            self.streams.append(stream)
        return stream

    def current_stream(self, device: Any = None) -> FakeStream:
        return getattr(self._current, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        former = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = former

    def _run_one(self) -> bool:
        ready = [s for s in self.streams if s.queue and (s.queue[0][0] == "work" or s.queue[0][1]())]
        if not ready:
            return False
        stream = self.rng.choices(ready, [s.haste for s in ready])[0]
        kind, call = stream.queue.popleft()
        if kind == "work":
            call()
        stream.done += 1
        return True

    def run_some(self) -> None:
        with self.lock:
            while self.rng.random() < self._eager and self._run_one():
                pass

    def run_until(self, reached: Callable[[], bool]) -> None:
        with self.lock:
            while not reached():
                assert self._run_one(), "every stream waits for another"

    def synchronize(self, device: Any = None) -> None:
        self.run_until(lambda: not any(s.queue for s in self.streams))

    # memory

    @property
    def in_use(self) -> int:
        """Bytes that aren't free, blocks that streams still use included."""
        self._collect()
        return self._used

    def take(self, nbytes: int) -> Any:
        """A block for the stream that computes now: what was freed last comes first."""
        size = -(-nbytes // ALIGN) * ALIGN
        stream = self.current_stream()
        with self.lock:
            self._collect()
            holes = self._free.setdefault((stream, size), [])
            if holes:
                offset = holes.pop()
            else:
                offset, self._end = self._end, self._end + size
                assert self._end <= len(self._arena), "the arena is full"
            self._used += size
            self._blocks[offset] = block = Block(offset, size, stream)
        memory = (ctypes.c_char * nbytes).from_buffer(self._arena, offset)
        weakref.finalize(memory, self._give, block)
        if self.poison:
            address = self._base + offset
            stream.issue("work", lambda: ctypes.memset(address, 0xFF, nbytes))
        return memory

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device, freed when its last tensor goes."""
        return torch.frombuffer(self.take(max(count, 1) * dtype.itemsize), dtype=dtype)[:count]

    def _give(self, block: Block) -> None:
        with self.lock:
            del self._blocks[block.offset]
            self._leaving.append((block, [stream.record_event() for stream in block.users]))

    def _collect(self) -> None:
        with self.lock:
            for entry in list(self._leaving):
                block, events = entry
                if all(event.query() for event in events):
                    self._leaving.remove(entry)
                    self._free.setdefault((block.stream, block.size), []).append(block.offset)
                    self._used -= block.size

    def block(self, tensor: torch.Tensor) -> Block:
        """The block that a device tensor lies in."""
        return self._blocks[tensor.untyped_storage().data_ptr() - self._base]

    def record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        block = self.block(tensor)
        if stream is not block.stream:
            block.users.add(stream)

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the arena."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or _device_of(tensor).type != "cpu":
            return False
        return 0 <= tensor.untyped_storage().data_ptr() - self._base < len(self._arena)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy; like the device, it knows addresses, not tensors."""
        assert target.nbytes == source.nbytes
        self._hosts += [t for t in (target, source) if not self.is_device(t)]
        to, come, nbytes = target.data_ptr(), source.data_ptr(), source.nbytes
        self.current_stream().issue("work", lambda: ctypes.memmove(to, come, nbytes))

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """A kernel that writes `pattern`."""
        address, data = tensor.data_ptr(), pattern(value, tensor.nbytes)
        self.current_stream().issue("work", lambda: ctypes.memmove(address, data, len(data)))

    def look(self, tensor: torch.Tensor, want: int) -> Callable[[], bool]:
        """A kernel that reads: tells, once it has run, whether it found the pattern of `want`."""
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        found: list[bool] = []
        self.current_stream().issue(
            "work", lambda: found.append(ctypes.string_at(address, nbytes) == pattern(want, nbytes))
        )
        return lambda: found == [True]

    # the runtime's own interface

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        if self.register_code == 0:
            assert not any(a < address + nbytes and address < a + n for a, n in self.registered.items())
            self.registered[address] = nbytes
            self.registrations += 1
        return self.register_code

    def _unregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def _device(self, tensor: torch.Tensor) -> torch.device:
        return DEVICE if self.is_device(tensor) else _device_of(tensor)

    @contextlib.contextmanager
    def installed(self) -> Iterator[FakeCuda]:
        """The package's accelerator is this device inside, and `torch.empty` on it takes memory from the arena."""
        copy_, empty, zeros = torch.Tensor.copy_, torch.empty, torch.zeros

        def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if not non_blocking:
                return copy_(target, source)
            self.copy(target, source)
            return target

        def emptied(*size: Any, device: Any = None, dtype: Any = None, **options: Any) -> torch.Tensor:
            if getattr(device, "type", "cpu") == "cuda":
                shape = torch.Size(size if isinstance(size[0], int) else size[0])
                return self.empty(shape.numel(), dtype).view(shape)
            return empty(*size, device=device, dtype=dtype, **options)

        def zeroed(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
            return zeros(*size, **options) if getattr(device, "type", "cpu") == "cuda" else zeros(*size, device=device)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accelerator, "module", self)
            # Or torch.empty would lock pages by the driver, which isn't here.
            patch.setattr(accelerator, "IS_BUILT", False)
            patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
            patch.setattr(torch.Tensor, "copy_", copied)
            patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream))
            patch.setattr(torch.Tensor, "device", property(self._device))
            patch.setattr(torch, "empty", emptied)
            patch.setattr(torch, "zeros", zeroed)
            yield self
            self.synchronize()
