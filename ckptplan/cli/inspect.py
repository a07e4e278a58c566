"""Commands that show a profile, a plan or a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ckptplan.cli.arguments import ModelSource, PlanFile, ProfileFile, SwapFolder, to_bytes
from ckptplan.cli.output import check_writable, terminal
from ckptplan.cli.subject import model_of
from ckptplan.cli.tables import right
from ckptplan.core.display import progress
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.files import read_json
from ckptplan.core.option import DISCARD, Option
from ckptplan.core.plan import KEEP, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.progress import limited
from ckptplan.core.request import Limits
from ckptplan.core.units import format_bytes, format_seconds, format_swapped
from ckptplan.referee import Violation, simulate, validate
from ckptplan.referee.rules import broken_rules

SHOWN_PEAK_S = 5.0
"""Time limit of the search for the smallest peak that `show` prints."""


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="A profile or a plan.")],
    options: Annotated[bool, typer.Option("--options", help="Also list the options of every kind of stage.")] = False,
    graph: Annotated[
        bool,
        typer.Option(
            "--graph", help="Print a profile's graph instead: what each stage makes and which later ones need it."
        ),
    ] = False,
) -> None:
    """Print a profile or a plan as a table.

    Example: [bold]ckptplan show profile.json --graph[/bold]
    """
    found = _load(file)
    if graph:
        if isinstance(found, Plan):
            raise InvalidInputError(f"{file} is a plan, which has no graph; give the profile it was made for")
        # Here, since networkx takes longer to load than all that a table needs.
        from ckptplan.report.graph import graph_table

        terminal().print(graph_table(found))
    elif isinstance(found, Plan):
        typer.echo(str(found))
    else:
        _show_profile(found)
        if options:
            _show_options(found)


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
    profile = plan.require_profile(profile)
    budget_bytes = plan.budget_bytes if budget_gb is None else to_bytes(budget_gb, "--budget-gb")
    violations = validate(profile, plan, budget_bytes, disk_bytes=plan.disk_bytes)
    if not broken_rules(profile, plan.choices, plan.segments):  # otherwise it can't be replayed
        _show_timeline(profile, plan, budget_bytes)
    _show_violations(violations)
    if violations:
        raise typer.Exit(1)


def trace(
    source: ModelSource,
    plan_file: PlanFile,
    output: Annotated[
        Path, typer.Option("-o", "--output", "--out", metavar="TRACE.json", help="Where to write the trace.")
    ] = Path("trace.json"),
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", metavar="PROFILE.json", help="Also draw the step predicted from this profile."),
    ] = None,
    swap_dir: SwapFolder = None,
) -> None:
    """Run one planned step and draw it for https://ui.perfetto.dev: compute, copies both ways, memory.

    Example: [bold]ckptplan trace train:build plan.json --profile profile.json -o trace.json[/bold]
    """
    check_writable(output, "the trace")
    plan = Plan.load(plan_file)
    profile = None if profile_file is None else Profile.load(profile_file)
    model, inputs = model_of(source)
    from ckptplan.planning.applying import trace
    from ckptplan.profiling.workload.inputs import find_inputs
    from ckptplan.training.step import model_device

    if inputs is None:
        args, kwargs, _ = find_inputs(model, model_device(model))
        inputs = args or kwargs
    with progress("running the planned step", console=Console(stderr=True)):
        found = trace(model, plan, inputs, profile=profile, swap_dir=swap_dir)
    found.save(output)
    typer.echo(str(found))
    typer.echo(f"written to {output}")


def _load(path: Path) -> Profile | Plan:
    schema = read_json(path, Profile.SCHEMA, Plan.SCHEMA, *Plan.OLDER)["schema"]
    return Profile.load(path) if schema == Profile.SCHEMA else Plan.load(path)


def _show_profile(profile: Profile) -> None:
    from ckptplan.solving.planner import smallest_peak

    columns = right("saves", "pinned", "inputs", "forward", "backward", "recompute", no_wrap=False)
    title = f"{len(profile.stages)} stages, {len(profile.storages)} storages"
    table = Table("stage", "options", *columns, title=title)
    for stage in profile.stages:
        again = stage.recompute
        table.add_row(
            escape(stage.name),
            _menu(stage.options),
            _nbytes(profile, stage.keep.saved),
            _nbytes(profile, stage.keep.pinned),
            "–" if again is None else _nbytes(profile, again.held),
            format_seconds(stage.forward_s),
            format_seconds(stage.backward_s),
            "–" if again is None else format_seconds(again.recompute_s),
        )
    console = terminal()
    console.print(table)
    keep_all = simulate(profile, (KEEP,) * len(profile.stages))
    with progress(console=Console(stderr=True)) as shown:
        shown(limited("looking for the smallest peak", SHOWN_PEAK_S))
        smallest = smallest_peak(profile, Limits(time_limit_s=SHOWN_PEAK_S))
    within = f" found in {SHOWN_PEAK_S:g} s, at least {format_bytes(smallest.bound_bytes)}"
    totals = Table(show_header=False, box=None)
    for label, text in (
        (
            "options",
            "k keep, s swap, r recompute, r+s recompute with swapped inputs, d discard, +n others; --options lists all",
        ),
        ("keep-all peak", f"{format_bytes(keep_all.peak_bytes)} ({keep_all.peak_phase} of {keep_all.peak_stage})"),
        ("smallest feasible peak", format_bytes(smallest.peak_bytes) + ("" if smallest.proven else within)),
        ("held without activations", format_bytes(min(profile.base_forward_bytes))),
        ("update peak", format_bytes(profile.update_peak_bytes)),
        ("keep-all step", format_seconds(profile.baseline_step_s)),
        (
            "recompute of every stage",
            format_seconds(sum(stage.recompute.recompute_s for stage in profile.stages if stage.recompute is not None)),
        ),
        (
            "link",
            f"{format_bytes(profile.link.out_bytes_per_s)}/s out, {format_bytes(profile.link.in_bytes_per_s)}/s in, "
            f"latency {format_seconds(profile.link.latency_s)}",
        ),
        *(("note", note) for note in profile.notes),
    ):
        totals.add_row(label, escape(text))
    console.print(totals)


_SHORT = {"keep": "k", "swap": "s", "recompute": "r", "recompute+swap": "r+s", DISCARD: "d"}


def _menu(options: Sequence[Option]) -> str:
    """Return a menu in a few characters, which leaves room for the names of stages."""
    names = {option.name for option in options}
    others = len(names - set(_SHORT))
    return " ".join([short for name, short in _SHORT.items() if name in names] + ([f"+{others}"] if others else []))


def _nbytes(profile: Profile, storages: Sequence[int]) -> str:
    return format_bytes(sum(profile.storages[s].nbytes for s in storages))


def _show_options(profile: Profile) -> None:
    """Print every option of the first stage of each kind."""
    columns = right("held", "moved", "in forward", "in backward", "recompute", no_wrap=False)
    table = Table("stage", "option", *columns, title="options, one stage of each kind")
    first = {stage.kind: stage for stage in reversed(profile.stages)}
    for kind, count in Counter(stage.kind for stage in profile.stages).items():
        stage = first[kind]
        table.add_section()
        for option in stage.options:
            label = escape(stage.name) + (f" × {count}" if count > 1 else "")
            table.add_row(
                label if option is stage.keep else "",
                escape(option.name),
                _nbytes(profile, option.held),
                _nbytes(profile, option.moved),
                format_bytes(option.forward_bytes),
                format_bytes(option.backward_bytes),
                format_seconds(option.recompute_s),
            )
    terminal().print(table)


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
        ("swapped", f"{format_swapped(timeline.host_bytes, timeline.disk_bytes)}: {format_seconds(busy['out'])} out, "
                    f"{format_seconds(busy['in'])} in"),
    ):  # fmt: skip
        table.add_row(label, escape(text))
    console = terminal()
    console.print(table)
    worst = Table("phase", "stage", *right("at start", "peak", no_wrap=False), title="steps with the most bytes")
    for step in sorted(timeline.steps, key=lambda step: -step.peak_bytes)[:5]:
        worst.add_row(
            "again" if step.sweep else step.phase,
            escape(step.stage),
            format_bytes(step.start_bytes),
            format_bytes(step.peak_bytes),
        )
    console.print(worst)


def _show_violations(violations: Sequence[Violation]) -> None:
    console = terminal()
    if not violations:
        console.print("[green]no violations[/green]")
    for violation in violations:
        where = f" {violation.stage}:" if violation.stage else ""
        console.print(
            f"[red]violation[/red] ({violation.kind}){escape(where)} {escape(violation.detail)}", soft_wrap=True
        )
