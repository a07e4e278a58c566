"""Stage: a call of a module with its options and times, and the tensors it is called with.

A step runs forward 0, 1, ..., L-1, then backward L-1, ..., 1, 0, then the optimizer update. The bytes of each of these
steps follow from NOTE [Residency] in rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptplan.core.checks import MOST_BYTES, check_each, check_indices, check_seconds, check_type, is_int, short_repr
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.option import Option

Phase = Literal["forward", "backward", "update"]


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
                f"input {self.path!r}: shape={short_repr(self.shape)} must be a tuple of sizes, 0 or more"
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
