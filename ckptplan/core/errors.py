"""The errors a user can meet. Each message says what, the value, the limit and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptplan.core.shortage import Shortage


class CkptPlanError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidInputError(CkptPlanError, ValueError):
    """An argument, a profile or a model step that can't be used as given."""


class UnsupportedModelError(CkptPlanError):
    """The model does something the planner can't take over (says what, and what to do)."""


class PlanMismatchError(CkptPlanError):
    """A plan meets a model, shape, device or library it was not made for (names the field)."""


class SwapError(CkptPlanError):
    """A copy to or from the swap tier failed; the gradients of this step must not be used."""


class InfeasibleBudgetError(CkptPlanError):
    """No plan fits the budget.

    Attributes
    ----------
    budget_bytes : int
        The budget asked for.
    min_peak_bytes : int
        The smallest budget for which a plan exists.
    stage : str
        The stage at which the smallest plan has its peak.
    phase : str
        "forward", "backward" or "update".
    """

    def __init__(self, message: str, *, budget_bytes: int, min_peak_bytes: int, stage: str, phase: str) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.min_peak_bytes = min_peak_bytes
        self.stage = stage
        self.phase = phase


class OutOfMemoryError(CkptPlanError, MemoryError):
    """A step with a plan applied ran out of memory all the same; the allocator's own error is the cause.

    Attributes
    ----------
    shortage : Shortage
        Where the step was, what the plan said of that moment and what was measured then; its text is the report.
    replans : int
        How many plans were tried for this step before.
    """

    def __init__(self, shortage: Shortage, *, replans: int = 0, note: str = "") -> None:
        tried = f"\n  tried     {replans} plans with corrected models before" if replans else ""
        super().__init__(f"{shortage}{tried}{note}")
        self.shortage = shortage
        self.replans = replans


class CheckError(CkptPlanError):
    """What a stage's second run made, or what came back from a swap, isn't what forward saved.

    The gradients of this step must not be used. Raised from the backward of a step that `apply(..., check=)` checks.

    Attributes
    ----------
    stage : str
    tensor : str
        What differs, as in the message.
    """

    def __init__(self, message: str, *, stage: str, tensor: str) -> None:
        super().__init__(message)
        self.stage = stage
        self.tensor = tensor
