"""The errors of this package. Each message names the cause, the value, the limit and the remedy."""

from __future__ import annotations

from typing import Any


class CkptPlanError(Exception):
    """Base class of all errors of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args, vars(self))


def _remade(kind: type[CkptPlanError], args: tuple[Any, ...], attributes: dict[str, Any]) -> CkptPlanError:
    """Return an error that was pickled, whatever its constructor takes."""
    found = kind.__new__(kind)
    found.args = args
    vars(found).update(attributes)
    return found


class InvalidInputError(CkptPlanError, ValueError):
    """An argument, a profile or a model's step can't be used as given."""


class UnsupportedModelError(CkptPlanError):
    """The model does something that planning doesn't support; the message has the remedy."""


class PlanMismatchError(CkptPlanError):
    """The plan was made for another model, shape, device or library version; the message names the field."""


class SwapError(CkptPlanError):
    """A copy to or from the swap tier failed; the gradients of this step must not be used."""


class SwapFullError(SwapError):
    """The swap tier has no room for further bytes, of which none has left the device."""


class InfeasibleBudgetError(CkptPlanError):
    """No plan fits the budget.

    Attributes
    ----------
    budget_bytes : int
        The given budget.
    min_peak_bytes : int
        The smallest budget for which a plan was found.
    min_peak_bound_bytes : int
        No plan fits a smaller budget, which is proven; 0: nothing is.
    stage : str
        The stage at which the smallest plan has its peak.
    phase : str
        "forward", "backward" or "update".
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        min_peak_bytes: int,
        stage: str,
        phase: str,
        min_peak_bound_bytes: int = 0,
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.min_peak_bytes = min_peak_bytes
        self.min_peak_bound_bytes = min_peak_bound_bytes
        self.stage = stage
        self.phase = phase

    @property
    def min_peak_proven(self) -> bool:
        """Whether no plan fits a budget below `min_peak_bytes`."""
        return self.min_peak_bytes == self.min_peak_bound_bytes


class RankError(CkptPlanError):
    """A rank of the model's process group has failed or ended in a call that all of them make.

    Attributes
    ----------
    rank : int
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class CheckError(CkptPlanError):
    """A recompute, or a swap, returned other values than forward saved.

    The gradients of the step must not be used. Raised from its backward; for the few elements that `apply(..., check=)`
    compares on CUDA in every step, from a later forward or from `remove()`, as the message says.

    Attributes
    ----------
    stage : str
    tensor : str
        The tensor that differs, as in the message.
    """

    def __init__(self, message: str, *, stage: str, tensor: str) -> None:
        super().__init__(message)
        self.stage = stage
        self.tensor = tensor
