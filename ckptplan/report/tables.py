"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ckptplan.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class Row:
    """What one planner reached under one budget.

    Parameters
    ----------
    planner : str
    budget_bytes : int
    baseline_step_s : float
        Predicted step with everything kept.
    step_s : float or None
        Predicted step of the plan; None where nothing fits.
    """

    planner: str
    budget_bytes: int
    baseline_step_s: float
    step_s: float | None

    @property
    def overhead(self) -> float | None:
        """Excess over keeping everything, as a fraction; None where nothing fits."""
        return None if self.step_s is None else self.step_s / self.baseline_step_s - 1 if self.baseline_step_s else 0.0


def comparison_table(rows: Sequence[Row], *, title: str | None = None) -> Table:
    """One line per planner, one column per budget: overhead over keeping everything.

    The smallest overhead of each budget is bold; a dash says that the planner's rule finds nothing that fits.
    """
    budgets = sorted({row.budget_bytes for row in rows})
    overhead = {(row.planner, row.budget_bytes): row.overhead for row in rows}
    table = Table(title=title, caption="overhead over keeping everything; – : nothing fits")
    table.add_column("planner")
    for budget in budgets:
        table.add_column(format_bytes(budget), justify="right")
    best = {
        budget: min((value for (_, b), value in overhead.items() if b == budget and value is not None), default=None)
        for budget in budgets
    }
    for planner in dict.fromkeys(row.planner for row in rows):
        cells = [_cell(overhead.get((planner, budget)), best[budget]) for budget in budgets]
        table.add_row(planner, *cells)
    return table


def _cell(value: float | None, best: float | None) -> str:
    if value is None or best is None:
        return "–"
    text = f"{max(value, 0.0):.1%}"
    return f"[bold]{text}[/bold]" if text == f"{max(best, 0.0):.1%}" else text
