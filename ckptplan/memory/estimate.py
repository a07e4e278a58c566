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
from ckptplan.core.checks import check_count
from ckptplan.core.device import library_workspaces
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.estimate import CATEGORIES, KEPT, Estimate, Phase
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.plan import Plan
from ckptplan.core.request import UNSAID, StepKeywords, Training, require_known
from ckptplan.memory.allocator import SimulatedOutOfMemoryError
from ckptplan.memory.folding import Folding
from ckptplan.memory.ledger import Account, Ledger, Player, saved_bytes
from ckptplan.memory.recorder import Block, Recording, record_step, record_updates
from ckptplan.profiling.profiler import as_ours, outside_tensors, training_step
from ckptplan.profiling.target import Target, find_target
from ckptplan.profiling.values.answers import Answers
from ckptplan.profiling.values.real_run import answered
from ckptplan.profiling.workload.optimizers import make_optimizer
from ckptplan.runtime.guard.gradients import made_gradient_bytes
from ckptplan.runtime.state.compiled import refuse_compiled
from ckptplan.runtime.state.process import in_own_context
from ckptplan.runtime.state.restore import restored
from ckptplan.runtime.step import TrainingStep, caching, check_supported, fingerprint, training_config

_UNKNOWN_ON_CUDA = (
    (("aten.convolution", "aten.convolution_backward"), "cuDNN's workspaces for convolutions are not included"),
    (("aten._fft_r2c", "aten._fft_c2r", "aten._fft_c2c"), "cuFFT's workspaces for Fourier transforms are not included"),
    (("aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward"), "recurrent layers are counted as on the CPU"),
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear")


@dataclass(frozen=True, slots=True)
class DDP:
    """Memory of distributed data parallel (Li et al., VLDB 2020).

    Gradients are copied into buckets or, with `gradient_as_bucket_view`, are views of buckets from the start. NCCL's
    own memory is outside PyTorch's allocator and not part of an estimate.

    Parameters
    ----------
    bucket_cap_mb, first_bucket_mb : float
        Size of a full bucket and of the first one, in units of 2**20 bytes.
    gradient_as_bucket_view : bool
        As in `torch.nn.parallel.DistributedDataParallel`.
    """

    bucket_cap_mb: float = 25.0
    first_bucket_mb: float = 1.0
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "first_bucket_mb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 20:
                raise InvalidInputError(f"ddp: {name}={value!r} must be a number above 0, in units of 2**20 bytes")

    def buckets(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Return the bytes of each bucket: gradients in reverse order, by data type, until a bucket is full."""
        sizes: list[int] = []
        filling: dict[torch.dtype, int] = {}
        for p in reversed([p for p in parameters if p.requires_grad]):
            filling[p.dtype] = filling.get(p.dtype, 0) + p.numel() * p.element_size()
            if filling[p.dtype] >= (self.bucket_cap_mb if sizes else self.first_bucket_mb) * 2**20:
                sizes.append(filling.pop(p.dtype))
        return [*sizes, *filling.values()]


@in_own_context
def estimate(
    model: nn.Module,
    inputs: Any = None,
    *,
    grad_scaler: bool | None = None,
    ddp: DDP | bool = False,
    accumulation_steps: int = 1,
    set_to_none: bool = True,
    checkpoint_on_device: bool = False,
    holds_output: bool = True,
    keeps: Collection[str] = (),
    plan: Plan | None = None,
    allocator: AllocatorSettings | str | None = None,
    **training: Unpack[StepKeywords],
) -> Estimate:
    """Return the memory of training `model`, by category and phase, without allocating it.

    The training loop consists of forward, loss and backward (`accumulation_steps` times, with the batch on the device
    throughout), the optimizer's update, and `zero_grad`. What the loop holds of output, loss and batch is said by
    `holds_output` and `keeps`. The estimate covers two steps, since the first update makes the optimizer's state, and
    then one forward without autograd ("inference"), and without `loss_fn`. Checkpoints of the model's own are estimated
    as they are.

    Parameters
    ----------
    model : nn.Module
        May be on `meta` if `device` is given.
    inputs : tensor, tuple, dict, optional
        As in `profile`.
    grad_scaler : bool, optional
        Whether a `GradScaler` is used; default: with float16.
    ddp : DDP or bool
        Whether gradients are reduced in buckets.
    accumulation_steps : int
        Micro-batches per update, each as large as `inputs`.
    set_to_none : bool
        Argument of `zero_grad`; False keeps the gradients' memory.
    checkpoint_on_device : bool
        Whether the weights were loaded from a file onto the device (no `map_location`) and the loaded tensors are still
        referenced.
    holds_output : bool
        Whether the loop holds the output during backward. False for ``loss = model(**batch).loss``, where what no
        backward needs of it, such as logits, is freed before.
    keeps : collection of str
        What is still referenced when the next forward begins: any of "output", "loss" and "batch". All three in a plain
        loop (``for batch in loader: output = model(batch); ...``), whose names refer to them until the next step's
        tensors are there. Default: none; output and loss are freed at the end of backward, the batch before the next.
    plan : Plan, optional
        The plan applied in training.
    allocator : AllocatorSettings or str, optional
        CUDA's caching allocator as in PYTORCH_CUDA_ALLOC_CONF, such as "expandable_segments:True".
    **training
        `loss_fn`, `optimizer`, `device`, `step`, `amp`, `accumulate` (see `ckptplan.core.request.Training`). Without an
        optimizer there is no update, and the phase "zero_grad" takes its place. With `accumulate` gradients exist from
        the start and are never dropped, as with `set_to_none=False` after the first step, or where `zero_grad` comes
        after the forward; default: whether the model has gradients now, or `plan` is for such steps.

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
    check_count(accumulation_steps=accumulation_steps)
    keeps = _checked(keeps, holds_output=holds_output)
    check_supported(model, checkpoints=plan is None)
    refuse_compiled(model, "an estimate is made without running the model")
    if request.accumulate is None and plan is not None and plan.fingerprint.accumulates:
        request = replace(request, accumulate=True)
    step, notes = training_step(model, request, target)
    if caching(model):
        as_given = "as in the model's configuration; in training it is mostly off"
        notes.append(f"use_cache is {as_given if plan is None else 'off, as the plan turns it off in training'}")
    run = _Run(
        step,
        target,
        None if request.optimizer is None else make_optimizer(request.optimizer, model.parameters()),
        scaler=_in_float16(step) if grad_scaler is None else grad_scaler,
        ddp=DDP() if ddp is True else (ddp or None),
        accumulation_steps=accumulation_steps,
        set_to_none=set_to_none,
        checkpoint_on_device=checkpoint_on_device,
        holds_output=holds_output,
        keeps=keeps,
        plan=plan,
        notes=notes,
    )
    with (
        _config(model, plan),
        restored(model, step.reached(), runs=False) as rewind,
        as_ours(step, "being estimated"),
    ):
        rewind()
        found = answered(lambda: run.estimate(rewind, settings), step, target, rewind)
        if target.answers is None or not target.answers.path_is_drawn:
            return found
        return _of_all_paths(found, run, rewind, settings)


_RANDOM_STATES = 4  # enough to see that paths differ; rare ones are found by none

_DRAWN = "numbers that forward draws may decide what runs"


def _of_all_paths(
    found: Estimate, run: _Run, rewind: Callable[..., None], settings: AllocatorSettings | None
) -> Estimate:
    """Return the largest of the estimates with several random states, `found` the first of them, with their range."""
    all_found = [found]
    for seed in range(1, _RANDOM_STATES):
        reseed = functools.partial(rewind, seed)
        target = replace(run.target, answers=Answers())
        again = replace(run, target=target, notes=list(run.notes), unknown=set(), folding=None)
        reseed()
        all_found.append(answered(functools.partial(again.estimate, reseed, settings), run.step, target, reseed))
    peaks = [each.reserved_bytes for each in all_found]
    most = all_found[peaks.index(max(peaks))]
    low, high = (f"{peak / 2**20:.2f}" for peak in (min(peaks), max(peaks)))
    spread = f"of {low} to {high} MiB, of which the largest is shown" if low != high else f"of {high} MiB alike"
    return replace(most, notes=(*most.notes, f"{_DRAWN}: {_RANDOM_STATES} random states gave peaks {spread}"))


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
    """

    def __init__(self, model: nn.Module, target: Target, training: Training = UNSAID) -> None:
        check_supported(model)
        self.model, self.target, self.training = model, target, training
        self._settings = _settings(None, target)
        optimizer = training.optimizer
        self._optimizer = None if optimizer is None else make_optimizer(optimizer, model.parameters())
        self._updates: Recording | None = None

    def step(self, inputs: Any) -> TrainingStep:
        """Return the training step on `inputs`."""
        return training_step(self.model, replace(self.training, inputs=inputs), self.target)[0]

    def missing_state_bytes(self) -> int:
        """Return the bytes of the state that the optimizer's next update will make, in blocks."""
        if self._optimizer is None:
            return 0
        # Recorded anew: updates may have been made since the last time.
        updates = record_updates(self._optimizer, self.model, self.target)
        block = self.target.round_to
        changes = [event for s in updates.sections if s.direction in ("update 1", "dropped 1") for event in s.events]
        sizes = ((sign, b.nbytes) for sign, n in changes if (b := updates.blocks[n]).category == "optimizer state")
        return max(sum(sign * (-(-nbytes // block) * block) for sign, nbytes in sizes), 0)

    def reserved(self, step: TrainingStep, plan: Plan | None = None) -> int:
        """Return the peak of the reserved bytes in two steps, updates included; on the CPU that of tensors."""
        return self.peaks(step, plan).reserved_bytes

    @in_own_context
    def peaks(self, step: TrainingStep, plan: Plan | None = None) -> DeviceBytes:
        """Return the peaks of two steps, updates included; on the CPU the three are equal."""
        with (
            _config(self.model, plan),
            restored(self.model, step.reached(), runs=False) as rewind,
            as_ours(step, "being estimated"),
        ):
            rewind()
            run = _Run(
                step,
                self.target,
                self._optimizer,
                scaler=_in_float16(step),
                plan=plan,
                updates=self._updates,
            )
            training, _ = answered(lambda: run.recorded(rewind), step, self.target, rewind)
            self._updates = run.updates
        account = Account.of(training, self._settings)
        return DeviceBytes(int(account.requested.max()), int(account.allocated.max()), int(account.reserved.max()))


def _config(model: nn.Module, plan: Plan | None) -> contextlib.AbstractContextManager[None]:
    """The configuration that training runs in: a plan turns generation caches off."""
    return contextlib.nullcontext() if plan is None else training_config(model)


def _in_float16(step: TrainingStep) -> bool:
    return step.autocast is not None and step.autocast[1] is torch.float16


def _settings(allocator: AllocatorSettings | str | None, target: Target) -> AllocatorSettings | None:
    """Return the given settings, or else this process's for a device of this machine, or else the defaults."""
    if allocator is None and target.spec is None and target.is_cuda:
        allocator = allocator_conf()
    if not target.is_cuda:
        if allocator is not None:
            raise InvalidInputError(
                f"allocator={allocator!r} are settings of CUDA's allocator, but the step runs on the CPU; leave it out"
            )
        return None
    return AllocatorSettings.from_string(allocator) if isinstance(allocator, str) else allocator or AllocatorSettings()


def _workspaces(target: Target) -> Iterator[Block]:
    """Yield the workspaces of a cuBLAS handle.

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
class _Run:
    """One training run, of which a ledger is made."""

    step: TrainingStep
    target: Target
    optimizer: torch.optim.Optimizer | None
    scaler: bool = False
    ddp: DDP | None = None
    accumulation_steps: int = 1
    set_to_none: bool = True
    checkpoint_on_device: bool = False
    holds_output: bool = True
    keeps: tuple[str, ...] = ()
    plan: Plan | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    updates: Recording | None = None
    unknown: set[str] = field(default_factory=set)
    folding: Folding | None = None

    def estimate(self, rewind: Callable[[], None], settings: AllocatorSettings | None) -> Estimate:
        """Record the parts, write them into ledgers, add them up."""
        training, fresh = self.recorded(rewind)
        inferring = self._record(rewind, inference=True)
        inference = Ledger()
        self._load(inference, training=False)
        self._forward(inference, Player(inference, inferring), "inference")
        account = self._account(training, settings)
        phases = (*account.phases(), *Account.of(inference, settings).phases()[1:])
        return self._result(account, phases, fresh)

    def recorded(self, rewind: Callable[[], None]) -> tuple[Ledger, Recording]:
        """Return the ledger of training, and the recording of its first forward and backward."""
        self.inputs = self.step.tensors() if self.step.fn is None else outside_tensors(self.step, self.target)
        rewind()
        if self.plan is not None:
            made_for = fingerprint(self.step, self.target.name)
            self.plan.fingerprint.require(made_for, ignore=("device", "torch_version", "accumulates"))
        fresh = self._record(rewind)
        # From the second backward on, gradients exist to add to, unless they are dropped after each step.
        lasting = self.accumulation_steps > 1 or not self._drops_gradients
        adding = self._record(rewind, accumulating=True) if lasting else fresh
        return self._training(fresh, adding), fresh

    def _record(self, rewind: Callable[[], None], *, accumulating: bool = False, inference: bool = False) -> Recording:
        """Record a step, with or without existing gradients, or one forward that saves nothing."""
        if self.plan is not None and not inference:
            recording, unknown = record_step(
                self.step,
                self.plan.stages,
                self.target,
                choices=self.plan.choices,
                segments=self.plan.segments,
                accumulating=accumulating,
                holds_output=self.holds_output,
            )
        else:
            self.folding = self.folding or Folding(self.step, self.target, rewind, holds_output=self.holds_output)
            recording, unknown = self.folding.record(accumulating=accumulating, inference=inference)
        rewind()
        self.unknown.update(unknown)
        return recording

    # --- the ledger ---

    def _training(self, fresh: Recording, adding: Recording) -> Ledger:
        """Return the ledger of two steps; in the first one the optimizer makes its state."""
        ledger = Ledger()
        self._load(ledger)
        if self.updates is None and self.optimizer is not None:
            self.updates = record_updates(
                self.optimizer,
                self.step.model,
                self.target,
                fresh,
                inputs=self.inputs,
                keeps_gradients=not self._drops_gradients,
            )
        updating = None if self.updates is None else Player(ledger, self.updates)
        held = range(len(ledger.blocks))
        if updating is not None:
            updating.run("held")
            updating.adopt("weights", [index for index in held if ledger.blocks[index].category == "weights"])
        lasting = () if self._drops_gradients else held
        gradients = [index for index in lasting if ledger.blocks[index].category == "gradients"]
        kept: list[tuple[str, int]] = []
        for number in (1, 2):
            suffix = "" if number == 1 else f" {number}"
            for micro in range(min(self.accumulation_steps, 2)):
                has_gradients = micro > 0 or self.step.accumulates or (number > 1 and not self.set_to_none)
                player = Player(ledger, adding if has_gradients else fresh, in_buckets=self._in_buckets)
                name = f"{suffix}, accumulating" if micro else suffix
                kept = self._forward(ledger, player, f"forward{name}", kept)
                ledger.phase(f"backward{name}")
                if number == 1 and not micro:
                    self._products(ledger, adding)  # the thread that runs backward has a cuBLAS handle of its own
                player.run("backward")
                kept += player.held_by(self.keeps)
                player.run("end")
                gradients += player.left("gradients")
                player.drop()
            if updating is not None:
                ledger.phase(f"optimizer{suffix}")
                self._unscale(ledger)
                gradients = updating.adopt(f"gradients {number}", gradients)
                updating.run(f"update {number}")
                if self._drops_gradients:
                    updating.run(f"dropped {number}")
                else:
                    gradients += updating.left("gradients")
            elif self._drops_gradients:
                ledger.phase(f"zero_grad{suffix}")
            if self._drops_gradients:
                gradients = self._free(ledger, gradients)
        return ledger

    @property
    def _drops_gradients(self) -> bool:
        """Whether gradients are freed between steps."""
        return self.set_to_none and not self.step.accumulates

    @property
    def _in_buckets(self) -> bool:
        return self.ddp is not None and self.ddp.gradient_as_bucket_view

    @staticmethod
    def _free(ledger: Ledger, indices: list[int]) -> list[int]:
        for index in indices:
            ledger.free(index)
        return []

    def _load(self, ledger: Ledger, *, training: bool = True) -> None:
        """Allocate the tensors that are on the device before the first step."""
        ledger.phase("loaded")
        model = self.step.model
        seen: set[int] = set()
        named: list[tuple[str, str, torch.Tensor]] = [("weights", *pair) for pair in model.named_parameters()]
        named += [("buffers", *pair) for pair in model.named_buffers()]
        for category, name, tensor in named:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and not (category == "buffers" and self._on_host(tensor)):
                seen.add(storage._cdata)
                ledger.allocate(_block(storage.nbytes(), category, name, tensor))
        if self.checkpoint_on_device:
            for _, name, tensor in named:
                nbytes = tensor.numel() * tensor.element_size()
                ledger.allocate(Block(nbytes, "weights", f"{name} (as loaded from the file)"))
        if training and self.step.accumulates and not self._in_buckets:
            for name, parameter in model.named_parameters():
                if nbytes := made_gradient_bytes([parameter]):
                    ledger.allocate(_block(nbytes, "gradients", name, parameter))
        if training and self.ddp is not None:
            for n, nbytes in enumerate(self.ddp.buckets(model.parameters())):
                ledger.allocate(Block(nbytes, "gradients", f"DDP bucket {n}"))
        if training and self.scaler:
            for what in ("scale", "growth tracker"):
                ledger.allocate(Block(4, "workspaces and temporaries", f"GradScaler's {what}"))

    def _on_host(self, tensor: torch.Tensor) -> bool:
        return self.target.spec is None and tensor.device.type not in (self.target.device.type, "meta")

    def _forward(
        self, ledger: Ledger, player: Player, name: str, kept: Sequence[tuple[str, int]] = ()
    ) -> list[tuple[str, int]]:
        """Write a forward, which frees what is `kept` of the step before; return what is kept of its own inputs."""
        ledger.phase(name)
        batch: list[tuple[str, int]] = []
        if name in ("forward", "inference") or "batch" in self.keeps:
            inputs = {t.untyped_storage()._cdata: t for t in self.inputs if not self._on_host(t)}
            for tensor in inputs.values():
                block = _block(tensor.untyped_storage().nbytes(), "inputs", "input", tensor)
                batch.append(("batch", ledger.allocate(block)))
        if name in ("forward", "inference"):
            self._products(ledger, player.recording)

        def rebind(name: str) -> None:
            self._free(ledger, [index for by, index in kept if by == name])

        rebind("batch")
        player.run("forward", "loss", before=lambda section: rebind("output") if section == "loss" else None)
        rebind("loss")
        if name == "inference":
            player.run("end")
        return batch if "batch" in self.keeps else []

    def _products(self, ledger: Ledger, recording: Recording) -> None:
        """Allocate the workspaces that cuBLAS gets with its first product and keeps."""
        operations = {block.op.removeprefix("aten.") for block in recording.blocks}
        if self.target.is_cuda and operations.intersection(_PRODUCTS):
            for block in _workspaces(self.target):
                ledger.allocate(block)

    def _unscale(self, ledger: Ledger) -> None:
        if self.scaler:
            for what in ("inverse scale", "flag of infinities"):
                ledger.free(ledger.allocate(Block(4, "workspaces and temporaries", f"GradScaler's {what}")))

    # --- adding up ---

    def _account(self, training: Ledger, settings: AllocatorSettings | None) -> Account:
        """Return the bytes of training; if they exceed the capacity, those with unused segments released on the way."""
        account = Account.of(training, settings)
        capacity, context = self.target.capacity_bytes, self.target.context_bytes
        if capacity is None or account.reserved.max() + context <= capacity:
            return account
        try:
            tight = Account.of(training, settings, capacity - context)
        except SimulatedOutOfMemoryError:
            return account
        self.notes.append("fits only because the allocator releases cached segments during the step, which takes time")
        return tight

    def _result(self, account: Account, phases: tuple[Phase, ...], fresh: Recording) -> Estimate:
        at = int(np.argmax(account.allocated))
        held = int(np.argmax(account.reserved))
        answers, context = self.target.answers, self.target.context_bytes
        categories = account.categories(held)
        categories["reservation"] = int(account.reserved[held] - account.allocated[held])
        categories["context"] = context
        if self.unknown:
            self.notes.append(f"temporaries not known for: {', '.join(sorted(self.unknown))}")
        if self.target.spec is not None and self.target.is_cuda:
            ran = {block.op for block in fresh.blocks}
            self.notes += [note for ops, note in _UNKNOWN_ON_CUDA if ran.intersection(ops)]
        return Estimate(
            device=self.target.description,
            phases=phases,
            peak_bytes=int(account.allocated[at]),
            peak_phase=next(name for name, begin, end in account.spans() if begin <= at < end),
            peak_stage=account.stage(at),
            reserved_bytes=int(account.reserved[held]),
            context_bytes=context,
            capacity_bytes=self.target.capacity_bytes,
            categories={name: categories[name] for name in CATEGORIES if categories.get(name)},
            saved_bytes=saved_bytes(fresh.blocks),
            alive=account.tensors(at),
            holds_output=self.holds_output,
            keeps=self.keeps,
            notes=tuple(self.notes if answers is None or not answers.note else [answers.note, *self.notes]),
        )
