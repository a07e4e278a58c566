"""Storage: a memory block that outlives the step that made it."""

from __future__ import annotations

from dataclasses import dataclass

from ckptplan.core.checks import MOST_BYTES, check_bytes, check_type, is_int, short_repr
from ckptplan.core.errors import InvalidInputError


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
                f"{owner}: born={short_repr(self.born)}, program_until={short_repr(self.program_until)}; "
                "want forward steps with -1 <= born <= program_until"
            )
