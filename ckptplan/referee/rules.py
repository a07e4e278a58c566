"""Conditions for decisions and segments that can be replayed, on purpose independent of core/rules.py.

Options of the menu, segments, moves, points, tiers and holders, one function each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptplan.core.plan import Decision
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment

Kind = Literal[
    "stages", "option", "segment", "moves", "points", "tier", "held", "budget", "host budget", "disk budget",
    "prediction", "bound"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule."""

    kind: Kind
    stage: str
    detail: str


def holds(profile: Profile, i: int, choice: Decision, segment: Segment | None) -> tuple[int, ...]:
    """Return the storages that stage `i` holds from its forward on; `segment` is the outermost around it (rule 2)."""
    stage = profile.stages[i]
    held = stage.option(choice.option).held
    if segment is None:
        return held
    # Glue isn't run again and needs all it saved; it has no linked storages.
    return tuple(s for s in held if s not in stage.linked or profile.storages[s].born < segment.first)


def outermost(segments: Sequence[Segment]) -> dict[int, Segment]:
    """Return stage -> the outermost segment around it, for the stages inside segments."""
    return {i: segment for segment in segments for i in range(segment.first, segment.last + 1)}


def broken_rules(profile: Profile, choices: Sequence[Decision], segments: Sequence[Segment]) -> tuple[Violation, ...]:
    """Return the violated rules of structure; empty if decisions and segments can be replayed."""
    if len(choices) != len(profile.stages):
        return (Violation("stages", "", f"{len(choices)} decisions for {len(profile.stages)} stages"),)
    broken = [*_options(profile, choices), *_segments(profile, choices, segments)]
    if broken:
        return tuple(broken)
    around = outermost(segments)
    held = [holds(profile, i, choice, around.get(i)) for i, choice in enumerate(choices)]
    return (
        *_moves(profile, choices, held),
        *_points(profile, choices, around),
        *_tiers(profile, choices),
        *_holders(profile, choices, held),
    )


def _options(profile: Profile, choices: Sequence[Decision]) -> Iterator[Violation]:
    for stage, choice in zip(profile.stages, choices, strict=True):
        option = stage.find(choice.option)
        if option is None:
            menu = ", ".join(option.name for option in stage.options)
            yield Violation("option", stage.name, f"no option {choice.option!r}; its options are {menu}")
        elif choice.action != option.action:
            yield Violation("option", stage.name, f"action {choice.action!r}, but {option.name!r} is {option.action!r}")
        elif choice.ops != option.ops:
            yield Violation("option", stage.name, f"ops {choice.ops}, but {option.name!r} has {option.ops}")


def _segments(profile: Profile, choices: Sequence[Decision], segments: Sequence[Segment]) -> Iterator[Violation]:
    end = 0
    for segment in segments:
        where = f"segment {segment.first}..{segment.last}"
        if segment.first < end or segment.last >= len(choices) or segment.first == segment.last:
            yield Violation("segment", "", f"{where} is out of order, past the last stage, or a single stage")
            return
        end = segment.last + 1
        for i in range(segment.first, end):
            stage, name = profile.stages[i], choices[i].option
            if stage.is_glue:
                if name != "keep":
                    yield Violation("segment", stage.name, f"{where}: glue must be decided 'keep', not {name!r}")
            elif stage.recompute is None:
                yield Violation("segment", stage.name, f"{where}: the stage can't be recomputed")
            elif name not in ("recompute", "recompute+swap"):
                yield Violation("segment", stage.name, f"{where}: the stage must be decided 'recompute', not {name!r}")
        yield from _ends(profile, segment)


def _ends(profile: Profile, segment: Segment) -> Iterator[Violation]:
    for i, verb in ((segment.first, "begins"), (segment.last, "ends")):
        stage = profile.stages[i]
        if stage.is_glue:
            where = f"segment {segment.first}..{segment.last}"
            yield Violation("segment", stage.name, f"{where} {verb} in glue, which isn't run again")
    for inner in segment.inner:
        yield from _ends(profile, inner)


def _moves(profile: Profile, choices: Sequence[Decision], held: Sequence[tuple[int, ...]]) -> Iterator[Violation]:
    mover: dict[int, str] = {}
    for stage, choice, own in zip(profile.stages, choices, held, strict=True):
        option = stage.option(choice.option)
        for p in choice.moves:
            if p not in option.moves:
                yield Violation("moves", stage.name, f"position {p} is not one that {option.name!r} moves")
                continue
            s = option.saved[p]
            if s not in own:
                yield Violation("moves", stage.name, f"moves storage {s}, which its segment makes again")
            if s in mover:
                yield Violation("moves", stage.name, f"storage {s} is moved by {mover[s]!r} too")
            if profile.storages[s].stays:
                yield Violation("moves", stage.name, f"moves storage {s}, which must stay")
            if profile.storages[s].graph_until is not None:
                yield Violation("moves", stage.name, f"moves storage {s}, whose graph forward drops")
            mover[s] = stage.name


def _points(profile: Profile, choices: Sequence[Decision], around: dict[int, Segment]) -> Iterator[Violation]:
    n = len(choices)
    modules = [k for k, stage in enumerate(profile.stages) if not stage.is_glue] or list(range(n))
    meets = {k for k in modules if profile.stages[k].find("discard") is None} or set(modules)
    for i, (stage, choice) in enumerate(zip(profile.stages, choices, strict=True)):
        back_by = around[i].last if i in around else i
        for transfer in choice.transfers:
            release, prefetch = transfer.release, transfer.prefetch
            if not i <= release < n:
                yield Violation("points", stage.name, f"release point {release} is not in [{i}, {n})")
            elif release > modules[-1]:
                yield Violation("points", stage.name, "release point after the last module's end, where nothing runs")
            if not back_by <= prefetch < n:
                yield Violation("points", stage.name, f"prefetch point {prefetch} is not in [{back_by}, {n})")
            elif prefetch not in meets:
                yield Violation("points", stage.name, "prefetch point outside of any module's backward")


def _tiers(profile: Profile, choices: Sequence[Decision]) -> Iterator[Violation]:
    if profile.disk is not None:
        return
    for stage, choice in zip(profile.stages, choices, strict=True):
        if choice.tier == "disk":
            yield Violation("tier", stage.name, "moves to the disk, but the profile has no disk tier")


def _holders(profile: Profile, choices: Sequence[Decision], held: Sequence[tuple[int, ...]]) -> Iterator[Violation]:
    mover: dict[int, int] = {}
    for o, (stage, choice) in enumerate(zip(profile.stages, choices, strict=True)):
        saved = stage.option(choice.option).saved
        mover.update((saved[p], o) for p in choice.moves if 0 <= p < len(saved))
    for j, (stage, choice) in enumerate(zip(profile.stages, choices, strict=True)):
        moved = stage.option(choice.option).moved
        for s in held[j]:
            o = mover.get(s, j)
            if o != j and (j > o or s not in moved):
                yield Violation("held", stage.name, f"holds storage {s}, which {profile.stages[o].name!r} moves")
    for s, o in mover.items():
        storage = profile.storages[s]
        if storage.to_end:
            yield Violation("held", profile.stages[o].name, f"moves storage {s}, which the caller holds")
