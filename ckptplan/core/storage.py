"""Storage: a memory block that outlives the program step that made it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptplan.core.checks import MOST_BYTES, check_fields, is_int, short_repr
from ckptplan.core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Storage:
    """One memory block that outlives the step that made it; views share it and it is counted once.

    Parameters
    ----------
    name : str
        The stage that makes it and a number, for messages.
    nbytes : int
        Size as the device's allocator counts it.
    born : int
        Forward step that makes it; -1: it exists before the step.
    program_until : int
        Last forward step at whose start a variable of the program holds it; `born` if there is none.
    to_end : bool
        Whether it counts until the end of the step: the caller keeps it, like the model's output, or the program or its
        graph holds it when forward ends.
    stays : bool
        Whether it never moves, because a transfer would cost more than it frees.
    dropped_bytes : int
        Size of a storage that forward frees together with the graph that saved it (of an unused output). It exists at
        the end of its stage, but no stage holds it until backward, so `nbytes` is 0.
    origin : str
        The operation that makes it, the module whose forward runs then, and the line of the model's code, for people:
        "aten.gelu in h.0.mlp.act, modeling_gpt2.py:312". Empty if it isn't known; compared with nothing.
    """

    name: str
    nbytes: int
    born: int
    program_until: int
    to_end: bool = False
    stays: bool = False
    dropped_bytes: int = 0
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        owner = f"storage {self.name!r}"
        check_fields(owner, self)
        steps = (self.born, self.program_until)
        if not all(map(is_int, steps)) or not -1 <= self.born <= self.program_until < MOST_BYTES:
            raise InvalidInputError(
                f"{owner}: born={short_repr(self.born)}, program_until={short_repr(self.program_until)}; "
                "they must be forward steps with -1 <= born <= program_until"
            )
