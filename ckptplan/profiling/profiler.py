"""profile(): a model and its inputs in, a Profile out, nothing changed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptplan.core.chain import Option, Storage
from ckptplan.core.errors import CkptPlanError, InvalidInputError, UnsupportedModelError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.profiling.discover import discover_stages
from ckptplan.profiling.fake import FakeWorld, fake_parameters
from ckptplan.profiling.inputs import find_inputs
from ckptplan.profiling.links import measure_link
from ckptplan.profiling.timing import Times, time_stages
from ckptplan.profiling.trace import fake_inputs, replay, trace_chain
from ckptplan.profiling.tracker import Tracker
from ckptplan.runtime.measure import Outside, held_tensors, optimizer_tensors, unique_bytes
from ckptplan.runtime.state import restored
from ckptplan.runtime.step import (
    LossFn,
    TrainingStep,
    check_supported,
    fingerprint,
    make_step,
    model_device,
    training_config,
)

_CUDA_BLOCK = 512
_LINK_BLOCK = 64 << 20

Report = Callable[[str], None]


def profile(
    model: nn.Module,
    inputs: Any = None,
    *,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | torch.device | None = None,
    step: Callable[[], torch.Tensor] | None = None,
    swap_dir: str | Path | None = None,
    menus: bool = True,
    on_progress: Report | None = None,
) -> Profile:
    """Measure one training step of `model`: stages, bytes and times.

    Bytes come from replays that allocate nothing for activations; times from running each distinct stage alone. The
    device never holds more than parameters, buffers, inputs, the glue's saved tensors and one stage's step.

    Parameters
    ----------
    model : nn.Module
        In training mode if the plan is for training.
    inputs : tensor, tuple, dict, optional
        Positional or keyword inputs of the forward; found by `find_inputs` if left out.
    loss_fn : callable, optional
        Output -> scalar tensor; default `output.loss`, else the sum of the floating outputs' means.
    optimizer : Optimizer, optional
        Its state (after the first update) and its update's temporaries count.
    device : str, optional
        Must be where the model is.
    step : callable, optional
        Runs every forward of one step and returns the loss; replaces `inputs` and `loss_fn`. `model` must hold every
        module that it trains.
    swap_dir : path, optional
        Where the CPU tier's bandwidth is measured.
    menus : bool
        Also look for options inside the stages: which operations' outputs to keep, swap and recompute. False: a stage
        is kept, swapped or recomputed as a whole.
    on_progress : callable, optional
        Told what is being done.

    Returns
    -------
    Profile

    Raises
    ------
    InvalidInputError
        If inputs, loss or step can't be used.
    UnsupportedModelError
        If the model checkpoints already, is compiled, or can't be traced.
    """
    report = on_progress or (lambda text: None)
    where = model_device(model)
    if device is not None and torch.device(device).type != where.type:
        raise InvalidInputError(
            f"device={str(device)!r}, but the model is on {str(where)!r}; move the model there first"
        )
    check_supported(model)
    training, notes = training_step(model, inputs, loss_fn=loss_fn, step=step)
    with restored(model) as rewind, training_config(model):
        rewind()
        with _as_ours(training, "tracing"):
            return _profile(training, optimizer, where, swap_dir, menus, notes, report, rewind)


def training_step(
    model: nn.Module,
    inputs: Any = None,
    *,
    loss_fn: LossFn | None = None,
    step: Callable[[], torch.Tensor] | None = None,
) -> tuple[TrainingStep, list[str]]:
    """The step from the public arguments, its inputs found where none are given, and a note on where.

    Raises
    ------
    InvalidInputError
    """
    device = model_device(model)
    if inputs is None and step is None:
        args, kwargs, source = find_inputs(model, device)
        found = dataclasses.replace(make_step(model, (), loss_fn=loss_fn), args=args, kwargs=kwargs)
        return found, [f"inputs from {source}"]
    given = make_step(model, inputs, loss_fn=loss_fn, step=step)
    given.on_device(device)
    return given, []


def replayed_peak(measured: Profile, step: TrainingStep, plan: Plan, device: torch.device) -> int:
    """Bytes at the worst moment of `plan` applied to the model, by a replay that counts tensors and allocates none.

    Temporaries inside operations are not in it, so it is at most the real peak; the chain's figure has them.
    """
    with restored(step.model) as rewind, training_config(step.model):
        rewind()
        round_to = _CUDA_BLOCK if device.type == "cuda" else 1
        seen = replay(step, plan.stages, plan.choices, device, segments=plan.segments, round_to=round_to)
    return measured.resident_bytes + seen.peak_bytes


def _profile(
    step: TrainingStep,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    swap_dir: str | Path | None,
    menus: bool,
    notes: list[str],
    report: Report,
    rewind: Callable[[], None],
) -> Profile:
    round_to = _CUDA_BLOCK if device.type == "cuda" else 1
    report("finding stages")
    with contextlib.ExitStack() as stack:
        world = FakeWorld()
        stack.enter_context(fake_parameters(step.model, world))
        given = fake_inputs(step, world.fake)
        names = discover_stages(given, lambda: world)
    rewind()
    report("tracing bytes")
    outside = step.tensors() if step.fn is None else _outside(step, rewind)
    resident = unique_bytes([*held_tensors(step.model), *outside])
    state_bytes, update_bytes = (0, 0) if optimizer is None else _optimizer_bytes(optimizer, round_to, device)
    chain = trace_chain(
        step,
        names,
        device,
        resident_bytes=resident + state_bytes,
        update_bytes=update_bytes,
        round_to=round_to,
        fingerprint=fingerprint(step),
        menus=menus,
    )
    rewind()
    report("timing stages")
    kinds = {stage.name: stage.kind for stage in chain.stages if not stage.is_glue}
    again: dict[str, dict[tuple[int, ...], None]] = {}
    for stage in chain.stages:
        again.setdefault(stage.kind, {}).update((o.ops, None) for o in stage.options if o.recomputes)
    times = time_stages(step, kinds, {kind: tuple(ways) for kind, ways in again.items()}, device, rewind)
    rewind()
    report("measuring bandwidth")
    # Two blocks are on the device at once: within what the largest stage adds in any plan.
    largest = max(stage.keep.forward_bytes for stage in chain.stages)
    link = measure_link(device, max(min(_LINK_BLOCK, largest // 4), 1 << 16), swap_dir)
    return _with_times(dataclasses.replace(chain, link=link, notes=(*notes, *chain.notes)), times)


def _with_times(chain: Profile, times: Times) -> Profile:
    stages = []
    following = 0
    for stage in chain.stages:
        if stage.is_glue:
            seconds = (times.glue_forward_s.get(following, 0.0), times.glue_backward_s.get(following, 0.0))
        else:
            following += 1
            seconds = (times.forward_s[stage.kind], times.backward_s[stage.kind])
        menu = [
            dataclasses.replace(option, recompute_s=times.recompute_s[stage.kind, option.ops])
            if option.recomputes
            else option
            for option in stage.options
        ]
        menu = [option for option in menu if not (option.ops and _beaten(option, menu, chain.storages))]
        stages.append(dataclasses.replace(stage, options=tuple(menu), forward_s=seconds[0], backward_s=seconds[1]))
    return dataclasses.replace(chain, stages=tuple(stages))


def _beaten(option: Option, menu: list[Option], storages: tuple[Storage, ...]) -> bool:
    """Whether another option of a menu moves the same share or nothing, and is nowhere worse and somewhere better."""

    def costs(o: Option) -> tuple[float, ...]:
        held, moved = (sum(storages[s].nbytes for s in some) for some in (o.held, o.moved))
        return held - moved, moved, o.forward_bytes, o.backward_bytes, o.recompute_s

    mine = costs(option)
    return any(
        all(theirs <= ours for theirs, ours in zip(costs(other), mine, strict=True)) and costs(other) != mine
        for other in menu
    )


def _outside(step: TrainingStep, rewind: Callable[[], None]) -> list[torch.Tensor]:
    """Tensors that a step's callable reads and nothing in it makes; run without memory."""
    world = FakeWorld()
    with fake_parameters(step.model, world), world, Outside() as mode:
        step.forward()
    rewind()
    own = {t.untyped_storage()._cdata for t in held_tensors(step.model)}
    return [
        t
        for t in mode.tensors
        if not isinstance(t, torch._subclasses.FakeTensor) and t.untyped_storage()._cdata not in own
    ]


def _optimizer_bytes(optimizer: torch.optim.Optimizer, round_to: int, device: torch.device) -> tuple[int, int]:
    """Bytes of the optimizer's state after its first update, and what an update adds at its worst moment."""
    present = unique_bytes(optimizer_tensors(optimizer))
    tracker = Tracker(round_to, device.type)
    try:
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = []
        for group in optimizer.param_groups:
            fakes = []
            for p in group["params"]:
                fake = tracker.fake(p.detach()).requires_grad_(p.requires_grad)
                tracker.outside(fake)
                if p.requires_grad:
                    fake.grad = tracker.fake(p.detach()).detach()
                    tracker.outside(fake.grad)
                fakes.append(fake)
            twin.param_groups.append({**group, "params": fakes})
        with tracker:
            twin.step()
            state = tracker.live_bytes
            before = tracker.live_bytes
            tracker.peak_bytes = tracker.live_bytes
            twin.step()
            update = tracker.peak_bytes - before
    except Exception as error:
        raise UnsupportedModelError(
            f"the update of {type(optimizer).__name__} can't be traced ({error}); "
            "leave optimizer= out and lower the budget by its state"
        ) from error
    return max(present, state), update


@contextlib.contextmanager
def _as_ours(step: TrainingStep, doing: str) -> Any:
    """Errors of the model's own code come out as ours, with the first of them as the cause."""
    try:
        yield
    except CkptPlanError:
        raise
    except torch._subclasses.fake_tensor.DataDependentOutputException as error:
        raise UnsupportedModelError(
            f"the model reads the value of {error.func} to decide what to run, which can't be traced without memory; "
            "keep such decisions outside of the step"
        ) from error
    except Exception as error:
        what = "step()" if step.fn is not None else f"{type(step.model).__name__}'s forward with these inputs"
        raise InvalidInputError(f"{what} failed while {doing}: {type(error).__name__}: {error}") from error
