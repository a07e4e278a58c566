"""`ckptplan demo`: measure steps of a model, plain and with the plans of several planners for one budget."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.core.checks import MOST_BYTES
from ckptplan.core.display import progress
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Report
from ckptplan.core.units import GIB, format_bytes, format_seconds
from ckptplan.runtime.verify import Verification
from ckptplan.tensors.accelerator import default_device, is_accelerator

VOCABULARY = 256
"""Number of tokens: one for each byte."""
SEED = 0
OURS = "ckptplan"
GREEDY = {"cpu": "chen_greedy", "cuda": "pooch"}
"""Type of device -> the greedy rule to compare with: on the CPU one that recomputes, on CUDA one that swaps, too."""


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
    """Layer that mixes each byte with the one before it through a gated MLP: many activations, little compute."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.share = nn.Parameter(torch.full((width,), 0.5))
        self.gate, self.value = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (batch, context, width)."""
        h = self.norm(x)
        h = torch.lerp(h, F.pad(h, (0, 0, 1, 0))[:, :-1], self.share)
        return x + self.out(F.silu(self.gate(h)) * self.value(h))  # type: ignore[no-any-return]


class Hourglass(nn.Module):
    """Byte-level decoder, with narrow layers at every byte and wide ones at every few bytes.

    A wide layer has much compute for its activations, a narrow one little, so it matters which ones are recomputed. The
    group of bytes that a wide position stands for ends with the first byte that it is added to, so that no position
    sees the byte that it has to predict.

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
        """Return the logits of the next byte for `tokens` (batch, context)."""
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


@dataclass(frozen=True, slots=True)
class DemoRow:
    """The plan of one planner, and its measurements.

    `found` also has the plain steps that alternated with the planned ones.
    """

    name: str
    plan: Plan
    found: Verification

    @property
    def plain(self) -> tuple[int, float]:
        """Peak bytes and seconds of the plain steps."""
        peak_bytes, step_s = self.found.plain_peak_bytes, self.found.plain_step_s
        assert peak_bytes is not None
        assert step_s is not None
        return peak_bytes, step_s

    @property
    def overhead(self) -> float:
        """Excess of a measured step over the plain steps beside it, as a fraction."""
        return self.found.measured_step_s / self.plain[1] - 1

    @property
    def faults(self) -> list[str]:
        """Descriptions of broken promises."""
        faults = {
            "the measured peak is above the budget": self.found.measured_peak_bytes > self.plan.budget_bytes,
            "loss or gradients differ from those of the plain step": not self.found.gradients_equal,
            "a stage saved something else than profiled": self.found.other_paths > 0,
        }
        return [f"{self.name}: {fault}" for fault, is_so in faults.items() if is_so]


def keep_pages(keeps: bool) -> None:
    """Set whether glibc keeps freed memory from here on, or returns it to the system, its default.

    By default it returns large blocks and pays for their pages anew in every step, more or fewer of them by chance,
    which a profile of single stages doesn't see. Other C libraries are left unchanged.
    """
    if platform.libc_ver()[0] == "glibc":
        glibc = ctypes.CDLL(None)
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX in malloc.h
        glibc.mallopt(trim_threshold, -1 if keeps else 128 << 10)
        glibc.mallopt(mmap_max, 0 if keeps else 65536)


@contextlib.contextmanager
def steady(device: torch.device) -> Iterator[None]:
    """Use one thread, and a heap that keeps its pages, within the block on the CPU: equal steps then take equal times.

    With more threads every operation waits for the slowest one, which another program may hold up.
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
    """Return the profile without options that move anything, for every planner."""
    stages = [replace(s, options=tuple(option for option in s.options if not option.moves)) for s in profile.stages]
    return replace(profile, stages=tuple(stages))


def plans_of(profile: Profile, time_limit_s: float, *, swaps: bool, greedy: str) -> tuple[dict[str, Plan], list[str]]:
    """Return the plans to compare by planner, the solver's first, and remarks on them.

    The budget is what a step needs beside activations and half of these, or the smallest feasible peak if that is more.
    """
    base = min(profile.base_forward_bytes)
    budget_bytes = base + (BASELINES["keep_all"](profile, MOST_BYTES - 1).peak_bytes - base) // 2
    notes = [f"budget {format_bytes(budget_bytes)}: all but the activations, {format_bytes(base)}, and half of these"]

    def solved(profile: Profile, budget_bytes: int) -> Plan:
        return ckptplan.solve(profile, budget_bytes / GIB, time_limit_s=time_limit_s, gap=0.0)

    alone = without_swaps(profile)
    if not swaps:
        profile = alone
        notes.append("nothing is swapped on a CPU, where it would go to the same memory: plans recompute")
    try:
        plans = {OURS: solved(profile, budget_bytes)}
    except InfeasibleBudgetError as error:
        budget_bytes = error.min_peak_bytes
        notes.append(f"no plan fits, so the budget is the smallest feasible peak, {format_bytes(budget_bytes)}")
        plans = {OURS: solved(profile, budget_bytes)}
    rivals: dict[str, Callable[[], Plan]] = {
        "uniform": lambda: BASELINES["uniform"](profile, budget_bytes),
        "greedy": lambda: BASELINES[greedy](profile, budget_bytes),
    }
    if swaps:
        rivals["recompute"] = lambda: solved(alone, budget_bytes)
    for name, planned in rivals.items():
        try:
            plans[name] = planned()
        except InfeasibleBudgetError:
            notes.append(f"{name} finds no plan within the budget")
    return plans, notes


def measured(
    size: Size, device: torch.device, steps: int, time_limit_s: float, tell: Report
) -> tuple[list[DemoRow], list[str]]:
    """Profile the model, plan for half of its activations, and measure each plan; return remarks, too."""
    torch.manual_seed(SEED)
    model = Hourglass(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = torch.randint(VOCABULARY, (2, size.batch, size.context), device=device)

    def loss_fn(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    profile = ckptplan.profile(model, inputs=(tokens,), loss_fn=loss_fn, optimizer=optimizer, on_progress=tell)
    tell(f"solving, at most {time_limit_s:g} s")
    # On a CPU copies would take cores from training.
    plans, notes = plans_of(profile, time_limit_s, swaps=is_accelerator(device), greedy=GREEDY[device.type])
    rows = []
    for name, plan in plans.items():
        tell(f"measuring {steps} steps with the plan by {name}")
        found = ckptplan.verify(model, plan, (tokens,), loss_fn, optimizer=optimizer, repeats=steps)
        rows.append(DemoRow(name, plan, found))
    return rows, notes


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
        Default: CUDA where there is one, otherwise the CPU.
    steps : int
        Timed steps of each plan, and as many plain ones beside them.
    size : Size, optional
        Default: one that suits the device.
    time_limit_s : float
        For the solver.
    console : rich.console.Console, optional

    Returns
    -------
    bool
        Whether all losses and gradients were identical and every measured peak within the budget.
    """
    # The profiler that counts the allocator's bytes writes a line to stderr at each start and stop below this level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    console = console or Console(highlight=False)
    kind = str(device or default_device())
    if kind.partition(":")[0] not in GREEDY:
        raise InvalidInputError(f"device={kind!r}: the demo runs on {' or '.join(GREEDY)}; give one of these")
    try:
        where = torch.empty(0, device=kind).device
    except (RuntimeError, AssertionError) as error:
        raise InvalidInputError(f"device={kind!r} can't be used: {error}; give another, or leave it out") from error
    size = size or (GPU_SIZE if is_accelerator(where) else Size())
    console.print(
        f"Byte-level model of {2 * size.outer} narrow layers and {size.inner} wide ones on {where}: "
        f"{size.batch} × {size.context} bytes a step"
    )
    with steady(where), progress("profiling", console=Console(stderr=True)) as shown:
        rows, notes = measured(size, where, steps, time_limit_s, shown)
    for note in notes:
        console.print(note)
    console.print(_table(rows))
    lines, sound = verdict(rows)
    for line in lines:
        console.print(line)
    ours = rows[0].plan
    console.print(
        f"ckptplan's predicted step is {ours.status}, {ours.gap:.2%} above the bound proven for every plan "
        f"({ours.space})."
    )
    return sound


def _table(rows: list[DemoRow]) -> Table:
    # Neither lines nor padding, so that it fits 80 columns.
    table = Table("", box=box.SIMPLE_HEAD, padding=0)
    for column in ("budget", "peak\npredicted", "\nmeasured", "step, or over plain\npredicted", "\nmeasured"):
        table.add_column(column, justify="right", no_wrap=True)
    peak_bytes, step_s = rows[0].plain  # the other rows' steps are compared with plain ones of their own
    predicted_s = rows[0].found.predicted_plain_step_s
    table.add_row("plain", "-", "", format_bytes(peak_bytes), format_seconds(predicted_s), format_seconds(step_s))
    for row in rows:
        table.add_row(
            row.name,
            format_bytes(row.plan.budget_bytes),
            format_bytes(row.plan.peak_bytes),
            format_bytes(row.found.measured_peak_bytes),
            f"{row.plan.overhead:+.1%}",
            f"{row.overhead:+.1%}",
        )
    return table


def verdict(rows: list[DemoRow]) -> tuple[list[str], bool]:
    """Return lines for a console about the measurements, and whether all promises are kept.

    Parameters
    ----------
    rows : list of DemoRow
        The solver's plan first.
    """
    faults = [fault for row in rows for fault in row.faults]
    lines = [f"[red]{fault}[/red]" for fault in faults]
    if not faults:
        lines.append("[green]Losses and gradients equal plain training's bit for bit, every peak is in budget.[/green]")
    peak_bytes, step_s = rows[0].plain
    saved = 1 - rows[0].found.measured_peak_bytes / peak_bytes
    lines.append(f"Measured with ckptplan: {saved:.0%} less memory than plain, {rows[0].overhead:+.1%} time.")
    off = rows[0].found.predicted_plain_step_s / step_s
    if not 2 / 3 <= off <= 3 / 2:
        lines.append(
            f"[yellow]The plain step was predicted at {off:.2g} times its measured time: the machine was busy with "
            "something else. Try again when it is idle; the bytes don't depend on it.[/yellow]"
        )
    return lines, not faults
