"""The seam to the device: no other module names `torch.cuda`, and what the seam does on the CPU and on a stand-in."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_memory import FakeMemory

import ckptplan
from ckptplan.core.measured import DeviceBytes
from ckptplan.tensors import accelerator

PACKAGE = Path(ckptplan.__file__).parent
SEAM = PACKAGE / "tensors" / "accelerator.py"
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20


def device_code(source: str) -> Iterator[str]:
    """Expressions in `source` that reach past the seam; strings and comments don't count."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text in ("torch.cuda", "torch.accelerator", "torch.get_device_module") or text.startswith(
                "torch._C._cuda_"
            ):
                yield text
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found = [f"{node.module}.{name}" for name in names] if isinstance(node, ast.ImportFrom) else names
            yield from (name for name in found if name.startswith(("torch.cuda", "torch.accelerator")))
        elif isinstance(node, ast.Compare) and ".type" in ast.unparse(node):
            constants = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
            if "cuda" in constants:
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()", "from torch.cuda import Stream", "torch._C._cuda_getDevice()",
        "torch.get_device_module(device)", "on = device.type in ('cpu', 'cuda')",
    ],
)  # fmt: skip
def test_what_reaches_past_the_seam_is_found(source: str) -> None:
    assert list(device_code(source))


@pytest.mark.long
def test_one_module_alone_knows_the_device() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): list(device_code(path.read_text())) for path in PACKAGE.rglob("*.py")
    }
    assert {path for path, code in found.items() if code} == {SEAM.relative_to(PACKAGE).as_posix()}


def test_pytorch_has_all_that_the_seam_calls() -> None:
    """In this version, whatever it was built for."""
    nodes = [node for node in ast.walk(ast.parse(SEAM.read_text())) if isinstance(node, ast.Attribute)]
    names = {node.attr for node in nodes if ast.unparse(node.value) in ("module", "own")}
    assert {"Event", "current_stream", "memory_stats"} < names
    assert [name for name in sorted(names) if not hasattr(torch.cuda, name)] == []


def test_the_cpu_needs_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "module", None)  # so that any use of it fails
    for device in (CPU, torch.device("meta")):
        assert not accelerator.is_accelerator(device)
        assert accelerator.current_stream(device) is accelerator.compute_capability(device) is None
        assert accelerator.capacity_bytes(device) is None
        assert not accelerator.is_capturing(device)
        assert not accelerator.has_generator(device)
        assert accelerator.foreign_bytes(device) == 0
        assert accelerator.with_index(device) == device
        for nothing in (accelerator.synchronize, accelerator.reset_peaks, accelerator.empty_cache):
            nothing(device)
    assert accelerator.free_bytes(CPU) > 1 << 20
    assert accelerator.own_module(CPU) is torch.cpu
    with accelerator.on_stream(None), accelerator.run_on(None, [torch.ones(1)]):
        accelerator.recorded_event(CPU).synchronize()


@pytest.mark.parametrize(("found", "expected"), [(None, "cpu"), ("mps", "cpu"), ("xpu", "cpu"), ("cuda", "cuda")])
def test_only_cuda_is_taken_for_an_accelerator(
    found: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: there)
    assert accelerator.default_device() == torch.device(expected)


class Module:
    """What the seam calls of PyTorch's module."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.code = 0
        self.states = [torch.tensor([1]), torch.tensor([2])]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 3

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [state.clone() for state in self.states]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.states = states

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.calls.append(device)
        yield
        self.calls.append("left")

    def _sleep(self, cycles: int) -> None:
        self.calls.append(cycles)

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.calls.append)

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append((address, nbytes, flags))
        return self.code

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    def Event(self, **options: bool) -> Any:
        return SimpleNamespace(record=functools.partial(self.calls.append), **options)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module()
    monkeypatch.setattr(accelerator, "module", made)
    return made


def test_accounts_of_memory() -> None:
    memory: Any = FakeMemory()
    memory.mem_get_info = lambda device: (5 * MIB, 10 * MIB)
    memory.get_per_process_memory_fraction = lambda device: 1.0
    with memory.installed():
        memory.allocate(300)
        assert accelerator.device_bytes(CUDA) == DeviceBytes(300, 512, 2 * MIB)
        assert accelerator.free_bytes(CUDA) == 5 * MIB
        assert accelerator.foreign_bytes(CUDA) == 3 * MIB
        assert accelerator.capacity_bytes(CUDA) == 7 * MIB
        memory.get_per_process_memory_fraction = lambda device: 0.25
        assert accelerator.capacity_bytes(CUDA) == 2.5 * MIB
        stats = {**memory.memory_stats(CUDA), "requested_bytes.all.current": 0}  # as with cudaMallocAsync
        memory.memory_stats = lambda device: stats
        assert accelerator.device_bytes(CUDA) == DeviceBytes(512, 512, 2 * MIB)


def test_the_peak_of_a_call_is_its_own() -> None:
    memory = FakeMemory()

    def call(nbytes: int, *, run: str, device: str) -> str:
        """With options named as `allocated_by` names its own."""
        memory.allocator.free(memory.allocate(nbytes))
        return run + device

    with memory.installed():
        memory.allocator.free(memory.allocate(MIB))
        assert accelerator.allocated_by(CUDA, call, 70, run="a", device="b") == ("ab", 512)


def test_page_locking_asks_for_all_devices_and_takes_up_its_error(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, made = torch.empty(512, dtype=torch.uint8), []
    monkeypatch.setattr(torch, "zeros", lambda count, device: made.append(device))
    assert accelerator.lock_pages(memory, CUDA) == 0
    assert module.calls == [CUDA, (memory.data_ptr(), 512, 1), "left"]
    assert made == []
    module.code = 2
    assert accelerator.lock_pages(memory, CUDA) == 2
    assert made == [CUDA]
    accelerator.unlock_pages(memory)
    assert module.calls[-1] == memory.data_ptr()


def test_events_are_recorded_where_the_device_computes(module: Module) -> None:
    assert accelerator.timing_event(CUDA).enable_timing
    assert not hasattr(accelerator.recorded_event(CUDA), "enable_timing")
    assert module.calls == ["stream of cuda:0"] * 2
    module.calls.clear()
    accelerator.delay(CUDA, 99)
    assert module.calls == [CUDA, 99, "left"]


def test_generators_of_all_devices_come_back(module: Module) -> None:
    restore = accelerator.keep_generators()
    for state in module.states:
        state += 5
    restore()
    assert [int(state) for state in module.states] == [1, 2]


def test_a_device_without_an_index_is_the_current_one(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.with_index(torch.device("cuda")) == torch.device("cuda", 3)
    assert accelerator.with_index(CUDA) == CUDA
    monkeypatch.setattr(module, "is_available", lambda: False)
    assert accelerator.with_index(torch.device("cuda")) == CUDA
    assert accelerator.device_count() == 0  # whatever a driver that is too old counts
