"""PoocH (Ito et al.): a greedy choice of keep, swap and recompute, corrected by replaying it on a three-lane timeline.

The rule:

1. Maps whose transfers hide completely stay swapped. Those with unhidden swap-in form a binary tree, keep or swap, in
   the order of backward. In each leaf those with unhidden swap-out are kept, the longest wait first, while memory
   lasts. The fastest leaf wins.
2. The other direction, which one description has: from everything kept, swap one map after another until it fits.
3. From either: while a map still swapped gains by recompute (its unhidden swap time minus its recompute time),
   convert the best, replay, repeat until nothing improves. The faster of the two directions is the plan.

Where the published text leaves a choice open, this is the better one for the baseline:

- Release and prefetch points are those of core/schedule.py, the laziest and earliest that fit.
- The tree spans the `TREE_MAPS` maps that wait longest (at most 2**10 leaves); branches that don't fit are cut. A
  leaf also counts without its kept swap-outs.
- Conversions are judged by a replay of each, with what recompute chained to it costs; the estimate only picks which
  maps to replay: 32, and fewer in chains of more than 20 stages, down to 6. Where no replay is faster, the best of
  those whose estimate promises a gain is still converted, since several may pay together. The fastest of all that was
  replayed and fits is the plan.
- When keep and swap alone don't fit, maps are converted to recompute, the most excess bytes per second added first,
  until they do. (Excess: bytes over the budget, summed over all program steps.)
- The memory that a conversion gives back may be used: a swapped map is kept again where that is the best next step.
- A recompute pins what its neighbour moved, so a conversion can lack room. Step 3 is run as above, and again with
  kept maps swapped where a conversion doesn't fit; neither is always the better.
- What recomputes of neighbours share is tried in three ways, each with a search of its own: every stage by itself;
  the same with the inputs of recomputed stages swapped where their maps are; and neighbours as one chain, which holds
  the inputs of its first stage alone (a segment without inner ones).

A map here is what one stage saves. Options inside a stage (selective) are not part of the rule.

Reference
---------
Y. Ito, H. Imai, T. Le Duc, Y. Negishi, K. Kawachiya, R. Matsumiya, T. Endo, "Profiling based Out-of-core Hybrid Method
for Large Neural Networks", PPoPP 2019 poster, arXiv 1907.05013. O(stages**2) replays of O(stages) each, and 2**11 for
the tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ckptplan.baselines._build import (
    Selection,
    build,
    everywhere,
    named,
    raise_infeasible,
    scheduled,
    smallest_peak,
    ways_to_recompute,
)
from ckptplan.core.lanes import Copy, lane
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import EQUAL_S, Evaluation, StepNeed, residency, tightest_peak

TREE_MAPS = 10
CANDIDATES = 32
SHORTLIST_WORK = 640
"""Candidates times stages: beyond 20 stages fewer are replayed, at least `FEWEST`, since every replay takes longer."""
FEWEST = 6

Actions = tuple[str, ...]
"""Option names, one per stage."""


@dataclass(frozen=True, slots=True)
class _Costed:
    """Options with the cost of their best schedule: within the budget or, if they don't fit, at their smallest peak."""

    actions: Actions
    excess_bytes: int
    makespan_s: float
    out_wait_s: tuple[float, ...]
    in_wait_s: tuple[float, ...]

    @property
    def fits(self) -> bool:
        return self.excess_bytes == 0

    def wait_s(self, stage: int) -> float:
        """Unhidden swap time of one stage."""
        return self.out_wait_s[stage] + self.in_wait_s[stage]


def waits_s(profile: Profile, found: Evaluation) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per stage, unhidden swap-out and swap-in: how long compute waits for its copies (NOTE [Lanes] in core/lanes.py).

    Backward is taken in the order in which it runs, since a copy back is what the stage that needs it waits for.
    """
    r, n, link = found.residency, len(found.options), profile.link
    moving = [(i, sent) for i, sendings in enumerate(found.sendings) for sent in sendings]
    out = [Copy(i + 1, sent.release + 1, link.out_s(sent.nbytes)) for i, sent in moving]
    back = [Copy(n - 1 - sent.prefetch, n - 1 - r.needed[i], link.in_s(sent.nbytes)) for i, sent in reversed(moving)]
    out_wait_s, in_wait_s = [0.0] * n, [0.0] * n
    for (i, _), seconds in zip(moving, lane(out, [stage.forward_s for stage in profile.stages])[1], strict=True):
        out_wait_s[i] += seconds
    for (i, _), seconds in zip(reversed(moving), lane(back, r.backward_s[::-1])[1], strict=True):
        in_wait_s[i] += seconds
    return tuple(out_wait_s), tuple(in_wait_s)


def plan(profile: Profile, budget_bytes: int) -> Plan:
    """Plan in both of PoocH's directions and return the faster.

    Raises
    ------
    InfeasibleBudgetError
        If neither fits; `min_peak_bytes` is the smallest peak among all that was replayed.
    """
    best: tuple[_Costed, Selection] | None = None
    smallest: StepNeed | None = None
    for again, chained in ways_to_recompute(profile):
        search = _Conversions(profile, budget_bytes, again, chained)
        for start in (search.swap_first(), search.keep_first()):
            search.convert(start, make_room=False)
            search.convert(start, make_room=True)
        smallest = search.smallest if smallest is None or search.smallest.bytes < smallest.bytes else smallest
        found = search.fastest()
        if found is not None and (best is None or found.makespan_s < best[0].makespan_s):
            best = found, search.selection(found.actions)
    if best is None:
        assert smallest is not None
        raise_infeasible(profile, smallest, budget_bytes, "pooch")
    return build(profile, best[1], budget_bytes, "pooch")


class _Conversions:
    """Conversions of one kind on one profile under one budget; each list of options is evaluated only once.

    Parameters
    ----------
    again : str
        The option a conversion gives: "recompute" or "recompute+swap".
    chained : bool
        Whether neighbours that recompute do so together.
    """

    def __init__(self, profile: Profile, budget_bytes: int, again: str, chained: bool) -> None:
        self.profile = profile
        self.budget_bytes = budget_bytes
        self.again = again
        self.chained = chained
        self.candidates = min(CANDIDATES, max(FEWEST, SHORTLIST_WORK // len(profile.stages)))
        self.seen: dict[Actions, _Costed] = {}
        self.smallest: StepNeed = smallest_peak(profile, self.selection(("keep",) * len(profile.stages)))

    def selection(self, actions: Actions) -> Selection:
        """`actions` with the segments that chained recompute makes."""
        return named(self.profile, actions, chained=self.chained)

    def start(self, name: str) -> Actions:
        """The option of that name for every stage that has it, keep for the others."""
        return tuple(option.name for option in everywhere(self.profile, name).options)

    def evaluated(self, actions: Actions) -> _Costed:
        """Schedule and time `actions`; swaps that never need to be away come back as keep."""
        if actions not in self.seen:
            selection = self.selection(actions)
            r = residency(self.profile, selection.options, selection.segments)
            tightest = tightest_peak(self.profile, r)
            self.smallest = min(self.smallest, tightest, key=lambda p: p.bytes)
            needs = (*r.forward_bytes, *r.backward_bytes, self.profile.update_peak_bytes)
            excess = sum(max(0, need - self.budget_bytes) for need in needs)
            found = scheduled(self.profile, selection, max(self.budget_bytes, tightest.bytes))
            assert found is not None, "a schedule exists at the tightest peak"
            settled = actions if excess else tuple(option.name for option in found.options)
            state = _Costed(settled, excess, found.makespan_s, *waits_s(self.profile, found))
            self.seen[actions] = self.seen[state.actions] = state
        return self.seen[actions]

    def fastest(self) -> _Costed | None:
        """Pick the fastest of all that was replayed and fits."""
        return _fastest(self.seen.values())

    def fits(self, actions: Actions) -> bool:
        """Whether some schedule of `actions` fits, without timing it."""
        return smallest_peak(self.profile, self.selection(actions)).bytes <= self.budget_bytes

    def swap_first(self) -> _Costed:
        """Everything swapped, then the tree of what to keep."""
        start = self.evaluated(self.start("swap"))
        if not start.fits:
            return start
        waiting = [i for i in _of(start, "swap") if start.in_wait_s[i] > 0]
        longest = sorted(waiting, key=lambda i: -start.in_wait_s[i])[:TREE_MAPS]
        leaves = [start.actions]
        for i in sorted(longest, reverse=True):
            kept = (_with(leaf, i, "keep") for leaf in leaves)
            leaves += [leaf for leaf in kept if self.fits(leaf)]
        ends = [state for leaf in leaves for state in self._keep_swap_outs(self.evaluated(leaf))]
        return min(ends, key=lambda state: state.makespan_s)

    def _keep_swap_outs(self, leaf: _Costed) -> Iterable[_Costed]:
        """Yield the leaf, and the leaf with unhidden swap-outs kept while memory lasts."""
        yield leaf
        actions = leaf.actions
        out_wait_s = leaf.out_wait_s
        for i in sorted((i for i in _of(leaf, "swap") if out_wait_s[i] > 0), key=lambda i: -out_wait_s[i]):
            kept = _with(actions, i, "keep")
            if self.fits(kept):
                actions = kept
        if actions != leaf.actions:
            yield self.evaluated(actions)

    def keep_first(self) -> _Costed:
        """Everything kept, then swapped map by map until it fits or swapping no longer helps."""
        state = self.evaluated(self.start("keep"))
        while not state.fits:
            sizes = {
                i: sum(self.profile.storages[s].nbytes for s in self.profile.stages[i].keep.saved)
                for i, (stage, now) in enumerate(zip(self.profile.stages, state.actions, strict=True))
                if now == "keep" and stage.find("swap") is not None
            }
            largest = sorted(sizes, key=lambda i: -sizes[i])[
                : self.candidates
            ]  # among equals the first: longest to hide
            better = self._most_relief(state, [_with(state.actions, i, "swap") for i in largest])
            if better is None:
                break
            state = better
        return state

    def convert(self, state: _Costed, *, make_room: bool) -> None:
        """Recompute until it fits, then as long as a conversion gains; `fastest` knows the best on the way.

        With `make_room`, a conversion that doesn't fit is tried again with every kept map swapped.
        """
        while not state.fits:
            trials = [_with(state.actions, i, name) for i, name in self._convertible(state)]
            if not trials:
                return
            # A recompute may pin what its neighbour moved, so one alone can make it worse and two together better.
            state = self._most_relief(state, trials) or min(
                map(self.evaluated, trials), key=lambda trial: trial.excess_bytes
            )
        again = self._evaluated_with_room if make_room else self.evaluated
        while True:
            recompute_s = {
                i: math.inf if (option := self.profile.stages[i].recompute) is None else option.recompute_s
                for i in _of(state, "swap")
            }
            promising = sorted(recompute_s, key=lambda i: recompute_s[i] - state.wait_s(i))[: self.candidates]
            recomputed = {
                i: again(_with(state.actions, i, self._converted(i))) for i in promising if recompute_s[i] < math.inf
            }
            kept = {i: again(_with(state.actions, i, "keep")) for i in promising}
            best = _fastest([*recomputed.values(), *kept.values()])
            # A tie is no gain.
            if best is None or best.makespan_s >= state.makespan_s * (1 - EQUAL_S):
                # Several conversions may pay together: go on while the estimate promises a gain.
                best = _fastest(s for i, s in recomputed.items() if state.wait_s(i) > recompute_s[i])
            if best is None:
                return
            state = best

    def _evaluated_with_room(self, actions: Actions) -> _Costed:
        """Replay `actions`; where they don't fit, with the maps that are kept swapped again."""
        state = self.evaluated(actions)
        if state.fits:
            return state
        swapped = zip(self.start("swap"), actions, strict=True)
        return self.evaluated(tuple(most if now == "keep" else now for most, now in swapped))

    def _converted(self, i: int) -> str:
        """The option of stage `i` after a conversion to recompute."""
        return self.again if self.profile.stages[i].find(self.again) is not None else "recompute"

    def _convertible(self, state: _Costed) -> list[tuple[int, str]]:
        """Stages not recomputed that can be, and their option then."""
        return [
            (i, self._converted(i))
            for i, (stage, now) in enumerate(zip(self.profile.stages, state.actions, strict=True))
            if not now.startswith("recompute") and stage.recompute is not None
        ]

    def _most_relief(self, state: _Costed, trials: Iterable[Actions]) -> _Costed | None:
        """Pick the trial that takes most excess bytes off per second it adds; None if none takes any off.

        Free relief goes first, the largest; then the best rate.
        """
        helpful = [trial for trial in map(self.evaluated, trials) if trial.excess_bytes < state.excess_bytes]

        def rate(trial: _Costed) -> tuple[bool, float, int]:
            relief = state.excess_bytes - trial.excess_bytes
            added_s = max(0.0, trial.makespan_s - state.makespan_s)
            return added_s == 0, relief / added_s if added_s else 0.0, relief

        return max(helpful, key=rate, default=None)


def _fastest(states: Iterable[_Costed]) -> _Costed | None:
    return min((state for state in states if state.fits), key=lambda state: state.makespan_s, default=None)


def _of(state: _Costed, action: str) -> list[int]:
    return [i for i, now in enumerate(state.actions) if now == action]


def _with(actions: Actions, stage: int, action: str) -> Actions:
    return (*actions[:stage], action, *actions[stage + 1 :])
