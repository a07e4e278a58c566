"""`probe`: what the device, its libraries and PyTorch on it do; each line is a result of its own.

Nothing here is compared with anything: it says what is, for those who read it before the expensive runs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import platform
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ckptplan
from ckptplan.profiling.bytes.kernels import _prefers_cudnn
from ckptplan.profiling.times.stopwatch import Stopwatch, Took
from ckptplan.state.restore import restored
from experiments.gpu.cases import Case
from experiments.gpu.profiling import Bench
from experiments.gpu.results import Skipped
from experiments.gpu.subject import compared, peaks, plan_by_hand, results_of
from experiments.gpu.work import Options

MIB, GIB = 1 << 20, 1 << 30
PAGE = 4096


def run(case: Case, options: Options) -> None:
    """`case` is trained end to end; all else needs no model."""
    bench = Bench(case, options)
    probe = Probe(bench.device, options.small)
    lines: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": probe.versions,
        "workspaces": probe.workspaces,  # early: the libraries take theirs once in a process
        "attention": probe.attention,
        "batch-norm": probe.batch_norm,
        "gradient-sums": probe.gradient_sums,
        "launch": probe.launch,
        "brackets": probe.brackets,
        "page-locking": probe.page_locking,
        "links": probe.links,
        "end-to-end": lambda: end_to_end(bench),
    }
    for name, measure in lines.items():
        bench.run(f"probe/{name}", measure)


class Seen(TorchDispatchMode):
    """Notes the operations that run, in which thread, and what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[tuple[str, int]] = []
        self.results: list[tuple[str, list[str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append((str(func), threading.get_ident()))
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self.results.append(
            (str(func), [f"{t.dtype} {list(t.shape)} {t.device}".removeprefix("torch.") for t in tensors])
        )
        return result


class Probe:
    """Lines of the probe that need a device and nothing else."""

    def __init__(self, device: torch.device, small: bool) -> None:
        self.device, self.small = device, small
        self.cuda = device.type == "cuda"

    def need_cuda(self) -> None:
        if not self.cuda:
            raise Skipped("needs CUDA")

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0

    def versions(self) -> dict[str, Any]:
        packages = ("torch", "transformers", "numpy", "networkx", "ortools", "trl", "pytest", "hypothesis", "triton")
        out: dict[str, Any] = {"python": platform.python_version(), "packages": {}}
        for name in packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                out["packages"][name] = importlib.metadata.version(name)
        out |= {
            "cpus": os.cpu_count(), "threads": torch.get_num_threads(), "host_bytes": psutil.virtual_memory().total,
            "host_free_bytes": psutil.virtual_memory().available,
            "environment": {k: v for k, v in os.environ.items() if k.startswith(("PYTORCH_", "CUBLAS_", "CUDA_"))},
        }  # fmt: skip
        if not self.cuda:
            return out
        properties = torch.cuda.get_device_properties(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        smi = ["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.sm"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            ran = subprocess.run([*smi, "--format=csv"], capture_output=True, text=True, timeout=20, check=False)
            out["nvidia-smi"] = ran.stdout.splitlines()
        torch.zeros(1, device=self.device)
        return out | {
            "device": properties.name, "capability": [properties.major, properties.minor],
            "processors": properties.multi_processor_count, "total_bytes": total,
            "outside_allocator_bytes": total - free - torch.cuda.memory_reserved(self.device),
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
            "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
        }  # fmt: skip

    def workspaces(self) -> dict[str, Any]:
        """Device bytes that stay after the first matrix product forward, and after the first backward (in another
        thread), by data type; a convolution likewise."""
        self.need_cuda()
        found: dict[str, Any] = {}
        for dtype in (torch.bfloat16, torch.float32):
            before = self.allocated()
            a, b = (torch.ones(512, 512, device=self.device, dtype=dtype, requires_grad=True) for _ in range(2))
            own = self.allocated()
            c = a @ b
            self.synchronize()
            forward = self.allocated() - own - c.nbytes
            c.sum().backward()
            self.synchronize()
            del c
            a.grad = b.grad = None
            backward = self.allocated() - own - forward
            found[str(dtype)] = {"forward_bytes": forward, "backward_bytes": backward, "operands_bytes": own - before}
            del a, b
        x = torch.ones(8, 64, 56, 56, device=self.device, requires_grad=True)
        layer = nn.Conv2d(64, 64, 3, padding=1, device=self.device)
        before = self.allocated()
        layer(x).sum().backward()
        x.grad = None
        layer.zero_grad()
        self.synchronize()
        found["convolution"] = {"stays_bytes": self.allocated() - before}
        torch.cuda.synchronize()
        before = self.allocated()
        torch._C._cuda_clearCublasWorkspaces()
        return {**found, "cleared_bytes": before - self.allocated()}

    def attention(self) -> dict[str, Any]:
        """Which kernel runs, and on which devices its results lie, for real tensors and for fake ones."""
        flags = {
            name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
            for name in ("flash", "mem_efficient", "math", "cudnn")
        }
        order = getattr(torch._C, "_get_sdp_priority_order", list)()
        rows = []
        kinds = itertools.product(
            (torch.bfloat16, torch.float32), ("none", "causal", "mask"), (0.0, 0.1), (64, 128), (False, True)
        )
        for dtype, mask, dropout, width, deterministic in kinds:
            row: dict[str, Any] = {
                "dtype": str(dtype).removeprefix("torch."), "mask": mask, "dropout": dropout, "width": width,
                "deterministic": deterministic,
            }  # fmt: skip
            torch.use_deterministic_algorithms(deterministic)  # with a warning alone, cuDNN's stays allowed
            try:
                for world in ("real", "fake"):
                    row[world] = self._attention(world, dtype, mask, dropout, width)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            finally:
                torch.use_deterministic_algorithms(False)
            row["alike"] = row.get("real") == row.get("fake")
            rows.append(row)
        chosen = Counter(row["real"][0] for row in rows if row.get("real"))
        rule = _prefers_cudnn(torch.cuda.get_device_capability(self.device)) if self.cuda else None
        return {
            "enabled": flags, "priority": [str(x) for x in order], "cudnn_first_by_rule": rule,
            "kernels": dict(chosen), "rows": rows,
        }  # fmt: skip

    def _attention(
        self, world: str, dtype: torch.dtype, mask: str, dropout: float, width: int
    ) -> tuple[str, list[str]]:
        length = 32 if self.small else 256
        mode = FakeTensorMode() if world == "fake" else contextlib.nullcontext()
        with mode:
            q, k, v = (
                torch.zeros(2, 4, length, width, dtype=dtype, device=self.device, requires_grad=True) for _ in range(3)
            )
            where = torch.ones(2, 1, length, length, dtype=torch.bool, device=self.device) if mask == "mask" else None
            with Seen() as seen:
                F.scaled_dot_product_attention(q, k, v, where, dropout_p=dropout, is_causal=mask == "causal")
        found = [(name, tensors) for name, tensors in seen.results if "attention" in name]
        return found[0] if found else ("math", [])

    def batch_norm(self) -> dict[str, Any]:
        """Which kernel runs, and what it leaves for backward, for real tensors and for fake ones."""
        rows = []
        for dtype, channels_last in itertools.product((torch.float32, torch.bfloat16), (False, True)):
            row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "channels_last": channels_last}
            for world in ("real", "fake"):
                mode = FakeTensorMode() if world == "fake" else contextlib.nullcontext()
                with mode:
                    layer = nn.BatchNorm2d(256, device=self.device)
                    x = torch.zeros(4, 256, 14, 14, device=self.device, dtype=dtype)
                    if channels_last:
                        x = x.to(memory_format=torch.channels_last)
                    with Seen() as seen:
                        layer(x.requires_grad_())
                row[world] = [found for found in seen.results if "batch_norm" in found[0]]
            row["alike"] = row["real"] == row["fake"]
            rows.append(row)
        return {"rows": rows}

    def gradient_sums(self) -> dict[str, Any]:
        """How two gradients of one tensor are added, and in which thread; the bytes at the worst moment."""
        count = (1 << 14) if self.small else (16 << 20)
        x = torch.ones(count, device=self.device, requires_grad=True)
        y = x * 1
        z = torch.sin(y) + torch.cos(y)
        if self.cuda:
            self.synchronize()
            torch.cuda.reset_peak_memory_stats(self.device)
        before = self.allocated()
        with Seen() as seen:
            z.sum().backward()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before if self.cuda else None
        main = threading.get_ident()
        operations = [(name, "caller" if thread == main else "another thread") for name, thread in seen.names]
        return {"tensor_bytes": 4 * count, "peak_bytes": peak, "operations": operations}

    def launch(self) -> dict[str, Any]:
        """Seconds of the CPU for one operation on a small tensor; on CUDA also of the device for an empty kernel."""
        x = torch.zeros(64, device=self.device)
        times = []
        count = 100 if self.small else 2000
        for _ in range(5):
            self.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                x.add_(1)
            times.append((time.perf_counter() - began) / count)
            self.synchronize()
        out: dict[str, Any] = {"issue_s": statistics.median(times)}
        if self.cuda:
            behind = min(count, 500)  # more than the device's queue holds would be issued after the delay
            out["device_s"] = self._on_device(lambda: [x.add_(1) for _ in range(behind)]) / behind
            out["event_record_s"] = _seconds(lambda: [torch.cuda.Event().record() for _ in range(200)]) / 200
            out["stream_switch_s"] = _seconds(_switches(torch.cuda.Stream(self.device), 200)) / 200
        return out

    def _on_device(self, call: Callable[[], Any]) -> float:
        """Seconds of the device for what is queued behind a delay, so that issuing it doesn't count."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        torch.cuda._sleep(200_000_000)
        begin.record()
        call()
        end.record()
        self.synchronize()
        return begin.elapsed_time(end) / 1e3

    def brackets(self) -> dict[str, Any]:
        """A block's forward: between synchronisations, behind a delay, on the CPU alone, and as profiles have it."""
        self.need_cuda()
        width = 256 if self.small else 2048
        layer = nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, device=self.device).bfloat16()
        rows = []
        watch = Stopwatch(self.device)
        for tokens in (256, 2048, 16384):
            x = torch.randn(1, tokens, width, device=self.device, dtype=torch.bfloat16)
            for _ in range(3):
                layer(x)

            def bracket(x: Tensor = x) -> float:
                self.synchronize()
                began = time.perf_counter()
                layer(x)
                self.synchronize()
                return time.perf_counter() - began

            def issue(x: Tensor = x) -> float:
                self.synchronize()
                began = time.perf_counter()
                layer(x)
                return time.perf_counter() - began

            def stopped(x: Tensor = x) -> Took:
                for _ in range(3):  # a delay that was too short grows
                    span = watch.begin(len(x))
                    layer(x)
                    took = watch.end(span)
                return took

            rows.append(
                {
                    "tokens": tokens,
                    "bracketed_s": statistics.median(bracket() for _ in range(9)),
                    "device_s": statistics.median(self._on_device(lambda x=x: layer(x)) for _ in range(5)),  # type: ignore[misc]
                    "cpu_s": statistics.median(issue() for _ in range(9)),
                    "stopwatch": stopped()._asdict(),
                }
            )
        return {"rows": rows}

    def page_locking(self) -> dict[str, Any]:
        """Seconds per GiB to register memory that was touched before and that was not, by how many threads at once;
        and to take it from PyTorch's pinned allocator."""
        self.need_cuda()
        size = 64 * MIB if self.small else 2 * GIB
        runtime = torch.cuda.cudart()
        rows = []
        for touched, threads in itertools.product((False, True), (1, 2, 4, 8, 16)):
            area = torch.empty(size + PAGE, dtype=torch.uint8)
            area = area[-area.data_ptr() % PAGE :]  # parts of two threads must have no page in common
            if touched:
                area.fill_(1)
            part = size // threads
            codes = [0] * threads

            def register(i: int, area: Tensor = area, part: int = part, codes: list[int] = codes) -> None:
                torch.cuda.set_device(self.device)
                codes[i] = int(runtime.cudaHostRegister(area.data_ptr() + i * part, part, 1))

            began = time.perf_counter()
            workers = [threading.Thread(target=register, args=(i,)) for i in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            took_s = time.perf_counter() - began
            began = time.perf_counter()
            for i in range(threads):
                if codes[i] == 0:
                    runtime.cudaHostUnregister(area.data_ptr() + i * part)
            if any(codes):
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self.device)  # takes up the error, which the next kernel would report else
            rows.append(
                {
                    "touched": touched,
                    "threads": threads,
                    "codes": codes,
                    "s_per_gib": took_s * GIB / size,
                    "unlock_s_per_gib": (time.perf_counter() - began) * GIB / size,
                }
            )
            del area
        began = time.perf_counter()
        taken = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        own_s = time.perf_counter() - began
        del taken
        return {"bytes": size, "rows": rows, "pinned_allocator_s_per_gib": own_s * GIB / size}

    def links(self) -> dict[str, Any]:
        """Bytes per second by size of copy: each way alone, both at once, and each under matrix products in bf16."""
        self.need_cuda()
        largest = (1 if self.small else 256) * MIB
        sizes = [s for s in (64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB) if s <= largest]
        host = [torch.empty(largest, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        there = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(2)]
        streams = [torch.cuda.Stream(self.device) for _ in range(2)]
        side = 1024 if self.small else 8192
        a = torch.ones(side, side, device=self.device, dtype=torch.bfloat16)
        product = torch.empty_like(a)

        def copies(way: int, size: int, count: int) -> tuple[Any, Any]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            source, target = (there[0], host[0]) if way == 0 else (host[1], there[1])
            with torch.cuda.stream(streams[way]):
                begin.record()
                for _ in range(count):
                    target[:size].copy_(source[:size], non_blocking=True)
                end.record()
            return begin, end

        def products(count: int) -> tuple[Any, Any]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                torch.mm(a, a, out=product)
            end.record()
            return begin, end

        def idle(count: int) -> float:
            self.synchronize()
            events = products(count)
            self.synchronize()
            return events[0].elapsed_time(events[1]) / 1e3

        idle(3)
        alone_s = idle(10) / 10
        rows = []
        for size in sizes:
            count = max(4, min(256, 4 * largest // size))
            row: dict[str, Any] = {"bytes": size, "copies": count}
            for name, ways, busy in (
                ("out", (0,), False),
                ("in", (1,), False),
                ("both", (0, 1), False),
                ("out_busy", (0,), True),
                ("in_busy", (1,), True),
            ):
                best = []
                for _ in range(3):
                    self.synchronize()
                    work = products(max(4, int(count * size / 40e9 / alone_s * 1.5))) if busy else None
                    events = [copies(way, size, count) for way in ways]
                    self.synchronize()
                    best.append(max(b.elapsed_time(e) for b, e in events) / 1e3)
                    if work is not None:
                        row[f"{name}_products_s"] = work[0].elapsed_time(work[1]) / 1e3
                row[f"{name}_bytes_per_s"] = count * size / statistics.median(best)
            rows.append(row)
        flops = 2 * side**3
        return {"product_s": alone_s, "product_flops_per_s": flops / alone_s, "rows": rows}


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _switches(stream: Any, count: int) -> Callable[[], None]:
    def call() -> None:
        for _ in range(count):
            with torch.cuda.stream(stream):
                pass

    return call


def end_to_end(bench: Bench) -> dict[str, Any]:
    """Profile a small model, make a plan by hand of every kind, apply it, and compare bits and peaks."""
    subject = bench.subject
    model = subject.copy()
    profile = ckptplan.profile(model, subject.inputs, optimizer=subject.optimizer, amp=subject.case.amp)
    found: dict[str, Any] = {"options": sorted({option.name for stage in profile.stages for option in stage.options})}
    step = subject.step_of(model)
    mixes = (("swap",), ("recompute",), ("swap", "recompute", "keep"))
    plans = {"+".join(actions): plan_by_hand(profile, actions) for actions in mixes}
    with restored(model) as rewind:
        wanted = results_of(subject, step.forward, rewind)
        found["plain_again"] = compared(results_of(subject, step.forward, rewind), wanted)
        for name, plan in plans.items():
            with ckptplan.apply(model, plan):
                found[name] = compared(results_of(subject, step.forward, rewind), wanted)
    for name, plan in plans.items():
        with ckptplan.apply(model, plan):
            subject.train(step.forward)
            found[name] |= {"peaks": peaks(subject, step.forward), "predicted_peak_bytes": plan.peak_bytes}
    return found
