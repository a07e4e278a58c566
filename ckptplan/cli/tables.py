"""Tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Column, Table

from ckptplan.core.estimate import ERROR, fits_in_words
from ckptplan.core.option import ACTIONS
from ckptplan.core.plan import Plan
from ckptplan.core.units import format_bytes, format_seconds

if TYPE_CHECKING:  # this imports torch
    from ckptplan.fitting.survey import DeviceFit


def right(*headers: str, no_wrap: bool = True) -> list[Column]:
    """Return right-aligned columns."""
    return [Column(header, justify="right", no_wrap=no_wrap) for header in headers]


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one planner under one budget.

    Parameters
    ----------
    planner : str
    budget_bytes : int
    baseline_step_s : float
        Predicted step with everything kept.
    step_s : float or None
        Predicted step of the plan; None if no plan fits.
    peak_bytes, host_bytes : int or None
        The plan's peak on the device, and the bytes that it moves to the host.
    bound_s : float or None
        Proven lower bound on the step of any plan within this budget; None: not known.
    needs_bytes : int or None
        If no plan fits, the smallest budget for which the planner finds one.
    planning_s : float or None
        Wall-clock time of planning.
    """

    planner: str
    budget_bytes: int
    baseline_step_s: float
    step_s: float | None
    peak_bytes: int | None = None
    host_bytes: int | None = None
    bound_s: float | None = None
    needs_bytes: int | None = None
    planning_s: float | None = None

    @property
    def overhead(self) -> float | None:
        """Excess over keeping everything, as a fraction; None if no plan fits."""
        return None if self.step_s is None else self.step_s / self.baseline_step_s - 1 if self.baseline_step_s else 0.0

    @property
    def gap(self) -> float | None:
        """Excess over the bound, as a fraction; None if no plan fits or there is no bound."""
        if self.step_s is None or self.bound_s is None:
            return None
        return self.step_s / self.bound_s - 1 if self.bound_s else 0.0


def planners_table(rows: Sequence[Row], *, title: str | None = None) -> Table:
    """Return a table with a section per budget and a line per planner; the fastest steps of a budget are bold.

    If no plan fits, the line has the smallest budget for which the planner finds one.
    """
    budgets = sorted({row.budget_bytes for row in rows})
    table = Table(
        Column("planner", no_wrap=True),
        *right("step", "overhead", "peak", "swapped", "gap", "planned in"),
        title=title,
        caption="overhead: over keeping everything; gap: over the proven bound",
    )
    for budget in budgets:
        found = [row for row in rows if row.budget_bytes == budget]
        best = min((row.step_s for row in found if row.step_s is not None), default=None)
        table.add_section()
        table.add_row(f"[italic]within {format_bytes(budget)}[/italic]")
        for row in found:
            took = "" if row.planning_s is None else format_seconds(row.planning_s)
            if row.step_s is None or row.overhead is None:
                needs = "–" if row.needs_bytes is None else f"needs {format_bytes(row.needs_bytes)}"
                table.add_row(row.planner, "–", "–", needs, "–", "–", took)
                continue
            # Sums of the same seconds in another order may differ in the last bits.
            fastest = best is not None and row.step_s <= best * (1 + 1e-9)
            cells = (
                format_seconds(row.step_s),
                f"{max(row.overhead, 0.0):.1%}",
                "–" if row.peak_bytes is None else format_bytes(row.peak_bytes),
                "–" if row.host_bytes is None else format_bytes(row.host_bytes),
                "–" if row.gap is None else f"{max(row.gap, 0.0):.2%}",
                took,
            )
            table.add_row(row.planner, *(f"[bold]{cell}[/bold]" for cell in cells) if fastest else cells)
    return table


def fit_table(rows: Sequence[DeviceFit], *, batch: int) -> Table:
    """Return a table with one line per device."""
    table = Table(
        "device",
        *right("has", f"batch {batch}", "largest kept", "largest planned", "slowdown there", no_wrap=False),
        "its stages",
        title=f"batch {batch} needs {_range(row.kept_bytes for row in rows)} with everything kept, "
        f"{_range(row.planned_bytes for row in rows)} with the leanest plan",
        caption="bytes as CUDA's allocator reserves them, context aside; the largest with a plan is interpolated\n"
        f"barely: by less than the largest error of estimates, {ERROR:.1%}\n"
        "plans take whole stages, solve may find faster ones; k kept, s swapped, r recomputed",
        box=None,
        padding=(0, 1),
    )
    for row in rows:
        table.add_row(
            row.device.name,
            format_bytes(row.budget_bytes),
            _answer(row),
            str(row.most_kept or "–"),
            str(row.most_planned or "–"),
            "–" if row.most_plan is None else f"{row.most_plan.overhead:+.1%}",
            "" if row.most_plan is None else _counts(row.most_plan),
        )
    return table


def _range(sizes: Iterable[int]) -> str:
    found = sorted(set(map(format_bytes, sizes)), key=lambda text: (len(text), text))
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _answer(row: DeviceFit) -> str:
    """Return whether the user's batch fits, in words."""
    fits = fits_in_words(row.kept_bytes, row.budget_bytes)
    if fits:
        return fits
    return f"needs {format_bytes(row.planned_bytes)}" if row.plan is None else f"plan {row.plan.overhead:+.1%}"


def _counts(plan: Plan) -> str:
    counts = Counter(choice.action for choice in plan.choices)
    return " ".join(f"{action[0]}{counts[action]}" for action in ACTIONS if counts[action])
