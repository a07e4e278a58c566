"""A campaign of injected faults: after each, is everything as before, the error clear, and the next step right?

    python experiments/faults.py --faults 1500 --out experiments/results
    python experiments/faults.py --resident --faults 500 --out experiments/results

Small models under the plans of bitwise.py are trained with faults of these kinds: an exception in forward, in a
recompute, in backward; a copy out or back that fails; a full disk; a worker thread that is killed; a swap file that is
cut off, or whose bytes are changed; an interrupt (SIGINT's) at any moment; an operation that is out of memory. A plan
stays applied through hundreds of them. After each fault:

- the step raised an error of the kind that belongs to it, or, where the fault hit nothing, its gradients are right;
- parameters, buffers, training flags, hooks and random states are what the same fault leaves of a plain step;
- no swap space is in use, and threads and open files are as many as before;
- the next clean step has the loss and gradients of the plain model, bit for bit.

With `--resident` the plans move weights, optimizer state and gradients of small models that AdamW trains, and some
frozen weights are away between steps too. There a fault that comes before the update must leave each parameter, each
gradient's part of earlier micro-batches and each moment as it was. A swap file that is lost or changed is not among
these faults: it has the only copy of what is away.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import documents  # isort: split

import small_models
import torch
import weight_models
from bitwise import plans, two_files
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from weight_models import moving_all

import ckptplan
from ckptplan.core.errors import CheckError, CkptPlanError, SwapError
from ckptplan.core.resident import PARTS
from ckptplan.runtime.swap.stores import DiskStore, disk
from ckptplan.tensors.storages import is_away, same_bits
from ckptplan.training.step import default_loss

MODELS = ("transformer", "routed", "shared", "views", "conv_norm", "nested", "low_rank")


class Boom(Exception):
    """The exception of a user's own code."""


@dataclass
class Fault:
    """One fault, and what it did.

    Attributes
    ----------
    kind : str
    expected : tuple of type
        Errors that it may end a step with.
    fired : bool
        Whether it has hit anything.
    """

    kind: str
    expected: tuple[type[BaseException], ...]
    fired: bool = False


@dataclass
class Subject:
    """A model with a plan applied, and what a clean step gives without one."""

    name: str
    what: str
    model: nn.Module
    inputs: Any
    handle: Any
    wanted: list[Any]
    step_s: float = 0.05
    buffers: list[torch.Tensor] = field(default_factory=list)
    optimizer: torch.optim.Optimizer | None = None
    started: list[torch.Tensor] = field(default_factory=list)
    frozen: list[torch.Tensor] = field(default_factory=list)
    between: int = 0
    home_bytes: int = 0
    phase: str = ""
    after_forward: torch.Tensor | None = None
    inside: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)

    def rewind(self) -> None:
        """Buffers as they were in the beginning: some models compute with what they count."""
        with torch.no_grad():
            for (name, _), value in zip(list(self.model.named_buffers()), self.buffers, strict=True):
                owner, _, last = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[last] = value.clone()
            if self.optimizer is not None and self.started:
                for tensor, value in zip(trained_state(self.optimizer), self.started, strict=True):
                    tensor.copy_(value)

    @property
    def stores(self) -> list[DiskStore]:
        """The files that its bytes go to: on the CPU the host tier is one, and the disk tier another, staged."""
        return list(self.handle._applied.stores.values())

    @property
    def used_bytes(self) -> int:
        """Swap space in use, beside the copies of weights and state that are kept between steps."""
        return max(sum(store.used_bytes for store in self.stores) - self.home_bytes, 0)

    def step(self) -> list[Any]:
        """Loss, gradients and what is trained from one seed; gradients of earlier micro-batches are there where an
        optimizer is."""
        self.phase = "forward"
        for k, p in enumerate(self.model.parameters()):
            p.grad = None if self.optimizer is None or not p.requires_grad else torch.full_like(p, k / 64)
        torch.manual_seed(3)
        with self.inside:
            loss = loss_of(self.model, self.inputs)
            self.phase, self.after_forward = "backward", torch.get_rng_state()
            loss.backward()
            gradients = [p.grad if p.grad is None else p.grad.clone() for p in self.model.parameters()]
            if self.optimizer is not None:
                self.phase = "update"
                self.optimizer.step()
        return [loss.detach(), *gradients, *trained_state(self.optimizer)]


def loss_of(model: nn.Module, inputs: Any) -> torch.Tensor:
    return default_loss(model(**inputs) if isinstance(inputs, dict) else model(inputs))


def trained_state(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """What an optimizer changes: its parameters and its state."""
    if optimizer is None:
        return []
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return parameters + [v for state in optimizer.state.values() for v in state.values()]


def same(found: list[Any], wanted: list[Any]) -> bool:
    """Bit for bit."""
    return all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))


# ---------------------------------------------------------------- faults


@contextlib.contextmanager
def registered(handle: Any) -> Iterator[None]:
    """Takes a hook off at the end."""
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def raising_module(subject: Subject, rng: random.Random, fault: Fault) -> Iterator[None]:
    """A leaf module raises when it is called for the first or, in a recompute, a later time."""
    leaves = [m for m in subject.model.modules() if not list(m.children())]
    module, call = rng.choice(leaves), 1 if fault.kind == "forward" else rng.randint(2, 3)
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            fault.fired = True
            raise Boom(f"call {call}")

    with registered(module.register_forward_pre_hook(hook)):
        yield


@contextlib.contextmanager
def raising_gradient(subject: Subject, rng: random.Random, fault: Fault) -> Iterator[None]:
    """The hook of a parameter's gradient raises."""
    parameter = rng.choice([p for p in subject.model.parameters() if p.requires_grad])

    def hook(_: torch.Tensor) -> None:
        fault.fired = True
        raise Boom("gradient")

    with registered(parameter.register_hook(hook)):
        yield


@contextlib.contextmanager
def failing_copy(subject: Subject, rng: random.Random, fault: Fault) -> Iterator[None]:
    """One write or read of the file fails."""
    name = "_read" if fault.kind == "copy back" else "_write"
    original, number = getattr(disk, name), rng.randint(1, 6)
    code = errno.ENOSPC if fault.kind == "full disk" else errno.EIO
    calls = 0

    def copy(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            fault.fired = True
            raise OSError(code, os.strerror(code))
        return original(*arguments)

    with mock.patch.object(disk, name, copy):
        yield


@contextlib.contextmanager
def killed_worker(subject: Subject, rng: random.Random, fault: Fault) -> Iterator[None]:
    """A worker thread ends, at the next line that it runs: before the step's first copy, or between two."""
    store = rng.choice(subject.stores)
    worker = rng.choice((store._out, store._in))

    def kill() -> None:
        fault.fired = True
        thread = ctypes.c_ulong(worker.thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))

    try:
        with contextlib.nullcontext(kill()) if rng.random() < 0.5 else between(subject, kill):
            yield
    finally:
        for _ in range(3):  # an idle one dies with the first of these, in its own time, and a later one has a new one
            worker.submit(lambda: None).settle()
            time.sleep(5e-3)


@contextlib.contextmanager
def between(subject: Subject, action: Callable[[], None]) -> Iterator[None]:
    """`action` runs when forward has ended and backward has not begun."""
    with registered(subject.model.register_forward_hook(lambda *_: action())):
        yield


@contextlib.contextmanager
def damaged_file(subject: Subject, rng: random.Random, fault: Fault) -> Iterator[None]:
    """The file is cut off, or every byte of it changed."""

    store = rng.choice(subject.stores)
    fd = store._file.fileno()

    def damage() -> None:
        for worker in (store._out, store._in):
            worker.submit(lambda: None).settle()  # behind all that is under way
        size = os.fstat(fd).st_size
        if not size:
            return
        fault.fired = True
        if fault.kind == "lost file":
            os.ftruncate(fd, 0)
            return
        block = bytearray(os.pread(fd, size, 0))
        os.pwrite(fd, bytes(b ^ 0x55 for b in block), 0)

    with between(subject, damage):
        yield
    with contextlib.suppress(OSError):
        os.posix_fallocate(fd, 0, max(store.reserved_bytes, 1))


@contextlib.contextmanager
def interrupt(subject: Subject, rng: random.Random, fault: Fault) -> Iterator[None]:
    """SIGALRM raises KeyboardInterrupt, as SIGINT does, at some moment of the step."""

    def handler(*_: Any) -> None:
        fault.fired = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, max(rng.random() * subject.step_s, 1e-5))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class OutOfMemory(TorchDispatchMode):
    """One operation finds no memory."""

    def __init__(self, number: int, fault: Fault) -> None:
        super().__init__()
        self.number, self.fault, self.seen = number, fault, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen == self.number:
            self.fault.fired = True
            raise torch.OutOfMemoryError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def out_of_memory(subject: Subject, rng: random.Random, fault: Fault) -> Iterator[None]:
    """Any operation of the step, forward or backward."""
    subject.inside = OutOfMemory(rng.randint(1, 400), fault)
    try:
        yield
    finally:
        subject.inside = contextlib.nullcontext()


Injector = Callable[[Subject, random.Random, Fault], contextlib.AbstractContextManager[None]]
KINDS: dict[str, tuple[Injector, tuple[type[BaseException], ...]]] = {
    "forward": (raising_module, (Boom,)), "recompute": (raising_module, (Boom,)),
    "backward": (raising_gradient, (Boom,)), "copy out": (failing_copy, (SwapError,)),
    "copy back": (failing_copy, (SwapError,)), "full disk": (failing_copy, (SwapError,)),
    "killed worker": (killed_worker, (SwapError,)), "lost file": (damaged_file, (SwapError,)),
    "corrupted file": (damaged_file, (CheckError,)), "interrupt": (interrupt, (KeyboardInterrupt,)),
    "out of memory": (out_of_memory, (torch.OutOfMemoryError,)),
}  # fmt: skip


# ---------------------------------------------------------------- what must be as before


def surroundings(subject: Subject) -> dict[str, Any]:
    """What no fault may change, beside the numbers that forward itself writes."""
    gc.collect()
    model = subject.model
    return {
        "parameters": [(id(p), p.requires_grad) for p in model.parameters()],
        "versions": [p._version for p in model.parameters() if not subject.optimizer or not p.requires_grad],
        "flags": [m.training for m in model.modules()],
        "hooks": [
            (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._backward_hooks), "forward" in m.__dict__)
            for m in model.modules()
        ],
        "hook stack": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": sorted(t.name for t in threading.enumerate()),
    }


def left_wrong(subject: Subject, failed: bool) -> list[str]:
    """Weights and moments that a step has left missing or wrong."""
    if subject.optimizer is None:
        return []
    frozen = [t for t in (*subject.model.parameters(), *subject.model.buffers()) if not t.requires_grad]
    trained, gradients = trained_state(subject.optimizer), [p.grad for p in subject.model.parameters()]
    present = [t for t in (*frozen, *trained, *gradients) if t is not None]
    for t in present:  # a copy that the fault has ended is an error of the first read, and is made again by the second
        with contextlib.suppress(SwapError):
            t.isnan()
    wrong = ["a frozen weight is wrong"] * (not same(frozen, subject.frozen))
    if failed and subject.phase != "update":
        wrong += ["a weight or a moment is wrong"] * (not same(trained, subject.started))
    # An error in backward leaves them away, for the failed step's activations may still be held: reading brings back.
    missing = sum(bool(t.isnan().any()) or is_away(t) for t in present)
    wrong += [f"{missing} weights, moments or gradients are not there"] * bool(missing)
    return wrong


def run_one(subject: Subject, kind: str, seed: int) -> dict[str, Any]:
    """One fault, one clean step, and all that was wrong."""
    rng = random.Random(seed)
    inject, expected = KINDS[kind]
    fault = Fault(kind, expected)
    subject.rewind()
    subject.phase = ""
    before = surroundings(subject)
    wrong: list[str] = []
    error: BaseException | None = None
    try:
        with inject(subject, rng, fault):
            result = subject.step()
        if not same(result, subject.wanted):
            wrong.append("SILENT: no error, and wrong gradients")
        del result
    except BaseException as raised:
        error = raised
    if error is not None:
        if not isinstance(error, expected):
            wrong.append(f"raised {type(error).__name__}: {str(error)[:200]}")
            wrong += traceback.format_exception(error)[-3:]
        if isinstance(error, CkptPlanError) and len(str(error)) < 40:
            wrong.append(f"unclear error: {error}")
        if subject.phase != "forward":
            moved = not torch.equal(torch.get_rng_state(), subject.after_forward)
            wrong += ["random state moved in backward"] * moved
    raised_as = type(error).__name__ if error is not None else ""
    error = None
    # A thread takes a moment to die, and a copy that nobody waits for any more to end.
    deadline = time.monotonic() + 2
    while (after := surroundings(subject)) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    wrong += [f"{name}: {before[name]} before, {after[name]} after" for name in after if after[name] != before[name]]
    in_backward = raised_as and subject.phase != "forward"
    while not in_backward and subject.used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    if not in_backward and subject.used_bytes:
        wrong.append("swap space is still in use")
    wrong += left_wrong(subject, bool(raised_as))
    subject.rewind()
    try:
        if not same(subject.step(), subject.wanted):
            wrong.append("the next step is wrong")
        gc.collect()
        # PyTorch keeps what a failed backward left in its queue; the next forward under the plan makes it let go.
        if subject.used_bytes:
            wrong.append("swap space is still in use after the next step")
    except Exception as raised:
        wrong.append(f"the next step raised {type(raised).__name__}: {str(raised)[:200]}")
    return {
        "model": subject.name, "plan": subject.what, "kind": kind, "seed": seed, "fired": fault.fired,
        "raised": raised_as, "wrong": wrong,
    }  # fmt: skip


def subjects(seed: int) -> Iterator[Subject]:
    """Every model with every kind of plan."""
    for name in MODELS:
        profile = ckptplan.profile(*small_models.build(name))
        plain = Subject(name, "", *small_models.build(name), None, [])
        wanted = plain.step()
        for what, plan in plans(profile, f"{name} {seed}").items():
            model, inputs = small_models.build(name)
            with two_files():
                handle = ckptplan.apply(model, plan, check="always")
            yield ready(Subject(name, what, model, inputs, handle, wanted))


def moving_residents(_: int) -> Iterator[Subject]:
    """Every model of which weights, state and gradients move, without and with weights away between steps."""
    for name, between in itertools.product(weight_models.MODELS, (0, PARTS)):
        plan = moving_all(
            name, ("activations", "weights", "optimizer", "gradients"), between, make=adamw, accumulate=True
        )
        plain = with_optimizer(Subject(name, "", *weight_models.built(name), None, []))
        wanted = plain.step()
        subject = with_optimizer(Subject(name, f"between {between}", *weight_models.built(name), None, wanted))
        subject.between = between
        with two_files():
            subject.handle = ckptplan.apply(subject.model, plan, check="always", optimizer=subject.optimizer)
        yield ready(subject)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def with_optimizer(subject: Subject) -> Subject:
    """A subject whose optimizer has its state."""
    subject.optimizer = adamw([p for p in subject.model.parameters() if p.requires_grad])
    subject.step()
    subject.started = [t.clone() for t in trained_state(subject.optimizer)]
    subject.frozen = [t.clone() for t in (*subject.model.parameters(), *subject.model.buffers()) if not t.requires_grad]
    return subject


def ready(subject: Subject) -> Subject:
    """A subject with its plan applied: its clean step is right, and takes `step_s`."""
    subject.buffers = [b.clone() for b in subject.model.buffers()]
    for _ in range(2):
        subject.rewind()
        begin = time.perf_counter()
        assert same(subject.step(), subject.wanted), (subject.name, subject.what)
        subject.step_s = time.perf_counter() - begin
    if subject.optimizer is not None:
        subject.home_bytes = subject.used_bytes
    return subject


def main() -> None:
    """Run the campaign."""
    parser = documents.parser(__doc__)
    parser.add_argument("--faults", type=int, default=1500, help="how many have to hit")
    parser.add_argument("--kinds", type=documents.among(KINDS), default=list(KINDS), help="only these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resident", action="store_true", help="weights, optimizer state and gradients move")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [kind for kind in given.kinds if not given.resident or KINDS[kind][0] is not damaged_file]
    threads_before, files_before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    everyone = list((moving_residents if given.resident else subjects)(given.seed))
    gc.freeze()  # what is there stays: each later collection looks at one step's objects alone
    rows: list[dict[str, Any]] = []
    hit = number = 0
    while hit < given.faults:
        subject = everyone[number % len(everyone)]
        kind = kinds[(number // len(everyone)) % len(kinds)]
        row = run_one(subject, kind, given.seed * 1_000_003 + number)
        number += 1
        hit += row["fired"]
        rows.append(row)
        if row["wrong"]:
            print(f"{row['model']} {row['plan']} {kind} seed {row['seed']}: {'; '.join(row['wrong'])}", flush=True)
    for subject in everyone:
        forwards = [m for m in subject.model.modules() if "forward" in m.__dict__]
        assert forwards, "the plan is still applied"
        subject.handle.remove()
        assert not [m for m in subject.model.modules() if "forward" in m.__dict__]
        subject.rewind()
        assert same(subject.step(), subject.wanted)
    everyone.clear()
    gc.unfreeze()
    gc.collect()
    left = threading.active_count() - threads_before, len(os.listdir("/proc/self/fd")) - files_before
    table = collections.Counter((row["kind"], row["raised"]) for row in rows if row["fired"])
    for kind in kinds:
        outcomes = ", ".join(f"{n} {what or 'no error'}" for (k, what), n in sorted(table.items()) if k == kind)
        print(f"{kind:<24} {outcomes}")
    bad = [row for row in rows if row["wrong"]]
    silent = sum(any(w.startswith("SILENT") for w in row["wrong"]) for row in rows)
    print(
        f"{number} steps, {hit} faults that hit: {silent} silent errors, {len(bad)} with anything wrong; "
        f"{left[0]} threads and {left[1]} files left behind"
    )
    summary = {
        "steps": number, "faults": hit, "silent": silent, "wrong": bad, "threads_left": left[0],
        "files_left": left[1], "outcomes": [[kind, what, n] for (kind, what), n in sorted(table.items())],
    }  # fmt: skip
    documents.save(given.out, "faults_resident.json" if given.resident else "faults.json", summary)
    sys.exit(bool(bad or any(left)))


if __name__ == "__main__":
    main()
