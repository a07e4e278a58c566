"""The interface to the device: its streams, events, memory, page-locked host memory, generators and properties.

Everything that depends on the kind of device goes through this module, and no other module of the package names
`torch.cuda`. Two kinds are supported, CUDA and the CPU; MPS and XPU are not. As with `torch.accelerator`, a process has
one kind of accelerator. On the CPU, functions without a result do nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import psutil
import torch

from ckptplan.core.measured import DeviceBytes
from ckptplan.tensors.private import DisableTorchFunction, disable_current_modes

module: Any = torch.get_device_module("cuda")
"""PyTorch's module for the accelerator. An emulated device replaces the whole module."""
IS_BUILT = torch.backends.cuda.is_built()
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


_RANGES = ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "deviceRangeStart", "deviceRangeEnd", "markA")


@functools.cache
def is_accelerator(device: torch.device) -> bool:
    """Whether `device` has streams that run beside the host, and its own memory: CUDA, not the CPU or meta."""
    return device.type == "cuda"


def own_module(device: torch.device) -> Any:
    """Return PyTorch's module for `device`; frequently run code stores it."""
    return module if is_accelerator(device) else torch.get_device_module(device)


def default_device() -> torch.device:
    """Return this machine's accelerator if it is supported, otherwise the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and is_accelerator(found) else torch.device("cpu")


def device_count() -> int:
    """Return the number of supported accelerators that PyTorch can use."""
    return int(module.device_count()) if module.is_available() else 0


@contextlib.contextmanager
def ranges_do_nothing() -> Iterator[None]:
    """Let marks for NVIDIA's profiler do nothing within the block if PyTorch has no CUDA, where they are errors."""
    if hasattr(torch._C, "_nvtx"):
        yield
        return
    nothing = SimpleNamespace(**dict.fromkeys(_RANGES, lambda *_: 0))
    with mock.patch.object(torch.cuda.nvtx, "_nvtx", nothing):
        yield


def with_index(device: torch.device) -> torch.device:
    """Return `device` with the index that its tensors have: as devices, "cuda" and "cuda:0" compare unequal."""
    if not is_accelerator(device) or device.index is not None:
        return device
    return torch.device(device.type, module.current_device() if module.is_available() else 0)


def properties(device: torch.device) -> Any:
    """Return the accelerator's `name`, `total_memory` (bytes) and CUDA compute capability (`major` and `minor`)."""
    return module.get_device_properties(device)


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return CUDA's compute capability (major, minor); None on the CPU."""
    return module.get_device_capability(device) if is_accelerator(device) else None


def current_index() -> int:
    """Return the index of the current accelerator; -1 before its first use, for which `set_device` does nothing."""
    return torch._C._cuda_getDevice() if module.is_initialized() else -1


def choose_attention() -> None:
    """Have PyTorch make the choice now that it makes at a process's first attention on CUDA.

    It sets the order of attention's kernels then (`priority_order` in ATen's `cuda/sdp_utils.cpp`; on Hopper cuDNN's
    comes first). Flags that were read before and are set again would take that back: recomputes, and all attention
    after a profile, would run other kernels.
    """
    # Without elements there is no kernel, which is an error; the order is set nevertheless.
    with disable_current_modes(), DisableTorchFunction(), contextlib.suppress(RuntimeError):
        nothing = torch.empty((1, 1, 0, 8), dtype=torch.float16, device=torch.device("cuda", current_index()))
        torch._fused_sdp_choice(nothing, nothing, nothing)


def current_stream(device: torch.device) -> Any:
    """Return the current stream of `device`; None on devices without streams."""
    return module.current_stream(device) if is_accelerator(device) else None


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `stream` is the current stream; with None it changes nothing."""
    return contextlib.nullcontext() if stream is None else module.stream(stream)


@contextlib.contextmanager
def run_on(stream: Any, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Make `stream` current within the block, where it uses `tensors` besides the memory that it allocates.

    At the beginning `stream` waits for the former current stream; at the end the former one waits for `stream`.
    """
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
    """Return an event on the current stream, which happens when all work issued to the stream so far is done."""
    own = own_module(device)
    event = own.Event()
    event.record(own.current_stream(device))
    return event


def timing_event(device: torch.device) -> Any:
    """Return an event on the accelerator's current stream that records its time."""
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait on the host until all streams of `device` are done."""
    if is_accelerator(device):
        module.synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream: events have no times then."""
    return is_accelerator(device) and module.is_current_stream_capturing()


def delay(device: torch.device, cycles: int) -> None:
    """Launch a CUDA kernel that idles for `cycles` clock cycles of the device."""
    with module.device(device):
        module._sleep(cycles)


def device_bytes(device: torch.device, when: Literal["current", "peak"] = "current") -> DeviceBytes:
    """Return the counters of an accelerator's allocator; peaks count from the process's start or `reset_peaks`."""
    stats = module.memory_stats(device)
    kinds = ("requested", "allocated", "reserved")
    requested, allocated, reserved = (stats.get(f"{kind}_bytes.all.{when}", 0) for kind in kinds)
    return DeviceBytes(requested or allocated, allocated, reserved)  # cudaMallocAsync doesn't count requested bytes


def reset_peaks(device: torch.device) -> None:
    """Reset the allocator's peaks to the bytes held now."""
    if is_accelerator(device):
        module.reset_peak_memory_stats(device)


def allocated_by(device: torch.device, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """Return the result of a call, and the most bytes that it allocated at once on an accelerator."""
    before = device_bytes(device).allocated_bytes
    reset_peaks(device)
    result = run(*args, **kwargs)
    return result, device_bytes(device, "peak").allocated_bytes - before


def empty_cache(device: torch.device) -> None:
    """Return the allocator's unused blocks to the device."""
    if is_accelerator(device):
        module.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Return the bytes of the accelerator, or on the CPU of the machine, that are free for any process."""
    return int(module.mem_get_info(device)[0] if is_accelerator(device) else psutil.virtual_memory().available)


def foreign_bytes(device: torch.device) -> int:
    """Return the bytes in use on the device outside this process's allocator: the driver's, and other processes'."""
    if not is_accelerator(device):
        return 0
    free, total = module.mem_get_info(device)
    return max(total - free - device_bytes(device).reserved_bytes, 0)


def capacity_bytes(device: torch.device) -> int | None:
    """Return the bytes this process's allocator can have: its own and the free ones, up to its limit; CPU: None."""
    if not is_accelerator(device):
        return None
    free, total = module.mem_get_info(device)
    share = int(module.get_per_process_memory_fraction(device) * total)
    return int(min(free + device_bytes(device).reserved_bytes, share))


def clear_library_workspaces(device: torch.device) -> int | None:
    """Free cuBLAS's workspaces and return their bytes; None, freeing nothing, if captured graphs may use them."""
    # As long as a graph's memory pool is alive, its replays write to workspaces that are older than its capture.
    index = with_index(device).index
    segments = module.memory_snapshot()
    if any(s["device"] == index and tuple(s.get("segment_pool_id", (0, 0))) != (0, 0) for s in segments):
        return None
    before = device_bytes(device).allocated_bytes
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
    return before - device_bytes(device).allocated_bytes


def lock_pages(memory: torch.Tensor, device: torch.device) -> int:
    """Page-lock host memory for copies to and from all CUDA devices; return CUDA's error code, 0 if there is none."""
    with module.device(device):
        code = int(module.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))
        if code:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)  # clears the error, which the next kernel would report otherwise
    return code


def unlock_pages(memory: torch.Tensor) -> None:
    """End the page-locking of `memory`; all copies to and from it must be done."""
    module.cudart().cudaHostUnregister(memory.data_ptr())


def has_generator(device: torch.device) -> bool:
    """Whether `device` is an accelerator with CUDA started; otherwise reading its generator would start CUDA."""
    return is_accelerator(device) and module.is_initialized()


def generator_states(device: torch.device) -> list[bytes]:
    """Return the states of PyTorch's generators that operations on `device` may draw from."""
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(module.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]  # as Python objects, which take no tensor memory


def keep_generators() -> Callable[[], None]:
    """Remember the states of all accelerators' generators, if CUDA is started; return a function that restores them."""
    if not module.is_initialized():
        return lambda: None
    return functools.partial(module.set_rng_state_all, module.get_rng_state_all())


@contextlib.contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Compute float32 matrix products in TF32 (`allowed`) or in full precision within the block."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
