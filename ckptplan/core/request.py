"""Training and Limits: all options of the public calls, defined, documented and checked in one place.

The public calls collect keywords (`Unpack` of a `TypedDict` below) into two objects, `Training` and `Limits`:

    def solve(model_or_profile, budget_gb=None, *, inputs=None, **options: Unpack[SolveKeywords]): ...
        require_known(solve, options, SolveKeywords)  # solve(model, budget_gbs=12): "did you mean budget_gb?"
        training, limits = Training.of(options, inputs), Limits.of(options)
"""

from __future__ import annotations

import difflib
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from ckptplan.core.checks import MOST_BYTES, check_whole, is_number
from ckptplan.core.ddp import DDP
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.fsdp import FSDP
from ckptplan.core.option import ACTIONS, Action, checked_actions
from ckptplan.core.progress import in_notebook
from ckptplan.core.resident import ACTIVATIONS, Kind, checked_offload
from ckptplan.core.units import budget_to_bytes

if TYPE_CHECKING:  # these import torch
    import torch

    from ckptplan.core.arguments import DeviceLike, LossFn, OptimizerLike
    from ckptplan.core.plan import Plan

OnPlan = Callable[["Plan"], None]
"""Called with each plan that is better than those before."""

Report = Callable[[str], None]
"""Called with a description of the present work."""

AMP_TYPES = {"float16": "float16", "fp16": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16"}
"""Types of autocast by the names that people give them."""
MOST_SEED = (1 << 31) - 1
"""CP-SAT's seed is a signed integer of 32 bits."""


def ignore_progress(text: str) -> None:
    """Do nothing: the default of `on_progress` in programs."""


def reporting(on_progress: Report | None) -> Report:
    """Return the function that `on_progress` stands for; None: a line in a notebook, and nothing elsewhere."""
    if on_progress is not None:
        return on_progress
    if not in_notebook():
        return ignore_progress
    from ckptplan.core.display import NotebookLine  # rich, which planning does without

    return NotebookLine()


class LossKeywords(TypedDict, total=False):
    """Fields of `Training` from the loss to the update."""

    loss_fn: LossFn | None
    optimizer: OptimizerLike | None
    amp: torch.dtype | str | None


class TrainingKeywords(LossKeywords, total=False):
    """Fields of `Training` without the inputs."""

    device: DeviceLike
    accumulate: bool | None
    ddp: DDP | bool | None
    fsdp: FSDP | int | None


class StepKeywords(TrainingKeywords, total=False):
    """Fields of `Training` without the inputs, with `step`."""

    step: Callable[[], torch.Tensor] | None


class SearchKeywords(TypedDict, total=False):
    """Fields of `Limits`, with the host's limit in units of 2**30 bytes."""

    actions: Iterable[Action]
    offload: str | Iterable[str]
    segments: bool
    host_gb: float | None
    time_limit_s: float
    gap: float
    seed: int
    workers: int | None
    on_progress: Report | None


class PlanKeywords(SearchKeywords, total=False):
    """Fields of `Limits`, with the limits of both tiers in units of 2**30 bytes."""

    disk_gb: float | None
    menus: bool
    compile: bool
    on_plan: OnPlan | None


class SolveKeywords(StepKeywords, PlanKeywords, total=False):
    """Options of `solve` and `frontier`, and of `apply` without a plan."""


class BatchKeywords(TrainingKeywords, SearchKeywords, total=False):
    """Options of `max_batch_size`."""


class ApplyKeywords(LossKeywords, SearchKeywords, total=False):
    """Options of `apply`, for new plans."""

    step: Callable[[], torch.Tensor] | None
    disk_gb: float | None


class ApplyOrSolveKeywords(SolveKeywords, total=False):
    """Options of `apply`: without a plan, those of `solve`; with one, `ApplyKeywords`."""


GONE = {
    "cache": "profiles are kept in no folder; plan_file= keeps a plan for the next run, Profile.save a profile",
    "checksums": "apply(..., check='always') compares all that comes back with what left, on any tier",
    "in_flight": "a plan is for one forward at a time; leave room for what the others hold: docs/devices.md, Pipelines",
    "on_oom": "an out-of-memory error passes through, with a note that says where it was and what helps",
    "retries": "a step that runs out of memory isn't repeated",
}
"""Options of earlier versions, and what there is in their place."""


def require_known(call: Callable[..., object], options: Iterable[str], keywords: type) -> None:
    """Raise `InvalidInputError` for the first of `options` that the TypedDict `keywords` of `call` lacks."""
    known: frozenset[str] = keywords.__optional_keys__  # type: ignore[attr-defined]
    for name in options:
        if name in GONE:
            raise InvalidInputError(f"{call.__name__}() has no option {name!r} any more: {GONE[name]}; leave it out")
        if name not in known:
            named = [p.name for p in inspect.signature(call).parameters.values() if p.kind is not p.VAR_KEYWORD]
            near = difflib.get_close_matches(name, [*known, *named], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its options are {', '.join(sorted(known))}"
            raise InvalidInputError(f"{call.__name__}() has no option {name!r}; {hint}")


@dataclass(frozen=True, slots=True)
class Training:
    """The step that is trained: model inputs, loss, optimizer, device and precision.

    Parameters
    ----------
    inputs : tensor, tuple, dict, optional
        Positional or keyword inputs of the forward; default: found by `find_inputs`. With a model on CUDA, inputs that
        the forward expects on the host (lengths, indices) may be there; they take no memory of the device.
    loss_fn : callable, optional
        Function from the output to a scalar tensor; default: `output.loss`, or else the sum of the floating outputs'
        means.
    optimizer : Optimizer, class, callable or str, optional
        The optimizer, whose state and update count; or its class, a function from parameters to an optimizer, or a
        name: "sgd", "momentum", "rmsprop", "adagrad", "adam", "adamw", "muon", or one that transformers' `optim` or
        axolotl's `optimizer` takes, such as "adamw_torch_fused" or "paged_adamw_8bit", made as their trainers do.
    device : str, path or Device, optional
        Default: the model's device. A known name ("a100-40gb"), a file that describes a device, or a `Device` plans for
        a device that isn't in this machine: bytes are from fake tensors and times from a roofline, and the model may be
        on `meta`.
    step : callable, optional
        Function that runs every forward of one step and returns the loss; replaces `inputs` and `loss_fn`. The model
        must contain every module that the step trains.
    amp : torch.dtype or str, optional
        Forward and loss run under autocast to this type: "bfloat16" or "bf16", "float16" or "fp16". Needed for a device
        that isn't in this machine: without CUDA, PyTorch disables a `torch.autocast("cuda")` in the model's own code.
    accumulate : bool, optional
        Whether steps start with gradients, which then count from the start: `zero_grad(set_to_none=False)` keeps them,
        or a step has several micro-batches. Default: whether a parameter that requires a gradient has one now.
    ddp : DDP or bool, optional
        Whether the model is trained in `DistributedDataParallel`, whose buckets count. Default: as the model is wrapped
        now.
    fsdp : FSDP or int, optional
        That the model is to be sharded by FSDP2 over so many ranks, which needn't be here: the bytes and times are
        those of one rank, and the budget is one device's. Default: as the model is sharded now.

    Raises
    ------
    InvalidInputError
        If options contradict each other, or a value can't be used.
    """

    inputs: Any = None
    loss_fn: LossFn | None = None
    optimizer: OptimizerLike | None = None
    device: DeviceLike = None
    step: Callable[[], torch.Tensor] | None = None
    amp: torch.dtype | str | None = None
    accumulate: bool | None = None
    ddp: DDP | bool | None = None
    fsdp: FSDP | int | None = None

    def __post_init__(self) -> None:
        if self.step is not None:
            if self.inputs is not None or self.loss_fn is not None:
                raise InvalidInputError("step= runs the forwards and the loss itself; leave out inputs= and loss_fn=")
            if not callable(self.step):
                raise InvalidInputError(f"step={self.step!r} is not callable; pass a function that returns the loss")
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise InvalidInputError(
                f"loss_fn={self.loss_fn!r} is not callable; pass a function from output to a scalar tensor"
            )
        if self.amp is not None:
            name = AMP_TYPES.get(str(self.amp).removeprefix("torch."))
            if name is None:
                raise InvalidInputError(
                    f"amp={self.amp!r}: autocast is to float16 (fp16) or bfloat16 (bf16); give one of them"
                )
            object.__setattr__(self, "amp", name)
        if self.accumulate not in (None, False, True):
            raise InvalidInputError(f"accumulate={self.accumulate!r}; it is True, False or None")
        if self.ddp is not None and not isinstance(self.ddp, (bool, DDP)):
            raise InvalidInputError(f"ddp={self.ddp!r}; it is True, False, None or a ckptplan.DDP")
        if FSDP.of(self.fsdp) is not None and self.ddp:
            raise InvalidInputError("a model is in DistributedDataParallel or sharded; give one of ddp= and fsdp=")

    @classmethod
    def of(cls, options: Mapping[str, Any], inputs: Any = None) -> Training:
        """Return the training described by a call's keywords; other keywords are ignored."""
        return cls(inputs, **{field.name: options[field.name] for field in fields(cls) if field.name in options})

    @property
    def has_forward(self) -> bool:
        """Whether the inputs, or a step, are given."""
        return self.inputs is not None or self.step is not None

    def given(self) -> list[str]:
        """Return the names of the given options."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


UNSAID = Training()
"""No option given: inputs, loss and gradients are found automatically."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The actions, memory and time that a plan and its solver may use.

    Parameters
    ----------
    actions : tuple of str
        "keep" and any of "swap" and "recompute".
    offload : tuple of str
        What may be swapped: "activations", and what is on the device before the step: "weights" (frozen ones between
        steps as well), "optimizer" (its state), "gradients". As a keyword also one of them, or "all".
    segments : bool
        Whether consecutive stages may be recomputed together, also nested; needs "recompute".
    menus : bool
        Whether a stage may save, move or recompute only some of its operations' outputs.
    compile : bool
        Whether a model is planned as if its layers were compiled one by one: those stages that have parts and that the
        compiler takes whole. It comes back uncompiled; `apply` compiles them, and `remove` takes that back.
    host_bytes : int, optional
        Limit on bytes swapped to the host; with 0 swaps go to the disk, if allowed. None: no limit. As a keyword:
        `host_gb`, in units of 2**30 bytes.
    disk_bytes : int, optional
        Limit on bytes swapped to the disk, beyond the host's limit: the host takes in the order of the stages what
        still fits, the disk the rest. Needs a profile with a disk tier (on CUDA it is measured if `swap_dir` is given).
        The disk's staging buffers, which are pinned host memory, count for the host. None: no disk. As a keyword:
        `disk_gb`, in units of 2**30 bytes, together with a `host_gb`.
    time_limit_s : float
        Wall-clock limit of solving, without profiling; small chains take far less. Where weights may be away between
        steps, shares of them are compared, and it takes up to three times as long.
    gap : float
        The search ends as soon as its plan's step is proven to be at most this share above the best possible one: 0.01
        for 1 %. 0: it looks for the optimum until it is proven or the time is over.
    seed : int
        Seed of local search and CP-SAT. The same seed and workers give the same plan unless the time limit ends the
        search.
    workers : int, optional
        Threads of CP-SAT, which proves bounds on chains of up to 40 stages in a process of its own; default: 1. All
        other searches use one thread, and SCIP another process.
    on_progress : callable
        Called with a description of the present work: `print`, or `shown` of ``with ckptplan.progress() as shown``.
        Default: a line that changes, in a notebook, and on a terminal for plans that are made inside a training
        (`apply` without a plan, the integrations); otherwise nothing.
    on_plan : callable, optional
        Called during the search with the first plan found that fits, and with better ones, twice a second at most
        within a part of the search. They have passed `validate`, but unlike the plan returned no replay of the model;
        where that needs more than the budget, the search begins again within less, and so do they. Before a
        `KeyboardInterrupt` leaves the search, the best plan is handed out with the bound proven so far. `frontier`
        calls it with each of its plans.

    Raises
    ------
    InvalidInputError
        If a value can't be used.
    """

    actions: tuple[Action, ...] = ACTIONS
    offload: tuple[Kind, ...] = ACTIVATIONS
    segments: bool = True
    menus: bool = True
    compile: bool = False
    host_bytes: int | None = None
    disk_bytes: int | None = None
    time_limit_s: float = 10.0
    gap: float = 0.01
    seed: int = 0
    workers: int | None = None
    on_progress: Report = ignore_progress
    on_plan: OnPlan | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", checked_actions(self.actions))
        object.__setattr__(self, "offload", checked_offload(self.offload))
        for name in ("segments", "menus", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name}={getattr(self, name)!r}; it is True or False")
        limit_s = self.time_limit_s
        if not is_number(limit_s) or not 0 < limit_s < math.inf:
            raise InvalidInputError(f"time_limit_s={limit_s!r} must be a finite number of seconds above 0")
        if not is_number(self.gap) or not 0 <= self.gap < math.inf:
            raise InvalidInputError(
                f"gap={self.gap!r} must be a number, 0 or more: 0.01 ends the search at a plan proven to be within 1 %"
            )
        if not callable(self.on_progress):
            raise InvalidInputError(f"on_progress={self.on_progress!r} is not callable; pass a function of a text")
        if self.on_plan is not None and not callable(self.on_plan):
            raise InvalidInputError(f"on_plan={self.on_plan!r} is not callable; pass a function of a plan")
        check_whole("", 0, MOST_SEED, seed=self.seed)
        whole = {"host_bytes": (0, MOST_BYTES), "disk_bytes": (0, MOST_BYTES), "workers": (1, 1 << 10)}
        for name, (least, most) in whole.items():
            if (value := getattr(self, name)) is not None:
                check_whole("", least, most, **{name: value})

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Limits:
        """Return the limits described by a call's keywords; other keywords are ignored.

        Raises
        ------
        InvalidInputError
            If a value can't be used, or `disk_gb` is given without `host_gb`: then nothing would go to the disk.
        """
        host_gb, disk_gb = options.get("host_gb"), options.get("disk_gb")
        if disk_gb and host_gb is None:
            raise InvalidInputError(
                f"disk_gb={disk_gb} without host_gb: only bytes beyond the host's limit go to the disk, so give "
                "host_gb too; host_gb=0 sends all to the disk"
            )
        named = {field.name: options[field.name] for field in fields(cls) if field.name in options}
        named["on_progress"] = reporting(named.get("on_progress"))
        if "offload" in named and "swap" not in checked_actions(named.get("actions", ACTIONS)):
            raise InvalidInputError(
                f"offload={named['offload']!r} with actions={named['actions']!r}: nothing may be moved without 'swap'; "
                "add it, or leave offload= out"
            )
        return cls(host_bytes=tier_bytes("host_gb", host_gb), disk_bytes=tier_bytes("disk_gb", disk_gb), **named)


_SOLVED: weakref.WeakKeyDictionary[Plan, Mapping[str, Any]] = weakref.WeakKeyDictionary()


def remember(plan: Plan, options: Mapping[str, Any]) -> None:
    """Note the options of `solve` with which a plan was made, for new plans while training.

    A display of progress isn't noted, since it may be over by then. An optimizer, and a loss that may hold a model or
    a batch, are held weakly. With one that can't be held so, nothing is noted.
    """
    kept = {
        name: options[name] for name in ApplyKeywords.__optional_keys__ - {"step", "on_progress"} if name in options
    }
    for name in kept.keys() & {"loss_fn", "optimizer"}:
        value = kept[name]
        plain = value is None or isinstance(value, (str, type))
        if not plain and (not inspect.isfunction(value) or value.__closure__):
            try:
                kept[name] = weakref.WeakMethod(value) if inspect.ismethod(value) else weakref.ref(value)
            except TypeError:  # of a class with __slots__
                return
    _SOLVED[plan] = kept


def recalled(plan: Plan) -> dict[str, Any] | None:
    """Return the options with which a plan was made in this process; None if not known, or if one is gone."""
    kept = _SOLVED.get(plan)
    if kept is None:
        return None
    found = {name: value() if isinstance(value, weakref.ref) else value for name, value in kept.items()}
    return None if any(found[name] is None and kept[name] is not None for name in found) else found


NO_LIMITS = Limits()
"""All actions, and no limit on the host tier."""


def tier_bytes(name: str, gb: float | None) -> int | None:
    """Return the limit `name` of a tier, given in units of 2**30 bytes, in whole bytes; None: no limit.

    Raises
    ------
    InvalidInputError
        If it isn't a number, 0 or more.
    """
    if gb is None:
        return None
    return 0 if gb is not False and gb == 0 else budget_to_bytes(gb, name=name)
