"""Commands that make profiles and plans: profile, solve, frontier, explain, compare."""

from __future__ import annotations

import csv
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ckptplan.cli.arguments import (
    EVERY_ACTION,
    WHAT_STAGES_SAVE,
    Accumulate,
    Actions,
    Autocast,
    Budget,
    Compiled,
    DiskLimit,
    Gap,
    HostLimit,
    InDdp,
    JsonOutput,
    ModelSource,
    Offload,
    OptimizerName,
    Output,
    PlanFile,
    ProfileFile,
    Sharded,
    Source,
    SwapFolder,
    TargetDevice,
    TimeLimit,
    Together,
    number,
    parts_of,
    to_actions,
    to_bytes,
    to_fsdp,
)
from ckptplan.cli.output import INTERRUPTED, check_writable, finishing, save_plan, show_interrupt, terminal, writing
from ckptplan.cli.subject import model_of, profile_of, subject_of
from ckptplan.cli.tables import Row, planners_table
from ckptplan.core.display import progress
from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError, InvalidInputError
from ckptplan.core.frontier import Frontier
from ckptplan.core.plan import KEEP, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.progress import Message, limited
from ckptplan.core.request import NO_LIMITS, Limits, SolveKeywords
from ckptplan.core.units import format_bytes, format_seconds
from ckptplan.referee import simulate, validate

OURS = "ckptplan"
"""The solver's name in the list of planners."""


def profile(
    source: ModelSource,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="PROFILE.json", help="Where to write the profile.")
    ] = Path("profile.json"),
    device: TargetDevice = None,
    optimizer: OptimizerName = None,
    amp: Autocast = None,
    accumulate: Accumulate = None,
    ddp: InDdp = False,
    fsdp: Sharded = None,
    swap_dir: SwapFolder = None,
) -> None:
    """Measure a model's training step: bytes and seconds of its stages, from which plans are made, here or elsewhere.

    Example: [bold]ckptplan profile train:build --optimizer adamw --amp bfloat16 -o profile.json[/bold]
    """
    check_writable(output, "the profile")
    model, inputs = model_of(source)
    from ckptplan.profiling.profiler import profile

    with progress("profiling", console=Console(stderr=True)) as shown:
        found = profile(
            model,
            inputs,
            device=device,
            optimizer=optimizer,
            amp=amp,
            accumulate=accumulate,
            ddp=ddp,
            fsdp=to_fsdp(fsdp),
            swap_dir=swap_dir,
            on_progress=shown,
        )
    typer.echo(str(found))
    with writing("the profile", output):
        found.save(output)
    typer.echo(f"written to {output}")


def solve(
    source: Source,
    budget_gb: Budget = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help="The budget in words instead: '12 GiB', '800 MB', '50%' of the way from the smallest peak to "
            "everything kept, 'auto' for the free memory less a margin.",
        ),
    ] = None,
    max_overhead: Annotated[
        float | None,
        typer.Option(metavar="X", help="Find the smallest peak within this slowdown instead, 0.1 for 10 per cent."),
    ] = None,
    host_gb: HostLimit = None,
    disk_gb: DiskLimit = None,
    actions: Actions = EVERY_ACTION,
    offload: Offload = WHAT_STAGES_SAVE,
    segments: Together = True,
    compiled: Compiled = False,
    accumulate: Accumulate = None,
    time_limit: TimeLimit = 10.0,
    gap: Gap = NO_LIMITS.gap,
    output: Output = None,
) -> None:
    """Find the fastest plan within a budget, or the plan with the smallest peak within a slowdown, with a proven bound.

    A model is profiled first, and its plan is replayed on it. With an optimizer, autocast or for another device, run
    [bold]ckptplan profile[/bold] and solve its file. Plans found on the way are shown. Exits with 2 if no plan fits;
    the message names the smallest budget that works. Ctrl-C prints and writes the best plan so far, and exits with 130.

    Example: [bold]ckptplan solve profile.json --budget-gb 12 -o plan.json[/bold]
    """
    if sum(value is not None for value in (budget_gb, budget, max_overhead)) != 1:
        raise InvalidInputError(
            "give one of --budget-gb, in units of 2**30 bytes, --budget, in words such as '12 GiB' or '50%', and "
            "--max-overhead, 0.1 for 10 %"
        )
    check_writable(output, "the plan")
    options = _options(host_gb, disk_gb, actions, offload, segments, accumulate, time_limit, gap)
    options["compile"] = compiled
    budget_in_gb = number(budget_gb, "--budget-gb")
    subject, inputs = subject_of(source)
    from ckptplan.api import solve as solve_subject

    found: list[Plan] = []
    console = Console(stderr=True)

    def on_plan(plan: Plan) -> None:
        found[:] = [plan]
        _show(console, plan)

    interrupted = False
    try:
        with progress("solving", console=console) as shown:
            options["on_progress"], options["on_plan"] = shown, on_plan
            plan = solve_subject(
                subject, budget_in_gb, budget=budget, inputs=inputs, max_overhead=max_overhead, **options
            )
    except KeyboardInterrupt:
        interrupted = True
    with finishing(interrupted):
        if interrupted:
            (plan,) = _best_so_far(found, subject)
        typer.echo(str(plan))
        if output is not None:
            save_plan(plan, output)
    if interrupted:
        show_interrupt("this is the best plan so far")
        raise typer.Exit(INTERRUPTED)


def _best_so_far(found: Sequence[Plan], subject: object) -> tuple[Plan, ...]:
    """Return the plans found before an interrupt, with a note; raise `KeyboardInterrupt` if there are none."""
    if not found:
        raise KeyboardInterrupt("no plan was found before")
    note = "the search was interrupted; a longer one may find a faster plan, or prove a smaller gap"
    if not isinstance(subject, Profile):
        note += "; the plan hasn't been replayed on the model, whose bytes may be more"
    return tuple(replace(plan, notes=(*plan.notes, note)) for plan in found)


def _show(console: Console, plan: Plan) -> None:
    console.print(
        f"found: step {format_seconds(plan.step_s)}, peak {format_bytes(plan.peak_bytes)}, gap {plan.gap:.2%}",
        highlight=False,
    )


def _options(
    host_gb: str | None,
    disk_gb: str | None,
    actions: str,
    offload: str,
    segments: bool,
    accumulate: bool | None,
    time_limit: float,
    gap: float,
) -> SolveKeywords:
    options = SolveKeywords(
        host_gb=number(host_gb, "--host-gb", least=0),
        disk_gb=number(disk_gb, "--disk-gb", least=0),
        actions=to_actions(actions),
        segments=segments,
        accumulate=accumulate,
        time_limit_s=time_limit,
        gap=gap,
    )
    if offload != WHAT_STAGES_SAVE:
        options["offload"] = parts_of(offload)
    return options


def frontier(
    source: Source,
    points: Annotated[int, typer.Option(min=2, help="Largest number of plans, both ends included.")] = 12,
    host_gb: HostLimit = None,
    disk_gb: DiskLimit = None,
    actions: Actions = EVERY_ACTION,
    offload: Offload = WHAT_STAGES_SAVE,
    segments: Together = True,
    compiled: Compiled = False,
    accumulate: Accumulate = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for all plans together.")] = 60.0,
    gap: Gap = NO_LIMITS.gap,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Where to write the plans, one file each, and all as frontier.json.",
        ),
    ] = None,
) -> None:
    """Find plans along the whole trade-off between memory and time, from the smallest peak to everything kept.

    Ctrl-C prints and writes the plans found so far, and exits with 130.

    Example: [bold]ckptplan frontier profile.json --points 8 -o plans[/bold]
    """
    options = _options(host_gb, disk_gb, actions, offload, segments, accumulate, time_limit, gap)
    options["compile"] = compiled
    for place in () if output is None else (output, *output.parents):
        if place.exists() and not place.is_dir():
            raise InvalidInputError(f"the plans can't be written to {output}: {place} is a file; give a folder's name")
    subject, inputs = subject_of(source)
    from ckptplan.api import frontier as frontier_of

    found: list[Plan] = []
    interrupted = False
    try:
        with progress("solving", console=Console(stderr=True)) as shown:
            options["on_progress"], options["on_plan"] = shown, found.append
            plans = frontier_of(subject, points=points, inputs=inputs, **options)
    except KeyboardInterrupt:
        interrupted = True
    with finishing(interrupted):
        if interrupted:
            plans = Frontier.of(_best_so_far(found, subject))
        typer.echo(str(plans))
        if output is not None:
            with writing("the plans", output):
                output.mkdir(parents=True, exist_ok=True)
            for plan in plans:
                save_plan(plan, output / f"plan_{plan.counted_bytes}.json")
            with writing("the frontier", output / "frontier.json"):
                plans.save(output / "frontier.json")
            typer.echo(f"written to {output / 'frontier.json'}, all of them, for ckptplan report --frontier")
    if interrupted:
        show_interrupt("these are the plans so far")
        raise typer.Exit(INTERRUPTED)


def explain(
    profile_file: ProfileFile,
    plan_file: PlanFile,
    host_gb: HostLimit = None,
    time_limit: TimeLimit = 10.0,
) -> None:
    """Explain a plan: the steps that limit it, the value of more memory, and the alternatives of each stage.

    Example: [bold]ckptplan explain profile.json plan.json[/bold]
    """
    profile, plan = Profile.load(profile_file), Plan.load(plan_file)
    from ckptplan.api import explain

    with progress("explaining", console=Console(stderr=True)) as shown:
        found = explain(
            profile, plan, host_gb=number(host_gb, "--host-gb", least=0), time_limit_s=time_limit, on_progress=shown
        )
    typer.echo(str(plan).partition("\n\n")[0])
    typer.echo(str(found))


def compare(
    source: Source,
    budget_gb: Budget = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            metavar="P,Q,..",
            help="Budgets instead, in per cent of the way from the smallest peak to that of keeping everything.",
        ),
    ] = None,
    planners: Annotated[
        str, typer.Option(metavar="A,B,..", help=f"Which planners to run; {OURS} is the solver, all is every one.")
    ] = "all",
    time_limit: TimeLimit = 10.0,
    json_file: JsonOutput = None,
    csv_output: Annotated[
        bool, typer.Option("--csv", help="Print comma-separated values instead of the table.")
    ] = False,
) -> None:
    """Run other planners and the solver on a model or a profile, all under the same budgets and rules.

    The solver always runs, since the gap of every plan refers to its bound. Every plan has passed the referee.

    Example: [bold]ckptplan compare profile.json --budgets 20,40,60 --planners ckptplan,pooch,rotor[/bold]
    """
    check_writable(json_file, "the rows")
    wanted = _planners(planners)
    if (budget_gb is None) == (budgets is None):
        raise InvalidInputError("give either --budget-gb, in units of 2**30 bytes, or --budgets, in percent")
    fixed = None if budget_gb is None else to_bytes(budget_gb, "--budget-gb")
    shares = None if budgets is None else _percentages(budgets)
    profile = profile_of(source)
    rows = []
    with progress("planning", console=Console(stderr=True)) as shown:
        if fixed is None:
            shown(limited("looking for the smallest peak", time_limit))
        limits = [fixed] if fixed is not None else _budgets(profile, shares or (), time_limit)
        for limit in limits:
            rows += _rows(profile, limit, wanted, time_limit, shown)
    if json_file is not None:
        data = {"source": source, "stages": len(profile.stages), "rows": [_fields(row) for row in rows]}
        with writing("the rows", json_file):
            json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if csv_output:
        writer = csv.DictWriter(sys.stdout, list(_fields(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(_fields(row) for row in rows)
        return
    everything = simulate(profile, (KEEP,) * len(profile.stages))
    terminal().print(
        planners_table(
            rows,
            title=f"{len(profile.stages)} stages; everything kept: {format_seconds(profile.baseline_step_s)}, "
            f"{format_bytes(everything.peak_bytes)}",
        )
    )


def _budgets(profile: Profile, shares: Sequence[float], time_limit_s: float) -> list[int]:
    """Return the bytes at each percentage of the way from the smallest peak to that of keeping everything."""
    from ckptplan.solving.planner import smallest_peak

    least = smallest_peak(profile, Limits(time_limit_s=time_limit_s)).peak_bytes
    most = simulate(profile, (KEEP,) * len(profile.stages)).peak_bytes
    return [least + int((most - least) * share / 100) for share in shares]


def _rows(
    profile: Profile, budget_bytes: int, wanted: Sequence[str], time_limit_s: float, on_progress: Callable[[str], None]
) -> list[Row]:
    """Return each planner's result within one budget, with the solver's bound on all of them."""
    from ckptplan.baselines import BASELINES
    from ckptplan.planning.job import job_of_profile

    names = (OURS, *(name for name in wanted if name != OURS))

    def ours(profile: Profile, budget_bytes: int) -> Plan:
        limits = Limits(time_limit_s=time_limit_s, gap=0.0, on_progress=functools.partial(tell, OURS))
        return job_of_profile(profile, limits).solved(budget_bytes)

    def tell(name: str, state: str = "") -> None:
        number = names.index(name) + 1
        timed = state if isinstance(state, Message) else Message(state)
        on_progress(
            Message(
                f"planner {number} of {len(names)} within {format_bytes(budget_bytes)}: {name}"
                + (f", {timed.what}" if state else ""),
                done=number,
                total=len(names),
                began_s=timed.began_s,
                limit_s=timed.limit_s,
            )
        )

    bound_s = None
    rows = []
    for name in names:
        tell(name)
        row = _row(profile, budget_bytes, name, ours if name == OURS else BASELINES[name])
        if name == OURS:
            bound_s = row.bound_s
        if name in wanted:
            rows.append(replace(row, bound_s=bound_s))
    return rows


def _row(profile: Profile, budget_bytes: int, name: str, planner: Callable[[Profile, int], Plan]) -> Row:
    began = time.perf_counter()
    row = Row(name, budget_bytes, profile.baseline_step_s, None)
    try:
        plan = planner(profile, budget_bytes)
    except InfeasibleBudgetError as error:
        took_s = time.perf_counter() - began
        return replace(row, needs_bytes=error.min_peak_bytes, planning_s=took_s)
    took_s = time.perf_counter() - began
    broken = validate(profile, plan, budget_bytes)
    if broken:
        raise CkptPlanError(f"the referee rejects the plan of {name}, please report it: {broken[0]}")
    return replace(
        row,
        step_s=plan.step_s,
        peak_bytes=plan.peak_bytes,
        host_bytes=plan.host_bytes,
        bound_s=plan.lower_bound_s,
        planning_s=took_s,
    )


def _fields(row: Row) -> dict[str, Any]:
    return {**asdict(row), "overhead": row.overhead, "gap": row.gap}


def _planners(text: str) -> tuple[str, ...]:
    from ckptplan.baselines import BASELINES

    known = (OURS, *BASELINES)
    wanted = parts_of(text)
    if wanted == ["all"]:
        return known
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise InvalidInputError(f"--planners {text!r}: choose from all, {', '.join(known)}, separated by commas")
    return tuple(name for name in known if name in wanted)


def _percentages(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= share <= 100 for share in found):
        raise InvalidInputError(f"--budgets {text!r}: give percentages from 0 to 100, separated by commas")
    return found
