"""The measurements and the result of `Handle.refine`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.measured import Measured
from ckptplan.core.plan import Plan
from ckptplan.core.units import format_bytes, format_seconds
from ckptplan.runtime.observe.meter import StepTimes, median_copied, median_step

LEAST_STEPS = 3
"""Least number of steps for a meaningful median."""


@dataclass(frozen=True, slots=True)
class Refinement:
    """A plan compared with measured steps, and the plan that replaced it.

    Attributes
    ----------
    threshold : float
        Fraction of the predicted step time; a smaller difference changes nothing.
    measured : Measured
    before : Plan
        The plan that ran, with its former predictions.
    told : Plan
        The same plan with predictions from the corrected profile; `before` itself if nothing was corrected.
    after : Plan
        The plan that is applied now.
    """

    threshold: float
    measured: Measured
    before: Plan
    told: Plan
    after: Plan

    @property
    def corrected(self) -> bool:
        """Whether the profile was corrected and solved again."""
        return self.told is not self.before

    @property
    def changed(self) -> bool:
        """Whether another plan is applied now."""
        return (self.after.choices, self.after.segments) != (self.before.choices, self.before.segments)

    def __str__(self) -> str:
        measured, before = self.measured, self.before
        error = f" ({measured.step_s / before.step_s - 1:+.1%})" if before.step_s else ""
        lines = [
            f"step     {format_seconds(measured.step_s)} measured (median of {measured.steps}), "
            f"{format_seconds(before.step_s)} predicted{error}"
        ]
        if measured.peak_bytes is not None:
            lines.append(
                f"peak     {format_bytes(measured.peak_bytes)} measured, {format_bytes(before.needed_bytes)} predicted,"
                f" budget {format_bytes(before.budget_bytes)}"
            )
        if not self.corrected:
            return "\n".join([*lines, f"within the threshold of {self.threshold:.0%}: nothing was changed"])
        lines.append(f"by the corrected profile that plan takes {format_seconds(self.told.step_s)}")
        if not self.changed:
            return "\n".join([*lines, "and it is still the best one found: only its predictions were changed"])
        now = [
            f"{stage}: {a.option} -> {b.option}"
            for stage, a, b in zip(before.stages, before.choices, self.after.choices, strict=True)
            if a != b
        ]
        lines.append(
            f"new plan {format_seconds(self.after.step_s)}, peak {format_bytes(self.after.needed_bytes)}; changed: "
            + (", ".join(now[:8]) or "segments")
            + (f" and {len(now) - 8} more" if len(now) > 8 else "")
        )
        return "\n".join(lines)


def checked_threshold(threshold: float) -> float:
    """Return `threshold` as a float.

    Raises
    ------
    InvalidInputError
        If it isn't a number of at least 0.
    """
    # A comparison with NaN is false, so NaN is refused too.
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold < 1e9:
        raise InvalidInputError(f"threshold={threshold!r}; give a fraction, 0.1 for a tenth")
    return float(threshold)


def measured_steps(steps: Sequence[StepTimes], plan: Plan, peak_bytes: int | None) -> Measured:
    """Return the medians of `steps`, with the measured peak.

    Raises
    ------
    InvalidInputError
        If there are fewer than `LEAST_STEPS`.
    """
    if len(steps) < LEAST_STEPS:
        raise InvalidInputError(
            f"{len(steps)} steps of this plan are measured and refine needs {LEAST_STEPS} (the first of a plan is left "
            "out, and on CUDA later ones are sampled); train on and call it then"
        )
    return Measured(
        stages=median_step(steps, len(plan.stages)),
        step_s=statistics.median(step.step_s for step in steps),
        steps=len(steps),
        host=median_copied([step.host for step in steps]),
        disk=median_copied([step.disk for step in steps]),
        peak_bytes=peak_bytes,
    )
