"""The chain: stages in forward order, the storages they share, and what each way to run a stage costs.

A step runs forward 0, 1, ..., L-1, then backward L-1, ..., 1, 0, then the optimizer update. The bytes of each of these
steps follow from NOTE [Residency] in rules.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ckptplan.core.errors import InvalidInputError

STAGING_BYTES = 64 << 20
"""Page-locked host memory of a disk tier beside a device: two chunks in each direction."""

Action = Literal["keep", "swap", "recompute"]
ACTIONS: tuple[Action, ...] = get_args(Action)
Tier = Literal["host", "disk"]
"""Where swapped bytes go: the host tier, or the disk behind it."""
TIERS: tuple[Tier, ...] = get_args(Tier)
Phase = Literal["forward", "backward", "update"]


MOST_BYTES = 1 << 60
"""Far above any device or host; sums of a few such numbers still fit 64 bits."""
MOST_SECONDS = 1e9


def is_int(value: object) -> bool:
    """Whether `value` is an integer and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_bytes(owner: str, /, **values: int) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a whole number of bytes, 0 or more."""
    for name, value in values.items():
        if not is_int(value) or not 0 <= value < MOST_BYTES:
            raise InvalidInputError(
                f"{owner}: {name}={_short(value)} must be a whole number of bytes, 0 or more and below 2**60"
            )


def check_seconds(owner: str, /, **values: float) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a finite number of seconds, 0 or more."""
    for name, value in values.items():
        # A comparison with NaN is false.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST_SECONDS:
            raise InvalidInputError(
                f"{owner}: {name}={_short(value)} must be a finite number of seconds, 0 or more and at most 1e9"
            )


def check_indices(owner: str, /, **values: tuple[int, ...]) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a tuple of distinct indices."""
    for name, indices in values.items():
        if not isinstance(indices, tuple) or not all(is_int(i) and 0 <= i < 1 << 31 for i in indices):
            raise InvalidInputError(f"{owner}: {name}={_short(indices)} must be a tuple of indices, 0 to 2**31")
        if len(set(indices)) != len(indices):
            raise InvalidInputError(f"{owner}: {name} names one twice: {indices}")


def check_type(owner: str, kind: type, /, **values: object) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a `kind`."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise InvalidInputError(f"{owner}: {name}={_short(value)} must be a {kind.__name__}")


def check_each(owner: str, kind: type, /, **values: tuple[object, ...]) -> None:
    """Raise `InvalidInputError` for the first of `values` that isn't a tuple of `kind`."""
    for name, items in values.items():
        if not isinstance(items, tuple) or not all(isinstance(item, kind) for item in items):
            raise InvalidInputError(f"{owner}: {name}={_short(items)} must be a tuple of {kind.__name__}")


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print very long ones
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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
    dropped_bytes : int
        Size of one that forward drops with the graph that saved it (an output that nothing uses). It is there when its
        stage ends, and no stage holds it until backward: `nbytes` is 0.
    """

    name: str
    nbytes: int
    born: int
    program_until: int
    to_end: bool = False
    stays: bool = False
    dropped_bytes: int = 0

    def __post_init__(self) -> None:
        check_type("storage", str, name=self.name)
        owner = f"storage {self.name!r}"
        check_bytes(owner, nbytes=self.nbytes, dropped_bytes=self.dropped_bytes)
        check_type(owner, bool, to_end=self.to_end, stays=self.stays)
        steps = (self.born, self.program_until)
        if not all(map(is_int, steps)) or not -1 <= self.born <= self.program_until < MOST_BYTES:
            raise InvalidInputError(
                f"{owner}: born={_short(self.born)}, program_until={_short(self.program_until)}; "
                "want forward steps with -1 <= born <= program_until"
            )


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage.

    Parameters
    ----------
    name : str
        Unique in its stage: "keep", "swap", "recompute", "recompute+swap" (its inputs), "selective-1", ...
    saved : tuple of int
        Storages held until backward that could be moved, in the order in which the runtime meets them.
    pinned : tuple of int
        Storages held until backward that can't be.
    forward_bytes, backward_bytes : int
        What the stage adds to the bytes at its start, at the worst moment of its forward and of its backward.
    recompute_s : float
        Compute time in front of its backward.
    recomputes : bool
        Backward runs its forward again, all of it or what `ops` leaves.
    moves : tuple of int
        Positions in `saved` of what leaves the device where rule 4 of NOTE [Residency] lets it.
    ops : tuple of int
        Operations whose outputs a recomputing stage saves all the same, by their number in its forward.
    launch_s : float
        Time in which the host launches the recompute, beside the device; 0 where it is no lane of its own.
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

    def __post_init__(self) -> None:
        check_type("option", str, name=self.name)
        owner = f"option {self.name!r}"
        check_bytes(owner, forward_bytes=self.forward_bytes, backward_bytes=self.backward_bytes)
        check_seconds(owner, recompute_s=self.recompute_s, launch_s=self.launch_s)
        check_type(owner, bool, recomputes=self.recomputes)
        check_indices(owner, saved=self.saved, pinned=self.pinned, moves=self.moves, ops=self.ops)
        if set(self.saved) & set(self.pinned):
            raise InvalidInputError(f"{owner}: {sorted(set(self.saved) & set(self.pinned))} are saved and pinned")
        if any(p >= len(self.saved) for p in self.moves):
            raise InvalidInputError(
                f"{owner}: moves={self.moves} are not positions in {len(self.saved)} saved storages"
            )
        if not self.recomputes and (self.recompute_s or self.launch_s or self.ops):
            raise InvalidInputError(
                f"{owner}: recompute_s={self.recompute_s}, launch_s={self.launch_s}, ops={self.ops}, but it doesn't "
                "recompute"
            )

    @property
    def held(self) -> tuple[int, ...]:
        """Storages held until backward, moved ones included."""
        return self.saved + self.pinned

    @property
    def moved(self) -> tuple[int, ...]:
        """Storages it would move."""
        return tuple(self.saved[p] for p in self.moves)

    @property
    def action(self) -> Action:
        """The action this is a kind of."""
        return "recompute" if self.recomputes else "swap" if self.moves else "keep"

    def allowed(self, actions: Sequence[str]) -> bool:
        """Whether it uses `actions` alone; "keep" needs no leave."""
        return (not self.recomputes or "recompute" in actions) and (not self.moves or "swap" in actions)


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor among what a stage is called with; a plan holds for such tensors, and for those that are nowhere larger.

    Parameters
    ----------
    path : str
        Where it is among the arguments, as `torch.utils._pytree.keystr` writes it of `(args, kwargs)`.
    dtype : str
        Without "torch.".
    shape : tuple of int
    """

    path: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_type("input", str, path=self.path, dtype=self.dtype)
        if not isinstance(self.shape, tuple) or not all(is_int(n) and 0 <= n < MOST_BYTES for n in self.shape):
            raise InvalidInputError(
                f"input {self.path!r}: shape={_short(self.shape)} must be a tuple of sizes, 0 or more"
            )

    def __str__(self) -> str:
        return f"{self.path} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Stage:
    """One call of one module (or the operations between two such calls), which receives one decision.

    Parameters
    ----------
    name : str
        Qualified name, `#k` added from the second call on; in parentheses for operations outside of any stage.
    kind : str
        Equal kinds have the same operations, shapes and dtypes, and so the same measurements.
    options : tuple of Option
        The menu; the first is "keep".
    forward_s, backward_s : float
        Compute time of forward and of backward, recompute left out.
    linked : tuple of int
        Those of the storages which "recompute" holds that are, unmodified, outputs of earlier stages.
    inputs : tuple of InputTensor or None
        The tensors it is called with, the largest that a plan is made for; None: not known.
    forward_launch_s, backward_launch_s : float
        Time in which the host launches forward and backward, beside the device; 0 where it is no lane of its own.
    """

    name: str
    kind: str
    options: tuple[Option, ...]
    forward_s: float
    backward_s: float
    linked: tuple[int, ...] = ()
    inputs: tuple[InputTensor, ...] | None = None
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0

    def __post_init__(self) -> None:
        check_type("stage", str, name=self.name)
        owner = f"stage {self.name!r}"
        check_type(owner, str, kind=self.kind)
        check_each(owner, Option, options=self.options)
        check_seconds(
            owner,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            forward_launch_s=self.forward_launch_s,
            backward_launch_s=self.backward_launch_s,
        )
        if self.inputs is not None:
            check_each(owner, InputTensor, inputs=self.inputs)
        check_indices(owner, linked=self.linked)
        names = [option.name for option in self.options]
        if not names or names[0] != "keep" or len(set(names)) != len(names):
            raise InvalidInputError(f"{owner}: options {names}; want 'keep' first and no name twice")
        if self.keep.recomputes or self.keep.moves:
            raise InvalidInputError(f"{owner}: 'keep' neither recomputes nor moves anything")
        again = self.find("recompute")
        if again is not None and (not again.recomputes or again.moves or again.ops):
            raise InvalidInputError(f"{owner}: 'recompute' recomputes, and neither moves nor saves operations' outputs")
        if self.linked and (again is None or not set(self.linked) <= set(again.held)):
            raise InvalidInputError(f"{owner}: linked={self.linked} must be among what 'recompute' holds")
        swapping = self.find("recompute+swap")
        if swapping is not None and not (
            again is not None
            and swapping.recomputes
            and swapping.moves
            and not swapping.ops
            and set(swapping.held) >= set(again.held)
        ):
            raise InvalidInputError(f"{owner}: 'recompute+swap' holds all that 'recompute' does, and moves some of it")
        if self.is_glue and len(self.options) > 1:
            raise InvalidInputError(f"{owner}: options {names}; operations outside of any module's call are kept")

    @property
    def is_glue(self) -> bool:
        """Whether these are operations outside of any module's call."""
        return self.name.startswith("(")

    @property
    def keep(self) -> Option:
        """The option that holds everything."""
        return self.options[0]

    @property
    def recompute(self) -> Option | None:
        """The option that holds its inputs alone; None where the stage can't run twice."""
        return self.find("recompute")

    def find(self, name: str) -> Option | None:
        """The option of that name."""
        return next((option for option in self.options if option.name == name), None)

    def option(self, name: str) -> Option:
        """The option of that name.

        Raises
        ------
        InvalidInputError
            If the stage has none.
        """
        found = self.find(name)
        if found is None:
            raise InvalidInputError(
                f"stage {self.name!r} has no option {name!r}; its options are {', '.join(o.name for o in self.options)}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Segment:
    """Stages `first..last` recomputed together (NOTE [Residency], rule 6), with inner segments for its sweep.

    Parameters
    ----------
    first, last : int
        Stage indices; at the top level `first < last`, since one stage by itself is an option's business.
    inner : tuple of Segment
        In order and disjoint, within `first..last-1`.
    """

    first: int
    last: int
    inner: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        if not (is_int(self.first) and is_int(self.last) and 0 <= self.first <= self.last):
            raise InvalidInputError(
                f"segment {_short(self.first)}..{_short(self.last)}: want stage indices with 0 <= first <= last"
            )
        check_each(f"segment {self.first}..{self.last}", Segment, inner=self.inner)
        at = self.first
        for segment in self.inner:
            if segment.first < at or segment.last >= self.last:
                raise InvalidInputError(
                    f"segment {self.first}..{self.last}: inner segment {segment.first}..{segment.last} is out of order "
                    f"or not within {self.first}..{self.last - 1}"
                )
            at = segment.last + 1

    def depth(self, stage: int) -> int:
        """How many segments, this one and inner ones, contain `stage`: so many times it runs again."""
        if not self.first <= stage <= self.last:
            return 0
        return 1 + sum(segment.depth(stage) for segment in self.inner)


@dataclass(frozen=True, slots=True)
class Link:
    """The way to a tier and back, at what speed a transfer passes the two first-in-first-out queues.

    A transfer is all that a stage moves in one direction.

    Parameters
    ----------
    latency_s : float
        What a transfer takes beyond its bytes.
    copy_s : float
        What each storage of a transfer takes to be issued. No time in a plan has it; storages for which it matters stay
        (`least_bytes`).
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0
    copy_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("out_bytes_per_s", self.out_bytes_per_s), ("in_bytes_per_s", self.in_bytes_per_s)):
            # Beyond these, a transfer takes longer than the age of the universe or no time at all.
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-3 <= value <= 1e18:
                raise InvalidInputError(
                    f"link: {name}={_short(value)} must be a finite number of bytes per second, from 1e-3 to 1e18"
                )
        check_seconds("link", latency_s=self.latency_s, copy_s=self.copy_s)

    @property
    def least_bytes(self) -> int:
        """A storage of fewer bytes takes longer to be issued than to be copied: half of the link's rate is lost."""
        return math.ceil(self.copy_s * max(self.out_bytes_per_s, self.in_bytes_per_s))

    def out_s(self, nbytes: int) -> float:
        """Time one transfer of `nbytes` takes to the tier, alone."""
        return self.latency_s + nbytes / self.out_bytes_per_s

    def in_s(self, nbytes: int) -> float:
        """Time one transfer of `nbytes` takes from the tier, alone."""
        return self.latency_s + nbytes / self.in_bytes_per_s

    def behind(self, nearer: Link) -> Link:
        """The same link, in nothing faster than `nearer`, through which its transfers pass; for what was measured."""
        return Link(
            min(self.out_bytes_per_s, nearer.out_bytes_per_s),
            min(self.in_bytes_per_s, nearer.in_bytes_per_s),
            max(self.latency_s, nearer.latency_s),
            max(self.copy_s, nearer.copy_s),
        )
