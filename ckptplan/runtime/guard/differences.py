"""Differences between the steps that run under a plan and the step that it was made for.

NOTE [Differences]
Real steps differ from the planned one: a mask makes attention take another path, a layer is thawed, a batch is longer.
A recompute is right whatever its bytes, so a step that differs still follows the decisions of the plan:

1. A stage whose arguments are larger, or that saves other storages, keeps, swaps or recomputes as planned. If a swapped
   stage saves more bytes than planned, all of them leave.
2. A call of a module beyond those that were planned runs by the decision of the module's last planned call, and a stage
   of a segment is recomputed alone then.
3. Memory that the plan doesn't include (gradients at the start, an earlier graph, thawed parameters) is there besides.

What may be lost is the budget, never the gradient. So a difference is a warning, given once for each kind and plan, and
is counted (`handle.stats().differences`). Where the step can be planned for, the next forward begins with a new plan.
With `strict=True` each difference is a `PlanMismatchError` instead.

A recompute or a copy that brings back other values than its forward had is no difference in this sense: it would be
silently wrong, and is always an error.

Example: a plan swaps storages of 8 and 6 MiB and keeps 2 MiB of a stage. With padding, the stage saves a mask of 4 MiB
more. All four leave, and the first such step warns.
"""

from __future__ import annotations

import collections
import warnings
from typing import Literal

from ckptplan.core.errors import CkptPlanError, PlanMismatchError

Reaction = Literal["count", "warn", "raise"]


class Differences:
    """The differences that steps under a plan have shown (NOTE [Differences]).

    Parameters
    ----------
    reaction : "count", "warn" or "raise"
        Whether a difference is counted only, warned of as well, or raised as a `PlanMismatchError`.

    Attributes
    ----------
    counts : Counter of str
        Number of differences by kind, since the first plan was applied.
    unplanned : set of str
        The kinds that were seen under the present plan.
    instead : str or None
        If set, the kind under which every difference of the present pass is counted.
    """

    def __init__(self, reaction: Reaction = "count") -> None:
        self._reaction = reaction
        self.counts: collections.Counter[str] = collections.Counter()
        self.unplanned: set[str] = set()
        self.instead: str | None = None

    def note(self, kind: str, text: str, error: CkptPlanError | None = None) -> None:
        """Count a difference of a kind, and warn with `text` if it is the first under the present plan.

        Raises
        ------
        CkptPlanError
            If the reaction is "raise": `error`, by default a `PlanMismatchError` with `text`.
        """
        if self._reaction == "raise":
            raise error or PlanMismatchError(text)
        kind = self.instead or kind
        self.counts[kind] += 1
        if kind not in self.unplanned:
            self.unplanned.add(kind)
            if self._reaction == "warn":
                warnings.warn(f"the peak may exceed the budget: {text}", RuntimeWarning, stacklevel=3)

    def plan_again(self) -> None:
        """Note that another plan is applied: what differs from it is warned of again."""
        self.unplanned.clear()
