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
