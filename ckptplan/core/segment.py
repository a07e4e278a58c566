"""Segment: consecutive stages that are recomputed together."""

from __future__ import annotations

from dataclasses import dataclass

from ckptplan.core.checks import check_fields, is_int, short_repr
from ckptplan.core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Segment:
    """Stages `first..last` that are recomputed together (NOTE [Residency] in rules.py, rule 6).

    Its module stages have the option "recompute" or "recompute+swap", and its glue "keep". The segment runs again just
    before the backward of `last`. Each inner segment then holds only its inputs, until it runs again itself. Example:
    `Segment(0, 3, (Segment(0, 1),))` runs the stages 0 and 1 three times, 2 and 3 twice.

    Parameters
    ----------
    first, last : int
        Indices of the first and the last stage, neither of them glue. At the top level `first < last`, since an option
        recomputes a single stage.
    inner : tuple of Segment
        Segments within `first..last-1` that are recomputed again while this one is, in order and disjoint.
    """

    first: int
    last: int
    inner: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        if not (is_int(self.first) and is_int(self.last) and 0 <= self.first <= self.last):
            raise InvalidInputError(
                f"segment {short_repr(self.first)}..{short_repr(self.last)}: must be stage indices, 0 <= first <= last"
            )
        check_fields(f"segment {self.first}..{self.last}", self)
        at = self.first
        for segment in self.inner:
            if segment.first < at or segment.last >= self.last:
                raise InvalidInputError(
                    f"segment {self.first}..{self.last}: inner segment {segment.first}..{segment.last} is out of order "
                    f"or not within {self.first}..{self.last - 1}"
                )
            at = segment.last + 1

    def shifted(self, by: int) -> Segment:
        """Return the segment of a chain in which all stages' indices are larger by that."""
        return Segment(self.first + by, self.last + by, tuple(segment.shifted(by) for segment in self.inner))

    def depth(self, stage: int) -> int:
        """Return how many segments, this one and inner ones, contain `stage`: how often it runs again."""
        if not self.first <= stage <= self.last:
            return 0
        return 1 + sum(segment.depth(stage) for segment in self.inner)
