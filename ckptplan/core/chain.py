"""The chain: stages in forward order, the storages they share, and what each way to run a stage costs.

A step runs forward 0, 1, ..., L-1, then backward L-1, ..., 1, 0, then the optimizer update. Where the bytes are is said
once, here; the referee and the solver each work it out from this text with code of their own.

NOTE [Residency]
1. Storage `s` is *made* in forward step `s.born` (-1: before the step). From the next forward step on it is resident
   while the program holds it (`k <= s.program_until`), or a stage before `k` holds it, or the caller keeps it
   (`s.to_end`).
2. A stage holds, until its backward: under keep its `saved` and `pinned`; under swap the same, less what is away; under
   recompute its `inputs`.
3. In backward step `k` a storage is resident while a stage `i <= k` holds it, or the caller keeps it.
4. A swapped stage `o` moves some of its `saved`, none of which `stays`. Such a storage has no other holder than swapped
   stages before `o`, and it is away after forward step `release` and until backward step `prefetch`: resident in
   forward steps `k <= release` and in backward steps `k <= prefetch`, with `o <= release` and `o <= prefetch`. Both
   points are met where a module begins or ends, so neither lies in glue after the last module, and prefetch in none.
5. Bytes of a step = base(step) + resident storages at its start + transient(step, the stage's action). The transient is
   what the step adds on top of its start at the worst moment, what it makes included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ckptplan.core.errors import InvalidInputError

Action = Literal["keep", "swap", "recompute"]
ACTIONS: tuple[Action, ...] = get_args(Action)
Phase = Literal["forward", "backward", "update"]


def enforceable_points(glue: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per step, the last release and the last prefetch point at or before it that the runtime can meet.

    Release points are met where a module ends or the next one begins; prefetch points where a module's backward does.
    """
    modules = [k for k, inside in enumerate(glue) if not inside] or list(range(len(glue)))
    prefetch, last = [], modules[0]
    for k in range(len(glue)):
        last = k if k in modules else last
        prefetch.append(last)
    return tuple(min(k, modules[-1]) for k in range(len(glue))), tuple(prefetch)


def check_bytes(owner: str, **values: int) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a whole number of bytes, 0 or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 60:
            raise InvalidInputError(f"{owner}: {name}={value!r} must be a whole number of bytes, 0 or more")


def check_seconds(owner: str, **values: float) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a finite number of seconds, 0 or more."""
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise InvalidInputError(f"{owner}: {name}={value!r} must be a finite number of seconds, 0 or more")


@dataclass(frozen=True, slots=True)
class Storage:
    """One memory block that outlives the step that made it; views share it and it is counted once.

    Parameters
    ----------
    name : str
        Where it was made, for people.
    nbytes : int
        Size as the device's allocator counts it.
    born : int
        Forward step that makes it; -1 when it is there before the step.
    program_until : int
        Last forward step at whose start the program itself (its variables) holds it; `born` when no later step does.
    to_end : bool
        The caller keeps it for the whole step (the model's output).
    stays : bool
        It never moves: a transfer would cost more than it frees.
    """

    name: str
    nbytes: int
    born: int
    program_until: int
    to_end: bool = False
    stays: bool = False

    def __post_init__(self) -> None:
        check_bytes(f"storage {self.name!r}", nbytes=self.nbytes)
        if self.born < -1 or self.program_until < self.born:
            raise InvalidInputError(
                f"storage {self.name!r}: born={self.born}, program_until={self.program_until}; "
                "want -1 <= born <= program_until"
            )


@dataclass(frozen=True, slots=True)
class Transient:
    """What a stage adds to the bytes at its start, at the worst moment of its forward and of its backward."""

    forward_bytes: int
    backward_bytes: int

    def __post_init__(self) -> None:
        check_bytes("transient", forward_bytes=self.forward_bytes, backward_bytes=self.backward_bytes)


@dataclass(frozen=True, slots=True)
class Stage:
    """One call of one module (or the operations between two such calls), which receives one decision.

    Parameters
    ----------
    name : str
        Qualified name, `#k` added from the second call on; in parentheses for operations outside of any stage.
    kind : str
        Equal kinds have the same operations, shapes and dtypes, and so the same measurements.
    saved, pinned, inputs : tuple of int
        Storage indices: what autograd saves and could be moved, in the order of saving; what keep and swap hold and
        can't be moved; what recompute holds.
    keep, swap, recompute : Transient or None
        None: the action isn't available. `keep` always is.
    forward_s, backward_s, recompute_s : float
        Compute time; a recomputed stage's backward takes `recompute_s + backward_s`.
    input_bytes : int
        Bytes of the tensors passed in, the largest the plan is made for.
    """

    name: str
    kind: str
    saved: tuple[int, ...]
    pinned: tuple[int, ...]
    inputs: tuple[int, ...]
    keep: Transient
    swap: Transient | None
    recompute: Transient | None
    forward_s: float
    backward_s: float
    recompute_s: float
    input_bytes: int = 0

    def __post_init__(self) -> None:
        owner = f"stage {self.name!r}"
        check_seconds(owner, forward_s=self.forward_s, backward_s=self.backward_s, recompute_s=self.recompute_s)
        check_bytes(owner, input_bytes=self.input_bytes)
        for field, indices in (("saved", self.saved), ("pinned", self.pinned), ("inputs", self.inputs)):
            if len(set(indices)) != len(indices):
                raise InvalidInputError(f"{owner}: {field} names a storage twice: {indices}")
        if set(self.saved) & set(self.pinned):
            raise InvalidInputError(
                f"{owner}: storages {sorted(set(self.saved) & set(self.pinned))} are saved and pinned"
            )

    @property
    def is_glue(self) -> bool:
        """Whether these are operations outside of any module's call."""
        return self.name.startswith("(")

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions this stage can take."""
        return tuple(a for a in ACTIONS if self.transient(a) is not None)

    def transient(self, action: Action) -> Transient | None:
        """The transient under `action`, None where the stage can't take it."""
        if action == "keep":
            return self.keep
        return self.swap if action == "swap" else self.recompute

    def held(self, action: Action) -> tuple[int, ...]:
        """Storages held until backward under `action` (NOTE [Residency], rule 2, moved ones included)."""
        return self.inputs if action == "recompute" else self.saved + self.pinned


@dataclass(frozen=True, slots=True)
class Link:
    """The way to the host tier and back: two first-in-first-out queues."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("out_bytes_per_s", self.out_bytes_per_s), ("in_bytes_per_s", self.in_bytes_per_s)):
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
                raise InvalidInputError(f"link: {name}={value!r} must be a finite number above 0")
        check_seconds("link", latency_s=self.latency_s)

    def out_s(self, nbytes: int) -> float:
        """Time one transfer of `nbytes` takes to the host tier, alone."""
        return self.latency_s + nbytes / self.out_bytes_per_s

    def in_s(self, nbytes: int) -> float:
        """Time one transfer of `nbytes` takes from the host tier, alone."""
        return self.latency_s + nbytes / self.in_bytes_per_s
