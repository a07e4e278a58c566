"""Memory that is held longer than planned: outputs and saved tensors of earlier forwards, and graphs that stay.

NOTE [Held over]
A plan counts the memory of one forward at a time, its output until its backward has ended, and what a stage saved until
the stage's backward. Loops may hold more, in four ways:

1. A variable of the loop holds the output until the next forward has returned, or longer::

       for x in data:
           output = model(x)  # the former output is alive until this call returns
           output.mean().backward()

2. A second forward begins before the first one's backward, while all tensors that the first one saved are alive::

       a, b = model(x), model(y)
       (a.mean() + b.mean()).backward()

3. A backward keeps the graph for another one, so that what the stages saved, and what came back, stays meanwhile::

       loss.backward(retain_graph=True)

4. A forward returns more tensors than the first one under the plan (`output_attentions=True` in some steps): a plan
   that recomputes or swaps would have freed them.

A plan has room for one forward at a time. None of these can be planned for without knowing the loop, so each forward
begins with a check for memory of earlier ones:
outputs are found by weak references to their storages, and graphs by their pass, which the hooks in their nodes hold.

That memory may be freed at any moment, and the step may still fit. So an output, an earlier forward, or a graph
that stays, without room is a difference from the planned step (NOTE [Differences]).

Example of the second case: the plan's peak is 900 MiB, 700 MiB until forward ends, its budget is 1000 MiB, and the
first forward holds 200 MiB. The second forward ends at 900 MiB at most, but its backward may reach 1100 MiB: a warning.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ckptplan.core.plan import Plan
from ckptplan.core.units import format_bytes
from ckptplan.runtime.guard.differences import Differences
from ckptplan.runtime.observer import Observer
from ckptplan.tensors.storages import storages_of, tensors_in

_LEAST_BYTES = 512
"""Storages of at most this size, such as a loss, don't count: it is the smallest block of PyTorch's CUDA allocator."""


class HeldOver(Observer):
    """Notes a forward that begins while memory of earlier ones is held (NOTE [Held over])."""

    def __init__(self, plan: Plan, differences: Differences) -> None:
        self._peak_bytes = max(plan.peak_bytes, plan.reserved_bytes or 0)
        forward = plan.peak_bytes if plan.forward_peak_bytes is None else plan.forward_peak_bytes
        self._forward_peak_bytes = forward + self._peak_bytes - plan.peak_bytes
        self._between_bytes = plan.between_bytes or 0
        self._budget_bytes = plan.budget_bytes
        # What several stages save counts for each.
        self._saved_bytes = sum(map(sum, plan.saved_bytes)) if plan.saved_bytes else plan.peak_bytes
        self._output: list[weakref.ref[torch.UntypedStorage]] = []
        self._former: list[weakref.ref[torch.UntypedStorage]] = []  # of the forward before
        self._first_sizes: list[int] | None = None  # of the storages that the first forward returned
        self._waiting: list[weakref.ref[Any]] = []
        self._differences = differences

    def output(self, output: Any, inputs: Any) -> None:
        """Record the storages of a forward's `output` that aren't among those of its `inputs`; note further ones."""
        made = {s._cdata: s for s in _storages(output)}
        if self._differences.instead is None:  # in another mode a model may return others
            self._note_more([storage.nbytes() for storage in made.values()])
        if made:
            given = {s._cdata for s in _storages(inputs)}
            again = given | made.keys()
            self._former = [ref for ref in self._output if (s := ref()) is not None and s._cdata not in again]
            self._output = [weakref.ref(storage) for key, storage in made.items() if key not in given]

    def _note_more(self, sizes: list[int]) -> None:
        if self._first_sizes is None:
            self._first_sizes = sizes
        more = sum(sizes) - sum(self._first_sizes)
        if len(sizes) > len(self._first_sizes) and self._peak_bytes + more > self._budget_bytes:
            self._differences.note(
                "returned",
                f"the model returns {len(sizes)} tensors, {format_bytes(more)} more than the {len(self._first_sizes)} "
                f"of the first forward under the plan, which needs {format_bytes(self._peak_bytes)} of its budget of "
                f"{format_bytes(self._budget_bytes)}; solve with these inputs and settings",
            )

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """Note a forward that has no room for the memory that earlier ones still hold.

        Parameters
        ----------
        waiting : weakref.ref or None
            The pass of the forward before, if its backward hasn't begun.
        """
        passes = self._waiting if waiting is None else [*self._waiting, waiting]
        self._waiting = [ref for ref in passes if (found := ref()) is not None and not found.backward_begun]
        if self._waiting:
            more = len(self._waiting) * self._between_bytes
            if self._peak_bytes + more > self._budget_bytes:
                self._differences.note(
                    "forwards",
                    f"a forward begins while {len(self._waiting)} before it had no backward yet, and each holds "
                    f"{format_bytes(self._between_bytes)} beside its inputs; the plan counts one forward at a time and "
                    f"needs {format_bytes(self._peak_bytes)} of its budget of {format_bytes(self._budget_bytes)}; "
                    "solve with the budget less what the others hold (docs/devices.md, Pipelines), plan them as one "
                    "step (`step=`), or delete their outputs and losses before this forward",
                )
            return
        self._note_held(self._output, self._forward_peak_bytes, "this one begins, and the plan, whose forward needs")

    def _note_held(self, output: list[weakref.ref[torch.UntypedStorage]], needs_bytes: int, when: str) -> None:
        more = sum(storage.nbytes() for ref in output if (storage := ref()) is not None)
        if more and needs_bytes + more > self._budget_bytes:
            self._differences.note(
                "output",
                f"the output of the previous forward, {format_bytes(more)}, is still held when {when} "
                f"{format_bytes(needs_bytes)} of its budget of {format_bytes(self._budget_bytes)}, doesn't include it; "
                "put the step into a function, or `del` the output before the next forward, or solve with a budget "
                "that is smaller by these bytes",
            )

    def backward_begins(self) -> None:
        """Note, without room for it: the former output, still held, and a graph that this backward keeps."""
        if not self._waiting:
            self._note_held(self._former, self._peak_bytes, "backward begins, and the plan, which needs")
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        # One that makes a graph of its own keeps it, too, and is noted as such.
        if keeps and not torch.is_grad_enabled() and self._peak_bytes + self._saved_bytes > self._budget_bytes:
            self._differences.note(
                "graph",
                "a backward keeps its graph (retain_graph=True), so what the stages saved, and what comes back, up to "
                f"{format_bytes(self._saved_bytes)}, stays until another backward; the plan frees it before; "
                "add the losses and run one backward, or solve with a budget that is smaller by these bytes",
            )


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    dense = [tensor for tensor in tensors_in(tree) if tensor.layout is torch.strided]
    return [s for tensor in dense for s in storages_of(tensor) if s.nbytes() > _LEAST_BYTES]
