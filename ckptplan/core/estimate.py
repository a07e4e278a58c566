"""Estimate: the memory of a training step by phase and category, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptplan.core.checks import check_bytes, check_fields
from ckptplan.core.files import Saved
from ckptplan.core.late import late
from ckptplan.core.page import Page
from ckptplan.core.units import format_bytes

GATHERED = "gathered weights"
CATEGORIES = (
    "weights",
    GATHERED,
    "buffers",
    "gradients",
    "optimizer state",
    "inputs",
    "forward outputs",
    "output gradients",
    "saved activations",
    "workspaces and temporaries",
    "rounding",
    "fragmentation",
    "context",
)
"""Categories of device memory, after DNNMem (Gao et al., ESEC/FSE 2020). `Estimate` describes them."""

KEPT = ("output", "loss", "batch")
"""What a training loop may still reference when the next forward begins."""

ERROR = 0.052
"""Largest error of estimates beside published measurements, as a share (docs/benchmarks.md)."""

_MOST_SHOWN = 12  # kinds of tensors in the printed table
_MOST_PHASES = 24  # phases in the printed table


def fits_in_words(needed_bytes: float, capacity_bytes: int) -> str:
    """Return "fits", or "fits, barely" if an estimate of these bytes may be too low by `ERROR`; empty if they don't."""
    if needed_bytes > capacity_bytes:
        return ""
    return "fits" if needed_bytes <= (1 - ERROR) * capacity_bytes else "fits, barely"


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors of one kind that are allocated at the peak.

    Unknown texts are empty. A `*` in a name stands for the numbers of repeated layers, whose equal tensors are counted
    together.

    Parameters
    ----------
    nbytes, count : int
        Sum of the requested sizes, and number of blocks.
    category : str
        A category of `Estimate`.
    stage : str
        For saved activations, the stage that saves them.
    name : str
        Name of the parameter, buffer or state; empty for other tensors.
    module, line, op : str
        The module, the line of the model's code and the operation that made them.
    shape : tuple of int
        Their size in each dimension.
    dtype : str
        Their type.
    """

    nbytes: int
    count: int
    category: str
    stage: str
    name: str
    module: str
    line: str
    op: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def source(self) -> str:
        """The name, or else the line and module."""
        if self.name:
            return self.name
        return " ".join(part for part in (self.line, f"in {self.module}" if self.module else "") if part)


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of training.

    Parameters
    ----------
    name : str
        "loaded", "forward", "backward", "optimizer" ("zero_grad" without one); the same of later steps ("forward 2")
        and of micro-batches ("forward, accumulating", "forward 2, accumulating 3"); "inference" ("inference 2" of the
        second batch).
    start_bytes, end_bytes, peak_bytes : int
        Bytes in blocks, rounded up as the device does.
    reserved_bytes : int
        Most bytes that the allocator reserves; on the CPU equal to the peak.
    categories : mapping
        Category -> bytes at the phase's peak; they add up to `peak_bytes`.
    batch : int or None
        Number of the batch that runs, or ran last, from 1 on; None: none has.
    """

    name: str
    start_bytes: int
    end_bytes: int
    peak_bytes: int
    reserved_bytes: int
    categories: Mapping[str, int]
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate(Saved):
    """The memory of a training.

    Categories of bytes are weights, gathered weights (whole parameters of a sharded model's units), buffers, gradients,
    optimizer state, inputs, forward outputs (results that no backward needs), output gradients, saved activations,
    workspaces and temporaries, rounding (blocks less requested bytes), fragmentation (the most reserved bytes less the
    blocks at the peak) and context (the driver's memory).

    Parameters
    ----------
    device : str
        The device's full name.
    phases : tuple of Phase
        In order, those of training first.
    peak_bytes : int
        Most bytes in blocks over all phases of training.
    peak_phase, peak_stage : str
        Phase and stage of the peak; the stage is empty outside of any.
    reserved_bytes : int
        Most bytes that the allocator reserves over all phases of training; on the CPU `peak_bytes`.
    context_bytes : int
        The driver's memory besides.
    capacity_bytes : int or None
        All memory of the device; None for main memory.
    categories : mapping
        Category -> bytes at the peak. With fragmentation they add up to `reserved_bytes` and `context_bytes` together.
    saved_bytes : mapping
        Stage -> bytes that it saves for backward. Each storage counts for the first stage that saves it.
    alive : tuple of Tensors
        Tensors at the peak, largest first.
    notes : tuple of str
        Limits and assumptions of the estimate.
    holds_output : bool
        Whether the loop is taken to hold the output during backward.
    keeps : tuple of str
        What the loop is taken to reference still when the next forward begins: "output", "loss", "batch".
    batches : tuple of str
        The tensors of each batch, in the order in which the batches run.
    empty_cache : bool
        Whether the loop is taken to empty the allocator's cache after each step.
    """

    SCHEMA = "ckptplan.estimate/1"

    device: str
    phases: tuple[Phase, ...]
    peak_bytes: int
    peak_phase: str
    peak_stage: str
    reserved_bytes: int
    context_bytes: int
    capacity_bytes: int | None
    categories: Mapping[str, int]
    saved_bytes: Mapping[str, int]
    alive: tuple[Tensors, ...]
    notes: tuple[str, ...] = ()
    holds_output: bool = True
    keeps: tuple[str, ...] = ()
    batches: tuple[str, ...] = ()
    empty_cache: bool = False

    def __post_init__(self) -> None:
        check_fields("estimate", self)
        for phase in self.phases:
            check_fields(f"phase {phase.name!r}", phase)
        for tensors in self.alive:
            check_fields(f"tensors {tensors.name!r}", tensors)
        for table in (self.categories, self.saved_bytes, *(phase.categories for phase in self.phases)):
            check_bytes("estimate", **{f"bytes of {name}": n for name, n in table.items()})

    @property
    def peak_batch(self) -> int | None:
        """Number of the batch of the peak, from 1 on; None: it is before the first step."""
        return self.phase(self.peak_phase).batch

    @property
    def reserved_phase(self) -> str:
        """The first phase with most reserved bytes."""
        most = (phase.name for phase in self.phases if phase.reserved_bytes == self.reserved_bytes)
        return next(most, self.peak_phase)

    @property
    def total_bytes(self) -> int:
        """Memory that the device needs: reserved bytes and the context."""
        return self.reserved_bytes + self.context_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough memory; None if its size isn't known."""
        return None if self.capacity_bytes is None else self.total_bytes <= self.capacity_bytes

    @property
    def verdict(self) -> str:
        """Whether the device has enough memory, in words; "fits, barely" within the error of estimates."""
        if self.capacity_bytes is None:
            return ""
        return fits_in_words(self.total_bytes, self.capacity_bytes) or "does NOT fit"

    @property
    def answer(self) -> str:
        """What the device needs, of how much, and whether that is enough, in a few words."""
        has = "" if self.capacity_bytes is None else f" of {format_bytes(self.capacity_bytes)}: {self.verdict}"
        return f"{format_bytes(self.total_bytes)} on {self.device}{has}"

    def report(self, *, commands: Sequence[str] = ()) -> Page:
        """A page with the memory by phase, what is there at the peak, and the devices that have enough.

        Parameters
        ----------
        commands : sequence of str
            How to make the estimate again.

        Returns
        -------
        Page
            `report.save("estimate.html")` writes it.
        """
        return late("report.page.estimated", "estimate_report")(self, commands)  # type: ignore[no-any-return]

    def phase(self, name: str) -> Phase:
        """Return the phase with this name.

        Raises
        ------
        KeyError
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise KeyError(f"no phase {name!r}; there are {', '.join(phase.name for phase in self.phases)}")

    def _of_batch(self, phase: str) -> str:
        """Return the name of a phase, with its batch if there are several."""
        batch = self.phase(phase).batch
        return f"{phase} of batch {batch}" if batch is not None and len(self.batches) > 1 else phase

    def _shown_phases(self) -> tuple[Phase, ...]:
        """Return the phases to print: of many, those of the batches with the peaks, of the first and of the last."""
        if len(self.phases) <= _MOST_PHASES:
            return self.phases
        peaks = (self.peak_batch, self.phase(self.reserved_phase).batch)
        shown = {None, 1, 2, *peaks, len(self.batches)}
        return tuple(phase for phase in self.phases if phase.batch in shown)

    def __str__(self) -> str:
        during = ", ".join(part for part in (self._of_batch(self.peak_phase), self.peak_stage) if part)
        reserved = f" ({self._of_batch(self.reserved_phase)})" if len(self.batches) > 1 else ""
        lines = [
            f"needs     {self.answer}",
            f"peak      {format_bytes(self.peak_bytes)} in tensors ({during}), "
            f"{format_bytes(self.reserved_bytes)} reserved{reserved}, {format_bytes(self.context_bytes)} context",
            f"loop      {'holds' if self.holds_output else 'drops'} the output during backward, and "
            f"{'keeps ' + ' and '.join(self.keeps) if self.keeps else 'nothing of a step'} until the next"
            + (", and empties the allocator's cache after each step" if self.empty_cache else ""),
        ]
        if len(self.batches) > 1:
            number = self.peak_batch or 1
            lines.append(f"batches   {len(self.batches)} in turn; batch {number} is {self.batches[number - 1]}")
        shown = self._shown_phases()
        width = max(14, *(len(phase.name) + 2 for phase in shown))
        lines += ["", f"{'phase':<{width}}{'at start':>12}{'peak':>12}{'at end':>12}{'reserved':>12}"]
        for p in shown:
            numbers = (p.start_bytes, p.peak_bytes, p.end_bytes, p.reserved_bytes)
            lines.append(f"{p.name:<{width}}" + "".join(f"{format_bytes(n):>12}" for n in numbers))
        if len(shown) < len(self.phases):
            lines.append(f"and {len(self.phases) - len(shown)} more phases")
        lines += ["", f"{'category':<28}{'bytes':>12}"]
        lines += [f"{name:<28}{format_bytes(n):>12}" for name, n in self.categories.items() if n]
        lines += ["", f"{'alive at the peak':<28}{'bytes':>12}  of"]
        for tensors in self.alive[:_MOST_SHOWN]:
            times = f"{tensors.count} x" if tensors.count > 1 else ""
            shape = f"{tensors.dtype}{list(tensors.shape)}" if tensors.dtype else tensors.op
            of = " ".join(part for part in (times, shape, tensors.source) if part)
            lines.append(f"{tensors.category:<28}{format_bytes(tensors.nbytes):>12}  {of}")
        if len(self.alive) > _MOST_SHOWN:
            rest = sum(t.nbytes for t in self.alive[_MOST_SHOWN:])
            lines.append(f"{f'and {len(self.alive) - _MOST_SHOWN} more kinds':<28}{format_bytes(rest):>12}")
        return "\n".join([*lines, *(["", *(f"note: {note}" for note in self.notes)] if self.notes else [])])
