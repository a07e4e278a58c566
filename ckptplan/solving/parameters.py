"""Numbers that the search goes by, and the tolerances of its proofs.

`Parameters` may be chosen freely: no value makes an answer wrong, only later, less good or less proven. The tolerances
above them are the errors of floating-point sums and of other solvers, and can't be chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ckptplan.core.checks import is_int, is_number
from ckptplan.core.errors import InvalidInputError

ROUNDING = 1e-9
"""Relative error, at most, of sums of some thousand numbers."""
SOLVER_ERROR = 1e-6
"""Amount by which a solver in floating-point numbers may break a row, or miss a whole number."""
CLOSE = 1e-4
"""Relative difference that counts for nothing: no search goes on for less, and a share of less is none."""
LARGE = 1e6
"""Factor that makes one thing count more than all others together, and leaves digits for them."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers that the search goes by.

    Attributes
    ----------
    few_plans : int
        Up to this many plans, looking at each is faster than any other proof.
    many_plans : int
        Up to this many, looking at each is the last resort where bounds leave a gap: it takes seconds.
    orders : int
        Most orders of a queue's copies that one search for transfers begins.
    cells : int
        Plans times stages evaluated at once, or kept in tables: bounds memory, and how late the deadline is seen.
    tried : int
        Most combinations tried where all are too many: ways to choose segments (each takes a millisecond), options
        of some stages, pairs of changes, a plan's transfers.
    window : int
        Most items handled one by one where they are ordered: newest copies in a queue, largest storages of a stage,
        stages around one that changes, places at which a pattern changes, forests that come near the best. Twice as
        many as the stages of the longest segment that the local search adds at once.
    nesting : int
        Deepest nesting of segments in the label DP; deeper ones come from the segment DP and the local search.
    least_width, most_width, width_factor : int
        Labels per boundary in the label DP's first and last round, and their growth from round to round. Of each round
        as many plans are evaluated as the first has labels, and as many are refined by the exact search.
    units : int
        Largest budget of the segment DP, in units of bytes; exact where the sizes' common divisor is no smaller a unit.
        Other chains get all of them.
    additions, still_additions : int
        Most additions of the segment DP, about a second per billion, and bytes of its tables; where nothing moves, it
        may be the proof.
    rounds : int
        Rounds in which the local search may find nothing; after half of them it goes back to the best plan.
    near : float
        Relative difference of two plans' seconds that is small: the worse one may still lead to a better one, and a
        faster one whose times aren't known that well may be given up.
    mixed_stages, cp_sat_stages : int
        Longest chains for SCIP and for CP-SAT on the mixed-integer program. On those too long for CP-SAT, SCIP first
        solves it with few segments.
    long_chain : int
        Stages from which on the bound comes before the label DP, which it steers, and two stages exchange nothing.
    large_share, small_share, last_share : float
        Of the time that is left: for a part that proves or that others wait for; for one that mends a plan; and for
        what follows the longest parts. The mixed-integer program has the small share of the gap, too: the rest is for
        what it leaves out.
    least_s : float
        Seconds below which nothing is begun or reported: between two reports, for a process, for an error's peak.

    Raises
    ------
    InvalidInputError
        If a count isn't a whole number, 0 or more (`least_width` 1, `width_factor` 2); another number isn't above 0; or
        a share is more than 1.
    """

    few_plans: int = 20_000
    many_plans: int = 4_000_000
    orders: int = 20_000
    cells: int = 1 << 18
    tried: int = 4096
    window: int = 8
    nesting: int = 2
    least_width: int = 60
    most_width: int = 10_000
    width_factor: int = 4
    units: int = 4_000
    additions: int = 200_000_000
    still_additions: int = 1_500_000_000
    rounds: int = 100
    near: float = 0.01
    mixed_stages: int = 100
    cp_sat_stages: int = 40
    long_chain: int = 300
    large_share: float = 0.5
    small_share: float = 0.2
    last_share: float = 0.1
    least_s: float = 0.5

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(field.default, int):
                least = {"least_width": 1, "width_factor": 2}.get(name, 0)
                if not is_int(value) or value < least:
                    raise InvalidInputError(f"{name}={value!r} must be a whole number, {least} or more")
            elif not is_number(value) or not 0 < value < math.inf:
                raise InvalidInputError(f"{name}={value!r} must be a finite number above 0")
            elif name.endswith("_share") and value > 1:
                raise InvalidInputError(f"{name}={value!r} is a share: at most 1")


DEFAULT = Parameters()
"""The numbers that the package plans with."""
