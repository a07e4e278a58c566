"""The one seam to the device: its streams, events, memory, page-locked host memory, generators and properties.

Everything that depends on the kind of device goes through this module, and nothing else in the package names
`torch.cuda`. Two kinds are supported today, CUDA and the CPU; MPS and XPU are not claimed. As for `torch.accelerator`
there is one kind of accelerator in a process. On the CPU, functions without a result do nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import psutil
import torch

from ckptplan.core.measured import DeviceBytes

module: Any = torch.get_device_module("cuda")
"""PyTorch's module for the accelerator. An emulated device takes its place as a whole."""
IS_BUILT = torch.backends.cuda.is_built()
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


@functools.cache
def is_accelerator(device: torch.device) -> bool:
    """Whether `device` computes on streams, beside the host, in memory of its own: CUDA, not the CPU or meta."""
    return device.type == "cuda"


def own_module(device: torch.device) -> Any:
    """PyTorch's module for `device`; hot code keeps it."""
    return module if is_accelerator(device) else torch.get_device_module(device)


def default_device() -> torch.device:
    """The accelerator of this machine, where it is a supported one, or else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and is_accelerator(found) else torch.device("cpu")


def device_count() -> int:
    """How many accelerators of the supported kind PyTorch can use."""
    return int(module.device_count()) if module.is_available() else 0


def with_index(device: torch.device) -> torch.device:
    """`device` with the index that PyTorch gives to its tensors, as devices are compared: "cuda" isn't "cuda:0"."""
    if not is_accelerator(device) or device.index is not None:
        return device
    return torch.device(device.type, module.current_device() if module.is_available() else 0)


def properties(device: torch.device) -> Any:
    """The accelerator's `name`, `total_memory`, and CUDA's compute capability as `major` and `minor`."""
    return module.get_device_properties(device)


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA's (major, minor); None on the CPU."""
    return module.get_device_capability(device) if is_accelerator(device) else None


def current_index() -> int:
    """The index of the current accelerator; -1 before the first use, which `set_device` takes for no change."""
    return torch._C._cuda_getDevice() if module.is_initialized() else -1


def current_stream(device: torch.device) -> Any:
    """The stream that computes now on `device`; None where there are no streams."""
    return module.current_stream(device) if is_accelerator(device) else None


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, `stream` computes, if there is one."""
    return contextlib.nullcontext() if stream is None else module.stream(stream)


@contextlib.contextmanager
def run_on(stream: Any, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, `stream` computes, on `tensors` too, behind the stream that computes now, which goes on behind it."""
    now: Any = None if stream is None else current_stream(stream.device)
    if now == stream:
        yield
        return
    stream.wait_stream(now)
    for tensor in tensors:
        if tensor.device == stream.device:
            tensor.record_stream(stream)
    try:
        with on_stream(stream):
            yield
    finally:
        now.wait_stream(stream)


def recorded_event(device: torch.device) -> Any:
    """An event of the stream that computes now: it happens when that has done what it was given so far."""
    own = own_module(device)
    event = own.Event()
    event.record(own.current_stream(device))
    return event


def timing_event(device: torch.device) -> Any:
    """The like with a time, on an accelerator."""
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until all streams of `device` are done."""
    if is_accelerator(device):
        module.synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the stream that computes now: events have no times then."""
    return is_accelerator(device) and module.is_current_stream_capturing()


def delay(device: torch.device, cycles: int) -> None:
    """Launch a CUDA kernel that does nothing for so many of the device's clock cycles."""
    with module.device(device):
        module._sleep(cycles)


def device_bytes(device: torch.device, when: Literal["current", "peak"] = "current") -> DeviceBytes:
    """The counters of an accelerator's allocator; peaks since the process began or since `reset_peaks`."""
    stats = module.memory_stats(device)
    kinds = ("requested", "allocated", "reserved")
    requested, allocated, reserved = (stats.get(f"{kind}_bytes.all.{when}", 0) for kind in kinds)
    return DeviceBytes(requested or allocated, allocated, reserved)  # cudaMallocAsync doesn't count what is asked for


def reset_peaks(device: torch.device) -> None:
    """Peaks begin at what is held now."""
    if is_accelerator(device):
        module.reset_peak_memory_stats(device)


def allocated_by(device: torch.device, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """What a call returns, and the most bytes that it allocated at once on an accelerator."""
    before = device_bytes(device).allocated_bytes
    reset_peaks(device)
    result = run(*args, **kwargs)
    return result, device_bytes(device, "peak").allocated_bytes - before


def empty_cache(device: torch.device) -> None:
    """Give blocks that nothing uses back from the allocator to the device."""
    if is_accelerator(device):
        module.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Bytes of the device, or of the machine, that no process holds."""
    return int(module.mem_get_info(device)[0] if is_accelerator(device) else psutil.virtual_memory().available)


def foreign_bytes(device: torch.device) -> int:
    """Bytes in use on the device that aren't this process's allocator's: of the driver, of other processes."""
    if not is_accelerator(device):
        return 0
    free, total = module.mem_get_info(device)
    return max(total - free - device_bytes(device).reserved_bytes, 0)


def capacity_bytes(device: torch.device) -> int | None:
    """Bytes that this process's allocator could have: its own, what is free, within its fraction; None on the CPU."""
    if not is_accelerator(device):
        return None
    free, total = module.mem_get_info(device)
    share = int(module.get_per_process_memory_fraction(device) * total)
    return int(min(free + device_bytes(device).reserved_bytes, share))


def clear_library_workspaces(device: torch.device) -> int | None:
    """Free what cuBLAS keeps for its products, and return its bytes; None where captured graphs still use it."""
    # Replays write to workspaces from before their capture, as long as the graphs' memory pools are alive.
    index = with_index(device).index
    segments = module.memory_snapshot()
    if any(s["device"] == index and tuple(s.get("segment_pool_id", (0, 0))) != (0, 0) for s in segments):
        return None
    before = device_bytes(device).allocated_bytes
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
    return before - device_bytes(device).allocated_bytes


def lock_pages(memory: torch.Tensor, device: torch.device) -> int:
    """Page-lock host memory for copies to and from all CUDA devices; returns CUDA's error code, which is 0 for none."""
    with module.device(device):
        code = int(module.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))
        if code:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)  # takes up the error, which the next kernel would report otherwise
    return code


def unlock_pages(memory: torch.Tensor) -> None:
    """End the page-locking of `memory`, which no copy may touch any more."""
    module.cudart().cudaHostUnregister(memory.data_ptr())


def has_generator(device: torch.device) -> bool:
    """Whether `device` has a generator that is in use; reading the state of another one would start CUDA."""
    return is_accelerator(device) and module.is_initialized()


def generator_states(device: torch.device) -> list[bytes]:
    """States of PyTorch's generators that operations on `device` may draw from."""
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(module.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]  # held by Python, which takes no memory of a step's


def keep_generators() -> Callable[[], None]:
    """Remember the state of all generators of accelerators, if there are any yet; calling the result restores it."""
    if not module.is_initialized():
        return lambda: None
    return functools.partial(module.set_rng_state_all, module.get_rng_state_all())


@contextlib.contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Products of float32 in TF32, or not, whatever the program has set."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
