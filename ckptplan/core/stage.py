"""Stage: a call of a module, with its options, times and input tensors.

A step runs forward 0, 1, ..., L-1, then backward L-1, ..., 1, 0, then the optimizer update. The bytes of each of these
steps follow from NOTE [Residency] in rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptplan.core.checks import MOST_BYTES, check_fields, is_int, short_repr
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.option import DISCARD, Option

Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A stage through which forward itself runs a backward: for a penalty, forces, a Hessian product, an inner loop.

    Parameters
    ----------
    stage : str
        Its name.
    plain, creating : int
        Number of backwards that begin in it and make no graph, and of those that make one (`create_graph=True`).
    """

    stage: str
    plain: int = 0
    creating: int = 0

    def __post_init__(self) -> None:
        check_fields("differentiated", self)


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor among the arguments of a stage.

    A plan is valid for a call if each tensor is at the path of a planned one and larger in no dimension.

    Parameters
    ----------
    path : str
        Its path in `(args, kwargs)`, as `torch.utils._pytree.keystr` writes it.
    dtype : str
        Its type without "torch.", such as "float32".
    shape : tuple of int
        Its size in each dimension, 0 or more.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields("input", self)
        if not all(is_int(n) and 0 <= n < MOST_BYTES for n in self.shape):
            raise InvalidInputError(
                f"input {self.path!r}: shape={short_repr(self.shape)} must be a tuple of sizes, 0 or more"
            )

    def __str__(self) -> str:
        return f"{self.path} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Stage:
    """One call of one module (or the operations between two such calls, called glue), which receives one decision.

    Parameters
    ----------
    name : str
        The module's qualified name, with `#k` from its second call on. A name in parentheses is glue.
    kind : str
        Stages of one kind have the same operations, shapes and dtypes, and therefore the same measurements.
    options : tuple of Option
        Ways to run it, with unique names. "keep" is the first, and for glue the only one.
    forward_s, backward_s : float
        Compute time of forward and of backward, without recompute.
    linked : tuple of int
        The storages held by "recompute" that are unmodified outputs of earlier stages. A segment with the stage that
        made such a storage makes it again.
    inputs : tuple of InputTensor or None
        The largest tensors among its arguments that a plan is valid for; None: not known, and not checked.
    forward_launch_s, backward_launch_s : float
        Time in which the host launches forward and backward; 0 if the host isn't modelled.
    rerun_overhead_s, rerun_overhead_launch_s : float
        Time that a run in a segment's sweep takes besides `forward_s` and `forward_launch_s`, for the runtime's own
        code; 0 for a stage without "recompute".
    forward_wait_s : float
        The part of `forward_s` in which the first run waits for weights that return before it (NOTE [Offloaded
        weights] in resident.py). Further runs don't wait.
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
    rerun_overhead_s: float = 0.0
    rerun_overhead_launch_s: float = 0.0
    forward_wait_s: float = 0.0

    def __post_init__(self) -> None:
        owner = f"stage {self.name!r}"
        check_fields(owner, self)
        if self.forward_wait_s > self.forward_s:
            raise InvalidInputError(
                f"{owner}: forward_wait_s={self.forward_wait_s} must be at most forward_s={self.forward_s}, its whole"
            )
        names = [option.name for option in self.options]
        if not names or names[0] != "keep" or len(set(names)) != len(names):
            raise InvalidInputError(f"{owner}: options {names} must begin with 'keep' and have no name twice")
        if self.keep.recomputes or self.keep.moves:
            raise InvalidInputError(f"{owner}: 'keep' must not recompute or move anything")
        again = self.find("recompute")
        if again is not None and (not again.recomputes or again.moves or again.ops):
            raise InvalidInputError(f"{owner}: 'recompute' must have recomputes=True, and neither moves nor ops")
        if self.linked and (again is None or not set(self.linked) <= set(again.held)):
            raise InvalidInputError(f"{owner}: linked={self.linked} must be storages that 'recompute' holds")
        discard = self.find(DISCARD)
        if discard is not None and (
            not discard.recomputes or discard.moves or discard.ops or discard.recompute_s or again is not None
        ):
            raise InvalidInputError(
                f"{owner}: 'discard' must have recomputes=True, neither moves, ops nor recompute_s, and no 'recompute' "
                "beside it"
            )
        swapping = self.find("recompute+swap")
        if swapping is not None and not (
            again is not None
            and swapping.recomputes
            and swapping.moves
            and not swapping.ops
            and set(swapping.held) >= set(again.held)
        ):
            raise InvalidInputError(
                f"{owner}: 'recompute+swap' must hold all that 'recompute' holds, and move some of it"
            )
        if self.is_glue and len(self.options) > 1:
            raise InvalidInputError(f"{owner}: options {names}; glue can only have 'keep'")
        if again is None and (self.rerun_overhead_s or self.rerun_overhead_launch_s):
            raise InvalidInputError(
                f"{owner}: rerun_overhead_s={self.rerun_overhead_s}, rerun_overhead_launch_s="
                f"{self.rerun_overhead_launch_s} must be 0 without an option 'recompute': no sweep runs the stage"
            )

    @property
    def is_glue(self) -> bool:
        """Whether these are the operations between two calls of modules."""
        return self.name.startswith("(")

    @property
    def has_backward(self) -> bool:
        """Whether backward runs: not where forward drops the graph, so that it may be discarded."""
        return self.find(DISCARD) is None

    @property
    def rerun_s(self) -> float:
        """Compute time of a run in a segment's sweep; 0 for glue, which no sweep runs again."""
        return 0.0 if self.is_glue else self.forward_s - self.forward_wait_s + self.rerun_overhead_s

    @property
    def rerun_launch_s(self) -> float:
        """Time in which the host launches such a run."""
        return 0.0 if self.is_glue else self.forward_launch_s + self.rerun_overhead_launch_s

    @property
    def keep(self) -> Option:
        """The option that holds everything."""
        return self.options[0]

    @property
    def recompute(self) -> Option | None:
        """The option that holds only the inputs; None if the stage can't run twice."""
        return self.find("recompute")

    def moving_s(self, option: Option) -> tuple[float, float]:
        """What a stage of a segment takes more with `option` than with "recompute": compute time, launching time."""
        again = self.recompute
        if again is None or not option.moves:
            return 0.0, 0.0
        return max(0.0, option.overhead_s - again.overhead_s), max(0.0, option.launch_s - again.launch_s)

    def find(self, name: str) -> Option | None:
        """Return the option with this name, or None."""
        return next((option for option in self.options if option.name == name), None)

    def option(self, name: str) -> Option:
        """Return the option with this name.

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
