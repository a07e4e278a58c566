"""Everything that only a GPU can show: tests marked gpu, and plans and baselines measured on real models.

    python experiments/gpu_suite.py --out experiments/results --minutes 9
    python experiments/gpu_suite.py --out /tmp/suite --device cpu --small --minutes 2 --models gpt2

Run it again to go on where it stopped: each finished cell is written to gpu_suite.json at once, and one with the same
fingerprint (package sources, this script, library versions, device, sizes) is not run again. Each model runs in a
process of its own, so that neither a crash nor a broken device ends the suite.

Budgets are percentages of the way from the smallest feasible peak to the peak with everything kept.
"""

# ruff: noqa: E402 - it runs from a checkout, without installation

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import hashlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when cuBLAS starts; without it a matrix product may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.units import format_bytes, format_seconds
from ckptplan.profiling.profiler import replayed_bytes, training_step
from ckptplan.profiling.target import Target
from ckptplan.referee import simulate, validate
from ckptplan.runtime.measure import peak_above_start, timed
from ckptplan.solving import planner

SCHEMA = "ckptplan.gpu_suite/1"
OURS = "ckptplan"
RULES = ("pooch", "recompute_all", "swap_all", "keep_all")
PERCENTS = "100,80,60,40,20,0"
MODELS = "gpt2,bert,vit,resnet50,llama"
STEPS = 3
TRIES = 2  # of a cell that was cut off
BROKEN = 3  # exit code of a process whose device can't go on


# --- models ---


def build(name: str, small: bool, device: torch.device) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model with random weights in training mode, and its inputs with labels; the same each time."""
    import transformers as hf

    torch.manual_seed(0)

    def text(kind: Any, config: Any, batch: int, length: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        tokens = torch.randint(config.vocab_size, (batch, length))
        return kind(config), {"input_ids": tokens, "labels": tokens.clone()}

    def images(kind: Any, config: Any, batch: int, side: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        pixels, labels = torch.randn(batch, 3, side, side), torch.randint(config.num_labels, (batch,))
        return kind(config), {"pixel_values": pixels, "labels": labels}

    if name == "gpt2":  # medium: 24 blocks of width 1024, dropout 0.1
        width, layers, heads, length = (64, 4, 2, 64) if small else (1024, 24, 16, 1024)
        vocabulary = 500 if small else 50257
        config = hf.GPT2Config(
            vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=heads,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        model, inputs = text(hf.GPT2LMHeadModel, config, 2 if small else 4, length)
    elif name == "bert":  # large: 24 layers of width 1024, dropout 0.1
        width, layers, heads, length = (64, 4, 2, 64) if small else (1024, 24, 16, 512)
        config = hf.BertConfig(
            vocab_size=500 if small else 30522, hidden_size=width, num_hidden_layers=layers,
            num_attention_heads=heads, intermediate_size=4 * width,
        )  # fmt: skip
        model, inputs = text(hf.BertForMaskedLM, config, 2 if small else 8, length)
    elif name == "vit":  # large: 24 layers of width 1024, patches of 16, dropout 0.1
        width, layers, heads, side = (64, 4, 2, 32) if small else (1024, 24, 16, 224)
        config = hf.ViTConfig(
            image_size=side, patch_size=8 if small else 16, hidden_size=width, num_hidden_layers=layers,
            num_attention_heads=heads, intermediate_size=4 * width, hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1, num_labels=10,
        )  # fmt: skip
        model, inputs = images(hf.ViTForImageClassification, config, 2 if small else 24, side)
    elif name == "resnet50":
        small_sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1]}
        config = hf.ResNetConfig(num_labels=10, **(small_sizes if small else {}))
        model, inputs = images(hf.ResNetForImageClassification, config, 2 if small else 128, 32 if small else 224)
    elif name == "llama":  # about 1.1e9 parameters, 16-bit, four query heads to a key-value head
        width, layers, heads, length = (64, 4, 4, 64) if small else (2048, 16, 32, 2048)
        config = hf.LlamaConfig(
            vocab_size=500 if small else 32000, hidden_size=width, intermediate_size=4 * width,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 4,
            max_position_embeddings=length, use_cache=False,
        )  # fmt: skip
        model, inputs = text(hf.LlamaForCausalLM, config, 2, length)
        model = model.to(torch.bfloat16)
    else:
        raise SystemExit(f"unknown model {name!r}; there are {MODELS}")
    return model.to(device).train(), {key: value.to(device) for key, value in inputs.items()}


def make_deterministic(name: str) -> dict[str, Any]:
    """What bitwise equality of two runs needs; returns it for the record."""
    # The backward of max pooling has no deterministic form for every layout, so it can only be warned of.
    warn_only = name == "resnet50"
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = False  # else every new tensor costs a write
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return {
        "use_deterministic_algorithms": "warn_only" if warn_only else True,
        "cudnn.deterministic": True,
        "cudnn.benchmark": False,
        "allow_tf32": False,
        "CUBLAS_WORKSPACE_CONFIG": os.environ["CUBLAS_WORKSPACE_CONFIG"],
    }


# --- the file ---


class Document:
    """gpu_suite.json: read once, replaced as a whole after each change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"schema": SCHEMA, "environment": {}, "commands": [], "cells": {}}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.get("schema") != SCHEMA:
                raise SystemExit(
                    f"{path} has schema {found.get('schema')!r}, this script writes {SCHEMA!r}; move it away"
                )
            self.data = found

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        return self.data["cells"]  # type: ignore[no-any-return]

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, prefix=".gpu_suite", suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            json.dump(self.data, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(file.name, 0o644)
        os.replace(file.name, self.path)


def fingerprint(device: torch.device, small: bool) -> tuple[str, dict[str, Any]]:
    """What a result is bound to: a digest, and what went into it in words."""
    digest = hashlib.sha256()
    for path in [*sorted((ROOT / "ckptplan").rglob("*.py")), Path(__file__)]:
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    import transformers

    environment = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "ortools": _version("ortools"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "cpus": os.cpu_count(),
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "small": small,
    }
    digest.update(json.dumps(environment, sort_keys=True).encode())
    return digest.hexdigest()[:16], environment


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    from importlib.metadata import version

    return version(package)


# --- measuring ---


def settle(device: torch.device) -> None:
    """Give everything unused back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def measured(run: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Peak and time of one step, as a training loop would see it.

    CUDA: the allocator's own peaks, everything that was there before included, after a warm-up step with empty caches
    that counts too. CPU: the peak above the start.
    """
    settle(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        seconds = [timed(run, device) for _ in range(STEPS)]
        return {
            "allocated_before_bytes": before,
            "allocated_peak_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(device),
            "step_s": statistics.median(seconds),
        }
    peak = peak_above_start(run, device)
    return {"peak_above_start_bytes": peak, "step_s": statistics.median(timed(run, device) for _ in range(STEPS))}


@dataclass
class Subject:
    """One model on the device and all that is known of it."""

    name: str
    model: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    device: torch.device

    def step(self) -> None:
        """Forward and backward; gradients made anew, as with `zero_grad()`."""
        self.model.zero_grad()
        self.model(**self.inputs).loss.backward()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad.detach().cpu() for n, p in self.model.named_parameters() if p.grad is not None}

    def clear(self) -> None:
        self.model.zero_grad()
        settle(self.device)


def plain_cell(subject: Subject) -> dict[str, Any]:
    """The plain step, and whether it repeats bit for bit: what equality of gradients can be held against."""
    buffers = {n: b.detach().clone() for n, b in subject.model.named_buffers()}
    runs = []
    for _ in range(2):
        with torch.no_grad():
            for n, b in subject.model.named_buffers():
                b.copy_(buffers[n])
        torch.manual_seed(1)
        subject.step()
        runs.append(subject.gradients())
        subject.clear()
    differing = [n for n in runs[0] if not torch.equal(runs[0][n], runs[1][n])]
    return {"repeatable": not differing, "differing": differing[:5], "measured": measured(subject.step, subject.device)}


def save_on_cpu_cell(subject: Subject) -> dict[str, Any]:
    """PyTorch's own offloading of everything saved, the model's parameters included."""

    def step() -> None:
        subject.model.zero_grad()
        with torch.autograd.graph.save_on_cpu(pin_memory=subject.device.type == "cuda"):
            loss = subject.model(**subject.inputs).loss
        loss.backward()

    try:
        return {"measured": measured(step, subject.device)}
    finally:
        release_pinned()


def hugging_face_cell(subject: Subject) -> dict[str, Any]:
    """Every layer recomputed by the library's own switch."""
    if not getattr(subject.model, "supports_gradient_checkpointing", False):
        return {"status": "unsupported"}
    subject.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        return {"measured": measured(subject.step, subject.device)}
    finally:
        subject.model.gradient_checkpointing_disable()


def release_pinned() -> None:
    """PyTorch keeps pinned memory for reuse; here it would only be in the way."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.cuda.is_initialized():
        empty()


def solve(profile: Profile, name: str, budget_bytes: int, limit_s: float) -> Plan:
    """The plan of one planner."""
    if name == OURS:
        return planner.solve_profile(profile, budget_bytes, time_limit_s=limit_s)
    return BASELINES[name](profile, budget_bytes)


def plan_cell(
    subject: Subject,
    profile: Profile,
    name: str,
    percent: float,
    budget_bytes: int,
    limit_s: float,
    known: dict[str, Any],
) -> dict[str, Any]:
    """One planner under one budget: planned, validated, replayed, verified, and run as a training loop would."""
    begin = time.perf_counter()
    base: dict[str, Any] = {"planner": name, "percent": percent, "budget_bytes": budget_bytes}
    try:
        plan = solve(profile, name, budget_bytes, limit_s)
    except ckptplan.InfeasibleBudgetError as error:
        return {**base, "status": "infeasible", "min_peak_bytes": error.min_peak_bytes}
    broken = validate(profile, plan, budget_bytes)
    base |= {
        "planning_s": time.perf_counter() - begin,
        "plan_status": plan.status,
        "gap": plan.gap,
        "lower_bound_s": plan.lower_bound_s,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_step_s": plan.step_s,
        "predicted_plain_step_s": plan.baseline_step_s,
        "predicted_stall_s": simulate(profile, plan).stall_s,
        "host_bytes": plan.host_bytes,
        "actions": {action: sum(c.action == action for c in plan.choices) for action in ("keep", "swap", "recompute")},
        "violations": [f"{v.kind}: {v.stage}: {v.detail}" for v in broken],
        "choices": hashlib.sha256(repr(plan.choices).encode()).hexdigest()[:16],
    }
    twin = known.get(base["choices"])
    if twin is not None:  # the same decisions are the same step, whatever the budget
        within = twin["verified"]["measured_peak_bytes"] <= budget_bytes
        verified = {**twin["verified"], "budget_bytes": budget_bytes, "within_budget": within}
        return {
            **base,
            **{k: twin[k] for k in ("replayed_peak_bytes", "measured")},
            "verified": verified,
            "same_as": twin["key"],
        }
    training, _ = training_step(subject.model, subject.inputs, target=Target(subject.device))
    base["replayed_peak_bytes"] = profile.resident_bytes + replayed_bytes(training, plan, Target(subject.device))
    subject.clear()
    found = ckptplan.verify(subject.model, plan, inputs=subject.inputs, repeats=STEPS)
    base["verified"] = {
        **dataclasses.asdict(found),
        "differing": found.differing[:5],
        "within_budget": found.within_budget,
    }
    subject.clear()
    with ckptplan.apply(subject.model, plan):
        base["measured"] = measured(subject.step, subject.device)
    return base


def profiled(subject: Subject, path: Path, mark: str) -> tuple[Profile, dict[str, Any]]:
    """The profile, from an earlier run of the same fingerprint where there is one, so that budgets stay the same."""
    seconds = None
    if path.exists() and mark in path.name:
        profile = Profile.load(path)
    else:
        begin = time.perf_counter()
        profile = ckptplan.profile(subject.model, subject.inputs)
        seconds = time.perf_counter() - begin
        profile.save(path)
    least = planner.smallest_peak(profile, time_limit_s=5)
    most = BASELINES["keep_all"](profile, 1 << 59).peak_bytes
    return profile, {
        "profiling_s": seconds,
        "stages": len(profile.stages),
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        "smallest_peak_bytes": least.peak_bytes,
        "smallest_peak_proven": least.proven,
        "keep_all_peak_bytes": most,
        "predicted_plain_step_s": profile.baseline_step_s,
        "out_bytes_per_s": profile.link.out_bytes_per_s,
        "in_bytes_per_s": profile.link.in_bytes_per_s,
        "notes": list(profile.notes),
    }


def _unproven() -> None:
    """Without OR-Tools the planner's heuristics run alone, and prove less."""

    class NoModel:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def hint(self, *args: Any) -> None: ...

        def solve(self, *args: Any, **kwargs: Any) -> Any:
            return argparse.Namespace(codes=None, proven=False, bound=0.0)

    planner.FluidModel = planner.PeakModel = NoModel  # type: ignore[assignment, misc]


# --- one model, in a process of its own ---


class OutOfTime(Exception):
    """The next cell might not end in time."""


def run_model(name: str, args: argparse.Namespace, document: Document, deadline: float) -> int:
    """Run the cells of one model that are still to do; 0 when all are done, 1 when the time was up."""
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if importlib.util.find_spec("ortools") is None:
        _unproven()
    flags = make_deterministic(name)
    mark, environment = fingerprint(device, args.small)
    document.data["environment"] = environment
    cells = document.cells
    longest = max(
        (c["seconds"] for k, c in cells.items() if k.startswith(f"{name}/") and c["fingerprint"] == mark), default=0.0
    )

    def cell(key: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        nonlocal longest
        key = f"{name}/{key}"
        before = cells.get(key, {})
        tries = before.get("tries", 0) if before.get("fingerprint") == mark else 0
        if before.get("status", "running") != "running" and tries:
            return before
        if tries >= TRIES:
            cells[key] |= {"status": "crashed", "error": f"not finished in {tries} tries"}
            document.write()
            return None
        if time.time() + longest > deadline:
            raise OutOfTime
        begin = time.time()
        cells[key] = {
            "status": "running",
            "fingerprint": mark,
            "seconds": 0.0,
            "tries": tries + 1,
            "deterministic": flags,
        }
        document.write()  # should the process die in it, the cell is known and not tried again for ever
        broken = False
        try:
            settle(device)
            result = {"status": "ok", **run()}
        except torch.OutOfMemoryError as error:
            result = {"status": "oom", "error": str(error).partition("\n")[0]}
        except Exception as error:  # a cell's failure is a result; the others go on
            broken = type(error).__name__ == "AcceleratorError"
            result = {"status": "error", "error": f"{type(error).__name__}: {error}"[:2000]}
        cells[key] = {**cells[key], **result, "seconds": time.time() - begin}
        document.write()
        longest = max(longest, cells[key]["seconds"])
        if broken:
            raise SystemExit(BROKEN)
        return cells[key] if cells[key]["status"] == "ok" else None

    percents = [float(x) for x in args.percents.split(",")]
    try:
        model, inputs = build(name, args.small, device)
        subject = Subject(name, model, inputs, device)
        holder: list[Profile] = []
        path = args.out / f"gpu_suite_profile_{name}_{mark}.json"

        def make_profile() -> dict[str, Any]:
            profile, facts = profiled(subject, path, mark)
            holder.append(profile)
            return facts

        facts = cell("profile", make_profile)
        if facts is None or facts["status"] != "ok":
            return 0
        profile = holder[0] if holder else Profile.load(path)
        least, most = facts["smallest_peak_bytes"], facts["keep_all_peak_bytes"]
        cell("plain", lambda: plain_cell(subject))
        subject.clear()
        for group in ((OURS,), RULES[:1], RULES[1:]):
            if group == RULES[1:]:
                cell("hugging_face", lambda: hugging_face_cell(subject))
                cell("save_on_cpu", lambda: save_on_cpu_cell(subject))
            for percent in percents:
                budget = least + int((most - least) * percent / 100)
                for rule in group:
                    known = {
                        c["choices"]: {**c, "key": k}
                        for k, c in cells.items()
                        if k.startswith(f"{name}/")
                        and c.get("measured")
                        and c.get("choices")
                        and c["fingerprint"] == mark
                    }
                    key = f"{percent:g}/{rule}"
                    cell(
                        key,
                        lambda r=rule, p=percent, b=budget, k=known: plan_cell(
                            subject, profile, r, p, b, args.time_limit, k
                        ),
                    )
                    subject.clear()
    except OutOfTime:
        return 1
    return 0


# --- the suite ---


def run_tests(document: Document, mark: str, args: argparse.Namespace, timeout_s: float) -> None:
    """The tests marked gpu, in a process of their own."""
    done = document.cells.get("pytest")
    if done is not None and done["fingerprint"] == mark:
        return
    begin = time.time()
    result: dict[str, Any] = {"status": "ok", "fingerprint": mark}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-x" if args.fail_fast else "-q"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", "tests/test_gpu.py"]
        try:
            ran = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False, env=_env()
            )
            result |= {"exit_code": ran.returncode, "tail": (ran.stdout + ran.stderr)[-6000:]}
            result["status"] = "ok" if ran.returncode == 0 else "failed"
        except subprocess.TimeoutExpired as error:
            out = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
            result |= {"status": "timeout", "tail": out[-6000:]}
        with contextlib.suppress(OSError, ElementTree.ParseError):
            suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
            counts = {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
            passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
            result["counts"] = {"passed": passed, **counts}
    document.cells["pytest"] = {**result, "seconds": time.time() - begin}
    document.write()


def _env() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_suite(args: argparse.Namespace, path: Path, deadline: float) -> None:
    """Tests first, then every model in turn with an equal share of what is left, until all is done or time is up."""
    document = Document(path)
    mark, document.data["environment"] = fingerprint(torch.device(args.device), args.small)
    document.data["fingerprint"] = mark
    document.data["commands"] = [*document.data["commands"], " ".join(["python", *sys.argv])][-20:]
    document.write()
    if not args.skip_tests:
        run_tests(document, mark, args, max(20.0, 0.35 * (deadline - time.time())))
    waiting = args.models.split(",")
    while waiting and time.time() + 10 < deadline:
        still = []
        finished = sum(c["status"] != "running" for c in Document(path).cells.values())
        for position, name in enumerate(waiting):
            left = deadline - time.time()
            if left < 10:
                return
            share = left / (len(waiting) - position)
            until = time.time() + share
            command = [
                sys.executable,
                str(Path(__file__).resolve()),
                *sys.argv[1:],
                "--child",
                name,
                "--until",
                str(until),
            ]
            try:
                # A cell that began in time may take a while longer than any before it, but not for ever.
                code = subprocess.run(command, timeout=min(share + 60, left + 15), check=False, env=_env()).returncode
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                still.append(name)
            if code not in (0, 1, BROKEN, None):
                _close_running(path, f"the process ended with exit code {code}")
        if sum(c["status"] != "running" for c in Document(path).cells.values()) == finished:
            return
        waiting = still


def _close_running(path: Path, why: str) -> None:
    document = Document(path)
    for item in document.cells.values():
        if item["status"] == "running":
            item |= {"status": "crashed", "error": why}
    document.write()


# --- tables ---


def print_tables(path: Path, models: list[str]) -> None:
    """What was found, short."""
    console = Console(width=150)
    data = Document(path).data
    cells = {key: c for key, c in data["cells"].items() if c["fingerprint"] == data["fingerprint"]}
    console.print(
        f"{data['environment'].get('device')}, torch {data['environment'].get('torch')}; {path}", soft_wrap=True
    )
    if "pytest" in cells:
        console.print(f"pytest -m gpu: {cells['pytest']['status']}, {cells['pytest'].get('counts')}")
    for name in models:
        table = Table(title=name)
        for column in ("budget %", "planner", "plan", "peak planned", "measured", "reserved", "fits", "step planned",
                       "measured", "x plain", "swapped", "waited", "gradients"):  # fmt: skip
            table.add_column(column, justify="left" if column in ("planner", "plan") else "right")
        rows = [(k.split("/")[1:], c) for k, c in cells.items() if k.startswith(f"{name}/")]
        for key, c in rows:
            for row in _row(key, c):
                table.add_row(*row)
        if rows:
            console.print(table)
    wrong = list(complaints(cells))
    for text in wrong:
        console.print(f"[bold red]WRONG[/bold red] {text}", soft_wrap=True)
    older = len(data["cells"]) - len(cells)
    console.print(f"{len(cells)} cells, {len(wrong)} complaints; {older} cells of other fingerprints not shown")


def _row(key: list[str], c: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    m = c.get("measured") or {}
    reserved = format_bytes(m["reserved_peak_bytes"]) if "reserved_peak_bytes" in m else ""
    if key[0] == "profile":
        return
    if len(key) == 1:
        peak = m.get("allocated_peak_bytes", m.get("peak_above_start_bytes"))
        step = format_seconds(m["step_s"]) if m else ""
        note = (
            ""
            if key[0] != "plain" or "repeatable" not in c
            else ("repeatable" if c["repeatable"] else "NOT repeatable")
        )
        yield (
            "",
            key[0],
            c["status"],
            "",
            format_bytes(peak) if peak else "",
            reserved,
            "",
            "",
            step,
            "",
            "",
            "",
            note,
        )
        return
    v = c.get("verified")
    if v is None:
        yield (key[0], key[1], c["status"], *[""] * 10)
        return
    ratio = f"{v['measured_step_s'] / v['plain_step_s']:.3f}" if v["plain_step_s"] else ""
    equal = {True: "equal", False: "DIFFER", None: "?"}[v["gradients_equal"]]
    yield (
        key[0], key[1], f"{c['plan_status']} {c['gap']:.1%}", format_bytes(c["predicted_peak_bytes"]),
        format_bytes(v["measured_peak_bytes"]), reserved, "yes" if v["within_budget"] else "OVER",
        format_seconds(c["predicted_step_s"]), format_seconds(v["measured_step_s"]), ratio,
        format_bytes(v["stats"]["swapped_out_bytes"]), format_seconds(v["stats"]["host_wait_s"]), equal,
    )  # fmt: skip


def complaints(cells: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What must not happen."""
    for key, c in cells.items():
        if c["status"] in ("error", "crashed", "failed", "timeout"):
            yield f"{key}: {c['status']}: {c.get('error', '')}"
        for text in c.get("violations", ()):
            yield f"{key}: unsound plan: {text}"
        v = c.get("verified")
        if v is None:
            continue
        if not v["within_budget"]:
            yield f"{key}: measured {v['measured_peak_bytes']} of {c['budget_bytes']} bytes"
        repeatable = cells.get(f"{key.split('/')[0]}/plain", {}).get("repeatable", True)
        if v["gradients_equal"] is False and repeatable:
            yield f"{key}: gradients differ from the plain model's: {', '.join(v['differing'])}"
        if v["stats"]["swapped_out_bytes"] != c["host_bytes"] and not c["host_bytes"]:
            yield f"{key}: swapped {v['stats']['swapped_out_bytes']} bytes, planned none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_suite.json")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop when these are used up; run again to go on")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", default=MODELS, help="comma-separated")
    parser.add_argument("--percents", default=PERCENTS, help="budgets, comma-separated")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the suite itself")
    parser.add_argument("--time-limit", type=float, default=4.0, help="seconds for each of our plans")
    parser.add_argument("--skip-tests", action="store_true", help="no pytest")
    parser.add_argument("--fail-fast", action="store_true", help="pytest -x")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    deadline = time.time() + 60 * args.minutes
    args.out = args.out.resolve()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_suite: no CUDA device here; run it on a machine with one, or try it with --device cpu --small",
            file=sys.stderr,
        )
        return 2
    path = args.out / "gpu_suite.json"
    if args.child:
        return run_model(args.child, args, Document(path), args.until)
    run_suite(args, path, deadline)
    print_tables(path, args.models.split(","))
    return 0


if __name__ == "__main__":
    sys.exit(main())
