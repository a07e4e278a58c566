"""Frontier: the best plans found along the trade-off between memory and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from ckptplan.core.files import Saved
from ckptplan.core.option import ACTIONS
from ckptplan.core.plan import Plan
from ckptplan.core.units import format_bytes, format_seconds, format_swapped, format_table


def beats(one: Plan, other: Plan) -> bool:
    """Return whether a plan needs no more memory and no more time than another, and less of one of them."""
    needs, others = (one.counted_bytes, one.step_s), (other.counted_bytes, other.step_s)
    return needs != others and all(a <= b for a, b in zip(needs, others, strict=True))


@dataclass(frozen=True, slots=True)
class Frontier(Saved, Sequence[Plan]):
    """The plans of a frontier; a sequence.

    Parameters
    ----------
    plans : tuple of Plan
        By rising peak and falling step time.
    """

    SCHEMA = "ckptplan.frontier/2"
    OLDER = ("ckptplan.frontier/1",)

    plans: tuple[Plan, ...]

    @classmethod
    def of(cls, plans: Iterable[Plan]) -> Frontier:
        """Return those of some plans that are faster than all that need less memory, by rising need."""
        out: list[Plan] = []
        for plan in sorted(plans, key=lambda p: (p.counted_bytes, p.step_s)):
            if not out or plan.step_s < out[-1].step_s:
                out.append(plan)
        return cls(tuple(out))

    def improved(self, others: Iterable[Plan]) -> Frontier:
        """Return this frontier with each plan that some of `others` beat replaced by the fastest of these."""
        known = list(others)
        best = [
            min([plan, *(o for o in known if beats(o, plan))], key=lambda p: (p.step_s, p.counted_bytes))
            for plan in self
        ]
        return Frontier.of(best)

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __str__(self) -> str:
        """Return a table with one line per plan."""
        rows = [("peak", "step", "over everything kept", "gap to the bound", "swapped", *ACTIONS, "segments")]
        for plan in self:
            counts = Counter(choice.action for choice in plan.choices)
            rows.append((
                format_bytes(plan.counted_bytes), format_seconds(plan.step_s), f"{max(plan.overhead, 0.0):.1%}",
                f"{plan.gap:.2%}", format_swapped(plan.host_bytes, plan.disk_bytes),
                *(str(counts[action]) for action in ACTIONS), str(len(plan.segments)),
            ))  # fmt: skip
        return "\n".join(format_table(rows))

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, index: int | slice) -> Plan | tuple[Plan, ...]:
        return self.plans[index]
