"""Sets of disjoint integer ranges, such as mapped addresses."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Ranges:
    """Disjoint half-open ranges in order; adjacent ranges are merged.

    Attributes
    ----------
    pairs : list of (int, int)
        Begin and end of each.
    """

    __slots__ = ("pairs",)

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self.pairs = [pair for pair in pairs if pair[0] < pair[1]]

    def add(self, start: int, stop: int) -> bool:
        """Add a range; return False, without a change, if a part of it is there already."""
        at = bisect_left(self.pairs, (start, stop))
        if (at and self.pairs[at - 1][1] > start) or (at < len(self.pairs) and self.pairs[at][0] < stop):
            return False
        first = last = at
        if at and self.pairs[at - 1][1] == start:
            first, start = at - 1, self.pairs[at - 1][0]
        if at < len(self.pairs) and self.pairs[at][0] == stop:
            last, stop = at + 1, self.pairs[at][1]
        if start < stop:
            self.pairs[first:last] = [(start, stop)]
        return True

    def remove(self, start: int, stop: int) -> bool:
        """Remove a range; return False, without a change, if a part of it isn't there."""
        at = bisect_right(self.pairs, (start, math.inf)) - 1
        if at < 0 or self.pairs[at][1] < stop:
            return False
        low, high = self.pairs[at]
        self.pairs[at : at + 1] = [pair for pair in ((low, start), (stop, high)) if pair[0] < pair[1]]
        return True
