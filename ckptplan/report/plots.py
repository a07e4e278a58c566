"""Plots, saved as PNG or SVG. Matplotlib is an extra and imported only when a plot is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptplan.core.errors import CkptPlanError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.units import GIB
from ckptplan.report.graph import crossing_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WHAT_COLOURS = {
    "forward": "#0072b2",
    "recompute": "#e69f00",
    "backward": "#56b4e9",
    "wait": "#d55e00",
    "out": "#009e73",
    "in": "#7fd1ae",
}
"""Colours of what a lane does, that readers who see few colours can tell apart (Okabe and Ito, 2008)."""


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
    unit, size = _unit(plans[-1].counted_bytes)
    peaks = [plan.counted_bytes / size for plan in plans]
    base_s = plans[0].baseline_step_s or 1.0
    slower = [100 * max(plan.overhead, 0.0) for plan in plans]
    axes.step(peaks, slower, where="post", marker="o", linewidth=2, label="plan")
    bounds = [max(100 * (plan.lower_bound_s / base_s - 1), 0.0) for plan in plans]
    axes.step(peaks, bounds, where="pre", linestyle="--", color="grey", label="proven bound")  # for smaller budgets
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
    unit, scale = _unit(max(kept))
    below.bar(range(len(stages)), [size / scale for size in kept], label="made and kept for its own backward")
    crossing = [size / scale for size in crossing_bytes(profile, graph)]
    below.step(range(len(stages)), crossing, where="post", color="C1", label="made so far and still needed behind it")
    below.set_ylabel(unit)
    below.set_xticks(range(len(stages)), [stage.name for stage in profile.stages], rotation=90, fontsize="x-small")
    for axes in (above, below):
        axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    figure.savefig(Path(path), format="png", dpi=150)


def plot_page(data: dict[str, Any], path: str | Path, title: str) -> None:
    """Draw the charts of a report: of a plan, memory and copies over the step, and a frontier; of an estimate, phases.

    Parameters
    ----------
    data : mapping
        The report's data.
    path : str or Path
        PNG or SVG file to write, by its suffix.
    title : str

    Raises
    ------
    CkptPlanError
        If matplotlib isn't installed.
    """
    figure = _figure()
    if "steps" in data:
        wide = "frontier" in data
        figure.set_size_inches(12.0 if wide else 8.0, 5.5)
        parts = figure.subfigures(1, 2 if wide else 1, width_ratios=(1.7, 1) if wide else None, squeeze=False)[0]
        memory, lanes = parts[0].subplots(2, 1, sharex=True, height_ratios=(4, 1))
        _draw_waterline(memory, data)
        _draw_lanes(lanes, data)
        if wide:
            _draw_frontier(parts[1].subplots(), data["frontier"])
    else:
        _draw_phases(figure.subplots(), data)
    figure.suptitle(title, fontsize=11)
    figure.savefig(Path(path), format=Path(path).suffix[1:].lower(), dpi=130)


def _draw_waterline(axes: Axes, data: dict[str, Any]) -> None:
    steps = data["steps"]
    x = [*steps["start"], steps["end"]]
    rows = [(row, name, colour) for row, name, colour in zip(data["stacked"], *_named(data), strict=True) if any(row)]
    unit, size = _unit(max(data["budget"], *map(sum, zip(*data["stacked"], strict=True))))
    below = [0.0] * len(x)
    for row, name, colour in rows:
        above = [low + n / size for low, n in zip(below, [*row, row[-1]], strict=True)]
        axes.fill_between(x, below, above, step="post", color=colour, label=name, linewidth=0)
        below = above
    axes.axhline(data["budget"] / size, color="#a8330d", linestyle="--", label="budget")
    if "measured" in data:
        measured = [n / size for n in data["measured"]["bytes"]]
        axes.step(data["measured"]["s"], measured, where="post", color="black", linewidth=1, label="measured")
    axes.set_ylabel(unit)
    axes.legend(fontsize="x-small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _named(data: dict[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
    return data["categories"], data["colours"]


def _draw_lanes(axes: Axes, data: dict[str, Any]) -> None:
    events, lanes = data["events"], data["lanes"]
    spans: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for lane, what, start, end in zip(*(events[key] for key in ("lane", "what", "start", "end")), strict=True):
        spans.setdefault((lane, data["whats"][what]), []).append((start, end - start))
    for (lane, what), found in spans.items():
        axes.broken_barh(found, (lane - 0.4, 0.8), color=WHAT_COLOURS[what], edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(lanes)), ["compute", "copies out", "copies in"])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlabel("seconds")


def _draw_frontier(axes: Axes, data: dict[str, Any]) -> None:
    plans, base = data["plans"], data["baseline"]
    unit, size = _unit(plans[-1]["peak"])

    def points(found: Sequence[dict[str, Any]], value: str) -> tuple[list[float], list[float]]:
        return [p["peak"] / size for p in found], [max(100 * (p[value] / base - 1), 0.0) for p in found]

    axes.step(*points(plans, "s"), where="post", color="#0072b2", marker="o", label="best plan found")
    axes.step(*points(plans, "bound"), where="pre", color="grey", linestyle="--", label="proven bound")
    for k, name in enumerate(dict.fromkeys(other["name"] for other in data["others"])):
        axes.plot(*points([o for o in data["others"] if o["name"] == name], "s"), "xd+*"[k % 4], label=name)
    axes.set_xlabel(f"peak ({unit})")
    axes.set_ylabel("slower than with everything kept (%)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_phases(axes: Axes, data: dict[str, Any]) -> None:
    phases = range(len(data["phases"]))
    unit, size = _unit(max([data["capacity"] or 0, *map(sum, zip(*data["bytes"], strict=True))]))
    below = [0.0] * len(phases)
    for row, name, colour in zip(data["bytes"], *_named(data), strict=True):
        if any(row):
            heights = [n / size for n in row]
            axes.bar(phases, heights, bottom=below, color=colour, label=name)
            below = [low + n for low, n in zip(below, heights, strict=True)]
    if data["capacity"]:
        axes.axhline(data["capacity"] / size, color="#a8330d", linestyle="--", label="the device has")
    axes.set_xticks(phases, data["phases"], rotation=25, ha="right", fontsize="small")
    axes.set_ylabel(unit)
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _unit(nbytes: float) -> tuple[str, int]:
    return ("GiB", GIB) if nbytes >= GIB else ("MiB", 1 << 20)


def _figure() -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CkptPlanError("plots need matplotlib, which is not installed; run: pip install matplotlib") from error
    # No pyplot: it would keep figures and choose a window system for the caller's process.
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
