"""A profile as searches and bounds read it: which stages may hold which bytes, in which steps, under which option.

All of it comes from NOTE [Residency] in `core/rules.py`, and is worked out once for each profile that is solved. An
option is named by its code, its position in the menu of its stage. What a stage holds is that by itself, in no segment;
what segments change (rule 2) depends on where they begin, and is left to `rules.held`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptplan.core import rules
from ckptplan.core.profile import Profile


@dataclass(frozen=True, slots=True)
class Holder:
    """How one stage may hold one storage: the codes under which it holds it, and those of them that would move it."""

    stage: int
    holding: frozenset[int]
    moving: frozenset[int]


class Chain:
    """The bytes of one profile, by storage, by step, and by stage and code.

    Parameters
    ----------
    profile : Profile

    Attributes
    ----------
    program : list of range
        Per storage, the forward steps in which the program or the caller holds it.
    movers : list of range
        Per storage, the stages that may move it if no other stage forbids it.
    decided : list of bool
        Per storage, whether stages that hold it do so until their backward, and decisions say which do.
    holders : list of tuple of Holder
        Per storage, the stages that may hold it, in order.
    forward_bytes, backward_bytes : list of int
        Per step, bytes that are there whatever is decided: the base, and what the program or the caller holds.
    held : list of list of tuple of int
        Per stage and code, the `decided` storages that it holds.
    passing : list of list of list
        Per stage and code, steps and bytes of graphs that are dropped in forward (see `rules.passing`).
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        stages, storages = profile.stages, profile.storages
        n = self.n = len(stages)
        self.program = [rules.program_steps(storage, n) for storage in storages]
        self.movers = [rules.movers(storage, n) for storage in storages]
        self.decided = [rules.counts(storage) and rules.awaits_backward(storage) for storage in storages]
        self.holders = self._holders()
        self.forward_bytes, self.backward_bytes = list(profile.base_forward_bytes), list(profile.base_backward_bytes)
        for storage, steps in zip(storages, self.program, strict=True):
            for k in steps:
                self.forward_bytes[k] += storage.nbytes
        kept_by_caller = sum(storage.nbytes for storage in storages if storage.to_end)
        self.backward_bytes = [nbytes + kept_by_caller for nbytes in self.backward_bytes]
        self.held = [[tuple(s for s in option.held if self.decided[s]) for option in stage.options] for stage in stages]
        self.passing = [
            [rules.passing(profile, i, option) for option in stage.options] for i, stage in enumerate(stages)
        ]

    def _holders(self) -> list[tuple[Holder, ...]]:
        found: list[list[Holder]] = [[] for _ in self.profile.storages]
        for i, stage in enumerate(self.profile.stages):
            holding: dict[int, set[int]] = {}
            moving: dict[int, set[int]] = {}
            for code, option in enumerate(stage.options):
                for s in option.held:
                    holding.setdefault(s, set()).add(code)
                for s in option.moved:
                    moving.setdefault(s, set()).add(code)
            for s, codes in holding.items():
                found[s].append(Holder(i, frozenset(codes), frozenset(moving.get(s, ()))))
        return [tuple(holders) for holders in found]

    def bytes_of(self, storages: tuple[int, ...]) -> int:
        """Bytes of these storages together."""
        return sum(self.profile.storages[s].nbytes for s in storages)
