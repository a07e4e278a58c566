"""What notebooks show of plans, profiles, frontiers, estimates and verifications: a headline, a picture, the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ckptplan.core.estimate import Estimate
from ckptplan.core.frontier import Frontier
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.units import format_bytes, format_seconds
from ckptplan.report.page.estimated import COLOURS, answer_of
from ckptplan.report.page.planned import answer

_ACTIONS = {"keep": "#0072b2", "swap": "#009e73", "recompute": "#e69f00"}
_WIDTH = 640.0  # of a picture, in pixels
_TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"


def plan_html(plan: Plan) -> str:
    """A plan: whether it fits, its slowdown, and its decisions in a row."""
    slower = f"{max(plan.overhead, 0.0):.1%} slower than with everything kept, gap {plan.gap:.2%}"
    runs: list[tuple[str, float]] = []
    for choice in plan.choices:  # neighbours alike are one part
        count = runs.pop()[1] + 1 if runs and runs[-1][0] == choice.action else 1
        runs.append((choice.action, count))
    bar = _bar([(_ACTIONS[action], count, f"{action}: {count:.0f} stages") for action, count in runs])
    legend = _legend((_ACTIONS[action], action) for action in _ACTIONS)
    return _card(answer(plan), slower, bar + legend, str(plan))


def profile_html(profile: Profile) -> str:
    """A profile: its stages, and what each saves with everything kept."""
    saved = [
        sum(profile.storages[s].nbytes for s in stage.keep.held if profile.storages[s].born == i)
        for i, stage in enumerate(profile.stages)
    ]
    most = max(saved, default=0) or 1
    wide = _WIDTH / len(saved)
    columns = "".join(
        f'<rect x="{i * wide:.1f}" y="{60 - 60 * n / most:.1f}" width="{max(wide - 1, wide / 2):.1f}" '
        f'height="{60 * n / most:.1f}"><title>{escape(stage.name)}: {format_bytes(n)}</title></rect>'
        for i, (n, stage) in enumerate(zip(saved, profile.stages, strict=True))
    )
    picture = f'<svg width="{_WIDTH:.0f}" height="60" fill="#0072b2" role="img" style="max-width:100%">{columns}</svg>'
    head = f"{len(profile.stages)} stages, {format_seconds(profile.baseline_step_s)} a step with everything kept."
    return _card(head, f"Kept for backward by stage, at most {format_bytes(most)}:", picture, str(profile))


def frontier_html(frontier: Frontier) -> str:
    """A frontier, as a table."""
    rows = [
        (format_bytes(p.peak_bytes), format_seconds(p.step_s), f"{max(p.overhead, 0.0):.1%}", f"{p.gap:.2%}")
        for p in frontier
    ]
    head = ("peak", "step", "over everything kept", "gap")
    return _card(f"{len(rows)} plans.", "", _table(head, rows), "")


def estimate_html(estimate: Estimate) -> str:
    """An estimate: whether it fits, and the categories at the peak."""
    parts = [(name, n) for name, n in estimate.categories.items() if n]
    bar = _bar([(COLOURS.get(name, "#bbbbbb"), n, f"{name}: {format_bytes(n)}") for name, n in parts])
    legend = _legend((COLOURS.get(name, "#bbbbbb"), f"{name} {format_bytes(n)}") for name, n in parts)
    return _card(answer_of(estimate), "", bar + legend, str(estimate))


def text_html(head: str, text: str, *, opened: bool) -> str:
    """A headline and a text, which is `opened` or not."""
    return _card(head, "", "", text, opened=opened)


def _card(head: str, more: str, picture: str, text: str, *, opened: bool = False) -> str:
    details = (
        f"<details{' open' if opened else ''}><summary>All of it</summary><pre>{escape(text)}</pre></details>"
        if text
        else ""
    )
    return f"<div><p><strong>{escape(head)}</strong> {escape(more)}</p>{picture}{details}</div>"


def _bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """Parts (colour, size, text) side by side, by their sizes."""
    total = sum(size for _, size, _ in parts) or 1
    at, out = 0.0, []
    for colour, size, text in parts:
        wide = _WIDTH * size / total
        out.append(
            f'<rect x="{at:.1f}" width="{wide:.1f}" height="24" fill="{colour}"><title>{escape(text)}</title></rect>'
        )
        at += wide
    return f'<svg width="{_WIDTH:.0f}" height="24" role="img" style="max-width:100%">{"".join(out)}</svg>'


def _legend(parts: Iterable[tuple[str, str]]) -> str:
    marks = (f'<span style="color:{colour}">&#9632;</span> {escape(text)}' for colour, text in parts)
    return f"<p>{' &nbsp; '.join(marks)}</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], kind: str) -> str:
        shown = (f'<{kind} style="text-align:right">{escape(cell)}</{kind}>' for cell in cells)
        return f"<tr>{''.join(shown)}</tr>"

    lines = [line(head, "th"), *(line(row, "td") for row in rows)]
    return f'<table style="{_TABLE}">{"".join(lines)}</table>'
