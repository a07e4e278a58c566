"""estimate(): the memory of a training step, by category and phase, without allocating it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from ckptplan.core.allocator_settings import AllocatorSettings, allocator_conf
from ckptplan.core.device import library_workspaces
from ckptplan.core.errors import InvalidInputError, UnsupportedModelError
from ckptplan.core.estimate import CATEGORIES, KEPT, Estimate, Phase
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.plan import Plan
from ckptplan.core.progress import counted
from ckptplan.core.request import (
    UNSAID,
    Report,
    StepKeywords,
    Training,
    ignore_progress,
    reporting,
    require_known,
)
from ckptplan.core.resident import GRADIENT_OF
from ckptplan.distributed.absent import as_asked
from ckptplan.memory.allocator import SimulatedOutOfMemoryError
from ckptplan.memory.batches import batch_steps, does_the_same, require_planned
from ckptplan.memory.ledger import Account, Ledger, Player, saved_bytes
from ckptplan.memory.recording import Block, Recording, record_step, record_updates
from ckptplan.profiling.bytes.replays import Replay, replay
from ckptplan.profiling.bytes.unfolding import Folding
from ckptplan.profiling.profiler import as_ours, outside_tensors, training_step
from ckptplan.profiling.target import Target, find_target
from ckptplan.profiling.values.answers import Answers
from ckptplan.profiling.values.real_run import answered
from ckptplan.profiling.workload.optimizer_names import notes_on
from ckptplan.profiling.workload.optimizers import make_optimizer
from ckptplan.runtime.guard.digests import BENCH_BYTES
from ckptplan.runtime.guard.spots import SHEET_BYTES
from ckptplan.runtime.handle import without_plan
from ckptplan.state.process import in_own_context
from ckptplan.state.restore import restored
from ckptplan.tensors.storages import local_part
from ckptplan.training.compiled import compiled_modules, stages_compiled
from ckptplan.training.gradients import accumulates, starting_gradients
from ckptplan.training.step import TrainingStep, caching, check_supported, every_layer, inputs_text, planned_config

_UNKNOWN_ON_CUDA = (
    (("aten.convolution", "aten.convolution_backward"), "cuDNN's workspaces for convolutions are not included"),
    (("aten._fft_r2c", "aten._fft_c2r", "aten._fft_c2c"), "cuFFT's workspaces for Fourier transforms are not included"),
    (("aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward"), "recurrent layers are counted as on the CPU"),
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear")


@as_asked
@in_own_context
def estimate(
    model: nn.Module,
    inputs: Any = None,
    *,
    grad_scaler: bool | None = None,
    accumulation_steps: int = 1,
    set_to_none: bool = True,
    checkpoint_on_device: bool = False,
    holds_output: bool = True,
    keeps: Collection[str] = (),
    plan: Plan | None = None,
    allocator: AllocatorSettings | str | None = None,
    empty_cache: bool = False,
    on_progress: Report | None = None,
    **training: Unpack[StepKeywords],
) -> Estimate:
    """Return the memory of training `model`, by category and phase, without allocating it.

    The training loop consists of forward, loss and backward (`accumulation_steps` times, with the batch on the device
    throughout), the optimizer's update, and `zero_grad`. `holds_output` and `keeps` say whether the loop holds output,
    loss and batch. The estimate covers two steps, since the first update makes the optimizer's state (three with a plan
    on CUDA, under which the allocator's cache is emptied after that), and then one forward without autograd
    ("inference") and without `loss_fn`. The model's own checkpointing is included.

    The batches of a list of two or more run in turn, each once (twice where micro-batches leave whole gradients of a
    sharded model: the last of an update reduces them, and there are two of one batch): memory that the allocator has
    reserved for one serves the next, and the first update makes the optimizer's state. ``inputs=batches * 2`` is two
    epochs. Each batch is loaded anew, so a tensor that two of them share counts for each.

    Parameters
    ----------
    model : nn.Module
        May be on `meta` if `device` is given.
    inputs : tensor, tuple, dict, list of these, optional
        As in `profile`; a list has the batches that run in turn.
    grad_scaler : bool, optional
        Whether a `GradScaler` is used; default: with float16.
    accumulation_steps : int
        Micro-batches per update: each as large as `inputs`, or this many of the list's batches in turn.
    set_to_none : bool
        Argument of `zero_grad`; False keeps the gradients' memory.
    checkpoint_on_device : bool
        Whether the weights were loaded from a file onto the device (no `map_location`) and the loaded tensors are still
        referenced.
    holds_output : bool
        Whether the loop holds the output during backward. False for ``loss = model(**batch).loss``, where tensors that
        no backward needs, such as logits, are freed before.
    keeps : collection of str
        What is still referenced when the next forward begins: any of "output", "loss" and "batch". All three in a plain
        loop (``for batch in loader: output = model(batch); ...``), whose names refer to them until the next step's
        tensors are there. Default: none; output and loss are freed at the end of backward, the batch before the next.
    plan : Plan, optional
        The plan applied in training; inputs may be smaller than those that it was made for, as in training.
    allocator : AllocatorSettings or str, optional
        CUDA's caching allocator as in PYTORCH_CUDA_ALLOC_CONF, such as "expandable_segments:True".
    empty_cache : bool
        Whether the loop calls `torch.cuda.empty_cache()` after each step, with only the tensors in `keeps` left.
    on_progress : callable, optional
        Called with a description of the present work.
    **training
        `loss_fn`, `optimizer`, `device`, `step`, `amp`, `accumulate`, `ddp`, `fsdp` (see
        `ckptplan.core.request.Training`). Without an optimizer there is no update, and the phase "zero_grad" takes its
        place. With `accumulate` gradients exist from the start and are never dropped, as with `set_to_none=False` after
        the first step, or where `zero_grad` comes after the forward; default: whether the model has gradients now, or
        `plan` is for such steps.

    Returns
    -------
    Estimate
        `print` shows it as tables.

    Raises
    ------
    InvalidInputError, UnsupportedModelError, PlanMismatchError
    """
    require_known(estimate, training, StepKeywords)
    request = Training.of(training, inputs)
    target = find_target(model, request.device)
    settings = _settings(allocator, target)
    _check_emptying(empty_cache, target)
    keeps = _checked(keeps, holds_output=holds_output)
    check_supported(model, checkpoints=plan is None)
    if request.accumulate is None and plan is not None and plan.fingerprint.accumulates:
        request = replace(request, accumulate=True)
    steps, notes = batch_steps(model, request, target, accumulation_steps)
    model = steps[0].model
    steps = [replace(step, accumulates=accumulates(model, request.accumulate)) for step in steps]  # besides buckets
    if caching(model):
        as_given = "as in the model's configuration; in training it is mostly off"
        notes.append(f"use_cache is {as_given if plan is None else 'off, as the plan turns it off in training'}")
    optimizer = None if request.optimizer is None else make_optimizer(request.optimizer, model)
    run = _Run(
        steps,
        target,
        optimizer,
        scaler=_in_float16(steps[0]) if grad_scaler is None else grad_scaler,
        accumulation_steps=accumulation_steps,
        set_to_none=set_to_none,
        checkpoint_on_device=checkpoint_on_device,
        holds_output=holds_output,
        keeps=keeps,
        empty_cache=empty_cache,
        plan=plan,
        notes=[*notes, *notes_on(optimizer)],
        report=reporting(on_progress),
    )
    reached = [each for step in steps for each in step.reached()]
    with (
        without_plan(model),
        _config(model, plan),
        steps[0].parallel.reduced() as run.keeps_whole_gradients,
        stages_compiled(model, () if plan is None else plan.fingerprint.compiled),
        restored(model, reached, runs=bool(compiled_modules(model))) as rewind,
    ):
        rewind()
        found = run.estimate(rewind, settings)
        return _of_all_paths(found, run, rewind, settings) if run.path_is_drawn else found


_RANDOM_STATES = 4  # enough to see that paths differ; rare paths may not be drawn

_DRAWN = "numbers that forward draws may decide what runs"


def _of_all_paths(
    found: Estimate, run: _Run, rewind: Callable[..., None], settings: AllocatorSettings | None
) -> Estimate:
    """Return the largest of the estimates with several random states, `found` the first of them, with their range."""
    all_found = [found]
    for seed in range(1, _RANDOM_STATES):
        reseed = functools.partial(rewind, seed)
        target = replace(run.target, answers=Answers())
        again = replace(run, target=target, notes=list(run.notes), unknown=set(), updates=None)
        reseed()
        all_found.append(again.estimate(reseed, settings))
    peaks = [each.reserved_bytes for each in all_found]
    most = all_found[peaks.index(max(peaks))]
    low, high = (f"{peak / 2**20:.2f}" for peak in (min(peaks), max(peaks)))
    spread = f"of {low} to {high} MiB, of which the largest is shown" if low != high else f"of {high} MiB alike"
    return replace(most, notes=(*most.notes, f"{_DRAWN}: {_RANDOM_STATES} random states gave peaks {spread}"))


def _check_emptying(empty_cache: bool, target: Target) -> None:
    if not isinstance(empty_cache, bool):
        raise InvalidInputError(f"empty_cache={empty_cache!r}; it is True (after each step) or False")
    if empty_cache and not target.is_cuda:
        raise InvalidInputError(
            "empty_cache=True, but the step runs on the CPU, whose allocator keeps no freed memory to empty; leave it "
            "out, or pass device="
        )


def _checked(keeps: Collection[str], *, holds_output: bool) -> tuple[str, ...]:
    """Return `keeps` in the order of `KEPT`.

    Raises
    ------
    InvalidInputError
        If it has other names, or the output is kept that isn't held.
    """
    if isinstance(keeps, str) or not isinstance(keeps, Collection) or not set(keeps) <= set(KEPT):
        raise InvalidInputError(f"keeps={keeps!r}: what a loop keeps is any of {', '.join(map(repr, KEPT))}")
    if not holds_output and "output" in keeps:
        raise InvalidInputError(
            "keeps has 'output', but holds_output=False: an output that isn't held during backward isn't there for the "
            "next step; leave one of them out"
        )
    return tuple(name for name in KEPT if name in keeps)


class TrainingBytes:
    """Peak memory of training one model, for batches of different sizes.

    The optimizer's update is the same for all batches and recorded once.

    Parameters
    ----------
    model : nn.Module
    target : Target
    training : Training
        Its inputs and device are ignored.
    allocator : AllocatorSettings or str, optional
        As in `estimate`.
    """

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        training: Training = UNSAID,
        allocator: AllocatorSettings | str | None = None,
    ) -> None:
        check_supported(model)
        self.model, self.target, self.training = model, target, training
        self._settings = _settings(allocator, target)
        optimizer = training.optimizer
        self._optimizer = None if optimizer is None else make_optimizer(optimizer, model)
        self.notes = notes_on(self._optimizer)
        """Notes on how the optimizer's state is counted."""
        self._updates: Recording | None = None

    def step(self, inputs: Any) -> TrainingStep:
        """Return the training step on `inputs`."""
        return training_step(self.model, replace(self.training, inputs=inputs), self.target)[0]

    def missing_state_bytes(self) -> int:
        """Return the bytes of the state that the optimizer's next update will make, in blocks."""
        if self._optimizer is None:
            return 0
        # Recorded anew: updates may have been made since the last time.
        return _made_state_bytes(record_updates(self._optimizer, self.model, self.target), self.target)

    def reserved(self, step: TrainingStep, plan: Plan | None = None) -> int:
        """Return the peak of the reserved bytes in the first steps, updates included; on the CPU that of tensors."""
        return self.peaks(step, plan).reserved_bytes

    def loaded_bytes(self, step: TrainingStep) -> int:
        """Return the reserved bytes when the model has been put on the device, inputs and optimizer state aside."""
        ledger = Ledger()
        _Run([step], self.target, None)._load(ledger, [])
        return int(Account.of(ledger, self._settings).reserved.max())

    @in_own_context
    def peaks(self, step: TrainingStep, plan: Plan | None = None) -> DeviceBytes:
        """Return the peaks of the first steps, updates included; on the CPU the three are equal."""
        with (
            _config(self.model, plan),
            step.parallel.reduced() as keeps_whole_gradients,
            restored(self.model, step.reached(), runs=False) as rewind,
        ):
            rewind()
            run = _Run(
                [step],
                self.target,
                self._optimizer,
                scaler=_in_float16(step),
                plan=plan,
                updates=self._updates,
                keeps_whole_gradients=keeps_whole_gradients,
            )
            batches = run.recorded(rewind)
            account = Account.of(run.training(batches), self._settings)
            reserved = [account.reserved]
            if plan is not None and self._settings is not None:
                # Which free block serves a request depends on what no plan decides: where the driver places segments,
                # whether the loop still holds the output while the optimizer makes its state, and the memory that the
                # check takes when the plan is applied. The worst counts.
                run.checks = True
                for over_update in (False, True):
                    run.holds_output_over_update = over_update
                    training = run.training(batches)
                    reserved += [
                        Account.of(training, self._settings, descending=falls).reserved for falls in (False, True)
                    ]
            self._updates = run.updates
        most = max(int(bytes_.max()) for bytes_ in reserved)
        return DeviceBytes(int(account.requested.max()), int(account.allocated.max()), most)


def _made_state_bytes(updates: Recording, target: Target, update: int = 1) -> int:
    """Return the bytes of the state that an update makes, in blocks."""
    names = f"update {update}", f"dropped {update}"
    changes = [event for s in updates.sections if s.direction in names for event in s.events]
    sizes = ((sign, b.nbytes) for sign, n in changes if (b := updates.blocks[n]).category == "optimizer state")
    return max(sum(sign * target.rounded(nbytes) for sign, nbytes in sizes), 0)


def _config(model: nn.Module, plan: Plan | None) -> contextlib.AbstractContextManager[None]:
    """Return a context with the configuration of training, with every layer: a plan turns generation caches off."""
    return every_layer(model) if plan is None else planned_config(model)


def _in_float16(step: TrainingStep) -> bool:
    return step.autocast is not None and step.autocast[1] is torch.float16


def _settings(allocator: AllocatorSettings | str | None, target: Target) -> AllocatorSettings | None:
    """Return the given settings; by default this process's for a device of this machine, otherwise PyTorch's."""
    if allocator is None and target.spec is None and target.is_cuda:
        allocator = allocator_conf()
    if not target.is_cuda:
        if allocator is not None:
            raise InvalidInputError(
                f"allocator={allocator!r} are settings of CUDA's allocator, but the step runs on the CPU; leave it out"
            )
        return None
    return AllocatorSettings.from_string(allocator) if isinstance(allocator, str) else allocator or AllocatorSettings()


def library_blocks(target: Target) -> Iterator[Block]:
    """Yield the workspaces of a cuBLAS handle, of which each thread that computes products has its own.

    Sizes are those of the device and version; for a device of this machine CUBLAS_WORKSPACE_CONFIG overrides them with
    pairs ":KiB:count".
    """
    cublas, cublaslt = library_workspaces(target.compute_capability or (0, 0), torch.__version__)
    setting = "" if target.spec is not None else os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    numbers = [part for part in setting.split(":") if part]
    if numbers and len(numbers) % 2 == 0 and all(part.isdecimal() for part in numbers):
        cublas = 1024 * sum(int(size) * int(count) for size, count in zip(numbers[::2], numbers[1::2], strict=True))
    yield Block(cublas, "workspaces and temporaries", "cuBLAS workspace")
    if cublaslt:
        yield Block(cublaslt, "workspaces and temporaries", "cuBLASLt workspace")


def _block(nbytes: int, category: str, name: str, tensor: torch.Tensor) -> Block:
    return Block(nbytes, category, name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


@dataclass
class _RecordedBatch:
    """A batch, and the recordings of a step on it: without gradients from before, with them, and without autograd.

    Of models that keep whole gradients, `fresh` reduces them and `adding` adds to them.
    """

    number: int
    step: TrainingStep
    inputs: list[torch.Tensor]
    others: list[torch.Tensor]
    """Tensors that the step reads beside its inputs and the model."""
    fresh: Recording
    adding: Recording
    inferring: Recording | None
    reads: bool = False
    """Whether the step reads values."""


@dataclass
class _Run:
    """One training run, of which a ledger is made."""

    steps: Sequence[TrainingStep]
    target: Target
    optimizer: torch.optim.Optimizer | None
    scaler: bool = False
    accumulation_steps: int = 1
    set_to_none: bool = True
    checkpoint_on_device: bool = False
    holds_output: bool = True
    keeps: tuple[str, ...] = ()
    empty_cache: bool = False
    plan: Plan | None = None
    notes: list[str] = field(default_factory=list)
    updates: Recording | None = None
    unknown: set[str] = field(default_factory=set)
    path_is_drawn: bool = False
    keeps_whole_gradients: bool = False
    holds_output_over_update: bool = False
    """Whether the loop holds the output until the next forward begins."""
    checks: bool = False
    """Whether the memory for checking a plan counts (`apply(..., check=)`)."""
    report: Report = ignore_progress

    def estimate(self, rewind: Callable[[], None], settings: AllocatorSettings | None) -> Estimate:
        """Record the parts, write them into ledgers, add them up."""
        batches = self.recorded(rewind, inference=True)
        self.report("adding up what is allocated")
        account, notes = self._account(self.training(batches), settings)
        inference = Account.of(self._inference(batches), settings)
        return self._result(account, (*account.phases(), *inference.phases()[1:]), batches, notes)

    def recorded(self, rewind: Callable[[], None], *, inference: bool = False) -> list[_RecordedBatch]:
        """Return the recordings of each batch; batches that can't differ share them."""
        if self.plan is not None:
            require_planned(self.plan, self.steps, self.target)
        batches: list[_RecordedBatch] = []
        distinct: list[_RecordedBatch] = []
        for number, step in enumerate(self.steps, 1):
            alike = next((batch for batch in distinct if does_the_same(step, batch.step, reads=batch.reads)), None)
            if alike is not None:
                batches.append(replace(alike, number=number, step=step, inputs=step.tensors()))
                continue
            target = self.target if number == 1 else replace(self.target, answers=Answers())
            doing = f"being estimated on batch {number}" if len(self.steps) > 1 else "being estimated"
            record = functools.partial(self._record, number, step, target, rewind, inference=inference)
            with as_ours(step, doing):
                rewind()
                distinct.append(answered(record, step, target, rewind))
            if target.answers is not None:
                note = target.answers.note
                self.notes[:0] = [note] if note and note not in self.notes else []
                self.path_is_drawn |= target.answers.path_is_drawn
                distinct[-1].reads = bool(target.answers.queues)
            batches.append(distinct[-1])
        return batches

    def _record(
        self, number: int, step: TrainingStep, target: Target, rewind: Callable[[], None], *, inference: bool
    ) -> _RecordedBatch:
        inputs, others = outside_tensors(step, target)
        rewind()
        folding = Folding(step, None, target)

        def planned(plan: Plan, **options: bool) -> tuple[Replay, tuple[str, ...]]:
            followed = plan.replayed
            return replay(step, followed, target, logs=True, **options), followed.stages

        def record(*, accumulating: bool = False, inference: bool = False) -> Recording:
            plan = None if inference else self.plan
            log = (
                functools.partial(folding.logged, inference=inference)
                if plan is None
                else functools.partial(planned, plan)
            )
            logged = functools.partial(log, accumulating=accumulating, holds_output=self.holds_output)
            choices = () if plan is None else plan.decided.choices
            recording, unknown = record_step(logged, target, choices, inference=inference)
            rewind()
            self.unknown.update(unknown)
            return recording

        # From the second backward on, gradients exist to add to, unless they are dropped after each step.
        lasting = self.accumulation_steps > 1 or not self._drops_gradients or self.keeps_whole_gradients
        passes, of_batch = 1 + lasting + inference, f" of batch {number}" if len(self.steps) > 1 else ""
        self.report(counted("recording", 1, passes, f"passes{of_batch}"))
        fresh = record()
        if lasting:
            self.report(counted("recording", 2, passes, f"passes{of_batch}"))
        with step.parallel.reducing(not self.keeps_whole_gradients):
            adding = record(accumulating=True) if lasting else fresh
        if inference:
            self.report(counted("recording", passes, passes, f"passes{of_batch}"))
        return _RecordedBatch(
            number, step, inputs, others, fresh, adding, record(inference=True) if inference else None
        )

    # --- the ledger ---

    def _in_steps(self, batches: Sequence[_RecordedBatch]) -> list[Sequence[_RecordedBatch]]:
        """Return the micro-batches of each step: the batches in turn, or the only one in two steps."""
        size = self.accumulation_steps
        if len(batches) == 1:
            steps: list[Sequence[_RecordedBatch]] = [[batches[0]] * min(size, 2)] * 2
        else:
            steps = [batches[at : at + size] for at in range(0, len(batches), size)]
        # Of micro-batches that leave whole gradients the last reduces them.
        return [[*step, *step] if self.keeps_whole_gradients and len(step) == 1 else step for step in steps]

    def training(self, batches: Sequence[_RecordedBatch]) -> Ledger:
        """Return the ledger of training; in the first step the optimizer makes its state."""
        steps = self._in_steps(batches)
        ledger = Ledger()
        self._load(ledger, batches)
        for resident in () if self.plan is None else self.plan.residents:
            if resident.returns is not None:  # it is away when the first forward begins
                ledger.free(ledger.movable[resident.names[0]])
        self._record_updates(batches, steps)
        if len(batches) == 1 and self._empties_before(2):
            steps.append(steps[-1])  # it starts with the segments left by the step after the cache was emptied
        updating = None if self.updates is None else _Updates(ledger, self.updates)
        held = range(len(ledger.blocks))
        if updating is not None:
            updating.run("held")
            updating.adopt("weights", [index for index in held if ledger.blocks[index].category == "weights"])
        lasting = () if self._drops_gradients else held
        gradients = [index for index in lasting if ledger.blocks[index].category == "gradients"]
        loop = _Loop(self, ledger)
        had: frozenset[str] = frozenset()
        unreduced: dict[str, int] = {}
        for number, step in enumerate(steps, 1):
            suffix = "" if number == 1 else f" {number}"
            remain = number > 1 and not self.set_to_none
            for micro, batch in enumerate(step, 1):
                if not self._accumulates and (remain or (micro > 1 and not self.keeps_whole_gradients)):
                    _require_gradients(batch, had)
                has_gradients = micro > 1 or self._accumulates or (number > 1 and not self.set_to_none)
                if self.keeps_whole_gradients:
                    has_gradients = micro < len(step)
                had |= batch.fresh.gradients
                name = f"{suffix}, accumulating{'' if micro == 2 else f' {micro}'}" if micro > 1 else suffix
                empties = micro == 1 and self._empties_before(number)
                player = Player(
                    ledger,
                    batch.adding if has_gradients else batch.fresh,
                    in_buckets=self.steps[0].parallel.gradients_in_buckets,
                    unreduced=unreduced,
                )
                ledger.phase(f"forward{name}", batch.number)
                self._make_unreduced(ledger, unreduced)
                loop.forward(player, batch, empties=empties)
                loop.backward(player, batch, f"backward{name}")
                made = player.left("gradients")
                # What the last micro-batch has reduced is added to what remains of the step before.
                gradients += _free(ledger, made) if self.keeps_whole_gradients and remain else made
                player.drop()
            if updating is not None:
                ledger.phase(f"optimizer{suffix}", step[-1].number)
                self._unscale(ledger)
                gradients = updating.update(gradients, drops=self._drops_gradients)
            elif self._drops_gradients:
                ledger.phase(f"zero_grad{suffix}", step[-1].number)
            if self._drops_gradients:
                gradients, had = _free(ledger, gradients), frozenset()
            if self.empty_cache and number < len(steps):
                loop.empty_cache()
        return ledger

    def _record_updates(self, batches: Sequence[_RecordedBatch], steps: Sequence[Sequence[_RecordedBatch]]) -> None:
        """Record the updates behind `steps`, unless they are known."""
        if self.updates is not None or self.optimizer is None:
            return
        given = [frozenset[str]().union(*(batch.fresh.gradients for batch in step)) for step in steps]
        self.updates = record_updates(
            self.optimizer,
            self._model,
            self.target,
            given if len({*given}) > 1 else given[:1] * 2,  # equal updates: the second one again and again
            inputs=[tensor for batch in batches for tensor in (*batch.inputs, *batch.others)],
            keeps_gradients=not self._drops_gradients,
        )

    def _empties_before(self, step: int) -> bool:
        """Whether the runtime empties the cache, as the update before has made state (runtime/guard/fresh_state.py)."""
        if self.plan is None or not self.target.is_cuda or self.updates is None or step < 2:
            return False
        recorded = sum(section.direction.startswith("update") for section in self.updates.sections)
        return _made_state_bytes(self.updates, self.target, min(step - 1, recorded)) > 0

    @property
    def _drops_gradients(self) -> bool:
        """Whether gradients are freed between steps."""
        return self.set_to_none and not self._accumulates

    @property
    def _accumulates(self) -> bool:
        return self.steps[0].accumulates and not self.keeps_whole_gradients  # see `_make_unreduced`

    @property
    def _model(self) -> nn.Module:
        return self.steps[0].model

    def _load(self, ledger: Ledger, batches: Sequence[_RecordedBatch], *, training: bool = True) -> None:
        """Allocate the tensors that are on the device before the first step."""
        ledger.phase("loaded")
        model = self._model
        seen: set[int] = set()
        named: list[tuple[str, str, torch.Tensor]] = [("weights", *pair) for pair in model.named_parameters()]
        named += [("buffers", *pair) for pair in model.named_buffers()]
        named += [("inputs", "read besides the inputs", tensor) for batch in batches for tensor in batch.others]
        for category, name, tensor in named:
            storage = local_part(tensor).untyped_storage()
            if storage._cdata not in seen and not (category != "weights" and self._on_host(tensor)):
                seen.add(storage._cdata)
                index = ledger.allocate(_block(storage.nbytes(), category, name, tensor))
                if category != "inputs":
                    ledger.movable[name] = index
        if self.checkpoint_on_device:
            for _, name, tensor in named:
                nbytes = tensor.numel() * tensor.element_size()
                ledger.allocate(Block(nbytes, "weights", f"{name} (as loaded from the file)"))
        parallel = self.steps[0].parallel
        if training and (self._accumulates or self.keeps_whole_gradients) and not parallel.gradients_in_buckets:
            for name, nbytes, parameter in self._gradients(whole=False):
                ledger.movable[GRADIENT_OF + name] = ledger.allocate(_block(nbytes, "gradients", name, parameter))
        for block in parallel.blocks() if training else ():
            ledger.allocate(Block(*block))
        if training and self.scaler:
            for what in ("scale", "growth tracker"):
                ledger.allocate(Block(4, "workspaces and temporaries", f"GradScaler's {what}"))
        if training and self.checks:
            for nbytes in (*BENCH_BYTES, SHEET_BYTES):
                ledger.allocate(Block(nbytes, "workspaces and temporaries", "memory of the check"))

    def _make_unreduced(self, ledger: Ledger, there: dict[str, int]) -> None:
        """Allocate the gradients that earlier micro-batches leave whole, but for those that are `there`."""
        for name, nbytes, parameter in self._gradients(whole=True):
            if name not in there:
                what = f"{name}, of micro-batches that don't reduce it"
                there[name] = ledger.allocate(_block(nbytes, "gradients", what, parameter))

    def _gradients(self, *, whole: bool) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield name, bytes and parameter of the gradients with which a step starts, those that are whole or others."""
        parameters = dict(self._model.named_parameters())
        for name, nbytes in starting_gradients(self._model, whole=whole).items():
            leaves_whole = self.keeps_whole_gradients and local_part(parameters[name]) is not parameters[name]
            if nbytes and leaves_whole == whole:
                yield name, nbytes, parameters[name]

    def _on_host(self, tensor: torch.Tensor) -> bool:
        return self.target.spec is None and tensor.device.type not in (self.target.device.type, "meta")

    def input_blocks(self, batch: _RecordedBatch) -> list[Block]:
        """Return the blocks of a batch on the device."""
        tensors = {t.untyped_storage()._cdata: t for t in batch.inputs if not self._on_host(t)}
        return [_block(t.untyped_storage().nbytes(), "inputs", "input", t) for t in tensors.values()]

    def _inference(self, batches: Sequence[_RecordedBatch]) -> Ledger:
        """Return the ledger of one forward of each batch, without autograd."""
        ledger = Ledger()
        self._load(ledger, batches, training=False)
        loop = _Loop(self, ledger)
        for batch in batches:
            if self.empty_cache and batch.number > 1:
                loop.empty_cache()
            assert batch.inferring is not None
            player = Player(ledger, batch.inferring)
            ledger.phase("inference" if batch.number == 1 else f"inference {batch.number}", batch.number)
            loop.forward(player, batch)
            player.run("end")
            loop.hold("output", player.rest())
        return ledger

    def _unscale(self, ledger: Ledger) -> None:
        if self.scaler:
            for what in ("inverse scale", "flag of infinities"):
                ledger.free(ledger.allocate(Block(4, "workspaces and temporaries", f"GradScaler's {what}")))

    # --- adding up ---

    def _account(self, training: Ledger, settings: AllocatorSettings | None) -> tuple[Account, list[str]]:
        """Return the bytes of training, and notes; beyond the capacity, with unused segments released on the way."""
        account = Account.of(training, settings)
        capacity, context = self.target.capacity_bytes, self.target.context_bytes
        if capacity is None or account.reserved.max() + context <= capacity:
            return account, []
        try:
            tight = Account.of(training, settings, capacity - context)
        except SimulatedOutOfMemoryError:
            return account, []
        note = "fits only because the allocator releases cached segments during the step, which takes time"
        return tight, [note]

    def _result(
        self, account: Account, phases: tuple[Phase, ...], batches: Sequence[_RecordedBatch], notes: list[str]
    ) -> Estimate:
        at = int(np.argmax(account.allocated))
        reserved_bytes = int(account.reserved.max())
        context = self.target.context_bytes
        categories = account.categories(at)
        categories["fragmentation"] = reserved_bytes - int(account.allocated[at])
        categories["context"] = context
        notes = [*self.notes, *notes]
        if self.unknown:
            notes.append(f"temporaries not known for: {', '.join(sorted(self.unknown))}")
        if self.target.spec is not None and self.target.is_cuda:
            ran = {block.op for batch in batches for block in batch.fresh.blocks}
            notes += [note for ops, note in _UNKNOWN_ON_CUDA if ran.intersection(ops)]
        if self._runs_once_before_state(batches):
            notes.append(_BEFORE_STATE)
        peak_phase, peak_batch = next((name, n) for name, begin, end, n in account.spans() if begin <= at < end)
        return Estimate(
            device=self.target.description,
            phases=phases,
            peak_bytes=int(account.allocated[at]),
            peak_phase=peak_phase,
            peak_stage=account.stage(at),
            reserved_bytes=reserved_bytes,
            context_bytes=context,
            capacity_bytes=self.target.capacity_bytes,
            categories={name: categories[name] for name in CATEGORIES if categories.get(name)},
            saved_bytes=saved_bytes(batches[(peak_batch or 1) - 1].fresh.blocks),
            alive=account.tensors(at),
            holds_output=self.holds_output,
            keeps=self.keeps,
            batches=tuple(inputs_text(batch.step) for batch in batches),
            empty_cache=self.empty_cache,
            notes=tuple(notes),
        )

    def _runs_once_before_state(self, batches: Sequence[_RecordedBatch]) -> bool:
        """Whether the first step's batches, of several, aren't run again when the optimizer has its state."""
        if len(batches) == 1 or self.updates is None or not _made_state_bytes(self.updates, self.target):
            return False
        first, *later = self._in_steps(batches)
        return not {id(batch.fresh) for batch in first} <= {id(batch.fresh) for step in later for batch in step}


_BEFORE_STATE = (
    "the first step's batches run once, before the optimizer has its state: if there is another epoch, they need more "
    "in it; inputs=batches * 2 is two of them"
)


class _Loop:
    """Writes forwards and backwards into a ledger, with what the loop holds meanwhile."""

    def __init__(self, run: _Run, ledger: Ledger) -> None:
        self._run, self._ledger = run, ledger
        self._kept: list[tuple[str, int]] = []
        self._loaded: _RecordedBatch | None = None
        self._with_handles: set[str] = set()

    def hold(self, name: str, indices: Iterable[int]) -> None:
        """Hold blocks until the next batch, output or loss, of which `name` is one, takes their place."""
        self._kept += [(name, index) for index in indices]

    def forward(self, player: Player, batch: _RecordedBatch, *, empties: bool = False) -> None:
        """Write a forward with its loss on a batch, loaded now if needed; `empties`: the cache is emptied first."""
        keeps = self._run.keeps
        again = batch is self._loaded and "batch" not in keeps
        self._release(*(what for what in KEPT if what not in keeps and not (again and what == "batch")))
        blocks = [] if again else self._run.input_blocks(batch)
        loaded = [self._ledger.allocate(block) for block in blocks]
        self._loaded = batch
        self._products("forward", player.recording)
        if not again:
            self._release("batch")
        self.hold("batch", loaded)
        if empties:
            self._ledger.empty_cache()
        player.run("forward", "loss", before=lambda section: self._release("output") if section == "loss" else None)
        self._release("loss")

    def backward(self, player: Player, batch: _RecordedBatch, name: str) -> None:
        """Write a backward, then drop output and loss unless the loop keeps them."""
        self._ledger.phase(name, batch.number)
        self._products("backward", player.recording)  # the thread that runs backward has a cuBLAS handle of its own
        player.run("backward")
        over_update = ("output",) if self._run.holds_output_over_update else ()
        self._kept += player.held_by({*self._run.keeps, *over_update})
        player.run("end")

    def empty_cache(self) -> None:
        """Free what the loop doesn't keep, and empty the allocator's cache."""
        if "batch" not in self._run.keeps:
            self._loaded = None
        self._release(*(what for what in KEPT if what not in self._run.keeps))
        self._ledger.empty_cache()

    def _release(self, *names: str) -> None:
        _free(self._ledger, [index for name, index in self._kept if name in names])
        self._kept = [(name, index) for name, index in self._kept if name not in names]

    def _products(self, thread: str, recording: Recording) -> None:
        """Allocate the workspaces that cuBLAS gets with a thread's first product and keeps."""
        operations = {block.op.removeprefix("aten.") for block in recording.blocks}
        if self._run.target.is_cuda and thread not in self._with_handles and operations.intersection(_PRODUCTS):
            self._with_handles.add(thread)
            for block in library_blocks(self._run.target):
                self._ledger.allocate(block)


class _Updates(Player):
    """Writes the updates of an optimizer; beyond those that were recorded, the last one again and again."""

    def __init__(self, ledger: Ledger, recording: Recording) -> None:
        super().__init__(ledger, recording)
        self._recorded = sum(section.direction.startswith("update") for section in recording.sections)
        self._done = 0

    def update(self, gradients: list[int], *, drops: bool) -> list[int]:
        """Write an update and `zero_grad`; return the blocks of gradients that are left."""
        self._done += 1
        n = min(self._done, self._recorded)
        if self._done > n:
            self.renew(f"update {n}", f"dropped {n}")
        gradients = self.adopt(f"gradients {n}", gradients)
        self.run(f"update {n}")
        if drops:
            self.run(f"dropped {n}")
        else:
            gradients += self.left("gradients")
        return gradients


def _free(ledger: Ledger, indices: Iterable[int]) -> list[int]:
    for index in indices:
        ledger.free(index)
    return []


def _require_gradients(batch: _RecordedBatch, had: frozenset[str]) -> None:
    """Raise `UnsupportedModelError` if a batch that adds to gradients makes some that aren't there."""
    new = sorted(batch.fresh.gradients - had)
    if new:
        raise UnsupportedModelError(
            f"batch {batch.number} gives {new[0]!r} a gradient, which the batches before don't, and gradients last "
            "from one to the next; begin with a batch that gives all of them, or leave out accumulation_steps= and "
            "set_to_none=False"
        )
