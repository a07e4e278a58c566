"""Frontier: the best plans found along the trade-off between memory and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from ckptplan.core.files import Saved
from ckptplan.core.late import late
from ckptplan.core.plan import Plan


@dataclass(frozen=True, slots=True)
class Frontier(Saved, Sequence[Plan]):
    """The plans of a frontier, by rising peak and falling step time; a sequence.

    Parameters
    ----------
    plans : tuple of Plan
    """

    SCHEMA = "ckptplan.frontier/2"
    OLDER = ("ckptplan.frontier/1",)

    plans: tuple[Plan, ...]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def _repr_html_(self) -> str:
        return late("report.page.notebook", "frontier_html")(self)  # type: ignore[no-any-return]

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, index: int | slice) -> Plan | tuple[Plan, ...]:
        return self.plans[index]
