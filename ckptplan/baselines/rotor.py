"""rotor (Beaumont et al. 2019), on purpose independent of the solver's segment program: recompute alone, optimal.

The dynamic program is in `_rotor_dp.py`, over persistent schedules: what a run saves stays until its backward. They
are exactly the nested segments of the plan space here.

Bytes are exact where the budget is at most 4000 units of the sizes' greatest common divisor, and 48 million entries
of the table are enough (4000 units up to 109 stages, 533 at 300). Beyond that every size is rounded up to a coarser
unit, of all up to twice as coarse the one that rounds least, at least 50 to the budget; the published program always
works in such slots. Rounding never lets a plan exceed the budget; it loses plans that fit by less than what it adds.

On a textbook chain (`Profile.from_chain`) at exact units the plan is the optimum, and the smallest budget named is
the smallest there is. On richer profiles the program's bytes are an estimate; the plans it gives for budgets around
the one asked for are replayed with true bytes, and the fastest of those that fit is taken, which is the better for
the baseline.

Reference
---------
O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory", INRIA RR-9302, arXiv 1911.13214 (2019).
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptplan.baselines._build import (
    Selection,
    everywhere,
    finish,
    raise_infeasible,
    scheduled,
    smallest_peak,
)
from ckptplan.baselines._rotor_dp import Table
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import Evaluation, StepNeed

TRIALS = 12
"""Replays in each direction from the border between plans that fit and plans that don't."""


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Recompute the stages that the dynamic program says, in its nested segments.

    Raises
    ------
    InfeasibleBudgetError
        If no plan it finds fits; `min_peak_bytes` is the smallest of their peaks.
    """
    everything = everywhere(profile, "keep")
    most = smallest_peak(profile, everything)
    if most.bytes <= budget_bytes:
        found = scheduled(profile, everything, budget_bytes)
        assert found is not None, "nothing moves, so the peak is that of the residency"
        return finish(profile, found, budget_bytes, "rotor")
    table = Table(profile, budget_bytes)
    best = fastest(table, budget_bytes) if table.chain.textbook else None
    if best is None:
        # For the smallest budget there is; on richer profiles for plans whose bytes the table counts too high.
        table = Table(profile, most.bytes)
        best = fastest(table, budget_bytes)
    if best is not None:
        return finish(profile, best, budget_bytes, "rotor")
    raise_infeasible(profile, smallest(table, most), budget_bytes, "rotor")


def fastest(table: Table, budget_bytes: int) -> Evaluation | None:
    """The fastest of the table's plans that truly fits."""
    levels = table.fits_from(table.units)
    # The first that fits by bisection, which is right where true bytes rise with the table's, then its neighbours.
    tried: dict[int, Evaluation | None] = {}

    def fits(at: int) -> bool:
        if at not in tried:
            tried[at] = scheduled(table.profile, table.selection(levels[at]), budget_bytes)
        return tried[at] is not None

    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    if not table.chain.textbook:
        for at in range(max(0, low - TRIALS), min(len(levels), low + TRIALS)):
            fits(at)
    found = [r for r in tried.values() if r is not None]
    return min(found, key=lambda r: r.makespan_s, default=None)


def smallest(table: Table, most: StepNeed) -> StepNeed:
    """The smallest peak among the table's leanest plans, or `most`, that of keeping everything."""
    return min(
        (smallest_peak(table.profile, selection) for selection in _leanest(table)), key=lambda p: p.bytes, default=most
    )


def _leanest(table: Table) -> Iterator[Selection]:
    for m in table.fits_from(table.units)[-TRIALS:]:
        yield table.selection(m)
