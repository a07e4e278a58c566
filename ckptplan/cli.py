"""The command line: solve, show, simulate and compare plans from files, and a demonstration that trains a model."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from ckptplan.core.chain import ACTIONS, Action
from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError, InvalidInputError
from ckptplan.core.plan import KEEP, Plan
from ckptplan.core.plan import SCHEMA as PLAN_SCHEMA
from ckptplan.core.profile import SCHEMA as PROFILE_SCHEMA
from ckptplan.core.profile import Profile
from ckptplan.core.units import budget_to_bytes, format_bytes, format_seconds
from ckptplan.referee import Violation, simulate, validate

STRUCTURE = {"stages", "action", "moves", "points", "held"}
"""Kinds of violation after which a replay would mean nothing."""


class _Group(TyperGroup):
    """Turns the package's own errors into one line and exit code 2; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CkptPlanError as error:
            Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # Locals of a training program can be gigabytes of tensors.
    pretty_exceptions_show_locals=False,
    help="Plan what a training step keeps, swaps and recomputes, so that it fits a memory budget and loses least time.",
)


def _show_version(asked: bool) -> None:
    if asked:
        try:
            found = version("ckptplan")
        except PackageNotFoundError:  # run from a source tree that isn't installed
            found = "0+unknown"
        typer.echo(f"ckptplan {found}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


ProfileFile = Annotated[Path, typer.Argument(metavar="PROFILE.json", help="A profile (docs/formats.md).")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan made by [bold]ckptplan solve -o[/bold].")]
# Taken as text, so that "12GB" meets the package's own message, which says the unit.
Budget = Annotated[str, typer.Option("--budget-gb", metavar="X", help="Device budget in units of 2**30 bytes.")]


@app.command()
def demo(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each of the two runs.")] = 5,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds the solver may take.")] = 10.0,
) -> None:
    """Train a small GPT on real text within half its activation memory, and compare with plain training.

    Exits with 1 if a loss or a gradient differs, or if a measured peak is above the budget.

    Example: [bold]ckptplan demo --device cpu[/bold]
    """
    # Here, since it imports torch, which no other command needs.
    from ckptplan.demo import run

    if not run(device, steps=steps, time_limit_s=time_limit):
        raise typer.Exit(1)


@app.command()
def solve(
    profile_file: ProfileFile,
    budget_gb: Budget,
    host_gb: Annotated[
        str | None, typer.Option(metavar="X", help="Most bytes on the host tier, same unit; default: no limit.")
    ] = None,
    actions: Annotated[str, typer.Option(help="What stages may do, separated by commas.")] = ",".join(ACTIONS),
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds the solver may take.")] = 10.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PLAN.json", help="Where to write the plan.")
    ] = None,
) -> None:
    """Find the fastest plan that fits the budget, with a proven bound.

    Exits with 2 if none fits; the message names the smallest budget that works.

    Example: [bold]ckptplan solve profile.json --budget-gb 12 -o plan.json[/bold]
    """
    from ckptplan.solving.planner import solve_profile

    profile = Profile.load(profile_file)
    budget_bytes = _bytes(budget_gb, "--budget-gb")
    host_bytes = None if host_gb is None else _bytes(host_gb, "--host-gb")
    wanted = _actions(actions)
    with Console(stderr=True).status("solving") as status:

        def on_progress(part: str, best_s: float, bound_s: float) -> None:
            best = format_seconds(best_s) if math.isfinite(best_s) else "none yet"
            status.update(f"solving, {part}: best {best}, bound {format_seconds(bound_s)}")

        plan = solve_profile(
            profile,
            budget_bytes,
            actions=wanted,
            host_bytes=host_bytes,
            time_limit_s=time_limit,
            on_progress=on_progress,
        )
    typer.echo(str(plan))
    # No plan is handed out that the referee, which shares no code with the solver, doesn't accept.
    violations = validate(profile, plan, budget_bytes, host_bytes=host_bytes)
    if violations:
        _show_violations(violations)
        raise typer.Exit(1)
    if output is not None:
        try:
            plan.save(output)
        except OSError as error:
            raise InvalidInputError(f"the plan can't be written to {output}: {error}") from error
        typer.echo(f"\nwritten to {output}")


@app.command()
def show(file: Annotated[Path, typer.Argument(metavar="FILE.json", help="A profile or a plan.")]) -> None:
    """Print a profile or a plan as a table.

    Example: [bold]ckptplan show profile.json[/bold]
    """
    found = _load(file)
    if isinstance(found, Plan):
        typer.echo(str(found))
    else:
        _show_profile(found)


@app.command("simulate")
def simulate_command(
    profile_file: ProfileFile,
    plan_file: PlanFile,
    budget_gb: Annotated[
        str | None, typer.Option(metavar="X", help="Check against this budget; default: the plan's own.")
    ] = None,
) -> None:
    """Replay a plan on its profile: peak, step time, transfers. Exits with 1 if it breaks a rule.

    Example: [bold]ckptplan simulate profile.json plan.json[/bold]
    """
    profile, plan = Profile.load(profile_file), Plan.load(plan_file)
    plan.require_profile(profile)
    budget_bytes = plan.budget_bytes if budget_gb is None else _bytes(budget_gb, "--budget-gb")
    violations = validate(profile, plan, budget_bytes)
    if not any(violation.kind in STRUCTURE for violation in violations):
        _show_timeline(profile, plan, budget_bytes)
    _show_violations(violations)
    if violations:
        raise typer.Exit(1)


@app.command()
def baselines(profile_file: ProfileFile, budget_gb: Budget) -> None:
    """Compare the published planners on a profile under one budget; no solver is run.

    Example: [bold]ckptplan baselines profile.json --budget-gb 12[/bold]
    """
    from ckptplan.baselines import BASELINES

    profile = Profile.load(profile_file)
    budget_bytes = _bytes(budget_gb, "--budget-gb")
    table = Table("planner", title=f"published planners within {format_bytes(budget_bytes)}")
    for column in ("peak", "step", "overhead", *ACTIONS):
        table.add_column(column, justify="right")
    for name, planner in BASELINES.items():
        try:
            plan = planner(profile, budget_bytes)
        except InfeasibleBudgetError as error:
            table.add_row(name, f"needs {format_bytes(error.min_peak_bytes)}", "-", "-", *["-"] * len(ACTIONS))
            continue
        counts = [str(sum(choice.action == action for choice in plan.choices)) for action in ACTIONS]
        table.add_row(
            name, format_bytes(plan.peak_bytes), format_seconds(plan.step_s), f"{plan.overhead:+.1%}", *counts
        )
    _console().print(table)


def _console() -> Console:
    """Standard output; wide where it is a pipe or a file, whose width is nobody's."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def _bytes(text: str, option: str) -> int:
    try:
        value: Any = float(text)
    except ValueError:
        value = text
    return budget_to_bytes(value, name=option)


def _actions(text: str) -> tuple[Action, ...]:
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in wanted if part not in ACTIONS]
    if unknown or not wanted:
        raise InvalidInputError(f"--actions {text!r}: choose from {', '.join(get_args(Action))}, separated by commas")
    return tuple(action for action in ACTIONS if action in wanted)


def _load(path: Path) -> Profile | Plan:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} can't be read as JSON: {error}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == PROFILE_SCHEMA:
        return Profile.load(path)
    if schema == PLAN_SCHEMA:
        return Plan.load(path)
    raise InvalidInputError(f"{path} has schema {schema!r}; this version reads {PROFILE_SCHEMA!r} and {PLAN_SCHEMA!r}")


def _show_profile(profile: Profile) -> None:
    from ckptplan.solving.planner import smallest_peak

    def nbytes(storages: Sequence[int]) -> str:
        return format_bytes(sum(profile.storages[s].nbytes for s in storages))

    table = Table("stage", "can", title=f"{len(profile.stages)} stages, {len(profile.storages)} storages")
    for column in ("saves", "pinned", "inputs", "forward", "backward", "recompute"):
        table.add_column(column, justify="right")
    for stage in profile.stages:
        times = (stage.forward_s, stage.backward_s, stage.recompute_s)
        # Initials, so that stage names keep their room.
        can = " ".join(action[0] if action in stage.actions else "-" for action in ACTIONS)
        table.add_row(
            escape(stage.name), can, *(nbytes(held) for held in (stage.saved, stage.pinned, stage.inputs)),
            *(format_seconds(seconds) for seconds in times),
        )  # fmt: skip
    console = _console()
    console.print(table)
    keep_all = simulate(profile, (KEEP,) * len(profile.stages))
    smallest = smallest_peak(profile, time_limit_s=5)
    totals = Table(show_header=False, box=None)
    for label, text in (
        ("can", ", ".join(f"{action[0]} = {action}" for action in ACTIONS)),
        ("keep-all peak", f"{format_bytes(keep_all.peak_bytes)} ({keep_all.peak_phase} of {keep_all.peak_stage})"),
        (
            "smallest feasible peak",
            format_bytes(smallest.peak_bytes)
            + ("" if smallest.proven else f" found in 5 s, at least {format_bytes(smallest.bound_bytes)}"),
        ),
        ("held without activations", format_bytes(min(profile.base_forward_bytes))),
        ("update peak", format_bytes(profile.update_peak_bytes)),
        ("keep-all step", format_seconds(profile.baseline_step_s)),
        ("recompute of every stage", format_seconds(sum(stage.recompute_s for stage in profile.stages))),
        (
            "link",
            f"{format_bytes(profile.link.out_bytes_per_s)}/s out, {format_bytes(profile.link.in_bytes_per_s)}/s in, "
            f"latency {format_seconds(profile.link.latency_s)}",
        ),
        *(("note", note) for note in profile.notes),
    ):
        totals.add_row(label, escape(text))
    console.print(totals)


def _show_timeline(profile: Profile, plan: Plan, budget_bytes: int) -> None:
    timeline = simulate(profile, plan)
    busy = {
        lane: sum(event.end_s - event.start_s for event in timeline.events if event.what == lane)
        for lane in ("out", "in", "recompute")
    }
    table = Table(show_header=False, box=None)
    for label, text in (
        ("peak", f"{format_bytes(timeline.peak_bytes)} of {format_bytes(budget_bytes)} "
                 f"({timeline.peak_phase} of {timeline.peak_stage})"),
        ("step", f"{format_seconds(timeline.makespan_s)}, keep-all {format_seconds(profile.baseline_step_s)}"),
        ("recompute", format_seconds(busy["recompute"])),
        ("waiting for transfers", format_seconds(timeline.stall_s)),
        ("swapped", f"{format_bytes(timeline.host_bytes)}: {format_seconds(busy['out'])} out, "
                    f"{format_seconds(busy['in'])} in"),
    ):  # fmt: skip
        table.add_row(label, escape(text))
    console = _console()
    console.print(table)
    worst = Table("phase", "stage", title="steps with the most bytes")
    worst.add_column("at start", justify="right")
    worst.add_column("peak", justify="right")
    for step in sorted(timeline.steps, key=lambda step: -step.peak_bytes)[:5]:
        worst.add_row(step.phase, escape(step.stage), format_bytes(step.start_bytes), format_bytes(step.peak_bytes))
    console.print(worst)


def _show_violations(violations: Sequence[Violation]) -> None:
    console = _console()
    if not violations:
        console.print("[green]no violations[/green]")
    for violation in violations:
        where = f" {violation.stage}:" if violation.stage else ""
        console.print(
            f"[red]violation[/red] ({violation.kind}){escape(where)} {escape(violation.detail)}", soft_wrap=True
        )


if __name__ == "__main__":
    app()
