"""`ckptplan demo`: a model trained plainly and with three planners' plans for one budget, step by step in turn."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.core.checks import MOST_BYTES
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.units import GIB, format_bytes, format_seconds
from ckptplan.tensors.accelerator import default_device, is_accelerator
from ckptplan.tensors.storages import same_bits, unique_bytes
from ckptplan.training.measure import held_tensors, optimizer_tensors, step_peaks, timed

VOCABULARY = 256
"""Bytes are the tokens."""
TEXT_BYTES = 2_000_000
SEED = 0
OURS = "ckptplan"
GREEDY = {"cpu": "chen_greedy", "cuda": "pooch"}
"""The greedy rule to compare with, by type of device: one that recomputes, and one that swaps, too."""


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of the model and of its batch."""

    narrow: int = 64
    hidden: int = 128
    outer: int = 4
    wide: int = 512
    heads: int = 8
    inner: int = 2
    shorten: int = 8
    context: int = 1024
    batch: int = 3
    dropout: float = 0.1


GPU_SIZE = Size(narrow=256, hidden=512, outer=6, wide=1024, heads=16, inner=6, context=4096, batch=16)


class Mixer(nn.Module):
    """Each byte with the one before it, through a gated MLP: many activations, little compute."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.share = nn.Parameter(torch.full((width,), 0.5))
        self.gate, self.value = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width) to the same."""
        h = self.norm(x)
        h = torch.lerp(h, F.pad(h, (0, 0, 1, 0))[:, :-1], self.share)
        return x + self.out(F.silu(self.gate(h)) * self.value(h))  # type: ignore[no-any-return]


class Hourglass(nn.Module):
    """Byte-level decoder, narrow at every byte and wide at every few: tokens (batch, context) to logits of the next.

    A wide layer has much compute for its activations, a narrow one little, so that it matters which ones run again.
    The groups of bytes that a wide position stands for end with the first byte that it is added to, so that none sees
    what it is to predict.

    Reference
    ---------
    P. Nawrot et al., "Hierarchical Transformers Are More Efficient Language Models", arXiv 2110.13711.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.shorten = size.shorten
        self.tokens = nn.Embedding(VOCABULARY, size.narrow)
        self.positions = nn.Parameter(0.02 * torch.randn(size.context // size.shorten, size.wide))
        self.before = nn.ModuleList(Mixer(size.narrow, size.hidden) for _ in range(size.outer))
        self.down = nn.Linear(size.shorten * size.narrow, size.wide)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(size.context // size.shorten))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.wide, size.heads, 4 * size.wide, size.dropout, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(size.inner)
        )
        self.up = nn.Linear(size.wide, size.shorten * size.narrow)
        self.after = nn.ModuleList(Mixer(size.narrow, size.hidden) for _ in range(size.outer))
        self.norm = nn.LayerNorm(size.narrow)
        self.head = nn.Linear(size.narrow, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte."""
        x = self.tokens(tokens)
        for layer in self.before:
            x = layer(x)
        earlier: Tensor = F.pad(x, (0, 0, self.shorten - 1, 0))[:, : x.shape[1]]
        y = self.down(earlier.reshape(len(x), -1, self.shorten * x.shape[2])) + self.positions
        for layer in self.blocks:
            y = layer(y, self.causal, is_causal=True)
        x = x + self.up(y).reshape(x.shape)
        for layer in self.after:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def read_text(limit: int = TEXT_BYTES) -> Tensor:
    """The first `limit` bytes of the standard library's own sources, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


Batch = tuple[Tensor, Tensor]


def batches(text: Tensor, size: Size, count: int, device: torch.device) -> list[Batch]:
    """`count` pairs (tokens, next tokens), drawn with a generator of their own."""
    generator = torch.Generator().manual_seed(SEED)
    out = []
    for _ in range(count):
        starts = torch.randint(len(text) - size.context, (size.batch,), generator=generator)
        rows = torch.stack([text[s : s + size.context + 1] for s in starts.tolist()])
        out.append((rows[:, :-1].contiguous().to(device), rows[:, 1:].contiguous().to(device)))
    return out


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TrainingRun:
    """A training of a copy of a model, with a plan or plainly, one step at a time.

    Attributes
    ----------
    losses, step_s : list of float
        Of each step; the time is that of forward and backward. On the CPU it is the processor time of the one thread
        that trains, which is the wall clock's where nothing else runs and hardly longer where something does.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = copy.deepcopy(model), device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.step_s: list[float] = []

    def step(self, batch: Batch) -> None:
        """Train on `batch`."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(SEED + len(self.losses))
        if not is_accelerator(self.device):
            begin_s = time.thread_time()
            self._gradients(batch)
            self.step_s.append(time.thread_time() - begin_s)
        else:
            self.step_s.append(timed(lambda: self._gradients(batch), self.device))
        self.optimizer.step()

    def _gradients(self, batch: Batch) -> None:
        tokens, targets = batch
        logits = self.model(tokens)  # held until backward has ended, as it is planned
        loss = loss_of(logits, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.losses.append(loss.item())

    def peak_bytes(self, batch: Batch) -> int:
        """Most bytes of tensors in one more step, without the targets, which no budget counts."""
        self.optimizer.zero_grad(set_to_none=True)
        held = unique_bytes([*held_tensors(self.model), *optimizer_tensors(self.optimizer), batch[0]], self.device)
        return step_peaks(lambda: self.step(batch), self.device, held).requested_bytes

    def same(self, other: TrainingRun) -> bool:
        """Whether every loss and every weight is bit for bit the other's."""
        weights = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return self.losses == other.losses and all(same_bits(a, b) for a, b in weights)


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One training beside its prediction.

    Attributes
    ----------
    budget_bytes : int or None
        None for plain training.
    measured_step_s : tuple of float
        Of each timed step, the k-th of every row on the same batch and one right after the other.
    same : bool
        Whether losses and weights are bit for bit those of plain training.
    other_paths : int
        Runs of stages that saved something else than was profiled.
    """

    name: str
    budget_bytes: int | None
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_step_s: float
    measured_step_s: tuple[float, ...]
    same: bool = True
    other_paths: int = 0

    @property
    def faults(self) -> list[str]:
        """What breaks a promise."""
        faults = []
        if self.budget_bytes is not None and self.measured_peak_bytes > self.budget_bytes:
            faults.append("the measured peak is above the budget")
        if not self.same:
            faults.append("losses or weights differ from those of plain training")
        if self.other_paths:
            faults.append(f"{self.other_paths} runs of stages saved something else than profiled")
        return faults

    def times(self, other: DemoRow) -> tuple[float, float, float]:
        """How many times as long as those of `other` its steps took: quartiles over steps on the same batch."""
        ratios = [a / b for a, b in zip(self.measured_step_s, other.measured_step_s, strict=True)]
        first, median, third = statistics.quantiles(ratios, n=4, method="inclusive")
        return first, median, third


def train_in_turn(model: nn.Module, plans: dict[str, Plan], data: Sequence[Batch]) -> list[DemoRow]:
    """Train copies of `model`, the first plainly and the others with their plans, and measure.

    Each batch is a step of every training, one right after the other and beginning with another one each time, so that
    what else the machine does meets all alike. The first step warms up and isn't timed.
    """
    plain = next(iter(plans))
    trainings = {name: TrainingRun(model, data[0][0].device) for name in plans}
    with contextlib.ExitStack() as stack:
        handles = {}
        for name in plans:
            if name != plain:
                handles[name] = stack.enter_context(ckptplan.apply(trainings[name].model, plans[name], check="off"))
                stack.enter_context(handles[name].unmetered())
        names = list(plans)
        for batch in data:
            for name in names:
                trainings[name].step(batch)
            names = [*names[1:], names[0]]
        peaks = {name: training.peak_bytes(data[0]) for name, training in trainings.items()}
        other_paths = {name: handle.stats().other_paths for name, handle in handles.items()}
    return [
        DemoRow(
            name,
            None if name == plain else plan.budget_bytes,
            plan.peak_bytes,
            peaks[name],
            plan.step_s,
            tuple(trainings[name].step_s[1 : len(data)]),
            trainings[name].same(trainings[plain]),
            other_paths.get(name, 0),
        )
        for name, plan in plans.items()
    ]


def keep_pages(keeps: bool) -> None:
    """Have glibc keep the memory that it has got, from here on, or return it as by default.

    By default it returns large blocks to the system and pays for their pages anew in every step, more or fewer of them
    by chance, which a profile of single stages doesn't see. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        glibc = ctypes.CDLL(None)
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX in malloc.h
        glibc.mallopt(trim_threshold, -1 if keeps else 128 << 10)
        glibc.mallopt(mmap_max, 0 if keeps else 65536)


@contextlib.contextmanager
def steady(device: torch.device) -> Iterator[None]:
    """Have equal steps take equal times on the CPU: one thread, and a heap that keeps its pages.

    With more threads a step waits for the slowest at every operation, and one that another program holds up delays
    all.
    """
    if device.type != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_pages(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        keep_pages(False)


def without_swaps(profile: Profile) -> Profile:
    """The same with no option that moves anything, for every planner alike."""
    stages = [replace(s, options=tuple(option for option in s.options if not option.moves)) for s in profile.stages]
    return replace(profile, stages=tuple(stages))


def solve_half(profile: Profile, keep_all_bytes: int, time_limit_s: float) -> tuple[Plan, str]:
    """Plan for half of what a plain step adds to parameters, optimizer and inputs, or the least feasible if it is more.

    Parameters
    ----------
    keep_all_bytes : int
        Peak of the plain step.

    Returns
    -------
    tuple of Plan and str
        The plan, and its budget in words.
    """
    base = min(profile.base_forward_bytes)
    half = base + (keep_all_bytes - base) // 2
    made_of = (
        f"{format_bytes(base)} of parameters, optimizer state and inputs plus half of the "
        f"{format_bytes(keep_all_bytes - base)} that a plain step adds"
    )
    try:
        plan = ckptplan.solve(profile, budget_gb=half / GIB, time_limit_s=time_limit_s, gap=0.0)
        return plan, f"budget {format_bytes(half)}: {made_of}"
    except InfeasibleBudgetError as error:
        least = error.min_peak_bytes
    return ckptplan.solve(profile, budget_gb=least / GIB, time_limit_s=time_limit_s, gap=0.0), (
        f"budget {format_bytes(least)}: the smallest feasible peak, since no plan fits in {format_bytes(half)} "
        f"({made_of})"
    )


def run(
    device: str | None = None,
    *,
    steps: int = 12,
    size: Size | None = None,
    time_limit_s: float = 5.0,
    console: Console | None = None,
) -> bool:
    """Run the demonstration and print its table.

    Parameters
    ----------
    device : str, optional
        Default: CUDA where there is one, else the CPU.
    steps : int
        Training steps of each of the runs, at least 3: the first isn't timed.
    size : Size, optional
        Default: one that suits the device.
    time_limit_s : float
        For the solver.
    console : rich.console.Console, optional

    Returns
    -------
    bool
        Whether all losses and weights were identical and every measured peak within the budget.
    """
    # The profiler that counts the allocator's bytes writes a line to stderr at each start and stop below this level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    console = console or Console(highlight=False)
    where = torch.device(device or default_device())
    size = size or (GPU_SIZE if is_accelerator(where) else Size())
    with steady(where):
        torch.manual_seed(SEED)
        model = Hourglass(size).to(where)
        data = batches(read_text(), size, steps, where)
        console.print(
            f"Byte-level model of {2 * size.outer} narrow layers and {size.inner} wide ones on {where}: "
            f"{size.batch} × {size.context} bytes of the standard library's sources a step"
        )
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            rows, plan = _rows(model, data, time_limit_s, progress)
    clock = ", measured in processor time" if not is_accelerator(where) else ""
    console.print(_table(rows, f"forward and backward on {where}{clock}"))
    lines, sound = verdict(rows)
    for line in lines:
        console.print(line)
    console.print(
        f"ckptplan's predicted step is {plan.status}, {plan.gap:.2%} above the bound proven for every plan "
        f"({plan.space})."
    )
    return sound


def _rows(model: nn.Module, data: list[Batch], time_limit_s: float, progress: Progress) -> tuple[list[DemoRow], Plan]:
    def phase(text: str) -> None:
        for task in progress.task_ids:
            progress.remove_task(task)
        progress.add_task(text, total=None)

    tokens, targets = data[0]
    phase("profiling: bytes and times of every stage")
    profile = ckptplan.profile(
        model,
        inputs=(tokens,),
        loss_fn=lambda logits: loss_of(logits, targets),
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    alone = without_swaps(profile)
    swaps = is_accelerator(tokens.device)  # elsewhere copies would go to the same memory, and take cores from training
    if not swaps:
        profile = alone
        progress.console.print("nothing is swapped on a CPU, where it would go to the same memory: plans recompute")
    phase(f"solving, at most {time_limit_s:g} s")
    plain = BASELINES["keep_all"](profile, MOST_BYTES - 1)
    ours, budget_text = solve_half(profile, plain.peak_bytes, time_limit_s)
    progress.console.print(budget_text)
    plans = {"plain": plain}
    progress.console.print(
        "beside ckptplan's plan for it: uniform, the best equal share of stages recomputed everywhere; and greedy, "
        f"{GREEDY[tokens.device.type]} of `ckptplan compare`"
        + ("; and recompute, its plan if nothing is swapped" if swaps else "")
    )
    rivals: dict[str, Callable[[], Plan]] = {
        "uniform": lambda: BASELINES["uniform"](profile, ours.budget_bytes),
        "greedy": lambda: BASELINES[GREEDY[tokens.device.type]](profile, ours.budget_bytes),
    }
    if swaps:
        budget_gb = ours.budget_bytes / GIB
        rivals["recompute"] = lambda: ckptplan.solve(alone, budget_gb, time_limit_s=time_limit_s, gap=0.0)
    for label, planned in rivals.items():
        try:
            plans[label] = planned()
        except InfeasibleBudgetError:
            progress.console.print(f"{label} finds no plan within the budget")
    plans[OURS] = ours
    phase(f"training {len(data)} steps, plainly and with {len(plans) - 1} plans in turn")
    return train_in_turn(model, plans, data), ours


def _table(rows: list[DemoRow], title: str) -> Table:
    # Neither lines nor padding, so that it fits 80 columns.
    table = Table("", title=title, box=box.SIMPLE_HEAD, padding=0)
    for column in ("budget", "peak\npredicted", "\nmeasured", "step, and over plain\npredicted", "\nmeasured"):
        table.add_column(column, justify="right", no_wrap=True)
    plain = rows[0]
    for row in rows:
        measured = format_bytes(row.measured_peak_bytes)
        predicted_over = row.predicted_step_s / plain.predicted_step_s - 1
        table.add_row(
            row.name,
            "-" if row.budget_bytes is None else format_bytes(row.budget_bytes),
            format_bytes(row.predicted_peak_bytes),
            f"[red]{measured}[/red]" if row.faults else measured,
            f"{format_seconds(row.predicted_step_s)} {predicted_over:+5.1%}",
            f"{format_seconds(statistics.median(row.measured_step_s))} {row.times(plain)[1] - 1:+5.1%}",
        )
    return table


def verdict(rows: list[DemoRow]) -> tuple[list[str], bool]:
    """What the measurements say, in lines for a console, and whether all promises are kept.

    Parameters
    ----------
    rows : list of DemoRow
        Plain training first, the solver's plan last.
    """
    plain, *rivals, ours = rows
    lines = [f"[red]{row.name}: {fault}[/red]" for row in rows for fault in row.faults]
    sound = not lines
    if sound:
        lines.append(
            "[green]Every loss and weight is bitwise that of plain training, every peak within budget.[/green]"
        )
    saved = 1 - ours.measured_peak_bytes / plain.measured_peak_bytes
    lines.append(
        f"Measured with {ours.name}: {saved:.0%} less memory than plain, {ours.times(plain)[1] - 1:+.1%} time."
    )
    for rival in rivals:
        first, median, third = rival.times(ours)
        how = "ahead of" if first > 1 else "behind" if third < 1 else "not clearly ahead of"
        lines.append(
            f"[{'green' if first > 1 else 'yellow'}]In this run {ours.name} is {how} {rival.name}, whose steps took "
            f"{median:.2f} times as long (the middle half of them {first:.2f} to {third:.2f} times).[/]"
        )
    off = plain.predicted_step_s / statistics.median(plain.measured_step_s)
    if not 2 / 3 <= off <= 3 / 2:
        lines.append(
            f"[yellow]The plain step was predicted at {off:.2g} times its measured time: the machine was busy with "
            "something else. Try again when it is idle; the bytes don't depend on it.[/yellow]"
        )
    return lines, sound
