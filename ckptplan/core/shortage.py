"""Shortage: measured and planned bytes at the moment when a planned step ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptplan.core.stage import Phase
from ckptplan.core.units import format_bytes

Doing = Literal["forward", "recompute", "backward", "copy out", "copy back", "update", "after backward"]


@dataclass(frozen=True, slots=True)
class Shortage:
    """An out-of-memory error of a step.

    Parameters
    ----------
    phase : "forward", "backward" or "update"
    stage : str
        The last stage that began in that phase; it includes the glue behind it (in backward: in front of it).
    doing : str
        The work that ran: the stage's forward or backward, its recompute, a copy of storages that it swaps, the update,
        or other code after backward.
    tier : "device" or "host"
        The memory that ran out; on the CPU always "device".
    requested_bytes, requested_least_bytes : int or None
        Largest and smallest possible size of the request; None if the message has no size. CUDA's message has the size
        of the segment for the request: 20 MiB for any request between 1 and 10 MiB.
    budget_bytes, planned_bytes : int
        The plan's budget, and its predicted peak of the stage in that phase; without a profile, that of the step.
    planned_start_bytes : int or None
        Predicted bytes at the stage's start; None without a profile.
    live_bytes, allocated_bytes, reserved_bytes, capacity_bytes : int or None
        CUDA: this process's bytes in tensors, in the allocator's blocks and in its segments, and the largest number
        possible. None on the CPU, whose allocator doesn't count.
    live_before_bytes : int or None
        CUDA: bytes in tensors when the step began.
    expandable_segments : bool
        CUDA: whether the allocator uses expandable segments, which have few fragments.
    model_bytes, process_bytes : int
        Parameters, buffers and gradients; the process's resident set in host memory.
    swapped : tuple of (str, int, int)
        State, number and bytes of the storages that the plan moves.
    recomputed_stages, swapped_out_bytes, swapped_in_bytes : int
        Work done by the step until the error.
    planned_recomputed_stages, planned_swapped_bytes : int
        Work of a whole step.
    gradients_lost : bool
        Whether the step had added to gradients from before it, which are None now.
    half_updated : bool
        Whether the update had written a part of the parameters or the optimizer's state.
    """

    phase: Phase
    stage: str
    doing: Doing
    tier: Literal["device", "host"]
    requested_bytes: int | None
    requested_least_bytes: int | None
    budget_bytes: int
    planned_bytes: int
    planned_start_bytes: int | None
    live_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    capacity_bytes: int | None
    live_before_bytes: int | None
    expandable_segments: bool
    model_bytes: int
    process_bytes: int
    swapped: tuple[tuple[str, int, int], ...]
    recomputed_stages: int
    planned_recomputed_stages: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    planned_swapped_bytes: int
    gradients_lost: bool
    half_updated: bool

    @property
    def over_bytes(self) -> int | None:
        """Smallest possible excess of tensors and request over the prediction; None: not known, below 0: no excess.

        Rounding of blocks and fragments don't count, since predictions don't include them.
        """
        if self.live_bytes is None or self.tier == "host":
            return None
        return self.live_bytes + (self.requested_least_bytes or 0) - self.planned_bytes

    @property
    def repeatable(self) -> bool:
        """Whether a second run of the step would have the result of a first run."""
        return not self.gradients_lost and not self.half_updated

    def __str__(self) -> str:
        """Return the report: place, plan, measurement, state of the training, advice."""
        request = ""
        if self.requested_bytes is not None:
            least, most = format_bytes(self.requested_least_bytes or 0), format_bytes(self.requested_bytes)
            request = f": {most} were requested" if least == most else f": between {least} and {most} were requested"
        where = f"in {self.phase} of stage {self.stage!r}"
        if self.phase == "update":
            where = "in the optimizer's update" if self.doing == "update" else "after backward"
        doing = f" ({self.doing})" if self.phase != "update" and self.doing != self.phase else ""
        start = "" if self.planned_start_bytes is None else f"{format_bytes(self.planned_start_bytes)} at its start, "
        peak = "at the peak of the step" if self.planned_start_bytes is None else "at its peak"
        budget = f"of a budget of {format_bytes(self.budget_bytes)} for the step"
        rows = [("planned", f"{start}{format_bytes(self.planned_bytes)} {peak}, {budget}")]
        if self.live_bytes is not None and self.allocated_bytes is not None and self.reserved_bytes is not None:
            against = "" if self.over_bytes is None else f", with the request {_signed(self.over_bytes)} to the plan"
            rounding, unused = self.allocated_bytes - self.live_bytes, self.reserved_bytes - self.allocated_bytes
            rows.append(("tensors", f"{format_bytes(self.live_bytes)}{against}"))
            parts = f"{format_bytes(max(rounding, 0))} rounding of blocks and {format_bytes(max(unused, 0))} fragments"
            capacity = format_bytes(self.capacity_bytes or 0)
            rows.append(("reserved", f"{format_bytes(self.reserved_bytes)} of at most {capacity}, including {parts}"))
        before = ""
        if self.live_before_bytes is not None:
            before = f", of {format_bytes(self.live_before_bytes)} in all when the step began"
        swapped = ", ".join(f"{count} {state} ({format_bytes(nbytes)})" for state, count, nbytes in self.swapped)
        done = (
            f"{self.recomputed_stages} of {self.planned_recomputed_stages} stages recomputed, "
            f"{format_bytes(self.swapped_out_bytes)} of {format_bytes(self.planned_swapped_bytes)} swapped out, "
            f"{format_bytes(self.swapped_in_bytes)} in"
        )
        rows += [
            ("model", f"{format_bytes(self.model_bytes)} of parameters, buffers and gradients{before}"),
            ("process", f"{format_bytes(self.process_bytes)} of host memory resident"),
            ("swapped", swapped or "no living storages"),
            ("so far", done),
            ("now", self._state()),
            ("advice", self._advice()),
        ]
        return "\n".join([f"out of {self.tier} memory {where}{doing}{request}", *(f"  {a:<10}{b}" for a, b in rows)])

    def _state(self) -> str:
        if self.half_updated:
            return "parameters or optimizer state are half updated; load the last saved ones"
        if self.gradients_lost:
            return "the gradients from before the step had been added to, and are None; begin the accumulation again"
        return "the step is undone: its graph is freed, gradients and buffers are as before"

    def _advice(self) -> str:
        if self.tier == "host":
            return "host memory for swapping ran out: solve with a smaller host_gb="
        if self.phase == "update":
            return "no plan changes the memory after backward: use an optimizer with less state, or foreach=False"
        over, capacity = self.over_bytes, self.capacity_bytes
        if over is None or self.live_bytes is None or capacity is None:
            return "the device has less memory than the budget: solve with a smaller budget_gb="
        if over > 0:
            return f"solve with a budget {format_bytes(over)} smaller, or free other tensors on the device"
        if self.requested_bytes is None:
            return "a library or the driver needed memory outside PyTorch's allocator: solve with a smaller budget_gb="
        # Tensors are within the plan: if the device is large enough for it, or for this request, fragments are the
        # cause.
        if self.live_bytes + self.requested_bytes <= capacity or self.budget_bytes <= capacity:
            if self.expandable_segments:
                return (
                    "free memory is in fragments, though expandable segments have few: solve with a smaller budget_gb="
                )
            return "free memory is in fragments: set PYTORCH_ALLOC_CONF=expandable_segments:True"
        return "the device has less memory than the budget: solve with a smaller budget_gb="


def _signed(nbytes: int) -> str:
    return f"{'+' if nbytes >= 0 else '-'}{format_bytes(abs(nbytes))}"
