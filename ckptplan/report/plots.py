"""Plots, saved as PNG. Matplotlib is an extra and imported only when a plot is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptplan.core.errors import CkptPlanError
from ckptplan.core.plan import Plan
from ckptplan.core.units import GIB
from ckptplan.report.tables import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX*"
LINES = ("-", "--", ":")
COLOURS = 10  # length of matplotlib's cycle; the next lines get another line style


def plot_step_time(
    rows: Sequence[Row], path: str | Path, *, title: str | None = None, ours: str | None = "ckptplan"
) -> None:
    """Draw step time over budget, one line per planner, without a marker at budgets for which a planner has no plan.

    Parameters
    ----------
    rows : sequence of Row
        At least one.
    path : str or Path
        PNG file to write.
    ours : str, optional
        The planner whose line is thick and on top.

    Raises
    ------
    CkptPlanError
        If matplotlib isn't installed.
    """
    figure, axes = _figure(title)
    unit, size = ("GiB", GIB) if max(row.budget_bytes for row in rows) >= GIB else ("MiB", 1 << 20)
    budgets = sorted({row.budget_bytes for row in rows})
    longest_s = max((row.step_s for row in rows if row.step_s is not None), default=1.0)
    scale, seconds = (1.0, "s") if longest_s >= 1 else (1e3, "ms")
    planners = list(dict.fromkeys(row.planner for row in rows))
    for index, planner in enumerate(planners):
        step_s = {row.budget_bytes: row.step_s for row in rows if row.planner == planner}
        found = [step_s.get(budget) for budget in budgets]
        axes.plot(
            [budget / size for budget in budgets],
            [math.nan if value is None else value * scale for value in found],
            marker=MARKERS[index % len(MARKERS)],
            linestyle=LINES[index // COLOURS % len(LINES)],
            linewidth=2.5 if planner == ours else 1.2,
            zorder=3 if planner == ours else 2,
            label=planner if any(value is not None for value in found) else f"{planner} (never fits)",
        )
    axes.axhline(
        rows[0].baseline_step_s * scale, color="grey", linestyle=":", linewidth=1, label="everything kept, no budget"
    )
    axes.set_xlabel(f"memory budget ({unit})")
    axes.set_ylabel(f"predicted step time ({seconds})")
    if len(planners) > COLOURS:
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        axes.legend(fontsize="small")
    figure.savefig(Path(path), format="png", dpi=150)


def plot_frontier(plans: Sequence[Plan], path: str | Path, *, title: str | None = None) -> None:
    """Draw the slowdown of a frontier's plans over their peaks, and the proven bound below them.

    Parameters
    ----------
    plans : sequence of Plan
        At least one, of one profile.
    path : str or Path
        PNG file to write.

    Raises
    ------
    CkptPlanError
        If matplotlib isn't installed.
    """
    figure, axes = _figure(title)
    unit, size = ("GiB", GIB) if plans[-1].peak_bytes >= GIB else ("MiB", 1 << 20)
    peaks = [plan.peak_bytes / size for plan in plans]
    base_s = plans[0].baseline_step_s or 1.0
    axes.plot(peaks, [100 * max(plan.overhead, 0.0) for plan in plans], marker="o", linewidth=2, label="plan")
    bounds = [100 * (plan.lower_bound_s / base_s - 1) for plan in plans]
    axes.plot(peaks, [max(bound, 0.0) for bound in bounds], linestyle="--", color="grey", label="proven bound")
    axes.set_xlabel(f"peak memory ({unit})")
    axes.set_ylabel("slowdown over keeping everything (%)")
    axes.legend()
    figure.savefig(Path(path), format="png", dpi=150)


def _figure(title: str | None) -> tuple[Figure, Axes]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CkptPlanError(
            "plots need matplotlib, which is not installed; run: pip install 'ckptplan[report]'"
        ) from error
    # Without pyplot, which would keep figures and choose a window system for the caller's process.
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if title is not None:
        axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure, axes
