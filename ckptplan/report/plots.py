"""Plots, saved as PNG. Matplotlib is an extra and imported only when a plot is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptplan.core.errors import CkptPlanError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.units import GIB
from ckptplan.report.graph import crossing_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    figure = _figure()
    axes = figure.subplots()
    unit, size = ("GiB", GIB) if plans[-1].peak_bytes >= GIB else ("MiB", 1 << 20)
    peaks = [plan.peak_bytes / size for plan in plans]
    base_s = plans[0].baseline_step_s or 1.0
    axes.plot(peaks, [100 * max(plan.overhead, 0.0) for plan in plans], marker="o", linewidth=2, label="plan")
    bounds = [100 * (plan.lower_bound_s / base_s - 1) for plan in plans]
    axes.plot(peaks, [max(bound, 0.0) for bound in bounds], linestyle="--", color="grey", label="proven bound")
    axes.set_xlabel(f"peak memory ({unit})")
    axes.set_ylabel("slowdown over keeping everything (%)")
    if title is not None:
        axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(Path(path), format="png", dpi=150)


def plot_graph(profile: Profile, path: str | Path) -> None:
    """Draw the graph of a profile: an arc from each stage to those that need what it makes, above bytes per stage.

    Parameters
    ----------
    profile : Profile
    path : str or Path
        PNG file to write.

    Raises
    ------
    CkptPlanError
        If matplotlib isn't installed.
    """
    figure = _figure()
    from matplotlib.patches import Arc

    graph, stages = profile.graph(), [("stage", i) for i in range(len(profile.stages))]
    figure.set_size_inches(max(7.0, min(0.3 * len(stages), 30.0)), 6.0)
    above, below = figure.subplots(2, 1, sharex=True)
    nbytes, passes = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for maker, storage in graph.out_edges(stages):
        for stage, edge in graph[storage].items():
            arc = (maker[1], stage[1])
            nbytes[arc] += graph.nodes[storage]["nbytes"]
            passes[arc] = max(passes[arc], edge["passes"])
    most = max(nbytes.values(), default=0) or 1
    for (i, k), size in nbytes.items():
        colour = "C1" if passes[i, k] else "C0"
        above.add_patch(Arc(((i + k) / 2, 0), k - i, k - i, theta2=180, linewidth=0.5 + 3 * size / most, color=colour))
    for colour, label in (("C0", "handed on"), ("C1", "skip past stages that don't need it")):
        above.plot([], [], color=colour, label=f"{label} (width: bytes)")
    above.set_ylim(0, 0.55 * max((k - i for i, k in nbytes), default=1))
    above.set_yticks([])
    kept = [
        sum(graph.nodes[s]["nbytes"] for s, edge in graph[stage].items() if "keep" in edge["held_by"])
        for stage in stages
    ]
    unit, scale = ("GiB", GIB) if max(kept) >= GIB else ("MiB", 1 << 20)
    below.bar(range(len(stages)), [size / scale for size in kept], label="made and kept for its own backward")
    crossing = [size / scale for size in crossing_bytes(profile, graph)]
    below.step(range(len(stages)), crossing, where="post", color="C1", label="made so far and still needed behind it")
    below.set_ylabel(unit)
    below.set_xticks(range(len(stages)), [stage.name for stage in profile.stages], rotation=90, fontsize="x-small")
    for axes in (above, below):
        axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    figure.savefig(Path(path), format="png", dpi=150)


def _figure() -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CkptPlanError(
            "plots need matplotlib, which is not installed; run: pip install 'ckptplan[report]'"
        ) from error
    # No pyplot: it would keep figures and choose a window system for the caller's process.
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
