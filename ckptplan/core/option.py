"""Option: one way to run a stage, with the storages that it holds and moves, its bytes and its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ckptplan.core.checks import check_fields, check_number
from ckptplan.core.errors import InvalidInputError

Action = Literal["keep", "swap", "recompute"]
ACTIONS: tuple[Action, ...] = get_args(Action)


DISCARD = "discard"
"""Name of an option of stages whose graph forward drops, which no segment can have: it saves the inputs as "recompute"
does, and runs only if a backward reads the graph after all."""

Way = tuple[int, ...] | float
"""How a stage runs again; see `Option.way`."""


def check_ratio(owner: str, ratio: float, ops: Sequence[int]) -> None:
    """Raise `InvalidInputError` unless compiled code can have this `activation_memory_budget`."""
    check_number(owner, 0, 1, ratio=ratio)
    if ratio and ops:
        raise InvalidInputError(f"{owner}: ratio={ratio} and ops={ops}: compiled code saves no operations' outputs")


def checked_actions(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return them, or raise `InvalidInputError` unless they are "keep" and others that exist."""
    if not isinstance(actions, Iterable):
        raise InvalidInputError(f"actions={actions!r}: give 'keep' and any of 'swap', 'recompute'")
    found = tuple(actions)
    unknown = [a for a in found if a not in ACTIONS]
    if unknown or "keep" not in found:
        wrong = f"unknown action {unknown[0]!r}" if unknown else "'keep' is missing, and every stage needs it"
        raise InvalidInputError(f"actions={found!r}: {wrong}; give 'keep' and any of 'swap', 'recompute'")
    return found


class HowAgain:
    """What follows from the fields that say how a stage runs again."""

    __slots__ = ()
    recomputes: bool
    ops: tuple[int, ...]
    ratio: float

    @property
    def way(self) -> Way:
        """How it runs again: the operations whose outputs it saves, or the ratio of its compiled code."""
        return self.ratio or self.ops

    @property
    def runs_again(self) -> bool:
        """Whether backward calls the stage's forward again: compiled code runs a part of it by itself."""
        return self.recomputes and not self.ratio


@dataclass(frozen=True, slots=True)
class Option(HowAgain):
    """One way to run a stage.

    These names have rules:

    - "recompute": needed by every module stage of a segment. It moves nothing and has no `ops`.
    - "recompute+swap": holds all that "recompute" holds, and moves some of it. In a segment it costs the excess of its
      `overhead_s` and `launch_s` over those of "recompute".
    - "compiled-1", "compiled-2", ...: run with a `ratio`. The larger the number, the less they save. "compiled-1+swap",
      ... also move what they save.
    - "weights", "recompute+weights", "selective-1+weights", ...: as "keep", "recompute", "selective-1", ..., and the
      stage's weights move. "optimizer", "gradients" and "weights+gradients" are alike. In a profile that offloads
      these, the options that move activations move them too.
    - "discard": `recomputes` is true and `recompute_s` is 0. Its stage has no "recompute", and no transfer has its
      prefetch point there.

    Parameters
    ----------
    name : str
        Unique in its stage.
    saved : tuple of int
        Storages held until backward that can be moved, in the order in which the runtime saves them. As in `pinned`,
        they are made by this stage or before.
    pinned : tuple of int
        Storages held until backward that can't be moved; none of them is in `saved`.
    forward_bytes, backward_bytes : int
        Bytes that the stage adds to those at its start, at the worst moment of its forward or backward, its results
        included.
    recompute_s : float
        Compute time of the recompute before its backward; of compiled code, what its forward and backward take more.
    recomputes : bool
        Whether backward runs the forward again, without the operations in `ops`, or a part of it (`ratio`).
    moves : tuple of int
        Positions in `saved` of the storages that leave the device, where rule 4 of NOTE [Residency] in rules.py allows
        it.
    ops : tuple of int
        Operations whose outputs are saved although the stage recomputes, by their number in its forward.
    launch_s : float
        Time in which the host launches the recompute and the copies; 0 if the host isn't modelled.
    overhead_s : float
        Further compute time, all of it counted in backward: what the copies take from the compute beside them, the
        runtime's own code, and where compiled code is faster, what the model's own code takes more than the fastest.
    ratio : float
        `activation_memory_budget` of the compiled code that runs in place of the model's own, saves less and computes a
        part again within backward (NOTE [Variants] in training/variants.py). `recomputes` is then true. 0: the model's
        own code.
    """

    name: str
    saved: tuple[int, ...]
    pinned: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int
    recompute_s: float = 0.0
    recomputes: bool = False
    moves: tuple[int, ...] = ()
    ops: tuple[int, ...] = ()
    launch_s: float = 0.0
    overhead_s: float = 0.0
    ratio: float = 0.0

    def __post_init__(self) -> None:
        owner = f"option {self.name!r}"
        check_fields(owner, self)
        if set(self.saved) & set(self.pinned):
            raise InvalidInputError(f"{owner}: {sorted(set(self.saved) & set(self.pinned))} are both saved and pinned")
        if any(p >= len(self.saved) for p in self.moves):
            raise InvalidInputError(
                f"{owner}: moves={self.moves} are not positions in {len(self.saved)} saved storages"
            )
        if not self.recomputes and (self.recompute_s or self.ops or self.ratio):
            raise InvalidInputError(
                f"{owner}: recompute_s={self.recompute_s}, ops={self.ops}, ratio={self.ratio} must be 0 and () with "
                "recomputes=False"
            )
        check_ratio(owner, self.ratio, self.ops)
        if not self.recomputes and not self.moves and self.launch_s:
            raise InvalidInputError(
                f"{owner}: launch_s={self.launch_s} must be 0 with recomputes=False and no moves; what every option "
                "takes belongs to the stage"
            )

    @property
    def added_s(self) -> float:
        """Compute time that the option adds to the stage's forward and backward."""
        return self.recompute_s + self.overhead_s

    @property
    def held(self) -> tuple[int, ...]:
        """Storages held until backward, moved ones included."""
        return self.saved + self.pinned

    @property
    def moved(self) -> tuple[int, ...]:
        """Storages in `moves`."""
        return tuple(self.saved[p] for p in self.moves)

    @property
    def action(self) -> Action:
        """The action this is a kind of."""
        return "recompute" if self.recomputes else "swap" if self.moves else "keep"

    def allowed(self, actions: Sequence[str]) -> bool:
        """Return whether the option uses no other actions than `actions` and "keep"."""
        return (not self.recomputes or "recompute" in actions) and (not self.moves or "swap" in actions)
