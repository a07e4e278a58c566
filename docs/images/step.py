"""Draw the picture of the README: one training step with and without a plan, and the best plan for every budget.

python docs/images/step.py docs/images/step.png

GPT-2 (124 million parameters), 16 sequences of 512 tokens, AdamW, bfloat16 autocast, planned for an RTX 4090. Bytes
come from a traced step and times from the published rates of the device, so no GPU is needed and every machine draws
nearly the same picture: only searches that the time limit ends depend on the machine. It takes about a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import GPT2Config, GPT2LMHeadModel

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.core.plan import KEEP, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.units import GIB
from ckptplan.referee.simulate import Timeline

COLOURS = {"forward": "#2f6690", "backward": "#81a4cd", "recompute": "#e07a1f", "out": "#3a9d5d", "in": "#8fcf9f"}
LANES = {"compute": ("forward", "backward", "recompute"), "to host": ("out",), "from host": ("in",)}


def main(path: str) -> None:
    """Profile, plan and draw."""
    profile = _profile()
    kept = ckptplan.simulate(profile, (KEEP,) * len(profile.stages))
    plans = ckptplan.frontier(profile, points=12, time_limit_s=60)
    budget_gb = (plans[0].peak_bytes + plans[-1].peak_bytes) / 2 / GIB
    plan = ckptplan.solve(profile, budget_gb, time_limit_s=20)
    print(plan)

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(1, 2, width_ratios=(1.6, 1))
    memory, lanes = left.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_memory(memory, kept, ckptplan.simulate(profile, plan), plan)
    _draw_lanes(lanes, ckptplan.simulate(profile, plan))
    _draw_frontier(right.subplots(), plans, plan, BASELINES["recompute_all"](profile, plans[-1].peak_bytes))
    figure.savefig(path, dpi=130)


def _profile() -> Profile:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config()).train()
    tokens = torch.zeros(16, 512, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    return ckptplan.profile(model, inputs, optimizer="adamw", amp="bfloat16", device="rtx4090")


def _bytes_over_time(timeline: Timeline) -> Iterator[tuple[float, float]]:
    """Points (milliseconds, GiB): the start and the worst moment of each program step."""
    events = iter([event for event in timeline.events if event.lane == "compute" and event.what != "wait"])
    end_s = 0.0
    for step in timeline.steps:
        begin_s = None
        for event in events:
            begin_s = event.start_s if begin_s is None else begin_s
            end_s = event.end_s
            if step.sweep or event.what in ("forward", "backward"):
                break
        begin_s = end_s if begin_s is None else begin_s
        yield begin_s * 1e3, step.start_bytes / GIB
        yield (begin_s + end_s) / 2 * 1e3, step.peak_bytes / GIB


def _draw_memory(axes: Axes, kept: Timeline, planned: Timeline, plan: Plan) -> None:
    axes.fill_between(*zip(*_bytes_over_time(kept), strict=True), color="#d8d8d8", label="everything kept")
    axes.fill_between(*zip(*_bytes_over_time(planned), strict=True), color="#2f6690", alpha=0.75, label="with the plan")
    axes.axhline(plan.budget_bytes / GIB, color="black", linestyle="--", linewidth=1)
    axes.annotate(f"budget {plan.budget_bytes / GIB:.1f} GiB", (0, plan.budget_bytes / GIB + 0.2), fontsize=9)
    axes.set_ylim(0, kept.peak_bytes / GIB * 1.1)
    axes.set_ylabel("device memory (GiB)")
    axes.set_title(f"One training step of GPT-2: {plan.overhead:.0%} slower, peak within the budget", fontsize=11)
    axes.legend(loc="upper right", fontsize=9)


def _draw_lanes(axes: Axes, timeline: Timeline) -> None:
    for row, kinds in enumerate(LANES.values()):
        for kind in kinds:
            spans = [
                (event.start_s * 1e3, (event.end_s - event.start_s) * 1e3)
                for event in timeline.events
                if event.what == kind
            ]
            label = kind if row == 0 else None
            axes.broken_barh(
                spans, (row - 0.4, 0.8), color=COLOURS[kind], edgecolor="white", linewidth=0.4, label=label
            )
    axes.set_yticks(range(len(LANES)), LANES)
    axes.invert_yaxis()
    axes.set_xlabel("time (ms)")
    axes.legend(loc="center right", ncols=3, fontsize=8)


def _draw_frontier(axes: Axes, plans: tuple[Plan, ...], plan: Plan, recomputed: Plan) -> None:
    peaks = [p.peak_bytes / GIB for p in plans]
    axes.plot(peaks, [100 * p.overhead for p in plans], marker="o", color="#2f6690", label="best plan found")
    bounds = [100 * max(p.lower_bound_s / p.baseline_step_s - 1, 0.0) for p in plans]
    axes.plot(peaks, bounds, color="grey", linestyle="--", label="proven bound on every plan")
    axes.plot(
        plan.peak_bytes / GIB, 100 * plan.overhead, "o", markersize=11, color="#e07a1f", label="the plan on the left"
    )
    axes.plot(recomputed.peak_bytes / GIB, 100 * recomputed.overhead, "kx", markersize=9, label="recompute every layer")
    axes.set_xlabel("peak memory (GiB)")
    axes.set_ylabel("slower than keeping everything (%)")
    axes.set_title("The best plan for every budget", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


if __name__ == "__main__":
    main(sys.argv[1])
