"""Memory of earlier forwards that is still held when the next one begins: outputs, and tensors saved for backward.

NOTE [Held over]
A plan counts the memory of one forward at a time, and its output until its backward has ended. Loops may hold more, in
two ways:

1. A variable of the loop holds the output until the next forward has returned::

       for x in data:
           output = model(x)  # the former output is alive until this call returns
           output.mean().backward()

2. A second forward begins before the first one's backward, while all tensors that the first one saved are alive::

       a, b = model(x), model(y)
       (a.mean() + b.mean()).backward()

A plan has room for as many forwards as it was made for (`in_flight`), mostly one. Beyond that neither can be planned
for without knowing the loop, so each forward begins with a check for memory of earlier ones:
outputs are found by weak references to their storages, and graphs by their pass, which the hooks in their nodes hold.

That memory may be freed at any moment. So an output without room is a warning. For a second forward it is an error if
there is no room until that forward ends, and a warning if there is room until then but not for the whole step.

Example of the second case: the plan's peak is 900 MiB, 700 MiB until forward ends, its budget is 1000 MiB, and the
first forward holds 200 MiB. The second forward ends at 900 MiB at most, but its backward may reach 1100 MiB: a warning.
With 400 MiB held, the second forward itself could reach 1100 MiB: `PlanMismatchError`.
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
"""Storages of at most this size, such as a loss, don't count: it is the smallest block of PyTorch's CUDA allocator."""


class Warned:
    """Warns that the peak may exceed the budget, once for each reason.

    Attributes
    ----------
    of : set of str
        The reasons that were warned of.
    """

    def __init__(self) -> None:
        self.of: set[str] = set()

    def once(self, what: str, text: str) -> None:
        """Warn with `text`, unless the reason `what` was warned of before."""
        if what not in self.of:
            self.of.add(what)
            warnings.warn(f"the peak may exceed the budget: {text}", RuntimeWarning, stacklevel=3)


class HeldOver(Observer):
    """Warns of, or refuses, a forward while memory of earlier ones is held (NOTE [Held over])."""

    def __init__(self, plan: Plan) -> None:
        self._peak_bytes = max(plan.peak_bytes, plan.reserved_bytes or 0)
        forward = plan.peak_bytes if plan.forward_peak_bytes is None else plan.forward_peak_bytes
        self._forward_peak_bytes = forward + self._peak_bytes - plan.peak_bytes
        self._between_bytes = plan.between_bytes or 0
        self._budget_bytes = plan.budget_bytes - plan.others_bytes
        self._others = plan.in_flight - 1
        self._output: list[weakref.ref[torch.UntypedStorage]] = []
        self._waiting: list[weakref.ref[Any]] = []
        self._warned = Warned()

    def output(self, output: Any, inputs: Any) -> None:
        """Record the storages of a forward's `output` that aren't among those of its `inputs`."""
        made = {s._cdata: s for s in _storages(output)}
        if made:
            given = {s._cdata for s in _storages(inputs)}
            self._output = [weakref.ref(storage) for key, storage in made.items() if key not in given]

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """Raise or warn if a forward begins and there is no room for the memory that earlier ones still hold.

        Parameters
        ----------
        waiting : weakref.ref or None
            The pass of the forward before, if its backward hasn't begun.

        Raises
        ------
        PlanMismatchError
            If the backward of an earlier forward hasn't begun, and this forward doesn't fit into the budget beside it.
        """
        passes = self._waiting if waiting is None else [*self._waiting, waiting]
        self._waiting = [ref for ref in passes if (found := ref()) is not None and not found.backward_begun]
        if self._waiting:
            more = max(len(self._waiting) - self._others, 0) * self._between_bytes
            text = (
                f"a forward begins while {len(self._waiting)} before it had no backward yet and hold "
                f"{format_bytes(more)} more than the plan, made for {self._others + 1} at a time, includes; it needs "
                f"{format_bytes(self._peak_bytes)} of its budget of {format_bytes(self._budget_bytes)}; solve with "
                f"in_flight={len(self._waiting) + 1}, plan them as one step (`step=`), or delete their outputs and "
                "losses before this forward"
            )
            if self._forward_peak_bytes + more > self._budget_bytes:
                raise PlanMismatchError(text)
            if self._peak_bytes + more > self._budget_bytes:
                self._warned.once("held", text)
            return
        more = sum(storage.nbytes() for ref in self._output if (storage := ref()) is not None)
        if more and self._forward_peak_bytes + more > self._budget_bytes:
            self._warned.once(
                "held",
                f"the output of the forward before, {format_bytes(more)}, is still held when this one begins, and the "
                f"plan, whose forward needs {format_bytes(self._forward_peak_bytes)} of its budget of "
                f"{format_bytes(self._budget_bytes)}, doesn't include it; put the step into a function, or `del` "
                "the output before the next forward, or solve with a budget that is smaller by these bytes",
            )


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    dense = [tensor for tensor in tensors_in(tree) if tensor.layout is torch.strided]
    return [s for tensor in dense for s in storages_of(tensor) if s.nbytes() > _LEAST_BYTES]
