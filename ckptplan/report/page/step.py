"""Data of one planned step for the page: bytes, lanes, stages with their decisions, and the model's graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.storage import Storage
from ckptplan.core.trace import Trace
from ckptplan.core.units import format_bytes, format_seconds
from ckptplan.referee import Timeline
from ckptplan.report.explain import Explanation
from ckptplan.report.page.waterline import CATEGORIES, COLOURS, drawn_end_s, waterline

WHAT_COLOURS = {
    "forward": "#0072b2",
    "recompute": "#e69f00",
    "backward": "#56b4e9",
    "wait": "#d55e00",
    "out": "#009e73",
    "in": "#7fd1ae",
}
"""Colours of what a lane does, that readers who see few colours can tell apart (Okabe and Ito, 2008)."""

LANES = ("compute", "out", "in")
WHATS = ("forward", "recompute", "backward", "wait", "out", "in")
COMPUTES = {"forward": "forward", "recompute": "forward again", "backward": "backward", "wait": "waits for a copy"}
"""Event of the compute lane -> its name on the page."""
PHASES = ("forward", "backward", "update")
_ROUNDED = 9  # digits after the point of seconds


@dataclass(frozen=True, slots=True)
class Arc:
    """Bytes that stage `maker` makes and `user`, a later one, needs; `skips` if others lie between."""

    maker: int
    user: int
    nbytes: int
    skips: bool


def step_data(
    profile: Profile, plan: Plan, timeline: Timeline, explanation: Explanation | None, trace: Trace | None
) -> dict[str, Any]:
    """Return the data of the waterline, the lanes and the stages, as plain lists for JSON.

    Storages on the device are lists by column, of which `first`, `last` are numbers of steps.
    """
    line = waterline(profile, plan, timeline)
    stages = {stage.name: i for i, stage in enumerate(profile.stages)}
    events = [event for event in timeline.events if event.end_s > event.start_s]
    shown = {stay.storage for stay in line.stays}
    data: dict[str, Any] = {
        "budget": plan.tensor_budget_bytes,
        "budget_name": "budget" if plan.reserved_bytes is None else "budget, less what the allocator adds",
        "categories": CATEGORIES,
        "colours": COLOURS,
        "stacked": line.stacked.tolist(),
        "steps": {
            "start": [round(step.start_s, _ROUNDED) for step in timeline.steps],
            "end": round(drawn_end_s(timeline), _ROUNDED),
            "phase": [PHASES.index(step.phase) for step in timeline.steps],
            "stage": [stages[step.stage] for step in timeline.steps],
            "again": [int(step.sweep) for step in timeline.steps],
        },
        "stays": {
            "storage": [stay.storage for stay in line.stays],
            "first": [stay.first for stay in line.stays],
            "last": [stay.last for stay in line.stays],
            "category": line.of,
        },
        "storages": {
            s: [storage.name, storage.nbytes, storage.origin]
            for s, storage in enumerate(profile.storages)
            if s in shown
        },
        "events": {
            "lane": [LANES.index(event.lane) for event in events],
            "what": [WHATS.index(event.what) for event in events],
            "stage": [stages[event.stage] for event in events],
            "start": [round(event.start_s, _ROUNDED) for event in events],
            "end": [round(event.end_s, _ROUNDED) for event in events],
        },
        "stages": _stages(profile, plan, explanation),
        "phases": PHASES,
        "lanes": LANES,
        "whats": WHATS,
        "shades": [WHAT_COLOURS[what] for what in WHATS],
    }
    if trace is not None and trace.measured.memory:
        seconds, nbytes = zip(*trace.measured.memory, strict=True)
        data["measured"] = {"s": [round(s, _ROUNDED) for s in seconds], "bytes": nbytes}
    return data


def _stages(profile: Profile, plan: Plan, explanation: Explanation | None) -> list[dict[str, Any]]:
    """Return name, decision and reasons of each stage."""
    names = [stage.name for stage in profile.stages]
    out: list[dict[str, Any]] = []
    for stage, choice in zip(profile.stages, plan.choices, strict=True):
        option = stage.option(choice.option)
        moved = [profile.storages[option.saved[p]].nbytes for p in choice.moves]
        held = sum(profile.storages[s].nbytes for s in option.held) - sum(moved)
        facts = [f"what runs {stage.name[1:-1]}, outside of all stages' modules; it can only be kept"] * stage.is_glue
        facts += [
            f"forward {format_seconds(stage.forward_s)}, backward {format_seconds(stage.backward_s)}",
            f"holds {format_bytes(held)} on the device until its backward",
        ]
        facts += _moves(choice, option.saved, profile.storages, names)
        if option.recomputes:
            again = "its forward" if option.way == () else "what it doesn't hold of its forward"
            facts.append(f"its backward runs {again} again: {format_seconds(option.recompute_s)}")
        out.append({"name": stage.name, "option": option.name, "facts": facts})
    for segment in plan.segments:
        for i in range(segment.first, segment.last + 1):
            out[i]["facts"].append(f"recomputed together: {names[segment.first]} .. {names[segment.last]}")
    if explanation is not None:
        _add_reasons(out, explanation)
    return out


def _moves(choice: Decision, saved: Sequence[int], storages: Sequence[Storage], names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each transfer."""
    where = "disk" if choice.tier == "disk" else "host"
    for transfer in choice.transfers:
        nbytes = sum(storages[saved[p]].nbytes for p in transfer.moves)
        yield (
            f"moves {format_bytes(nbytes)} to the {where}: gone after the forward of {names[transfer.release]}, back "
            f"before the backward of {names[transfer.prefetch]}"
        )


def _add_reasons(stages: list[dict[str, Any]], explanation: Explanation) -> None:
    """Add the price of memory in each stage's steps, and its next choices."""
    worth = explanation.worth
    unit, share = explanation.price_unit
    for i, stage in enumerate(stages):
        if worth is not None and worth.forward_gib_s:
            prices = (worth.forward_gib_s[i], worth.backward_gib_s[i])
            told = [
                f"{format_seconds(price * share)} per {unit} in its {phase}"
                for phase, price in zip(PHASES, prices, strict=False)
                if price > 0
            ]
            free = "memory costs nothing in its steps: other steps are tighter"
            stage["price"] = f"memory there costs {' and '.join(told)}" if told else free
    for choice in explanation.choices:
        for i in choice.stages:
            if choice.leaner is not None:
                stages[i]["leaner"] = str(choice.leaner)
            if choice.richer is not None:
                stages[i]["richer"] = str(choice.richer)
            if choice.count > 1:
                stages[i]["like"] = f"as for {choice.stage}, one of {choice.count} alike"


def arcs(profile: Profile) -> tuple[Arc, ...]:
    """Return the bytes that each stage makes for each later one, without those that it keeps for itself."""
    graph = profile.graph()
    found: dict[tuple[int, int], Arc] = {}
    stages = [("stage", i) for i in range(len(profile.stages))]
    for (_, maker), storage in graph.out_edges(stages):
        for (_, user), edge in graph[storage].items():
            if user == maker:
                continue
            before = found.get((maker, user), Arc(maker, user, 0, False))
            nbytes = before.nbytes + graph.nodes[storage]["nbytes"]
            found[maker, user] = Arc(maker, user, nbytes, before.skips or edge["passes"] > 0)
    return tuple(found.values())
