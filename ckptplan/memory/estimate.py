"""estimate(): the memory of a training step, by category and phase, before any of it is spent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from ckptplan.core.allocator_settings import AllocatorSettings, allocator_conf
from ckptplan.core.device import library_workspaces
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.estimate import CATEGORIES, Estimate, Phase
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.plan import Plan
from ckptplan.core.request import UNSAID, StepKeywords, Training, require_known
from ckptplan.memory.allocator import SimulatedOutOfMemoryError
from ckptplan.memory.folding import Folding
from ckptplan.memory.ledger import Account, Ledger, Player, saved_bytes
from ckptplan.memory.recorder import Block, Recording, record_step, record_updates
from ckptplan.profiling.profiler import as_ours, outside_tensors, training_step
from ckptplan.profiling.target import Target, find_target
from ckptplan.profiling.values.real_run import answered
from ckptplan.profiling.workload.optimizers import make_optimizer
from ckptplan.runtime.guard.gradients import made_gradient_bytes
from ckptplan.runtime.state.compiled import refuse_compiled
from ckptplan.runtime.state.process import in_own_context
from ckptplan.runtime.state.restore import restored
from ckptplan.runtime.step import TrainingStep, check_supported, fingerprint, training_config

_UNKNOWN_ON_CUDA = (
    (("aten.convolution", "aten.convolution_backward"), "workspaces that cuDNN chooses for convolutions are not in it"),
    (("aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward"), "recurrent layers are counted as on the CPU"),
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear")


@dataclass(frozen=True, slots=True)
class DDP:
    """Distributed data parallel, as far as it takes memory (Li et al., VLDB 2020).

    Gradients are copied into buckets, or, with `gradient_as_bucket_view`, lie there from the start. What NCCL takes is
    outside of PyTorch's allocator and not in an estimate.

    Parameters
    ----------
    bucket_cap_mb, first_bucket_mb : float
        Sizes, in units of 2**20 bytes, from which on a bucket is full.
    gradient_as_bucket_view : bool
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
        """Bytes of each bucket: gradients in reverse order, by data type, a bucket ends once it is full."""
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
    plan: Plan | None = None,
    allocator: AllocatorSettings | str | None = None,
    **training: Unpack[StepKeywords],
) -> Estimate:
    """What training `model` needs, by category and phase, without allocating it.

    The loop that is meant: forward, loss, backward (`accumulation_steps` times, the batch on the device all the
    while), the optimizer's update, `zero_grad`. Output and loss are let go when backward has ended. Two steps are
    laid out, since the optimizer's state comes with the first update; then one forward without autograd
    ("inference").

    Parameters
    ----------
    model : nn.Module
        May lie on `meta`, where `device` names one that isn't here.
    inputs : tensor, tuple, dict, optional
        As in `profile`.
    grad_scaler : bool, optional
        A `GradScaler` is used; by default with float16.
    ddp : DDP or bool
        Gradients are reduced in buckets.
    accumulation_steps : int
        Micro-batches per update, each as large as `inputs`.
    set_to_none : bool
        What `zero_grad` does; False keeps the gradients' memory.
    checkpoint_on_device : bool
        The weights were loaded from a file onto the device (no `map_location`), and what was loaded is still
        referenced.
    plan : Plan, optional
        Applied in training.
    allocator : AllocatorSettings or str, optional
        CUDA's caching allocator as in PYTORCH_CUDA_ALLOC_CONF, such as "expandable_segments:True".
    **training
        What is trained: `loss_fn`, `optimizer`, `device`, `step`, `amp`, `accumulate`
        (`ckptplan.core.request.Training`). Without an optimizer there is no update, and gradients stay from the first
        backward on until `zero_grad`. With `accumulate` the first step starts with gradients already, and none are
        dropped, as with `set_to_none=False` in a training under way; by default where the model has gradients now, or
        `plan` is for such steps.

    Returns
    -------
    Estimate
        Printable.

    Raises
    ------
    InvalidInputError, UnsupportedModelError, PlanMismatchError
    """
    require_known("estimate", training, StepKeywords)
    request = Training.of(training, inputs)
    target = find_target(model, request.device)
    settings = _settings(allocator, target)
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int) or accumulation_steps < 1:
        raise InvalidInputError(f"accumulation_steps={accumulation_steps!r} must be a whole number, at least 1")
    check_supported(model)
    refuse_compiled(model, "an estimate is made without running the model")
    if request.accumulate is None and plan is not None and plan.fingerprint.accumulates:
        request = replace(request, accumulate=True)
    step, notes = training_step(model, request, target)
    run = _Run(
        step,
        target,
        None if request.optimizer is None else make_optimizer(request.optimizer, model.parameters()),
        scaler=_in_float16(step) if grad_scaler is None else grad_scaler,
        ddp=DDP() if ddp is True else (ddp or None),
        accumulation_steps=accumulation_steps,
        set_to_none=set_to_none,
        checkpoint_on_device=checkpoint_on_device,
        plan=plan,
        notes=notes,
    )
    with training_config(model), restored(model, step.reached()) as rewind, as_ours(step, "being estimated"):
        rewind()
        return answered(lambda: run.estimate(rewind, settings), step, target, rewind)


class TrainingBytes:
    """What training one model takes at most, for one batch after the other.

    The optimizer's update is the same for all of them and recorded once.

    Parameters
    ----------
    model : nn.Module
    target : Target
    training : Training
        Its inputs and device don't matter.
    """

    def __init__(self, model: nn.Module, target: Target, training: Training = UNSAID) -> None:
        check_supported(model)
        self.model, self.target, self.training = model, target, training
        self._settings = _settings(None, target)
        optimizer = training.optimizer
        self._optimizer = None if optimizer is None else make_optimizer(optimizer, model.parameters())
        self._updates: Recording | None = None

    def step(self, inputs: Any) -> TrainingStep:
        """The training step on `inputs`."""
        return training_step(self.model, replace(self.training, inputs=inputs), self.target)[0]

    def missing_state_bytes(self) -> int:
        """What the optimizer's first update will make, in blocks; 0 where it has been."""
        if self._optimizer is None or self._optimizer.state:
            return 0
        if self._updates is None:
            self._updates = record_updates(self._optimizer, self.model, self.target)
        block = self.target.round_to
        sizes = (b.nbytes for b in self._updates.blocks if b.category == "optimizer state")
        return sum(-(-nbytes // block) * block for nbytes in sizes)

    def reserved(self, step: TrainingStep, plan: Plan | None = None) -> int:
        """Most that the allocator holds in two steps, the update included; on the CPU most bytes in tensors."""
        return self.peaks(step, plan).reserved_bytes

    @in_own_context
    def peaks(self, step: TrainingStep, plan: Plan | None = None) -> DeviceBytes:
        """The same by all of the allocator's accounts; on the CPU they are one."""
        with (
            training_config(self.model),
            restored(self.model, step.reached()) as rewind,
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


def _in_float16(step: TrainingStep) -> bool:
    return step.autocast is not None and step.autocast[1] is torch.float16


def _settings(allocator: AllocatorSettings | str | None, target: Target) -> AllocatorSettings | None:
    """The allocator's settings: as given, else this process's for the device that is here, else the defaults."""
    if allocator is None and target.spec is None and target.is_cuda:
        allocator = allocator_conf()
    if not target.is_cuda:
        if allocator is not None:
            raise InvalidInputError(
                f"allocator={allocator!r} are settings of CUDA's allocator; the step runs on the CPU"
            )
        return None
    return AllocatorSettings.from_string(allocator) if isinstance(allocator, str) else allocator or AllocatorSettings()


def _workspaces(target: Target) -> Iterator[Block]:
    """The workspaces of a cuBLAS handle: by device and version, or on the device here as CUBLAS_WORKSPACE_CONFIG says.

    The variable lists pairs ":KiB:count".
    """
    cublas, cublaslt = library_workspaces(target.compute_capability or (0, 0), torch.__version__)
    asked = "" if target.spec is not None else os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    numbers = [part for part in asked.split(":") if part]
    if numbers and len(numbers) % 2 == 0 and all(part.isdecimal() for part in numbers):
        cublas = 1024 * sum(int(size) * int(count) for size, count in zip(numbers[::2], numbers[1::2], strict=True))
    yield Block(cublas, "workspaces and temporaries", "cuBLAS workspace")
    if cublaslt:
        yield Block(cublaslt, "workspaces and temporaries", "cuBLASLt workspace")


@dataclass
class _Run:
    """One training run to be laid out."""

    step: TrainingStep
    target: Target
    optimizer: torch.optim.Optimizer | None
    scaler: bool = False
    ddp: DDP | None = None
    accumulation_steps: int = 1
    set_to_none: bool = True
    checkpoint_on_device: bool = False
    plan: Plan | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    updates: Recording | None = None
    unknown: set[str] = field(default_factory=set)
    folding: Folding | None = None

    def estimate(self, rewind: Callable[[], None], settings: AllocatorSettings | None) -> Estimate:
        """Record the parts, lay them out, add them up."""
        training, fresh = self.recorded(rewind)
        inferring = self._record(rewind, inference=True)
        inference = Ledger()
        self._load(inference, training=False)
        self._forward(inference, Player(inference, inferring), "inference")
        account = self._account(training, settings)
        phases = (*account.phases(), *Account.of(inference, settings).phases()[1:])
        return self._result(account, phases, fresh)

    def recorded(self, rewind: Callable[[], None]) -> tuple[Ledger, Recording]:
        """Training laid out, and its first forward and backward."""
        self.inputs = self.step.tensors() if self.step.fn is None else outside_tensors(self.step, self.target)
        rewind()
        if self.plan is not None:
            made_for = fingerprint(self.step, self.target.name)
            self.plan.fingerprint.require(made_for, ignore=("device", "torch_version", "accumulates"))
        fresh = self._record(rewind)
        # From the second backward on there are gradients to add to, unless each step's are dropped.
        lasting = self.accumulation_steps > 1 or not self._drops_gradients
        adding = self._record(rewind, accumulating=True) if lasting else fresh
        return self._training(fresh, adding), fresh

    def _record(self, rewind: Callable[[], None], *, accumulating: bool = False, inference: bool = False) -> Recording:
        """The step once, with or without gradients there already, or one forward that saves nothing."""
        if self.plan is not None and not inference:
            recording, unknown = record_step(
                self.step,
                self.plan.stages,
                self.target,
                choices=self.plan.choices,
                segments=self.plan.segments,
                accumulating=accumulating,
            )
        else:
            self.folding = self.folding or Folding(self.step, self.target, rewind)
            recording, unknown = self.folding.record(accumulating=accumulating, inference=inference)
        rewind()
        self.unknown.update(unknown)
        return recording

    # --- laying out ---

    def _training(self, fresh: Recording, adding: Recording) -> Ledger:
        """Two steps: in the first the optimizer makes its state."""
        ledger = Ledger()
        self._load(ledger)
        if self.updates is None and self.optimizer is not None:
            self.updates = record_updates(self.optimizer, self.step.model, self.target, fresh)
        updates = self.updates
        resumed = self.optimizer is not None and bool(self.optimizer.state)
        updating = None if updates is None else Player(ledger, updates)
        if updating is not None and resumed:
            updating.hold("optimizer state")
        ran_backward = False
        gradients: list[int] = []
        for number in (1, 2):
            suffix = "" if number == 1 else f" {number}"
            for micro in range(min(self.accumulation_steps, 2)):
                has_gradients = micro > 0 or self.step.accumulates or (number > 1 and not self.set_to_none)
                player = Player(ledger, adding if has_gradients else fresh, in_buckets=self._in_buckets)
                name = f"{suffix}, accumulating" if micro else suffix
                self._forward(ledger, player, f"forward{name}")
                if updating is None and self._drops_gradients and micro == 0:
                    gradients = self._free(ledger, gradients)
                ledger.phase(f"backward{name}")
                if not ran_backward:
                    self._products(ledger, adding)  # the thread that runs backward has a handle of its own
                    ran_backward = True
                player.run("backward", "end")
                gradients += player.left("gradients")
                player.drop()
            if updating is not None:
                ledger.phase(f"optimizer{suffix}")
                self._unscale(ledger)
                updating.run("update 1" if number == 1 and not resumed else "update 2")
                if self._drops_gradients:
                    gradients = self._free(ledger, gradients)
        return ledger

    @property
    def _drops_gradients(self) -> bool:
        """Whether gradients go between steps."""
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
        """What is on the device before the first step."""
        ledger.phase("loaded")
        model = self.step.model
        seen: set[int] = set()

        def put(name: str, tensor: torch.Tensor, category: str) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and not (category == "buffers" and self._on_host(tensor)):
                seen.add(storage._cdata)
                dtype = str(tensor.dtype).removeprefix("torch.")
                ledger.allocate(Block(storage.nbytes(), category, name, shape=tuple(tensor.shape), dtype=dtype))

        for name, parameter in model.named_parameters():
            put(name, parameter, "weights")
        for name, buffer in model.named_buffers():
            put(name, buffer, "buffers")
        if self.checkpoint_on_device:
            loaded: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
            for name, tensor in loaded:
                nbytes = tensor.numel() * tensor.element_size()
                ledger.allocate(Block(nbytes, "weights", f"{name} (as loaded from the file)"))
        if training and self.step.accumulates and not self._in_buckets:
            for name, parameter in model.named_parameters():
                nbytes = made_gradient_bytes([parameter])
                if nbytes:
                    dtype = str(parameter.dtype).removeprefix("torch.")
                    ledger.allocate(Block(nbytes, "gradients", name, shape=tuple(parameter.shape), dtype=dtype))
        if training and self.ddp is not None:
            for n, nbytes in enumerate(self.ddp.buckets(model.parameters())):
                ledger.allocate(Block(nbytes, "gradients", f"DDP bucket {n}"))
        if training and self.scaler:
            for what in ("scale", "growth tracker"):
                ledger.allocate(Block(4, "workspaces and temporaries", f"GradScaler's {what}"))

    def _on_host(self, tensor: torch.Tensor) -> bool:
        return self.target.spec is None and tensor.device.type not in (self.target.device.type, "meta")

    def _forward(self, ledger: Ledger, player: Player, name: str) -> None:
        ledger.phase(name)
        if name in ("forward", "inference"):
            inputs = {t.untyped_storage()._cdata: t for t in self.inputs if not self._on_host(t)}
            for tensor in inputs.values():
                dtype = str(tensor.dtype).removeprefix("torch.")
                nbytes = tensor.untyped_storage().nbytes()
                ledger.allocate(Block(nbytes, "inputs", "input", shape=tuple(tensor.shape), dtype=dtype))
            self._products(ledger, player.recording)
        player.run("forward")
        if name == "inference":
            player.run("end")

    def _products(self, ledger: Ledger, recording: Recording) -> None:
        """The workspaces that cuBLAS gets with its first product and keeps."""
        operations = {block.op.removeprefix("aten.") for block in recording.blocks}
        if not self.target.is_cuda or not operations.intersection(_PRODUCTS):
            return
        for block in _workspaces(self.target):
            ledger.allocate(block)

    def _unscale(self, ledger: Ledger) -> None:
        if self.scaler:
            for what in ("inverse scale", "flag of infinities"):
                ledger.free(ledger.allocate(Block(4, "workspaces and temporaries", f"GradScaler's {what}")))

    # --- adding up ---

    def _account(self, training: Ledger, settings: AllocatorSettings | None) -> Account:
        """What the allocator makes of it; where that is more than there is, after giving back what it keeps unused."""
        account = Account.of(training, settings)
        capacity, context = self.target.capacity_bytes, self.target.context_bytes
        if capacity is None or account.reserved.max() + context <= capacity:
            return account
        try:
            tight = Account.of(training, settings, capacity - context)
        except SimulatedOutOfMemoryError:
            return account
        self.notes.append("fits only because the allocator gives cached segments back on the way, which takes time")
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
            notes=tuple(self.notes if answers is None or not answers.note else [answers.note, *self.notes]),
        )
