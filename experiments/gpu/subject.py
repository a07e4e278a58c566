"""A case's model, its step under one regime or another, and what is measured of a step."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ckptplan.baselines._build import build, named, smallest_peak
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Training
from ckptplan.profiling.profiler import training_step
from ckptplan.profiling.target import Target, find_target
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors, optimizer_tensors, step_peaks
from ckptplan.training.step import TrainingStep, training_config
from experiments.gpu.cases import Case
from experiments.rivals import Forward, Rival

Enter = Callable[[TrainingStep], AbstractContextManager[Forward]]
LEARNING_RATE = 1e-5


@dataclass
class Timed:
    """Seconds of the timed steps.

    `step_s` and `update_s` are the device's by its own events, `cpu_s` how long the CPU took to issue a step.
    """

    step_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        medians = {f"median_{name}": statistics.median(getattr(self, name)) for name in ("step_s", "update_s", "cpu_s")}
        return {**medians, "step_s": self.step_s, "update_s": self.update_s, "cpu_s": self.cpu_s}


class Subject:
    """A model on its device, with inputs and an optimizer.

    Every regime gets a copy of the modules that shares all tensors with the model, so that several can be entered at
    once and one optimizer updates them all.
    """

    def __init__(self, case: Case, device: torch.device, small: bool) -> None:
        self.case, self.device, self.small = case, device, small
        torch.manual_seed(0)
        # A model without values is planned for inputs with them: masks are looked at.
        with torch.device("cpu") if device.type == "meta" else device:
            build, self.inputs = case.make(small)
        dtype = getattr(torch, case.dtype or "float32")
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # a model that is converted leaves fragments of its float32 weights' segments
        try:
            with device:
                model = build().to(dtype)
        finally:
            torch.set_default_dtype(before)
        self.inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.inputs.items()}
        self.model: nn.Module = model.train()
        if getattr(model, "loss_type", "") is None:  # else the first step warns, which breaks a compiled graph in two
            model.loss_type = "ForCausalLM"
        self.optimizer = _optimizer(case.optimizer, model)

    @property
    def target(self) -> Target:
        return find_target(self.model)

    def step_of(self, model: nn.Module, target: Target | None = None) -> TrainingStep:
        return training_step(model, Training(self.inputs, amp=self.case.amp), target or self.target)[0]

    def copy(self, *, layers_compiled: bool = True) -> nn.Module:
        """The same model in other modules."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        model = copy.deepcopy(self.model, {id(t): t for t in tensors})
        if self.case.compiled_layers and layers_compiled:
            for layer in model.get_submodule(self.case.compiled_layers):  # type: ignore[union-attr]
                layer.compile(dynamic=False, fullgraph=True)
        return model

    def held_bytes(self) -> int:
        held = [*held_tensors(self.model), *optimizer_tensors(self.optimizer), *self.inputs.values()]
        return unique_bytes(held)

    def train(self, forward: Forward, marks: Callable[[str], None] = lambda name: None) -> Tensor:
        """One step of training; output and loss are held until the end of backward, as a loop's variables are."""
        self.drop_gradients()
        output, loss = forward()
        loss.backward()
        marks("backward")
        if self.optimizer is not None:
            self.optimizer.step()
        marks("update")
        del output
        return loss.detach()  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def under(self, enter: Enter, *, layers_compiled: bool = True) -> Iterator[Forward]:
        """A function that runs forward and loss under a regime."""
        model = self.copy(layers_compiled=layers_compiled)
        with training_config(model), enter(self.step_of(model)) as forward:
            yield forward

    def drop_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def clear(self) -> None:
        """Give everything unused on the device back: gradients, cached memory."""
        self.drop_gradients()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def begin_training(self) -> None:
        """Clear, and on CUDA take the optimizer's state away."""
        if self.device.type == "cuda" and self.optimizer is not None:
            self.optimizer.state.clear()
        self.clear()

    def clear_host(self) -> None:
        """Give cached pinned memory back, which takes long to get again."""
        release = getattr(torch._C, "_host_emptyCache", None)
        if self.device.type == "cuda" and release is not None:
            release()


def _optimizer(name: str | None, model: nn.Module) -> torch.optim.Optimizer | None:
    if name is None or next(model.parameters()).is_meta:
        return None
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def as_regime(rival: Rival) -> Enter:
    return lambda step: rival.enter(step.model, step.forward)


def plan_by_hand(profile: Profile, actions: Sequence[str]) -> Plan:
    """The plan of smallest peak in which modules take `actions` in turn."""
    numbers = itertools.count()
    names = ["keep" if s.is_glue else actions[next(numbers) % len(actions)] for s in profile.stages]
    choice = named(profile, names)
    return build(profile, choice, smallest_peak(profile, choice).bytes, "+".join(actions))


# --- measuring ---


def peaks(subject: Subject, forward: Forward) -> dict[str, Any]:
    """Peaks of a training's first steps by each account of the allocator; timed steps are others.

    On CUDA the cache is empty and the optimizer has no state, as when a training begins: the first of three updates
    makes it, among the segments that the first forward and backward have left. On the CPU, of a single step, it has.
    """
    subject.begin_training()
    found = step_peaks(
        lambda: subject.train(forward), subject.device, subject.held_bytes(), subject.drop_gradients, steps=3
    )
    return {**asdict(found), "judged_bytes": found.needed_bytes}


def race(subject: Subject, contenders: Mapping[str, Forward], *, warm_up: int, timed: int) -> dict[str, dict[str, Any]]:
    """Steps in turn, every other round in reverse order, so that each is measured beside the others."""
    found = {name: Timed() for name in contenders}
    order = list(contenders.items())
    gc.disable()
    try:
        for turn in range(warm_up + timed):
            for name, forward in order if turn % 2 else order[::-1]:
                gc.collect()
                step = _timed_cuda if subject.device.type == "cuda" else _timed_cpu
                step_s, update_s, cpu_s = step(subject, forward)
                if turn >= warm_up:
                    found[name].step_s.append(step_s)
                    found[name].update_s.append(update_s)
                    found[name].cpu_s.append(cpu_s)
    finally:
        gc.enable()
    return {name: timed_.as_dict() for name, timed_ in found.items()}


def _timed_cuda(subject: Subject, forward: Forward) -> tuple[float, float, float]:
    events = {name: torch.cuda.Event(enable_timing=True) for name in ("begin", "backward", "update")}
    torch.cuda.synchronize(subject.device)  # none has a lead that another's kernels gave it
    began = time.perf_counter()
    events["begin"].record()
    subject.train(forward, lambda name: events[name].record())
    cpu_s = time.perf_counter() - began
    torch.cuda.synchronize(subject.device)
    seconds = [events[a].elapsed_time(events[b]) / 1e3 for a, b in (("begin", "backward"), ("backward", "update"))]
    return seconds[0], seconds[1], cpu_s


def _timed_cpu(subject: Subject, forward: Forward) -> tuple[float, float, float]:
    at = {"begin": time.perf_counter()}
    subject.train(forward, lambda name: at.__setitem__(name, time.perf_counter()))
    return at["backward"] - at["begin"], at["update"] - at["backward"], at["update"] - at["begin"]


def results_of(subject: Subject, forward: Forward, rewind: Callable[[], None]) -> dict[str, Tensor]:
    """The loss, every gradient and every buffer that one step leaves, without an update."""
    rewind()
    subject.model.zero_grad(set_to_none=True)
    _, loss = forward()
    loss.backward()
    left = {f"gradient {n}": p.grad for n, p in subject.model.named_parameters() if p.grad is not None}
    left |= {f"buffer {n}": b for n, b in subject.model.named_buffers()}
    found = {"loss": loss.detach(), **{n: t.detach() for n, t in left.items()}}
    out = {name: tensor.clone() for name, tensor in found.items()}
    subject.model.zero_grad(set_to_none=True)
    return out


def compared(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Any]:
    """Whether all is equal bit for bit, and how far it is apart: 2-norm of the difference over that of `wanted`."""
    if found.keys() != wanted.keys():
        return {"equal": False, "tensors": len(wanted), "differing": sorted(found.keys() ^ wanted.keys())}
    differing = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    distance = sum(float((found[n].double() - wanted[n].double()).square().sum()) for n in differing)
    whole = sum(float(t.double().square().sum()) for t in wanted.values()) if differing else 0.0
    return {
        "equal": not differing, "tensors": len(wanted), "differing": differing,
        "distance": (distance / whole) ** 0.5 if whole else 0.0, "loss": float(found["loss"]),
    }  # fmt: skip


def set_up(case: Case, device: torch.device) -> None:
    """Kernels, and how much of the device there is, as the case has them."""
    torch._dynamo.config.recompile_limit = 64  # each regime compiles the same forward anew
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if case.allocator is not None:
            torch.cuda.memory._set_allocator_settings(case.allocator)
        if case.cap_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, case.cap_bytes / total), device)
    if case.deterministic:
        torch.use_deterministic_algorithms(True)  # with a warning alone, attention takes other kernels
        torch.utils.deterministic.fill_uninitialized_memory = False  # else every new tensor costs a write
        torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
