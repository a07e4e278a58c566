"""Measure a device of this machine, and describe it as a `Device`.

Peaks are the rates of large matrix products and large copies. The share of each class of operation comes from a few
typical layers, forward and backward: their time by the roofline at the peaks, over the time that they take. Example: if
the roofline gives layer norms 1 ms at the peak bandwidth and they take 4 ms, reductions reach 25 %. So the roofline
with these shares is right for these layers on average; for other models it has the errors of its form.
"""

from __future__ import annotations

import itertools
import platform
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from ckptplan.core.device import Device
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.progress import counted
from ckptplan.core.request import Report, reporting
from ckptplan.core.units import format_bytes
from ckptplan.profiling.bytes.operations import SeenOperations
from ckptplan.profiling.times.links import measure_costs, measure_links
from ckptplan.profiling.times.overheads import measure_overheads
from ckptplan.profiling.times.roofline import flops_rate, op_cost, op_seconds
from ckptplan.tensors import accelerator
from ckptplan.training.measure import timed

_LEAST_SIDE = 256
_MOST_SIDE = 16384
_MOST_SCALE = {"cpu": 16, "cuda": 256}
"""Largest scale of the trial layers. On the CPU it keeps tensors to some MiB, as activations have there: larger ones
get fresh pages from the system in every run."""
_OTHERS = 4  # quantities besides the products of each type and the classes
_LAUNCHES = 2000  # of a next to empty operation, in ten runs


def calibrate(
    device: str | torch.device | None = None,
    *,
    name: str | None = None,
    swap_dir: str | Path | None = None,
    effort_s: float = 0.6,
    on_progress: Callable[[str], None] | None = None,
) -> Device:
    """Measure a device of this machine, with the number of threads that PyTorch uses now.

    Parameters
    ----------
    device : str or torch.device, optional
        By default CUDA if there is a CUDA device, otherwise the CPU.
    name : str, optional
        Name of the result; default: the device's own name, in lower case with hyphens.
    swap_dir : path, optional
        Directory of the CPU's host tier.
    effort_s : float
        Seconds of measured time for each of about a dozen quantities; sizes grow until a run takes 1/16 of it.
    on_progress : callable, optional
        Called with the number and the name of each quantity before it is measured.

    Returns
    -------
    Device
        `context_bytes` counts all processes on a CUDA device, so measure it while nothing else runs there.

    Raises
    ------
    InvalidInputError
        If the device can't be measured, isn't in this machine, or `effort_s` is out of range.
    """
    where = _device(device)
    if not 0 < effort_s <= 60:
        raise InvalidInputError(f"effort_s={effort_s!r} must be above 0 and at most 60 seconds per quantity")
    tell = reporting(on_progress)
    with torch.random.fork_rng(devices=[where] if accelerator.is_accelerator(where) else []), torch.enable_grad():
        return _calibrate(where, name, swap_dir, effort_s, tell)


def _device(device: str | torch.device | None) -> torch.device:
    try:
        where = accelerator.default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(f"PyTorch knows no device {device!r}; pass 'cpu' or 'cuda'") from error
    if where.type != "cpu" and not accelerator.is_accelerator(where):
        raise InvalidInputError(f"device {device!r} can't be measured; 'cpu' and 'cuda' can")
    count = accelerator.device_count()
    if accelerator.is_accelerator(where) and (where.index or 0) >= count:
        raise InvalidInputError(f"device {device!r} is not there: PyTorch sees {count} CUDA devices")
    return accelerator.with_index(where)


def _calibrate(
    where: torch.device, name: str | None, swap_dir: str | Path | None, effort_s: float, report: Report
) -> Device:
    cuda = accelerator.is_accelerator(where)
    types, classes = _types(where), _trials(where)
    number, total = itertools.count(1), len(types) + len(classes) + _OTHERS

    def tell(quantity: str) -> None:
        report(counted("measuring", next(number), total, f"quantities: {quantity}"))

    tell("memory bandwidth")
    bytes_per_s = _copy_rate(where, effort_s)
    flops_per_s = {}
    for label, dtype in types:
        tell(f"matrix products of {label}")
        with accelerator.tf32_products(label == "tf32"):
            flops_per_s[label] = _product_rate(where, dtype, effort_s)
    tell("time between operations")
    launch_s = _launch_s(where)
    tell("copies to the host tier and back")
    link, _ = measure_links(where, (64 if cuda else 16) << 20, swap_dir, together=False)
    latency_s = measure_costs(where, swap_dir).latency_s
    properties = accelerator.properties(where) if cuda else None
    accelerator.synchronize(where)
    accelerator.empty_cache(where)
    description = properties.name if properties is not None else _cpu_name()
    found = Device(
        name=name or "-".join(description.lower().split()),
        description=description if cuda else f"{description}, {torch.get_num_threads()} threads",
        memory_bytes=properties.total_memory if properties is not None else psutil.virtual_memory().total,
        context_bytes=accelerator.foreign_bytes(where),  # after the measurements: the libraries are loaded
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        out_bytes_per_s=link.out_bytes_per_s,
        in_bytes_per_s=link.in_bytes_per_s,
        latency_s=latency_s,
        compute_capability=(properties.major, properties.minor) if properties is not None else None,
    )
    tell("overheads of a running plan")
    overheads = measure_overheads(where, swap_dir)
    shares = {}
    for kind, trials in classes.items():
        tell(f"share of the peak of class {kind}")
        shares[kind] = _share(kind, trials, found, where, effort_s)
    here = f"measured here with torch {torch.__version__}"
    rates = ("bytes_per_s", "flops_per_s", "out_bytes_per_s", "in_bytes_per_s")
    timed_here = (*rates, "latency_s", "launch_s", "overheads")
    sources = dict.fromkeys(timed_here, here)
    sources |= {f"efficiency.{kind}": f"{here}, forward and backward of typical layers" for kind in shares}
    sources["memory_bytes"] = "torch.cuda.get_device_properties" if cuda else "physical memory, psutil"
    sources["context_bytes"] = f"{here}: bytes in use less those reserved" if cuda else "none on the CPU"
    if cuda:
        sources["compute_capability"] = "torch.cuda.get_device_properties"
    return replace(found, efficiency=shares, launch_s=launch_s, sources=sources, overheads=overheads)


def _cpu_name() -> str:
    """Name of the processor, from Linux if possible, otherwise from Python's `platform`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "CPU"


# --- peaks ---


def _median_s(run: Callable[[], Any], where: torch.device, effort_s: float) -> float:
    """Median time of a call after a warm-up: 3 to 100 calls, until they have taken half of `effort_s`."""
    run()
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < effort_s / 2 and len(seconds) < 100):
        seconds.append(timed(run, where))
    return statistics.median(seconds)


def _copy_rate(where: torch.device, effort_s: float) -> float:
    """Bytes read and written a second by copies of a block much larger than caches."""
    nbytes = min(512 << 20, accelerator.free_bytes(where) // 8)
    source = torch.ones(nbytes, dtype=torch.uint8, device=where)
    target = torch.zeros_like(source)
    return 2 * nbytes / _median_s(lambda: target.copy_(source), where, effort_s)


def _types(where: torch.device) -> list[tuple[str, torch.dtype]]:
    """Types of products, by the names that device files use."""
    types = [("float32", torch.float32), ("float16", torch.float16)]
    capability = accelerator.compute_capability(where)
    if capability is None or capability >= (8, 0):
        types.append(("bfloat16", torch.bfloat16))
    if capability is not None and capability >= (8, 0):
        types.append(("tf32", torch.float32))
    return [*types, ("float64", torch.float64)]


def _product_rate(where: torch.device, dtype: torch.dtype, effort_s: float) -> float:
    """Floating-point operations a second of square products, as large as `effort_s` and the device allow."""
    for side in itertools.count():
        side = _LEAST_SIDE << side
        a = torch.full((side, side), 0.5, dtype=dtype, device=where)
        out = torch.empty_like(a)

        def run(a: torch.Tensor = a, out: torch.Tensor = out) -> None:
            torch.mm(a, a, out=out)

        run()
        largest = 2 * side > _MOST_SIDE or 12 * side * side * dtype.itemsize > accelerator.free_bytes(where)
        if largest or timed(run, where) >= effort_s / 16:  # the next size takes eight times as long
            return float(2 * side**3) / _median_s(run, where, effort_s)
    raise AssertionError  # the loop only ends by returning


def _launch_s(where: torch.device) -> float:
    """Time from the start of one operation to that of the next, for operations on a single number."""
    x = torch.zeros(1, device=where)

    def run() -> None:
        with torch.no_grad():
            for _ in range(_LAUNCHES // 10):
                x.add_(1)

    run()
    return statistics.median(timed(run, where) for _ in range(10)) / (_LAUNCHES // 10)


# --- shares of the peaks ---

Trial = Callable[[int], Callable[[], Any]]
"""From a scale of the tensors' sizes to a call that runs typical operations of one class forward and backward."""


def _trials(where: torch.device) -> dict[str, list[Trial]]:
    """Typical layers of each class, in the data type that training on the device mostly uses."""
    dtype = torch.float16 if (accelerator.compute_capability(where) or (0, 0)) >= (7, 0) else torch.float32

    def tensor(*size: int) -> torch.Tensor:
        return torch.full(size, 0.5, dtype=dtype, device=where, requires_grad=True)

    def layer(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *more: torch.Tensor) -> Callable[[], Any]:
        gradient = torch.ones_like(run(x))
        return lambda: torch.autograd.grad(run(x), [x, *more], gradient)

    def linear(scale: int) -> Callable[[], Any]:
        weight = tensor(2048, 512)
        return layer(lambda x: F.linear(x, weight), tensor(64 * scale, 512), weight)

    def convolution(stride: int, channels: int, side: int) -> Trial:
        def made(scale: int) -> Callable[[], Any]:
            weight = tensor(2 * channels, channels, 3, 3)
            return layer(
                lambda x: F.conv2d(x, weight, stride=stride, padding=1), tensor(scale, channels, side, side), weight
            )

        return made

    def attention(scale: int) -> Callable[[], Any]:
        k, v = tensor(scale, 8, 256, 64), tensor(scale, 8, 256, 64)
        return layer(lambda q: F.scaled_dot_product_attention(q, k, v, is_causal=True), tensor(scale, 8, 256, 64), k, v)

    def of(run: Callable[[torch.Tensor], torch.Tensor]) -> Trial:
        return lambda scale: layer(run, tensor(64 * scale, 2048))

    def embedding(scale: int) -> Callable[[], Any]:
        table = tensor(8192, 512)
        indices = torch.arange(64 * scale, device=where) % 8192
        return layer(lambda table: F.embedding(indices, table), table)

    return {
        "matmul": [linear],
        "convolution": [convolution(1, 64, 28), convolution(2, 64, 28)],
        "attention": [attention],
        "elementwise": [of(F.gelu), of(F.relu), of(lambda x: x * 2 + x)],
        "reduction": [
            of(lambda x: F.layer_norm(x, x.shape[-1:])),
            of(lambda x: x.softmax(-1)),
            of(lambda x: x.sum(-1)),
        ],
        "other": [embedding],
    }


def _share(kind: str, trials: list[Trial], peaks: Device, where: torch.device, effort_s: float) -> float:
    """Time at the peaks over measured time, of the operations of one class in its trials."""
    at_peak = taken = 0.0
    for trial in trials:
        scale = 1
        run = trial(scale)
        run()
        while timed(run, where) < effort_s / 16 and scale < _MOST_SCALE[where.type]:
            scale *= 2
            run = trial(scale)
            run()
        with SeenOperations() as seen:
            run()
        bound_s = sum(op_seconds(key, peaks) for key in seen.keys)
        wanted_s = sum(op_seconds(key, peaks) for key in seen.keys if op_cost(key).kind == kind)
        # Operations of other classes in the trial (a sum of two gradients) are taken to reach the same share.
        taken += _median_s(run, where, effort_s / len(trials)) * (wanted_s / bound_s if bound_s else 1.0)
        at_peak += wanted_s
    return min(max(at_peak / taken, 1e-3), 1.0)


def summary(device: Device) -> list[tuple[str, str, str]]:
    """Rows of a table: quantity, value, and share of the peak if there is one."""
    rows = [
        ("memory", format_bytes(device.memory_bytes), ""),
        ("context", format_bytes(device.context_bytes), ""),
        ("memory bandwidth", f"{format_bytes(device.bytes_per_s)}/s", ""),
        ("to the host tier", f"{format_bytes(device.out_bytes_per_s)}/s", ""),
        ("back from it", f"{format_bytes(device.in_bytes_per_s)}/s", ""),
        ("a transfer besides its bytes", f"{device.latency_s * 1e6:.1f} µs", ""),
        ("between operations", f"{device.launch_s * 1e6:.1f} µs", ""),
    ]
    rows += [(f"products, {kind}", f"{rate / 1e9:,.1f} GFLOP/s", "") for kind, rate in device.flops_per_s.items()]
    for kind, share in device.efficiency.items():
        if kind in ("matmul", "convolution", "attention"):
            reached = f"{flops_rate(device, torch.float32, kind) / 1e9:,.1f} GFLOP/s in float32"
        else:
            reached = f"{format_bytes(device.bytes_per_s * share)}/s"
        rows.append((f"class {kind}", reached, f"{share:.0%}"))
    return rows
