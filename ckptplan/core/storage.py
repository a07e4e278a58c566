"""Storage: a memory block that outlives the program step that made it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptplan.core.checks import MOST_BYTES, check_fields, is_int, short_repr
from ckptplan.core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Storage:
    """One memory block that outlives the stage that made it. Views share it, and it is counted once.

    Parameters
    ----------
    name : str
        For messages: the stage that makes it, and a number.
    nbytes : int
        Size as the device's allocator counts it.
    born : int
        Forward step that makes it; -1: it exists before the step.
    program_until : int
        Last forward step at whose start a variable of the program holds it; `born` if none does.
    to_end : bool
        Whether it counts until the end of the step: the caller keeps it, like the model's output, or the program or its
        graph holds it when forward ends.
    stays : bool
        Whether it never moves, because a transfer would cost more than it frees.
    graph_until : int or None
        For a storage saved by a graph that the program drops in forward: the last forward step at whose start the graph
        is there. Only one stage may hold such a storage. From the next forward step on no stage holds it, and no
        backward reads it. None: stages hold it until their backward.
    on_host : bool
        Whether the tier to which it moves has the same bytes already, as of frozen weights. Then it leaves without a
        copy, and is copied back.
    origin : str
        For messages: the operation that makes it, the module whose forward runs then, and the line of the model's code,
        such as "aten.gelu in h.0.mlp.act, modeling_gpt2.py:312". Empty: not known. Comparisons of storages ignore it.
    """

    name: str
    nbytes: int
    born: int
    program_until: int
    to_end: bool = False
    stays: bool = False
    graph_until: int | None = None
    on_host: bool = False
    origin: str = field(default="", compare=False)

    @property
    def copied_bytes(self) -> int:
        """Bytes that are copied out where it moves."""
        return 0 if self.on_host else self.nbytes

    @staticmethod
    def upgraded(value: dict[str, Any]) -> dict[str, Any]:
        """Read what versions wrote that knew the bytes alone of a storage whose graph its own stage drops."""
        nbytes = value.pop("dropped_bytes", 0)
        return {**value, "nbytes": nbytes, "graph_until": value["born"]} if nbytes else value

    def __post_init__(self) -> None:
        owner = f"storage {self.name!r}"
        check_fields(owner, self)
        steps = (self.born, self.program_until)
        if not all(map(is_int, steps)) or not -1 <= self.born <= self.program_until < MOST_BYTES:
            raise InvalidInputError(
                f"{owner}: born={short_repr(self.born)}, program_until={short_repr(self.program_until)}; "
                "they must be forward steps with -1 <= born <= program_until"
            )
        until = self.graph_until
        if until is not None and not (is_int(until) and self.born <= until < MOST_BYTES):
            raise InvalidInputError(
                f"{owner}: graph_until={short_repr(until)} must be a forward step from born={self.born} on, or None"
            )
