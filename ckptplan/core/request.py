"""What is trained, and what a plan may use: every option of the public calls, defined, documented and checked once.

The public calls gather keywords (`Unpack` of a `TypedDict` below) and pass on two objects, `Training` and `Limits`:

    def solve(model_or_profile, budget_gb=None, *, inputs=None, **options: Unpack[SolveKeywords]): ...
        require_known("solve", options, SolveKeywords)  # solve(model, budget_gbs=12): "did you mean budget_gb?"
        training, limits = Training.of(options, inputs), Limits.of(options)
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from ckptplan.core.checks import MOST_BYTES, is_int
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.option import ACTIONS, Action
from ckptplan.core.units import budget_to_bytes

if TYPE_CHECKING:  # these import torch
    import torch

    from ckptplan.profiling.target import DeviceLike
    from ckptplan.profiling.workload.optimizers import OptimizerLike
    from ckptplan.runtime.step import LossFn

Report = Callable[[str], None]
"""Is given progress, in words."""

AMP_TYPES = ("float16", "bfloat16")
MOST_SEED = (1 << 31) - 1
"""CP-SAT's seed is a signed number of 32 bits."""


def ignore_progress(text: str) -> None:
    """The report of a call whose progress is not wanted."""


class LossKeywords(TypedDict, total=False):
    """How a forward becomes an update: fields of `Training`."""

    loss_fn: LossFn | None
    optimizer: OptimizerLike | None
    amp: torch.dtype | str | None


class TrainingKeywords(LossKeywords, total=False):
    """Fields of `Training` but the inputs."""

    device: DeviceLike
    accumulate: bool | None


class StepKeywords(TrainingKeywords, total=False):
    """Fields of `Training` but the inputs, with a `step` in their place."""

    step: Callable[[], torch.Tensor] | None


class SearchKeywords(TypedDict, total=False):
    """Fields of `Limits`, the host's in units of 2**30 bytes."""

    actions: Iterable[Action]
    segments: bool
    host_gb: float | None
    time_limit_s: float
    seed: int
    workers: int | None
    on_progress: Report | None


class PlanKeywords(SearchKeywords, total=False):
    """Fields of `Limits`, tiers in units of 2**30 bytes."""

    disk_gb: float | None
    menus: bool


class SolveKeywords(StepKeywords, PlanKeywords, total=False):
    """Options of `solve` and `frontier`."""


class BatchKeywords(TrainingKeywords, SearchKeywords, total=False):
    """Options of `max_batch_size`."""


class ApplyKeywords(LossKeywords, SearchKeywords, total=False):
    """Options of `apply`: what new plans are made with."""

    step: Callable[[], torch.Tensor] | None
    disk_gb: float | None


def require_known(call: str, options: Mapping[str, object], keywords: type) -> None:
    """Raise `InvalidInputError` for the first of `options` that the TypedDict `keywords` lacks."""
    known = sorted(keywords.__optional_keys__)  # type: ignore[attr-defined]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its options are {', '.join(known)}"
            raise InvalidInputError(f"{call}() has no option {name!r}; {hint}")


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained.

    Parameters
    ----------
    inputs : tensor, tuple, dict, optional
        Positional or keyword inputs of the forward; found by `find_inputs` if left out. Beside a model on CUDA, some
        may lie on the host where its forward takes them so (lengths, indices); they take no bytes of the device.
    loss_fn : callable, optional
        Output -> scalar tensor; default `output.loss`, else the sum of the floating outputs' means.
    optimizer : Optimizer, class, callable or str, optional
        Its state (after the first update) and its update's temporaries count. A class, a function from parameters to an
        optimizer, or a name will do: "sgd", "momentum", "rmsprop", "adagrad", "adam", "adamw", "adafactor".
    device : str, path or Device, optional
        By default where the model is. A known device ("a100-40gb"), a file that describes one, or a `Device`, is
        planned for without being here: bytes from fake tensors, times from a roofline; the model may lie on `meta`.
    step : callable, optional
        Runs every forward of one step and returns the loss; replaces `inputs` and `loss_fn`. The model must hold every
        module that it trains.
    amp : torch.dtype or str, optional
        Forward and loss run under autocast to this type ("float16", "bfloat16"). For a device that isn't here this is
        the way to say it, since PyTorch turns a `torch.autocast("cuda")` of the model's own off where there is no
        CUDA.
    accumulate : bool, optional
        Steps start with gradients, which then count from the start: where `zero_grad(set_to_none=False)` keeps them, or
        a step has several micro-batches. By default, whether any parameter that requires a gradient has one now.

    Raises
    ------
    InvalidInputError
        On contradictory options, or values that can't be used.
    """

    inputs: Any = None
    loss_fn: LossFn | None = None
    optimizer: OptimizerLike | None = None
    device: DeviceLike = None
    step: Callable[[], torch.Tensor] | None = None
    amp: torch.dtype | str | None = None
    accumulate: bool | None = None

    def __post_init__(self) -> None:
        if self.step is not None:
            if self.inputs is not None or self.loss_fn is not None:
                raise InvalidInputError(
                    "step= runs the forwards and the loss by itself; leave out inputs= and loss_fn="
                )
            if not callable(self.step):
                raise InvalidInputError(f"step={self.step!r} is not callable; pass a function that returns the loss")
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise InvalidInputError(
                f"loss_fn={self.loss_fn!r} is not callable; pass a function from output to a scalar tensor"
            )
        if self.amp is not None and str(self.amp).removeprefix("torch.") not in AMP_TYPES:
            raise InvalidInputError(f"amp={self.amp!r}: autocast goes to torch.float16 or torch.bfloat16")
        if self.accumulate not in (None, False, True):
            raise InvalidInputError(f"accumulate={self.accumulate!r}; it is True, False or None")

    @classmethod
    def of(cls, options: Mapping[str, Any], inputs: Any = None) -> Training:
        """The training that a call's keywords describe; other keywords are left alone."""
        return cls(inputs, **{field.name: options[field.name] for field in fields(cls) if field.name in options})

    @property
    def has_forward(self) -> bool:
        """Whether it says what a step runs on: inputs, or a step of its own."""
        return self.inputs is not None or self.step is not None

    def given(self) -> list[str]:
        """Names of the options that aren't left out."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


UNSAID = Training()
"""Nothing is said of the training: inputs, loss and gradients are found by themselves."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may use, and how long the solver may take.

    Parameters
    ----------
    actions : tuple of str
        Which of "keep", "swap" and "recompute" may be used; "keep" must be.
    segments : bool
        Whether consecutive stages may be recomputed together, nested where that pays; needs "recompute".
    menus : bool
        Whether a stage may also save, move or recompute some of its operations' outputs and not others.
    host_bytes : int, optional
        Limit on swapped bytes; 0 lets nothing move, but to the disk where that is allowed. None: no limit. As a
        keyword: `host_gb`, in units of 2**30 bytes.
    disk_bytes : int, optional
        Most bytes on the disk tier: what the host can't hold goes there. Needs a profile with such a tier (on CUDA,
        `swap_dir` has it measured). The disk's staging buffers, which are pinned host memory, count against the host.
        None: no disk. As a keyword: `disk_gb`, in units of 2**30 bytes, together with a `host_gb`.
    time_limit_s : float
        Wall clock for solving, profiling not counted; small chains take far less.
    seed : int
        Of what local search and CP-SAT draw: the same seed and workers give the same plan, unless the time limit cuts
        the search.
    workers : int, optional
        Threads of CP-SAT, which gets what time is left when everything else has come to its end; 1 where left out.
        Nothing else runs on more than one.
    on_progress : callable
        Given what is being done, in words.

    Raises
    ------
    InvalidInputError
        On values that can't be used.
    """

    actions: tuple[Action, ...] = ACTIONS
    segments: bool = True
    menus: bool = True
    host_bytes: int | None = None
    disk_bytes: int | None = None
    time_limit_s: float = 10.0
    seed: int = 0
    workers: int | None = None
    on_progress: Report = ignore_progress

    def __post_init__(self) -> None:
        if not isinstance(self.actions, Iterable):
            raise InvalidInputError(f"actions={self.actions!r}: give 'keep' and any of 'swap', 'recompute'")
        actions = tuple(self.actions)
        object.__setattr__(self, "actions", actions)
        unknown = [a for a in actions if a not in ACTIONS]
        if unknown or "keep" not in actions:
            wrong = f"unknown action {unknown[0]!r}" if unknown else "'keep' is missing, and every stage needs it"
            raise InvalidInputError(f"actions={actions!r}: {wrong}; give 'keep' and any of 'swap', 'recompute'")
        for name in ("segments", "menus"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name}={getattr(self, name)!r}; it is True or False")
        limit_s = self.time_limit_s
        if isinstance(limit_s, bool) or not isinstance(limit_s, (int, float)) or not 0 < limit_s < math.inf:
            raise InvalidInputError(f"time_limit_s={limit_s!r} must be a finite number of seconds above 0")
        whole = {"host_bytes": (0, MOST_BYTES), "disk_bytes": (0, MOST_BYTES), "workers": (1, 1 << 10)}
        for name, (least, most) in whole.items():
            value = getattr(self, name)
            if value is not None and (not is_int(value) or not least <= value <= most):
                raise InvalidInputError(f"{name}={value!r} must be a whole number, {least} or more, at most {most}")
        if not is_int(self.seed) or not 0 <= self.seed <= MOST_SEED:
            raise InvalidInputError(f"seed={self.seed!r} must be a whole number from 0 to {MOST_SEED}")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Limits:
        """The limits that a call's keywords describe; other keywords are left alone.

        Raises
        ------
        InvalidInputError
            Also if the disk is limited and the host isn't: then nothing would ever go to the disk.
        """
        host_gb, disk_gb = options.get("host_gb"), options.get("disk_gb")
        if disk_gb and host_gb is None:
            raise InvalidInputError(
                f"disk_gb={disk_gb} without host_gb: only what the host can't hold goes to the disk, so say what it "
                "can hold; host_gb=0 sends all to the disk"
            )
        named = {field.name: options[field.name] for field in fields(cls) if field.name in options}
        if named.get("on_progress", ignore_progress) is None:
            del named["on_progress"]
        return cls(host_bytes=tier_bytes("host_gb", host_gb), disk_bytes=tier_bytes("disk_gb", disk_gb), **named)


NO_LIMITS = Limits()
"""Every action, on tiers without limits."""


def tier_bytes(name: str, gb: float | None) -> int | None:
    """Whole bytes of the limit `name` of a tier, in units of 2**30 bytes; None: no limit.

    Raises
    ------
    InvalidInputError
        If it isn't a number, 0 or more.
    """
    if gb is None:
        return None
    return 0 if gb is not False and gb == 0 else budget_to_bytes(gb, name=name)
