"""Shortage: what was alive when a planned step ran out of memory, beside what the plan said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptplan.core.stage import Phase
from ckptplan.core.units import format_bytes

Doing = Literal["forward", "recompute", "backward", "copy out", "copy back", "update", "after backward"]


@dataclass(frozen=True, slots=True)
class Shortage:
    """One out-of-memory error of a step.

    Parameters
    ----------
    phase : "forward", "backward" or "update"
    stage : str
        The last stage that began in that phase. Glue behind a stage (in backward: in front of it) counts to it.
    doing : str
        What ran: the stage's own forward or backward, a recompute for it, a copy of what it swaps, the update, or
        something else behind the backward.
    tier : "device" or "host"
        Which memory ran out. On the CPU both are the same, and it is "device".
    requested_bytes, requested_least_bytes : int or None
        Most and least that can have been asked for when memory ran out; None where the message doesn't say. CUDA's
        messages tell the segment that was wanted for it, rounded: 20 MiB for all between 1 and 10.
    budget_bytes, planned_bytes : int
        The plan's budget, and what it predicts for the worst moment of that stage in that phase; without a profile, of
        the whole step.
    planned_start_bytes : int or None
        The same at the stage's start; None without a profile.
    live_bytes, allocated_bytes, reserved_bytes, capacity_bytes : int or None
        CUDA: bytes of this process then, as asked for, in the allocator's blocks and in its segments, and how many it
        could have. None on the CPU, whose allocator keeps no such count.
    live_before_bytes : int or None
        CUDA: bytes that had been asked for when the step began.
    expandable_segments : bool
        CUDA: the allocator works with these, which fragment little.
    model_bytes, process_bytes : int
        Parameters, buffers and gradients; the process's resident set in host memory.
    swapped : tuple of (str, int, int)
        Storages the plan moves, by state: how many, and their bytes.
    recomputed_stages, swapped_out_bytes, swapped_in_bytes : int
        What the step had done so far.
    planned_recomputed_stages, planned_swapped_bytes : int
        What it was to do.
    gradients_lost : bool
        Gradients from before the step had been added to; they are None now.
    half_updated : bool
        Parameters or optimizer state had been written to; they are neither the old nor the new ones.
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
        """What was wanted beyond the prediction for this moment, at least; None: not known, below 0: within it.

        In tensors alone: neither what blocks have beyond them nor fragments are the plan's.
        """
        if self.live_bytes is None or self.tier == "host":
            return None
        return self.live_bytes + (self.requested_least_bytes or 0) - self.planned_bytes

    @property
    def repeatable(self) -> bool:
        """Whether the step can run again with the result of a first run."""
        return not self.gradients_lost and not self.half_updated

    def __str__(self) -> str:
        """The report: where, planned, measured, the state things are in, advice."""
        asked = ""
        if self.requested_bytes is not None:
            least, most = format_bytes(self.requested_least_bytes or 0), format_bytes(self.requested_bytes)
            asked = f": {most} were asked for" if least == most else f": between {least} and {most} were asked for"
        where = f"in {self.phase} of stage {self.stage!r}"
        if self.phase == "update":
            where = "in the optimizer's update" if self.doing == "update" else "after backward"
        doing = f" ({self.doing})" if self.phase != "update" and self.doing != self.phase else ""
        start = "" if self.planned_start_bytes is None else f"{format_bytes(self.planned_start_bytes)} at its start, "
        rows = [
            ("planned", f"{start}{format_bytes(self.planned_bytes)} at the worst moment "
             + (f"of the step, of a budget of {format_bytes(self.budget_bytes)}" if self.planned_start_bytes is None
                else f"there, of a budget of {format_bytes(self.budget_bytes)} for the step")),
        ]  # fmt: skip
        if self.live_bytes is not None and self.allocated_bytes is not None and self.reserved_bytes is not None:
            against = "" if self.over_bytes is None else f", with the request {_signed(self.over_bytes)} to the plan"
            rounding, unused = self.allocated_bytes - self.live_bytes, self.reserved_bytes - self.allocated_bytes
            rows.append(("tensors", f"{format_bytes(self.live_bytes)}{against}"))
            rows.append(
                (
                    "reserved",
                    f"{format_bytes(self.reserved_bytes)} of {format_bytes(self.capacity_bytes or 0)} to be had, of it "
                    f"{format_bytes(max(rounding, 0))} rounding of blocks and {format_bytes(max(unused, 0))} fragments",
                )
            )
        before = ""
        if self.live_before_bytes is not None:
            before = f", of {format_bytes(self.live_before_bytes)} in all when the step began"
        rows.append(("model", f"{format_bytes(self.model_bytes)} of parameters, buffers and gradients{before}"))
        rows.append(("process", f"{format_bytes(self.process_bytes)} of host memory resident"))
        swapped = ", ".join(f"{count} {state} ({format_bytes(nbytes)})" for state, count, nbytes in self.swapped)
        rows.append(("swapped", swapped or "nothing that is alive"))
        rows.append(
            (
                "so far",
                f"{self.recomputed_stages} of {self.planned_recomputed_stages} stages recomputed, "
                f"{format_bytes(self.swapped_out_bytes)} of {format_bytes(self.planned_swapped_bytes)} swapped out, "
                f"{format_bytes(self.swapped_in_bytes)} in",
            )
        )
        rows.append(("now", self._state()))
        rows.append(("advice", self._advice()))
        return "\n".join([f"out of {self.tier} memory {where}{doing}{asked}", *(f"  {a:<10}{b}" for a, b in rows)])

    def _state(self) -> str:
        text = "the step is undone: its graph is freed, gradients and buffers are as before"
        if self.gradients_lost:
            text = "the gradients from before the step had been added to, and are None; begin the accumulation again"
        if self.half_updated:
            text = "parameters or optimizer state are half updated; load the last saved ones"
        return text

    def _advice(self) -> str:
        if self.tier == "host":
            return "host memory for swapping ran out: solve with a smaller host_gb="
        if self.phase == "update":
            return "no plan changes what is alive after backward: a leaner optimizer, or foreach=False, does"
        over, capacity = self.over_bytes, self.capacity_bytes
        if over is None or self.live_bytes is None or capacity is None:
            return "the device has less than the budget: solve with a smaller budget_gb="
        if over > 0:
            return f"solve with a budget {format_bytes(over)} smaller, or drop what else lies on the device"
        if self.requested_bytes is None:
            return "a library or the driver wanted memory beside PyTorch's: solve with a smaller budget_gb="
        # Within the plan, so where the device could hold the plan, or this moment, it is not bytes that are missing.
        if self.live_bytes + self.requested_bytes <= capacity or self.budget_bytes <= capacity:
            if self.expandable_segments:
                return "memory is there in fragments, few as they are: solve with a smaller budget_gb="
            return "memory is there in fragments: set PYTORCH_ALLOC_CONF=expandable_segments:True"
        return "the device has less than the budget: solve with a smaller budget_gb="


def _signed(nbytes: int) -> str:
    return f"{'+' if nbytes >= 0 else '-'}{format_bytes(abs(nbytes))}"
