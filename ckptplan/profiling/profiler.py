"""Measure one training step of a model (`profile`), and trace its bytes; the model comes back unchanged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from ckptplan.core.arguments import OptimizerLike
from ckptplan.core.device import Device
from ckptplan.core.errors import CkptPlanError, InvalidInputError, UnsupportedModelError
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.overheads import NO_OVERHEADS, Overheads
from ckptplan.core.plan import KEEP, Decisions, Plan
from ckptplan.core.profile import MOST_ERROR, Fingerprint, Profile
from ckptplan.core.request import Report, StepKeywords, Training, ignore_progress, reporting, require_known
from ckptplan.core.resident import Resident
from ckptplan.core.stage import InputTensor, Stage
from ckptplan.core.storage import Storage
from ckptplan.distributed import parallel_of
from ckptplan.distributed.absent import as_asked
from ckptplan.distributed.collectives import with_collectives
from ckptplan.distributed.group import on_all_ranks, present_call
from ckptplan.profiling.bytes.fake import FakeWorld, fake_parameters
from ckptplan.profiling.bytes.folding import UnlikeLayersError
from ckptplan.profiling.bytes.real_storages import Places, RealStorages, with_real_sizes
from ckptplan.profiling.bytes.replays import fake_inputs, find_stages, replay
from ckptplan.profiling.bytes.trace import BytesBeside, trace_chain
from ckptplan.profiling.bytes.traced import Traced, TracedStage
from ckptplan.profiling.bytes.tracker import Tracker
from ckptplan.profiling.bytes.unfolding import Folding
from ckptplan.profiling.target import Target, find_target
from ckptplan.profiling.times.links import measure_costs, measure_links, sharing_note
from ckptplan.profiling.times.overheads import measure_overheads
from ckptplan.profiling.times.timing import Again, StageWork, Times, time_stages
from ckptplan.profiling.values.real_run import answered
from ckptplan.profiling.values.variants import compilable, note_variants
from ckptplan.profiling.workload.inputs import find_inputs
from ckptplan.profiling.workload.optimizer_names import notes_on
from ckptplan.profiling.workload.optimizers import make_optimizer, traced_updates
from ckptplan.profiling.workload.stand_ins import StandIns
from ckptplan.runtime.handle import without_plan
from ckptplan.state.parameters import ParameterState
from ckptplan.state.process import in_own_context
from ckptplan.state.restore import restored
from ckptplan.tensors.accelerator import empty_cache, is_accelerator
from ckptplan.tensors.private import is_fake, is_traceable_wrapper_subclass
from ckptplan.tensors.quantized import tensor_at
from ckptplan.tensors.storages import local_part, plain_tensors, storages_of, unique_bytes
from ckptplan.training.compiled import compiled_modules
from ckptplan.training.gradients import accumulates, starting_gradient_bytes
from ckptplan.training.inputs import input_tensors
from ckptplan.training.measure import Outside, collection_off, held_tensors
from ckptplan.training.step import TrainingStep, check_supported, fingerprint, make_step, planned_config

_MOST_BLOCK_BYTES = 64 << 20  # of a copy that measures a link: large enough that its latency doesn't count
_LEAST_BLOCK_BYTES = 1 << 16


@on_all_ranks
@as_asked
def profile(
    model: nn.Module,
    inputs: Any = None,
    *,
    swap_dir: str | Path | None = None,
    menus: bool = True,
    on_progress: Report | None = None,
    **training: Unpack[StepKeywords],
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
    swap_dir : path, optional
        Where the CPU tier's bandwidth is measured.
    menus : bool
        Add options inside the stages, which keep or swap the outputs of some operations and recompute the rest. False:
        a stage is kept, swapped or recomputed as a whole.
    on_progress : callable, optional
        Called with a description of each step of the work.
    **training
        `loss_fn`, `optimizer`, `device`, `step`, `amp`, `accumulate`, `ddp`, `fsdp`, as in
        `ckptplan.core.request.Training`.

    Returns
    -------
    Profile

    Raises
    ------
    InvalidInputError
        If inputs, loss or step can't be used.
    UnsupportedModelError
        If the `gradient_checkpointing` of a module is on, the model calls `torch.utils.checkpoint` with
        `use_reentrant=True`, is compiled as a whole, or can't be traced.
    """
    require_known(profile, training, StepKeywords)
    request = Training.of(training, inputs)
    target = find_target(model, request.device)
    check_supported(model)
    with without_plan(model):
        step, notes = training_step(model, request, target)
        return profile_step(
            step,
            target,
            optimizer=request.optimizer,
            swap_dir=swap_dir,
            menus=menus,
            notes=notes,
            on_progress=reporting(on_progress),
        )


@in_own_context
def profile_step(
    training: TrainingStep,
    target: Target,
    *,
    optimizer: OptimizerLike | None = None,
    swap_dir: str | Path | None = None,
    menus: bool = True,
    notes: Sequence[str] = (),
    on_progress: Report = ignore_progress,
) -> Profile:
    """`profile` of a given step; `notes` go into the profile."""
    made = None if optimizer is None else make_optimizer(optimizer, training.model)
    found = _undone(training, target, optimizer, swap_dir, menus, [*notes, *notes_on(made)], on_progress)
    if made is not None:
        counted = dataclasses.replace(found.fingerprint, optimizer=type(made).__name__)
        found = dataclasses.replace(found, fingerprint=counted)
    return with_collectives(found, training.parallel, target.spec, present_call())


def _undone(
    training: TrainingStep,
    target: Target,
    optimizer: OptimizerLike | None,
    swap_dir: str | Path | None,
    menus: bool,
    notes: Sequence[str],
    on_progress: Report,
) -> Profile:
    """Return the profile of a step, whose model is as before afterwards."""
    with _untouched(training, runs=target.spec is None) as rewind, as_ours(training, "tracing"):
        found = _profile(training, optimizer, target, swap_dir, menus, list(notes), on_progress, rewind)
    empty_cache(target.device)  # what stages took alone lies otherwise than what steps take
    return found


def training_step(model: nn.Module, training: Training, target: Target) -> tuple[TrainingStep, list[str]]:
    """The step that `training` describes, and notes on inputs and gradients that it doesn't specify.

    Raises
    ------
    InvalidInputError
    """
    parallel_of(model, training.ddp).check()
    if training.has_forward:
        step, notes = make_step(model, training), []
        if target.spec is None:
            step.on_device(target.device)
    else:
        args, kwargs, source = find_inputs(model, target.device)
        shapes = ", ".join(f"{t.dtype}{list(t.shape)}" for t in input_tensors(args, kwargs))
        step = make_step(model, dataclasses.replace(training, inputs=()))
        step = dataclasses.replace(step, args=args, kwargs=kwargs, found=f"{source}: {shapes}")
        notes = [f"inputs {step.found}; pass inputs= for others"]
    if training.accumulate is None and accumulates(model, None):
        notes.append(
            "the model has gradients, so the plan is for steps that start with them; accumulate=False leaves them out"
        )
    return step.under(training.amp, target.device.type), notes


@contextlib.contextmanager
def _untouched(step: TrainingStep, *, runs: bool = False) -> Iterator[Callable[[], None]]:
    """Prepare the step to be traced within the block, or run for real if `runs`; restore its model afterwards.

    Yields
    ------
    callable
        Makes the model and the random generators as they were at the beginning.
    """
    with planned_config(step.model), restored(step.model, step.reached(), runs=runs) as rewind:
        rewind()
        yield rewind


@in_own_context
def replayed_bytes(step: TrainingStep, plan: Plan, target: Target) -> int:
    """Peak bytes of a step under `plan`, beyond those present before the step, by a replay that allocates nothing.

    Temporaries inside operations aren't counted, so it is at most the real peak; the chain's peak includes them.
    """
    with _untouched(step) as rewind:

        def peak_bytes() -> int:
            return replay(step, plan.replayed, target, accumulating=plan.fingerprint.accumulates).peak_bytes

        return answered(peak_bytes, step, target, rewind)


@in_own_context
def compilable_stages(step: TrainingStep, target: Target, report: Report) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules of the stages that are worth compiling and that the compiler takes whole, and notes on them."""
    report("finding the layers to compile")
    with _untouched(step, runs=True) as rewind, as_ours(step, "tracing"):
        found = answered(lambda: find_stages(step, target), step, target, rewind)
        rewind()
        return compilable(step, target.device, found.stages)


@in_own_context
def stage_inputs(step: TrainingStep, profile: Profile, target: Target) -> dict[str, tuple[InputTensor, ...]]:
    """The tensors with which a step calls the stages of a profile, by a replay that keeps everything."""
    stages = tuple(stage.name for stage in profile.stages if not stage.is_glue)
    with _untouched(step) as rewind:

        def arguments() -> dict[int, tuple[InputTensor, ...]]:
            rewind()
            return replay(step, Decisions(stages, (KEEP,) * len(stages)), target).arguments

        found = answered(arguments, step, target, rewind)
    return {stages[position // 2]: tensors for position, tensors in found.items() if position // 2 < len(stages)}


def _profile(
    step: TrainingStep,
    optimizer: OptimizerLike | None,
    target: Target,
    swap_dir: str | Path | None,
    menus: bool,
    notes: list[str],
    report: Report,
    rewind: Callable[[], None],
) -> Profile:
    if target.spec is None and not step.has_values:
        raise InvalidInputError(
            "the model or its inputs lie on 'meta', and times are measured by running the stages; make them on "
            f"{target.device}, or pass device= with the name of one that isn't in this machine (a100-40gb, say)"
        )
    costs = None
    if target.spec is None:
        report("measuring copies")
        costs = measure_costs(target.device, swap_dir)
    if costs is not None and target.is_cuda:  # first, since it decides which storages may move
        target = dataclasses.replace(target, least_moved_bytes=max(target.least_moved_bytes, costs.least_bytes))
    traced, on_devices, folding = _traced(step, optimizer, target, menus=menus, report=report, rewind=rewind)
    if target.answers is not None:
        notes = [*filter(None, [target.answers.note]), *target.answers.notes, *notes]
    if target.spec is not None:
        return _planned(step, traced, on_devices[0], target, notes)
    report("measuring the runtime")
    overheads = measure_overheads(target.device, swap_dir)
    report("timing stages")
    times, launches, unlike, real = _timed(step, traced, folding, target, rewind, report)
    rewind()
    first = {stage.kind: stage.name for stage in reversed(traced.stages)}
    refused = (f"{first[kind]} and its like can't be recomputed: {why}" for kind, why in unlike.items())
    traced = with_real_sizes(dataclasses.replace(traced, notes=(*traced.notes, *refused)), real)
    report("measuring bandwidth")
    # Measuring takes two blocks on the device: at most half of the bytes that the largest stage adds in any plan.
    largest = max(stage.keep.forward_bytes for stage in traced.stages)
    block = max(min(_MOST_BLOCK_BYTES, largest // 4), _LEAST_BLOCK_BYTES)
    link, shared = measure_links(target.device, block, swap_dir, together=is_accelerator(target.device))
    notes = [*notes, *filter(None, [sharing_note("host", link, shared)])] if is_accelerator(target.device) else notes
    if costs is not None:
        link = dataclasses.replace(link, latency_s=costs.latency_s, copy_s=costs.copy_s)
    disk = None
    if is_accelerator(target.device) and swap_dir is not None:
        disk, shared = measure_links(target.device, block, swap_dir, "disk")
        notes = [*notes, *filter(None, [sharing_note("disk", disk, shared)])]
        disk = disk.behind(link)
    lanes = _Lanes(times, launches, overheads, has_launches=is_accelerator(target.device))
    return _with_times(traced, lanes, link, fingerprint(step, target.name), notes, disk)


@in_own_context
def planned_profiles(
    step: TrainingStep,
    optimizer: OptimizerLike | None,
    target: Target,
    devices: Sequence[Device],
    *,
    menus: bool = False,
    report: Report = ignore_progress,
) -> list[Profile]:
    """Profiles for several devices that aren't in this machine from one trace, without collectives.

    Parameters
    ----------
    target : Target
        One of the devices; they all have its `byte_class`.
    menus : bool
        As in `profile`.
    """
    with _untouched(step) as rewind, as_ours(step, "tracing"):
        traced, times, _ = _traced(step, optimizer, target, menus=menus, devices=devices, rewind=rewind, report=report)
    return [
        _planned(step, traced, on_device, dataclasses.replace(target, spec=device), [])
        for device, on_device in zip(devices, times, strict=True)
    ]


@in_own_context
def traced_bytes(step: TrainingStep, optimizer: OptimizerLike | None, target: Target) -> Profile:
    """The chain of `step` with exact bytes, its stages as wholes, for questions that don't depend on time.

    Nothing is timed: in place of measured times, each stage takes one second in each direction and one to run again,
    and the link carries 1e9 bytes a second.
    """
    with _untouched(step) as rewind, as_ours(step, "tracing"):
        traced, *_ = _traced(step, optimizer, target, menus=False, devices=(), rewind=rewind)
    kinds = [stage.kind for stage in traced.stages]
    again = ((stage.kind, option.way) for stage in traced.stages for option in stage.options if option.recomputes)
    seconds = Times(
        forward_s=dict.fromkeys(kinds, 1.0),
        backward_s=dict.fromkeys(kinds, 1.0),
        recompute_s=dict.fromkeys(again, 1.0),
        glue_forward_s=dict.fromkeys(range(len(kinds) + 1), 1.0),
        glue_backward_s=dict.fromkeys(range(len(kinds) + 1), 1.0),
    )
    return _with_times(traced, _Lanes(seconds), Link(1e9, 1e9), fingerprint(step, target.name))


def _traced(
    step: TrainingStep,
    optimizer: OptimizerLike | None,
    target: Target,
    *,
    menus: bool,
    rewind: Callable[[], None],
    devices: Sequence[Device] | None = None,
    report: Report = ignore_progress,
) -> tuple[Traced, list[Times], Folding]:
    """The chain of `step` with exact bytes, times on devices that aren't in this machine, and the layers that ran."""

    # Tracing leaves little garbage, but makes enough objects to start many collections of the whole process.
    @collection_off()
    def trace() -> tuple[Traced, list[Times], Folding]:
        report("finding stages")
        found = find_stages(step, target)
        rewind()
        if menus and target.spec is None and compiled_modules(step.model):
            note_variants(step, target, found.stages, report)
            rewind()
        report("tracing bytes")
        inputs, others = outside_tensors(step, target)
        outside = [*inputs, *others]
        rewind()
        resident = unique_bytes([*held_tensors(step.model), *outside], target.device)
        if step.accumulates:
            resident += starting_gradient_bytes(step.model, target.round_to)
        resident += step.parallel.added_bytes(target.round_to)
        state_bytes, update_bytes, failed, state = _update_bytes(optimizer, step.model, outside, target)
        chain = functools.partial(
            trace_chain,
            step,
            found,
            target,
            beside=BytesBeside(resident + state_bytes, None if optimizer is None else update_bytes, failed),
            menus=menus,
            devices=devices,
            report=report,
        )
        folding = Folding(step, found.stages, target)
        try:
            traced, times = chain(folding=folding if folding.folds else None)
        except UnlikeLayersError:
            rewind()
            folding.give_up()
            traced, times = chain()
        rewind()
        return dataclasses.replace(traced, residents=(*traced.residents, *state)), times, folding

    return answered(trace, step, target, rewind, report)


def _timed(
    step: TrainingStep,
    traced: Traced,
    folding: Folding,
    target: Target,
    rewind: Callable[[], None],
    report: Report,
) -> tuple[Times, Times, dict[str, str], dict[int, Places]]:
    """`time_stages` of the layers that `folding` runs, and where the real storages of each segment are."""
    again: dict[str, Again] = {}
    for stage in traced.stages:
        again.setdefault(stage.kind, {}).update(
            (o.way, tuple(traced.storages[s].nbytes for s in o.saved)) for o in stage.options if o.recomputes
        )
    kinds = [stage.kind for stage in traced.stages if not stage.is_glue]
    few = {folding.stages[s]: kind for s, kind in zip(folding.positions, kinds, strict=False)}
    parameters = ParameterState(tensor_at(step.model, name) for name in traced.written)
    with parameters.restored(), folding.shortened():
        real = RealStorages(step.model, target.device, target.round_to)
        work = StageWork(few, Counter(kinds), again, traced.rerun_shares, {d.stage for d in traced.differentiated})
        times, launches, unlike = time_stages(step, work, target.device, rewind, real, report)
    places = {
        2 * k + inside: real.found[2 * s + inside]
        for k, s in enumerate(folding.positions)
        for inside in (0, 1)
        if 2 * s + inside in real.found
    }
    return times.unfolded(folding.positions), launches.unfolded(folding.positions), unlike, places


def _planned(step: TrainingStep, traced: Traced, times: Times, target: Target, notes: Sequence[str]) -> Profile:
    """The profile of `step` for a device that isn't in this machine."""
    device = target.spec
    assert device is not None
    planned = f"made for {device.description}, which isn't in this machine: bytes from fake tensors, times from a "
    planned += "roofline; no stage was run twice, so only the check of apply() finds stages that can't run again"
    link = Link(device.out_bytes_per_s, device.in_bytes_per_s, device.latency_s)
    # A roofline's operations take at least a launch each, so the host's launching isn't counted as a lane of its own.
    # The runtime's code runs while the device computes what was launched before.
    lanes = _Lanes(times, overheads=device.overheads, has_launches=device.is_cuda)
    return _with_times(traced, lanes, link, fingerprint(step, target.name), [planned, *notes])


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The times of a step's stages, and of the runtime's code beside them.

    Attributes
    ----------
    times, launches : Times
        The device's, and those of the host where it launches work beside the device.
    overheads : Overheads
    has_launches : bool
        Whether the runtime's code runs beside the device's compute, as launches do.
    """

    times: Times
    launches: Times = field(default_factory=Times)
    overheads: Overheads = NO_OVERHEADS
    has_launches: bool = False

    def timed(self, stage: TracedStage, following: int, storages: tuple[Storage, ...]) -> Stage:
        """Return a stage with its times, without the options that have none, or that another option always beats.

        Parameters
        ----------
        following : int
            The number of the stage that follows, if this one is glue.
        """
        times, launches = self.times, self.launches
        runtime, launched = NO_OVERHEADS, self.overheads
        if not self.has_launches:
            runtime, launched = launched, runtime
        forward_s, backward_s = _own_s(stage, times, following, runtime)
        slower_s = min(_slower_s(stage, times), backward_s)
        launch_forward_s, launch_backward_s = _own_s(stage, launches, following, launched)
        menu = [
            dataclasses.replace(
                option,
                recompute_s=max(_again_s(stage, option, times) + (slower_s if option.ratio else 0.0), 0.0),
                launch_s=_again_s(stage, option, launches) + launched.swapping_s(option),
                overhead_s=runtime.swapping_s(option)
                + self.overheads.copies_s(option, storages)
                + (0.0 if option.ratio else slower_s),
            )
            for option in stage.options
            if not option.recomputes or (stage.kind, option.way) in times.recompute_s
        ]
        menu = [option for option in menu if not (option.way and _beaten(option, menu, storages))]
        reruns = any(option.name == "recompute" for option in menu)
        # A recompute takes what a run in a sweep does, less what it leaves out behind the last tensor it needs.
        whole = stage.kind, ()
        rerun_s = max(runtime.rerun_s, times.recompute_s.get(whole, 0.0) - forward_s)
        rerun_launch_s = max(launched.rerun_s, launches.recompute_s.get(whole, 0.0) - launch_forward_s)
        return Stage(
            stage.name,
            stage.kind,
            tuple(menu),
            forward_s,
            backward_s - slower_s,
            stage.linked if reruns else (),
            stage.inputs,
            launch_forward_s,
            launch_backward_s,
            rerun_s if reruns else 0.0,
            rerun_launch_s if reruns else 0.0,
        )

    def moving(self, resident: Resident) -> Resident:
        """Return a resident with the times that moving it takes."""
        count = max(len(resident.sizes), 1)
        code_s, copies_s = self.overheads.storage_s * count, resident.nbytes * self.overheads.byte_s
        if self.has_launches:
            return dataclasses.replace(resident, overhead_s=copies_s, launch_s=code_s)
        return dataclasses.replace(resident, overhead_s=code_s + copies_s)


def _own_s(stage: TracedStage, lane: Times, following: int, code: Overheads) -> tuple[float, float]:
    """Seconds of a stage's forward, with the runtime's code around it, and of its backward."""
    if stage.is_glue:
        forward_s, backward_s = lane.glue_forward_s.get(following, 0.0), lane.glue_backward_s.get(following, 0.0)
    else:
        forward_s, backward_s = lane.forward_s.get(stage.kind, 0.0) + code.call_s, lane.backward_s.get(stage.kind, 0.0)
    return forward_s, backward_s if stage.has_backward else 0.0


_LEAST_GAIN = 0.02
"""Least share of a stage's time by which compiled code has to be faster than the user's own: less may be noise."""


def _slower_s(stage: TracedStage, lane: Times) -> float:
    """Seconds that the user's own compiled code takes beyond the fastest variant; 0 if below `_LEAST_GAIN`."""
    again = [lane.recompute_s.get((stage.kind, option.way), 0.0) for option in stage.options if option.ratio]
    own_s = lane.forward_s.get(stage.kind, 0.0) + lane.backward_s.get(stage.kind, 0.0)
    return max((-s for s in again if -s >= _LEAST_GAIN * own_s), default=0.0)


def _again_s(stage: TracedStage, option: Option, lane: Times) -> float:
    """Seconds in which an option runs its stage again; what compiled code takes more than the user's own, or less."""
    return lane.recompute_s.get((stage.kind, option.way), 0.0) if option.recomputes and stage.has_backward else 0.0


def _with_times(
    traced: Traced,
    lanes: _Lanes,
    link: Link,
    bound_to: Fingerprint,
    notes: Sequence[str] = (),
    disk: Link | None = None,
) -> Profile:
    """The profile of a traced step; `notes` are put before those of the trace."""
    stages = []
    following = 0
    for stage in traced.stages:
        stages.append(lanes.timed(stage, following, traced.storages))
        following += not stage.is_glue
    return Profile(
        stages=tuple(stages),
        storages=traced.storages,
        base_forward_bytes=traced.base_forward_bytes,
        base_backward_bytes=traced.base_backward_bytes,
        update_peak_bytes=traced.update_peak_bytes,
        link=link,
        resident_bytes=traced.resident_bytes,
        fingerprint=bound_to,
        notes=(*notes, *traced.notes),
        disk=disk,
        outside=traced.outside,
        uncalled=traced.uncalled,
        differentiated=traced.differentiated,
        foreign=traced.foreign,
        step_error=_step_error(stages, lanes.times),
        residents=tuple(map(lanes.moving, traced.residents)),
    )


def _step_error(stages: Sequence[Stage], times: Times) -> float:
    """The step's standard error as a share of it: stages of one kind have the same error, those of others their own."""
    step_s = sum(stage.forward_s + stage.backward_s for stage in stages)
    counts = Counter(stage.kind for stage in stages)
    error_s = math.hypot(*(counts[kind] * error_s for kind, error_s in times.error_s.items()))
    return min(error_s / step_s, MOST_ERROR) if step_s else 0.0


def _beaten(option: Option, menu: list[Option], storages: tuple[Storage, ...]) -> bool:
    """Whether another option of the menu is nowhere worse, in bytes held, moved and temporary and in time, and differs.

    Example: of two options that hold 8 MiB and move nothing, the one with the longer recompute is beaten.
    """

    def costs(o: Option) -> tuple[float, ...]:
        held, moved = (sum(storages[s].nbytes for s in some) for some in (o.held, o.moved))
        return held - moved, moved, o.forward_bytes, o.backward_bytes, o.added_s, o.launch_s

    mine = costs(option)
    return any(
        all(theirs <= ours for theirs, ours in zip(costs(other), mine, strict=True)) and costs(other) != mine
        for other in menu
    )


def _update_bytes(
    optimizer: OptimizerLike | None, model: nn.Module, outside: Sequence[torch.Tensor], target: Target
) -> tuple[int, int, list[str], list[Resident]]:
    """Bytes of the optimizer's state once it is complete, and those that an update adds at most.

    Also the operations whose bytes couldn't be measured, and the state that may be away.
    """
    if optimizer is None:
        return 0, 0, [], []
    made = make_optimizer(optimizer, model)
    tracker = Tracker(target.without_answers)
    live: dict[str, int] = {}
    segments: dict[str, int] = {}

    def begin(part: str, stand_ins: StandIns) -> None:
        live[part], segments[part] = tracker.live_bytes, 1 + len(segments)
        tracker.enter_segment(segments[part])

    with traced_updates(made, tracker, target, own=[*held_tensors(model), *outside], begin=begin) as stand_ins:
        begin("over", stand_ins)
        parts = _state_parts(made, stand_ins, model, target)
    weights = live["gradients 1"] - live["weights"]
    state = max(live[part] - weights for part in ("gradients 1", "gradients 2", "over"))
    gradients = live["update 1"] - live["gradients 1"]
    updates = [tracker.forward[segments[part]] for part in ("update 1", "update 2")]
    extra, failed, _ = target.workspaces(
        op.key for update in updates for op in update.ops if _runs_alone(op.key, target)
    )
    peak_bytes = max(update.start_bytes + update.rise(extra) for update in updates)
    return state, peak_bytes - gradients - weights - state, failed, parts


def _runs_alone(key: Any, target: Target) -> bool:
    """Whether an operation of an update can run alone: on CUDA, the operands of one on lists may not fit.

    Those operations take nothing there besides their results.
    """
    return key is not None and not (target.is_cuda and str(key[0]).startswith(("aten._foreach", "aten._fused")))


_STATE_PARTS = 16
"""Most parts in which optimizer state moves or stays: fewer bytes than one part has make no difference to a step."""


def _state_parts(
    optimizer: torch.optim.Optimizer, stand_ins: StandIns, model: nn.Module, target: Target
) -> list[Resident]:
    """The tensors of an optimizer's state that may be away between updates, in parts in the parameters' order.

    Of distributed tensors (DTensor) they are this rank's parts, as of all stand-ins.
    """
    names: dict[torch.Tensor, str]
    names = {p: name for name, p in model.named_parameters() if not is_traceable_wrapper_subclass(local_part(p))}
    seen = {twin.untyped_storage()._cdata for _, twin in stand_ins.parameters}
    found: list[tuple[str, int]] = []
    for p, twin in stand_ins.parameters:
        state = optimizer.state.get(twin, {}) if p in names else {}
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or type(key) is not str:
                continue
            storage = value.untyped_storage()
            if storage._cdata not in seen and storage.nbytes() >= max(target.least_moved_bytes, 1):
                seen.add(storage._cdata)
                found.append((f"{names[p]}: {key}", storage.nbytes()))
    least, parts = sum(nbytes for _, nbytes in found) / _STATE_PARTS, list[list[tuple[str, int]]]()
    for each in found:
        if not parts or sum(nbytes for _, nbytes in parts[-1]) >= least:
            parts.append([])
        parts[-1].append(each)
    return [
        Resident(tuple(names), sum(sizes), (), trained=True, kind="optimizer", sizes=sizes)
        for names, sizes in (zip(*part, strict=True) for part in parts)
    ]


def outside_tensors(step: TrainingStep, target: Target) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors from outside of the model that a step reads, found by a forward without memory.

    Returns
    -------
    inputs : list of torch.Tensor
        Those that come with each step: the inputs, or all that a step's callable reads.
    others : list of torch.Tensor
        What `loss_fn`, or the model's code, reads beside inputs: targets, the parameters of a teacher.
    """
    world = FakeWorld(target)
    with fake_parameters(step.model, world, step.reached()), target.choices():
        given = fake_inputs(step, world.fake)
        with world, Outside() as mode:
            given.forward()
    inputs = step.tensors()
    known = {s._cdata for t in (*held_tensors(step.model), *inputs) for s in storages_of(t)}
    found = [
        t
        for t in mode.tensors
        if not any(map(is_fake, plain_tensors(t)))
        and known.isdisjoint(s._cdata for s in storages_of(t))
        and not (t.dim() == 0 and t.device.type == "cpu")  # a tracker counts these itself
    ]
    return (inputs, found) if step.fn is None else (found, [])


@contextlib.contextmanager
def as_ours(step: TrainingStep, doing: str) -> Any:
    """Raise an error of the model's own code within the block as a `CkptPlanError`, with the original as its cause."""
    try:
        yield
    except CkptPlanError:
        raise
    except Exception as error:
        for mark, why in _UNTRACEABLE.items():
            if mark in str(error):
                raise UnsupportedModelError(why) from error
        raise _failed(step, doing, error) from error


_OF_TRANSFORMS = (
    "the step runs a transform of torch.func (grad, vmap, jvp), whose tensors autograd's hooks, and so plans, can't "
    "see; use torch.autograd.grad, or operations on whole batches"
)
_FROM_BEFORE = (
    "the step reads a tensor with the graph of an earlier run (one that is carried from step to step, or collected) in "
    "a place that profiling can't restore (an attribute of a global object); keep it in an attribute of a module, or "
    "detach it in forward, or in the function that is passed as step="
)
_UNTRACEABLE = {
    "use_reentrant=True": (
        "the model calls torch.utils.checkpoint with use_reentrant=True, whose backward can't run one stage at a "
        "time; pass use_reentrant=False, or leave the checkpoint out and let the plan decide"
    ),
    "storage of Sparse": (
        "a sparse tensor comes up in the step (an input, one that forward makes, or the gradient of an embedding with "
        "sparse=True), and its memory can't be traced; use a dense one, for an embedding use sparse=False"
    ),
    "BatchedTensorImpl": _OF_TRANSFORMS,
    "TensorWrapper": _OF_TRANSFORMS,
    "torch.func": _OF_TRANSFORMS,
    "backward through the graph a second time": _FROM_BEFORE,
    "unpack_hook expected to be a Tensor but got": _FROM_BEFORE,
    "data is not allocated yet": (
        "a kernel reads values of a tensor that has no memory while the step is traced, where no operation shows it; "
        "make the code that calls it an operation of its own (torch.library.custom_op), which is then run for real"
    ),
    "NestedIntNode": "a nested tensor comes up in the step, and its memory can't be traced; pad it, with a mask",
}
"""Text in PyTorch's errors about tensors that can't be traced -> message of the error raised in their place."""


def _failed(step: TrainingStep, doing: str, error: Exception) -> InvalidInputError:
    what = "step()" if step.fn is not None else f"{type(step.model).__name__}'s forward with these inputs"
    if step.found:
        what = (
            f"{type(step.model).__name__}'s forward with inputs {step.found} (pass inputs= for the right ones, or call "
            "ckptplan.apply(model, budget_gb=...), which plans for those of the first training forward)"
        )
    device = next(step.model.parameters()).device
    on_host = is_accelerator(device) and any(t.device.type == "cpu" for t in step.tensors())
    beside = f" (the model is on {device}, and some of its inputs are on the CPU)" if on_host else ""
    return InvalidInputError(f"{what} failed while {doing}: {type(error).__name__}: {error}{beside}")
