"""What a loop holds of the forward before when the next one begins: its output, or all that its backward needs.

NOTE [Held over]
A plan counts one forward at a time, with its output until its backward has ended. Two habits of loops hold more. A
variable of the loop (`output = model(x)`) holds the output until the next forward has returned; and a second forward
before the first one's backward finds all that the first one saved. Neither can be planned for without knowing the loop,
so each forward begins with a look at what is alive of those before it. The output is known by weak references to its
storages, and a graph by its pass, which the hooks in its nodes hold.

What is alive may go at any moment, so a plan that has room for it until forward ends is warned of and no more. A second
forward without that room is an error.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from ckptplan.core.errors import PlanMismatchError
from ckptplan.core.plan import Plan
from ckptplan.core.units import format_bytes
from ckptplan.runtime.observe.measure import tensors_in
from ckptplan.runtime.observer import Observer
from ckptplan.runtime.swap.own import storages_of

_LEAST_BYTES = 512
"""Storages of no more, a loss for one, don't count: PyTorch's allocator gives them as much on CUDA."""


class Warned:
    """Warns that the peak may exceed the budget, of each thing once.

    Attributes
    ----------
    of : set of str
    """

    def __init__(self) -> None:
        self.of: set[str] = set()

    def once(self, what: str, text: str) -> None:
        """Warn of `what`."""
        if what not in self.of:
            self.of.add(what)
            warnings.warn(f"the peak may exceed the budget: {text}", RuntimeWarning, stacklevel=3)


class HeldOver(Observer):
    """Notices what a plan didn't reckon with of the forwards before (NOTE [Held over])."""

    def __init__(self, plan: Plan) -> None:
        reserved_bytes = max((plan.reserved_bytes or 0) - plan.peak_bytes, 0)
        self._peak_bytes = plan.peak_bytes + reserved_bytes
        forward = plan.peak_bytes if plan.forward_peak_bytes is None else plan.forward_peak_bytes
        self._forward_peak_bytes = forward + reserved_bytes
        self._between_bytes = plan.between_bytes or 0
        self._budget_bytes = plan.budget_bytes
        self._output: list[weakref.ref[torch.UntypedStorage]] = []
        self._waiting: list[weakref.ref[Any]] = []
        self._warned = Warned()

    def output(self, output: Any, inputs: Any) -> None:
        """A forward has made `output` from `inputs`."""
        made = {s._cdata: s for s in _storages(output)}
        if made:
            given = {s._cdata for s in _storages(inputs)}
            self._output = [weakref.ref(storage) for key, storage in made.items() if key not in given]

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """A forward begins: raise or warn if there is no room for what is alive of those before.

        Parameters
        ----------
        waiting : weakref.ref or None
            The pass of the one before, if its backward hasn't begun.

        Raises
        ------
        PlanMismatchError
            If another forward is still to have its backward, and there is no room for this one beside it.
        """
        passes = self._waiting if waiting is None else [*self._waiting, waiting]
        self._waiting = [ref for ref in passes if (found := ref()) is not None and not found.backward_begun]
        if self._waiting:
            more = len(self._waiting) * self._between_bytes
            text = (
                f"a forward begins while {len(self._waiting)} before it had no backward yet and hold "
                f"{format_bytes(more)}, with which the plan, for one forward at a time, doesn't reckon; it needs "
                f"{format_bytes(self._peak_bytes)} of its budget of {format_bytes(self._budget_bytes)}; plan them as "
                "one step (`step=`), or let go of their outputs and losses before this forward"
            )
            if self._forward_peak_bytes + more > self._budget_bytes:
                raise PlanMismatchError(text)
            if self._peak_bytes + more > self._budget_bytes:
                self._warned.once("held", text)
            return
        more = sum(storage.nbytes() for ref in self._output if (storage := ref()) is not None)
        if self._forward_peak_bytes + more > self._budget_bytes:
            self._warned.once(
                "held",
                f"the output of the forward before, {format_bytes(more)}, is still held when this one begins, and the "
                f"plan, whose forward needs {format_bytes(self._forward_peak_bytes)} of its budget of "
                f"{format_bytes(self._budget_bytes)}, doesn't reckon with it; put the step into a function, or `del` "
                "the output before the next forward, or solve with so much less",
            )


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    dense = [tensor for tensor in tensors_in(tree) if tensor.layout is torch.strided]
    return [s for tensor in dense for s in storages_of(tensor) if s.nbytes() > _LEAST_BYTES]
