"""`ckptplan demo`: a small GPT trained on real text, plainly and within half its activation memory."""

from __future__ import annotations

import copy
import os
import sysconfig
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import KEEP, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.core.units import GIB, format_bytes, format_seconds
from ckptplan.referee import simulate
from ckptplan.runtime.accelerator import default_device, is_accelerator
from ckptplan.solving.planner import smallest_peak

VOCABULARY = 256
"""Bytes are the tokens."""
TEXT_BYTES = 2_000_000
SEED = 0


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of the model and of its batch."""

    blocks: int = 8
    width: int = 128
    heads: int = 4
    context: int = 256
    batch: int = 8
    dropout: float = 0.1


GPU_SIZE = Size(blocks=12, width=512, heads=8, context=512, batch=32)


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, size.dropout
        self.norm_1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm_2 = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width) to the same."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, 2))
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm_2(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Byte-level decoder: tokens (batch, context) to logits (batch, context, 256)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Parameter(0.02 * torch.randn(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def read_text(limit: int = TEXT_BYTES) -> Tensor:
    """The first `limit` bytes of the standard library's own sources, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def batches(text: Tensor, size: Size, count: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
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


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]], plan: Plan | None = None) -> list[float]:
    """Losses of one AdamW step per batch, from a copy of `model` and a fixed seed; with `plan` applied if given."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(SEED)
    losses = []
    with nullcontext() if plan is None else ckptplan.apply(model, plan):
        for tokens, targets in data:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(tokens), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return losses


def choose_budget(profile: Profile) -> tuple[int, str]:
    """Half of the activations on top of what is held anyway, or the smallest feasible peak where that is more.

    Returns
    -------
    tuple of int and str
        The budget in bytes, and what it is in words.
    """
    keep_all = simulate(profile, (KEEP,) * len(profile.stages)).peak_bytes
    base = min(profile.base_forward_bytes)
    half = base + (keep_all - base) // 2
    smallest = smallest_peak(profile, Limits(time_limit_s=5)).peak_bytes
    made_of = (
        f"{format_bytes(base)} of parameters and inputs plus half of the "
        f"{format_bytes(keep_all - base)} that a plain step adds to them"
    )
    if half >= smallest:
        return half, f"budget {format_bytes(half)}: {made_of}"
    return smallest, (
        f"budget {format_bytes(smallest)}: the smallest feasible peak, since no plan fits in "
        f"{format_bytes(half)} ({made_of})"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison; None where it doesn't apply or was not measured."""

    name: str
    budget_bytes: int | None
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    predicted_step_s: float | None
    measured_step_s: float | None
    gradients_equal: bool | None = None
    losses_equal: bool | None = None
    other_paths: int = 0

    @property
    def over(self) -> bool:
        """Whether the measured peak is above the budget."""
        budget, measured = self.budget_bytes, self.measured_peak_bytes
        return budget is not None and measured is not None and measured > budget

    @property
    def sound(self) -> bool:
        """Within its budget as measured, by the paths that were profiled, and nothing that was compared differs."""
        equal = self.gradients_equal is not False and self.losses_equal is not False
        return equal and not self.over and not self.other_paths


def run(
    device: str | None = None,
    *,
    steps: int = 5,
    size: Size | None = None,
    time_limit_s: float = 10.0,
    console: Console | None = None,
) -> bool:
    """Run the demonstration and print its table.

    Parameters
    ----------
    device : str, optional
        Default: CUDA where there is one, else the CPU.
    steps : int
        Training steps of each of the two runs whose losses are compared.
    size : Size, optional
        Default: one that suits the device.
    time_limit_s : float
        For the solver.
    console : rich.console.Console, optional

    Returns
    -------
    bool
        Whether every loss and gradient was identical and every measured peak within the budget.
    """
    # The profiler that counts the allocator's bytes writes a line to stderr at each start and stop below this level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    console = console or Console(highlight=False)
    where = torch.device(device or default_device())
    size = size or (GPU_SIZE if is_accelerator(where) else Size())
    torch.manual_seed(SEED)
    model = GPT(size).to(where)
    data = batches(read_text(), size, steps, where)
    tokens, targets = data[0]
    step: dict[str, Any] = {"inputs": (tokens,), "loss_fn": lambda logits: loss_of(logits, targets)}
    console.print(
        f"GPT of {size.blocks} blocks, width {size.width}, on {where}: {size.batch} × {size.context} bytes of the "
        "standard library's sources a step"
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:

        def phase(text: str) -> None:
            for task in progress.task_ids:
                progress.remove_task(task)
            progress.add_task(text, total=None)

        phase("profiling: bytes and times of every stage")
        profile = ckptplan.profile(model, **step)
        budget_bytes, budget_text = choose_budget(profile)
        progress.console.print(budget_text)
        phase(f"solving, at most {time_limit_s:g} s")
        plan = ckptplan.solve(profile, budget_gb=budget_bytes / GIB, time_limit_s=time_limit_s)
        phase("measuring the plan")
        report = ckptplan.verify(model, plan, **step)
        rows = [
            Row("plain", None, simulate(profile, (KEEP,) * len(profile.stages)).peak_bytes, report.plain_peak_bytes,
                profile.baseline_step_s, report.plain_step_s)
        ]  # fmt: skip
        for name, label in (("pooch", "greedy (pooch)"), ("recompute_all", "recompute all")):
            phase(f"measuring {label}")
            row = _baseline_row(label, BASELINES[name], profile, budget_bytes, model, step)
            if row is None:
                progress.console.print(f"{label}: finds no plan within the budget")
            else:
                rows.append(row)
        phase(f"training {steps} steps, plainly")
        plain = train(model, data)
        phase(f"training {steps} steps with the plan")
        planned = train(model, data, plan)
    rows.append(_row("ckptplan", plan, report, losses_equal=plain == planned))
    console.print(_table(rows, f"one training step on {where}"))
    console.print(f"losses plain {_series(plain)}; with the plan {_series(planned)}")
    return _conclude(console, plan, rows)


def _row(name: str, plan: Plan, report: Any, losses_equal: bool | None = None) -> Row:
    return Row(
        name, plan.budget_bytes, plan.peak_bytes, report.measured_peak_bytes, plan.step_s, report.measured_step_s,
        report.gradients_equal, losses_equal, report.other_paths,
    )  # fmt: skip


def _baseline_row(
    label: str,
    planner: Callable[[Profile, int], Plan],
    profile: Profile,
    budget_bytes: int,
    model: nn.Module,
    step: dict[str, Any],
) -> Row | None:
    try:
        plan = planner(profile, budget_bytes)
    except InfeasibleBudgetError:
        return None
    return _row(label, plan, ckptplan.verify(model, plan, repeats=2, **step))


def _series(losses: list[float]) -> str:
    return f"{losses[0]:.4f} .. {losses[-1]:.4f}"


def _table(rows: list[Row], title: str) -> Table:
    # Neither lines nor padding, so that it fits 80 columns.
    table = Table("", title=title, box=box.SIMPLE_HEAD, padding=0)
    for column in ("budget", "predicted\npeak", "measured\npeak", "predicted\nstep", "measured\nstep"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("gradients,\nlosses")

    def nbytes(value: int | None) -> str:
        return "-" if value is None else format_bytes(value)

    def seconds(value: float | None) -> str:
        return "-" if value is None else format_seconds(value)

    def same(equal: bool | None) -> str:
        return "-" if equal is None else "[green]same[/green]" if equal else "[red]DIFFER[/red]"

    for row in rows:
        measured = nbytes(row.measured_peak_bytes)
        table.add_row(
            row.name,
            nbytes(row.budget_bytes),
            nbytes(row.predicted_peak_bytes),
            f"[red]{measured}[/red]" if row.over else measured,
            seconds(row.predicted_step_s),
            seconds(row.measured_step_s),
            f"{same(row.gradients_equal)}, {same(row.losses_equal)}",
        )
    return table


def _conclude(console: Console, plan: Plan, rows: list[Row]) -> bool:
    sound = [row.sound for row in rows]
    for row in rows:
        if row.over:
            console.print(f"[red]{row.name}: the measured peak is above the budget[/red]")
        if row.gradients_equal is False or row.losses_equal is False:
            console.print(f"[red]{row.name}: gradients or losses differ from plain training[/red]")
        if row.other_paths:
            console.print(f"[red]{row.name}: {row.other_paths} runs of stages saved something else than profiled[/red]")
    plain, ours = rows[0], rows[-1]
    if plain.predicted_step_s and plain.measured_step_s:
        ratio = plain.predicted_step_s / plain.measured_step_s
        if not 2 / 3 <= ratio <= 3 / 2:
            console.print(
                f"[yellow]The plain step was predicted at {ratio:.2g} times its measured time, so don't compare "
                "times: try again on an idle machine. The bytes don't depend on it.[/yellow]"
            )
    if all(sound):
        saved = ""
        if plain.measured_peak_bytes and ours.measured_peak_bytes and plain.measured_step_s and ours.measured_step_s:
            saved = (
                f" Measured: {1 - ours.measured_peak_bytes / plain.measured_peak_bytes:.0%} less memory, "
                f"{ours.measured_step_s / plain.measured_step_s - 1:+.0%} time."
            )
        console.print(
            "[green]The plan fits, and every loss and gradient is bitwise that of plain training.[/green] "
            f"Its predicted step is {plan.status}, {plan.gap:.2%} above the bound proven for every plan "
            f"({plan.space}).{saved}"
        )
    return all(sound)
