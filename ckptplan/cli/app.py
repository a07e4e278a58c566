"""The command line: solve, show, simulate and compare plans, and a demonstration that trains a model."""

from __future__ import annotations

import csv
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError, InvalidInputError
from ckptplan.core.option import ACTIONS, Action, Option
from ckptplan.core.plan import KEEP, Plan
from ckptplan.core.plan import SCHEMA as PLAN_SCHEMA
from ckptplan.core.profile import SCHEMA as PROFILE_SCHEMA
from ckptplan.core.profile import Profile
from ckptplan.core.units import budget_to_bytes, format_bytes, format_seconds
from ckptplan.referee import Violation, simulate, validate
from ckptplan.referee.rules import broken_rules
from ckptplan.report.tables import FitRow, Row, fit_table, frontier_table, planners_table, swapped

if TYPE_CHECKING:  # it imports torch
    from ckptplan.fitting.survey import DeviceFit

EVERY_ACTION = ",".join(ACTIONS)
OURS = "ckptplan"
"""The solver's name among the planners."""


class _Group(TyperGroup):
    """Turns the package's own errors, and PyTorch's absence, into one line and exit code 2.

    Anything else is a bug and keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CkptPlanError as error:
            _show_error(str(error))
            raise typer.Exit(2) from error
        except ModuleNotFoundError as error:
            if not _is_torch(error):
                raise
            _show_error("this needs PyTorch, which isn't installed; install it with: pip install torch")
            raise typer.Exit(2) from error


def _show_error(text: str) -> None:
    Console(stderr=True).print(f"[red]error:[/red] {escape(text)}", soft_wrap=True, highlight=False)


def _is_torch(error: ImportError) -> bool:
    """Whether PyTorch is what is missing."""
    return (error.name or "").partition(".")[0] == "torch"


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


Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_PROFILE",
        help="A profile (docs/formats.md), or [bold]package.module:name[/bold] of a model, of a function that makes "
        "one, or of one that makes model and inputs.",
    ),
]
ProfileFile = Annotated[Path, typer.Argument(metavar="PROFILE.json", help="A profile (docs/formats.md).")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan made by [bold]ckptplan solve -o[/bold].")]
# Taken as text, so that "12GB" meets the package's own message, which says the unit.
Budget = Annotated[str | None, typer.Option("--budget-gb", metavar="X", help="Device budget in units of 2**30 bytes.")]
HostLimit = Annotated[
    str | None, typer.Option(metavar="X", help="Most bytes on the host tier, same unit; default: no limit.")
]
DiskLimit = Annotated[
    str | None,
    typer.Option(metavar="X", help="Most bytes on the disk tier, same unit: what the host can't hold; default: none."),
]
Actions = Annotated[str, typer.Option(help="What stages may do, separated by commas.")]
Together = Annotated[bool, typer.Option("--segments/--no-segments", help="Whether stages may be recomputed together.")]
TimeLimit = Annotated[float, typer.Option(min=0.1, help="Seconds the solver may take.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="PLAN.json", help="Where to write the plan.")]
Accumulate = Annotated[
    bool | None,
    typer.Option(
        "--accumulate/--no-accumulate",
        help="Steps start with gradients, as under accumulation; default: where the model has any.",
    ),
]


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
    from ckptplan.cli.demo import run

    if not run(device, steps=steps, time_limit_s=time_limit):
        raise typer.Exit(1)


@app.command()
def solve(
    source: Source,
    budget_gb: Budget = None,
    max_overhead: Annotated[
        float | None,
        typer.Option(metavar="X", help="Instead: the smallest peak within this slowdown, 0.1 for 10 per cent."),
    ] = None,
    host_gb: HostLimit = None,
    disk_gb: DiskLimit = None,
    actions: Actions = EVERY_ACTION,
    segments: Together = True,
    accumulate: Accumulate = None,
    time_limit: TimeLimit = 10.0,
    output: Output = None,
) -> None:
    """Find the fastest plan that fits a budget, or the leanest within a slowdown, with a proven bound.

    A model is profiled first, and its plan replayed on it. Exits with 2 if no plan fits; the message names the smallest
    budget that works.

    Example: [bold]ckptplan solve profile.json --budget-gb 12 -o plan.json[/bold]
    """
    if (budget_gb is None) == (max_overhead is None):
        raise InvalidInputError("give either --budget-gb, in units of 2**30 bytes, or --max-overhead, 0.1 for 10 %")
    limits = {
        "host_gb": _number(host_gb, "--host-gb", least=0),
        "disk_gb": _number(disk_gb, "--disk-gb", least=0),
        "actions": _actions(actions),
        "segments": segments,
        "accumulate": accumulate,
    }
    budget = _number(budget_gb, "--budget-gb")
    subject, inputs = _subject(source)
    from ckptplan.api import solve as solve_subject

    with Console(stderr=True).status("solving") as status:
        plan = solve_subject(
            subject,
            budget,
            inputs=inputs,
            max_overhead=max_overhead,
            time_limit_s=time_limit,
            on_progress=status.update,
            **limits,  # type: ignore[arg-type]
        )
    typer.echo(str(plan))
    if output is not None:
        _save(plan, output)


@app.command()
def frontier(
    source: Source,
    points: Annotated[int, typer.Option(min=2, help="Most plans, both ends included.")] = 12,
    host_gb: HostLimit = None,
    disk_gb: DiskLimit = None,
    actions: Actions = EVERY_ACTION,
    segments: Together = True,
    accumulate: Accumulate = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for all plans together.")] = 60.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FOLDER", help="Where to write the plans, one file each.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw slowdown over memory, with the proven bound.")
    ] = None,
) -> None:
    """The whole trade-off between memory and time, from the smallest peak to everything kept.

    Example: [bold]ckptplan frontier profile.json --points 8 --plot frontier.png[/bold]
    """
    limits = {
        "host_gb": _number(host_gb, "--host-gb", least=0),
        "disk_gb": _number(disk_gb, "--disk-gb", least=0),
        "actions": _actions(actions),
        "segments": segments,
        "accumulate": accumulate,
    }
    subject, inputs = _subject(source)
    from ckptplan.api import frontier as frontier_of

    with Console(stderr=True).status("solving") as status:
        plans = frontier_of(
            subject,
            points=points,
            inputs=inputs,
            time_limit_s=time_limit,
            on_progress=status.update,
            **limits,  # type: ignore[arg-type]
        )
    _console().print(frontier_table(plans))
    if plot is not None:
        from ckptplan.report.plots import plot_frontier

        plot_frontier(plans, plot, title=Path(source).stem)
        typer.echo(f"drawn in {plot}")
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInputError(f"{output} can't be made a folder for the plans: {error}") from error
        for plan in plans:
            _save(plan, output / f"plan_{plan.budget_bytes}.json")


@app.command("explain")
def explain_command(
    profile_file: ProfileFile,
    plan_file: PlanFile,
    host_gb: HostLimit = None,
    time_limit: TimeLimit = 10.0,
) -> None:
    """Say why a plan is as it is: what binds, what more memory would save, each stage's next choices.

    Example: [bold]ckptplan explain profile.json plan.json[/bold]
    """
    profile, plan = Profile.load(profile_file), Plan.load(plan_file)
    from ckptplan.api import explain

    found = explain(profile, plan, host_gb=_number(host_gb, "--host-gb", least=0), time_limit_s=time_limit)
    typer.echo(str(plan).partition("\n\n")[0])
    typer.echo(str(found))


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="A profile or a plan.")],
    options: Annotated[bool, typer.Option("--options", help="Also list the options of every kind of stage.")] = False,
) -> None:
    """Print a profile or a plan as a table.

    Example: [bold]ckptplan show profile.json[/bold]
    """
    found = _load(file)
    if isinstance(found, Plan):
        typer.echo(str(found))
    else:
        _show_profile(found)
        if options:
            _show_options(found)


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
    violations = validate(profile, plan, budget_bytes, disk_bytes=plan.disk_bytes)
    if not broken_rules(profile, plan.choices, plan.segments):  # else a replay would mean nothing
        _show_timeline(profile, plan, budget_bytes)
    _show_violations(violations)
    if violations:
        raise typer.Exit(1)


@app.command()
def compare(
    source: Source,
    budget_gb: Budget = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            metavar="P,Q,..",
            help="Instead: percentages of the way from the smallest peak to that of keeping everything.",
        ),
    ] = None,
    planners: Annotated[
        str, typer.Option(metavar="A,B,..", help=f"Which planners; {OURS} is the solver, all is every one.")
    ] = "all",
    time_limit: TimeLimit = 10.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE.json", help="Write the rows there too.")
    ] = None,
    csv_output: Annotated[
        bool, typer.Option("--csv", help="Print comma-separated values instead of the table.")
    ] = False,
) -> None:
    """Run the published planners and ours on a model or a profile, all under the same budgets and rules.

    The solver always runs, since every plan's gap is measured against its bound. Every plan has passed the referee.

    Example: [bold]ckptplan compare profile.json --budgets 20,40,60 --planners ckptplan,pooch,rotor[/bold]
    """
    wanted = _planners(planners)
    if (budget_gb is None) == (budgets is None):
        raise InvalidInputError("give either --budget-gb, in units of 2**30 bytes, or --budgets, in percent")
    fixed = None if budget_gb is None else _bytes(budget_gb, "--budget-gb")
    shares = None if budgets is None else _percentages(budgets)
    profile = _profile_of(source)
    rows = []
    with Console(stderr=True).status("planning") as status:
        limits = [fixed] if fixed is not None else _budgets(profile, shares or (), time_limit)
        for limit in limits:
            rows += _rows(profile, limit, wanted, time_limit, status.update)
    if json_file is not None:
        data = {"source": source, "stages": len(profile.stages), "rows": [_fields(row) for row in rows]}
        _write_text(json_file, json.dumps(data, indent=1) + "\n", "the rows")
    if csv_output:
        writer = csv.DictWriter(sys.stdout, list(_fields(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(_fields(row) for row in rows)
        return
    everything = simulate(profile, (KEEP,) * len(profile.stages))
    _console().print(
        planners_table(
            rows,
            title=f"{len(profile.stages)} stages; everything kept: {format_seconds(profile.baseline_step_s)}, "
            f"{format_bytes(everything.peak_bytes)}",
        )
    )


@app.command("calibrate")
def calibrate_command(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.json", help="Where to write the description.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call the device; default: its own name.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    swap_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the CPU's swapped bytes would go; default: as in training."),
    ] = None,
    effort: Annotated[
        float,
        typer.Option(
            min=0.01, max=60, metavar="SECONDS", help="Measured time per quantity, of which there are a dozen."
        ),
    ] = 0.6,
) -> None:
    """Measure this machine: memory, rates, the link; planning for it elsewhere takes the file as a device.

    Example: [bold]ckptplan calibrate -o here.json --name workstation[/bold]
    """
    # Here, since it imports torch.
    from ckptplan.profiling.times.calibrate import calibrate, summary

    with Console(stderr=True).status("measuring") as status:
        found = calibrate(device, name=name, swap_dir=swap_dir, effort_s=effort, on_progress=status.update)
    table = Table("what", "measured", "share of the peak", title=escape(f"{found.name}: {found.description}"))
    for row in summary(found):
        table.add_row(*map(escape, row))
    _console().print(table)
    if output is not None:
        try:
            found.save(output)
        except OSError as error:
            raise InvalidInputError(f"the device can't be written to {output}: {error}") from error
        typer.echo(f"written to {output}")


MODEL = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="[bold]package.module:name[/bold] of a model, of a function that makes one, or of one that makes model "
        "and inputs. A function may take the batch size, as [bold]n[/bold], [bold]batch[/bold] or "
        "[bold]batch_size[/bold]; else the inputs' first dimension is the batch.",
    ),
]
OptimizerName = Annotated[
    str | None, typer.Option(metavar="NAME", help="sgd, momentum, rmsprop, adagrad, adam, adamw or adafactor.")
]
Autocast = Annotated[str | None, typer.Option("--amp", metavar="TYPE", help="Autocast to float16 or bfloat16.")]


@app.command("estimate")
def estimate_command(
    source: MODEL,
    device: Annotated[
        str | None, typer.Option(metavar="D", help="A known device (a100-40gb) or its file; default: the model's.")
    ] = None,
    optimizer: OptimizerName = None,
    amp: Autocast = None,
    accumulate: Accumulate = None,
    ddp: Annotated[bool, typer.Option("--ddp", help="Gradients in buckets, as in distributed data parallel.")] = False,
    accumulation: Annotated[int, typer.Option(min=1, metavar="N", help="Micro-batches per update.")] = 1,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN.json", help="Trained with this plan.")
    ] = None,
    allocator: Annotated[
        str | None, typer.Option(metavar="SETTINGS", help="CUDA's, as in PYTORCH_CUDA_ALLOC_CONF.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE.json", help="Write the estimate there too.")
    ] = None,
) -> None:
    """What training a model needs, by phase and category, without allocating it.

    Example: [bold]ckptplan estimate train:build --device a100-40gb --optimizer adamw --amp bfloat16[/bold]
    """
    plan = None if plan_file is None else Plan.load(plan_file)
    model, inputs = _model(source)
    from ckptplan.memory.estimate import estimate

    with Console(stderr=True).status("estimating"):
        found = estimate(
            model,
            inputs,
            device=device,
            optimizer=optimizer,
            amp=amp,
            accumulate=accumulate,
            ddp=ddp,
            accumulation_steps=accumulation,
            plan=plan,
            allocator=allocator,
        )
    typer.echo(str(found))
    if json_file is not None:
        try:
            found.save(json_file)
        except OSError as error:
            raise InvalidInputError(f"the estimate can't be written to {json_file}: {error}") from error


@app.command("trace")
def trace_command(
    source: MODEL,
    plan_file: PlanFile,
    output: Annotated[
        Path, typer.Option("-o", "--output", "--out", metavar="TRACE.json", help="Where to write the trace.")
    ] = Path("trace.json"),
    profile_file: Annotated[
        Path | None,
        typer.Option(
            "--profile", metavar="PROFILE.json", help="Draw the step as predicted from it beside the real one."
        ),
    ] = None,
    swap_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the CPU's swapped bytes go; default: as in training.")
    ] = None,
) -> None:
    """Run one planned step and draw it for https://ui.perfetto.dev: compute, copies both ways, memory.

    Example: [bold]ckptplan trace train:build plan.json --profile profile.json -o trace.json[/bold]
    """
    plan = Plan.load(plan_file)
    profile = None if profile_file is None else Profile.load(profile_file)
    model, inputs = _model(source)
    from ckptplan.model_api import trace
    from ckptplan.profiling.workload.inputs import find_inputs
    from ckptplan.runtime.step import model_device

    if inputs is None:
        args, kwargs, _ = find_inputs(model, model_device(model))
        inputs = args or kwargs
    with Console(stderr=True).status("running"):
        found = trace(model, plan, inputs, profile=profile, swap_dir=swap_dir)
    found.save(output)
    typer.echo(str(found))
    typer.echo(f"written to {output}")


@app.command("snapshot")
def snapshot_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.pickle",
            help="As [bold]torch.cuda.memory._dump_snapshot[/bold] writes it; no code in it runs.",
        ),
    ],
    limit_gb: Annotated[
        str | None,
        typer.Option(
            metavar="X",
            help="Most that other settings may reserve, units of 2**30 bytes; default: no limit, for "
            "garbage_collection_threshold the recorded peak.",
        ),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE.json", help="Write the figures there too; - prints them alone."),
    ] = None,
) -> None:
    """Explain a recorded CUDA memory history: peaks, fragments and whose they are, and what settings would change.

    Example: [bold]ckptplan snapshot snapshot.pickle --json -[/bold]
    """
    limit = None if limit_gb is None else _bytes(limit_gb, "--limit-gb")
    from ckptplan.memory.history.reader import load_snapshot
    from ckptplan.memory.history.summary import summarize, to_json
    from ckptplan.report.snapshot import snapshot_tables

    with Console(stderr=True).status(f"reading {file}") as status:
        found = summarize(load_snapshot(file), limit_bytes=limit, on_progress=status.update)
    text = to_json(found) + "\n"
    if json_file == "-":
        typer.echo(text, nl=False)
        return
    console = _console()
    for summary in found:
        console.print(snapshot_tables(summary), crop=False)
    if not found:
        typer.echo("nothing reserved or recorded on any device")
    if json_file is not None:
        _write_text(Path(json_file), text, "the figures")


@app.command("fit")
def fit_command(
    source: MODEL,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="D", help="Only this device, or the file that describes it; may be repeated."),
    ] = None,
    budget_gb: Annotated[
        str | None, typer.Option(metavar="X", help="In place of each device's memory, units of 2**30 bytes.")
    ] = None,
    optimizer: OptimizerName = None,
    amp: Autocast = None,
    accumulate: Accumulate = None,
    batch: Annotated[int | None, typer.Option(min=1, metavar="B", help="Default: that of the inputs.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for each plan.")] = 0.5,
) -> None:
    """Does it fit, at what batch, with what plan and slowdown: one row for each known device.

    Example: [bold]ckptplan fit train:build --optimizer adamw --amp bfloat16[/bold]
    """
    from ckptplan.core.device import find_device, known_devices

    budget = None if budget_gb is None else _bytes(budget_gb, "--budget-gb")
    wanted = [find_device(name) for name in device] if device else list(known_devices().values())
    wanted = list({found.name: found for found in wanted}.values())
    model, make_inputs, given = _batches(source)
    from ckptplan.fitting.survey import survey

    with Console(stderr=True).status("estimating") as status:
        rows = survey(
            model,
            make_inputs,
            wanted,
            batch or given,
            budget_bytes=budget,
            optimizer=optimizer,
            amp=amp,
            accumulate=accumulate,
            time_limit_s=time_limit,
            on_progress=status.update,
        )
    # A table wider than this is cut in many terminals.
    console = Console(width=100, highlight=False)
    console.print(fit_table([_fit_row(row) for row in rows], batch=batch or given))


def _fit_row(row: DeviceFit) -> FitRow:
    return FitRow(
        row.device.name,
        row.budget_bytes,
        row.kept_bytes,
        row.planned_bytes,
        None if row.plan is None else row.plan.overhead,
        row.most_kept,
        row.most_planned,
        None if row.most_plan is None else row.most_plan.overhead,
        None if row.most_plan is None else row.most_plan,
    )


_BATCH_NAMES = ("n", "batch", "batch_size")


def _model(source: str) -> tuple[Any, Any]:
    """The model named `module:name` and its inputs, None where they don't come with it."""
    if ":" not in source or Path(source).exists():
        raise InvalidInputError(
            f"{source} is no model; give package.module:name of a model or of a function that makes one"
        )
    return _subject(source)


def _batches(source: str) -> tuple[Any, Callable[[int], Any], int]:
    """A model, its inputs by the size of the batch, and the size of what it came with."""
    import inspect

    from torch import nn
    from torch.utils import _pytree as pytree

    from ckptplan.profiling.workload.inputs import find_inputs, resized

    model, inputs = _model(source)
    if inputs is None:
        import torch

        args, kwargs, _ = find_inputs(model, torch.device("cpu"))
        inputs = args or kwargs
    builder = _import(source, *source.split(":", 1))
    parameter = None
    if callable(builder) and not isinstance(builder, nn.Module):
        names = inspect.signature(builder).parameters
        parameter = next((name for name in _BATCH_NAMES if name in names), None)
    sizes = [t.shape[0] for t in pytree.tree_leaves(inputs) if hasattr(t, "shape") and len(t.shape)]
    if not sizes:
        raise InvalidInputError(f"{source}: none of the inputs is a tensor with a first dimension to be the batch")

    def make(n: int) -> Any:
        if parameter is None:
            return resized(inputs, n)
        made = builder(**{parameter: n})
        if not (isinstance(made, tuple) and len(made) == 2):
            raise InvalidInputError(f"{source}({parameter}={n}) gives no pair of model and inputs")
        return made[1]

    return model, make, int(sizes[0])


def _budgets(profile: Profile, shares: Sequence[float], time_limit_s: float) -> list[int]:
    """Bytes at each percentage between the smallest peak and that of keeping everything; 0 and 100 are the ends."""
    from ckptplan.solving.planner import smallest_peak

    least = smallest_peak(profile, time_limit_s=time_limit_s).peak_bytes
    most = simulate(profile, (KEEP,) * len(profile.stages)).peak_bytes
    return [least + int((most - least) * share / 100) for share in shares]


def _rows(
    profile: Profile, budget_bytes: int, wanted: Sequence[str], time_limit_s: float, tell: Callable[[str], None]
) -> list[Row]:
    """What each planner reaches within one budget, and our bound on all of them."""
    from ckptplan.baselines import BASELINES
    from ckptplan.solving.planner import solve_profile

    def ours(profile: Profile, budget_bytes: int) -> Plan:
        return solve_profile(profile, budget_bytes, time_limit_s=time_limit_s)

    bound_s = None
    rows = []
    for name in (OURS, *(name for name in wanted if name != OURS)):
        tell(f"planning within {format_bytes(budget_bytes)}: {name}")
        row = _row(profile, budget_bytes, name, ours if name == OURS else BASELINES[name])
        if name == OURS:
            bound_s = row.bound_s
        if name in wanted:
            rows.append(replace(row, bound_s=bound_s))
    return rows


def _row(profile: Profile, budget_bytes: int, name: str, planner: Callable[[Profile, int], Plan]) -> Row:
    began = time.perf_counter()
    try:
        plan = planner(profile, budget_bytes)
    except InfeasibleBudgetError as error:
        took_s = time.perf_counter() - began
        return Row(
            name, budget_bytes, profile.baseline_step_s, None, needs_bytes=error.min_peak_bytes, planning_s=took_s
        )
    took_s = time.perf_counter() - began
    broken = validate(profile, plan, budget_bytes)
    if broken:
        raise CkptPlanError(f"{name} gave a plan that the referee rejects, please report it: {broken[0]}")
    return Row(
        name,
        budget_bytes,
        profile.baseline_step_s,
        plan.step_s,
        peak_bytes=plan.peak_bytes,
        host_bytes=plan.host_bytes,
        bound_s=plan.lower_bound_s,
        planning_s=took_s,
    )


def _fields(row: Row) -> dict[str, Any]:
    return {**asdict(row), "overhead": row.overhead, "gap": row.gap}


def _write_text(path: Path, text: str, what: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{what} can't be written to {path}: {error}") from error


def _planners(text: str) -> tuple[str, ...]:
    from ckptplan.baselines import BASELINES

    known = (OURS, *BASELINES)
    wanted = [part.strip() for part in text.split(",") if part.strip()]
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


def _profile_of(source: str) -> Profile:
    """The profile in a file, or that of a model."""
    subject, inputs = _subject(source)
    if isinstance(subject, Profile):
        return subject
    from ckptplan.profiling.profiler import profile

    with Console(stderr=True).status("profiling") as status:
        return profile(subject, inputs, on_progress=status.update)


def _subject(source: str) -> tuple[Any, Any]:
    """A profile from its file, or the model named `module:name`; and the model's inputs where they come with it."""
    path = Path(source)
    module, colon, name = source.partition(":")
    if path.exists() or not colon or "/" in source or not name.replace(".", "").isidentifier():
        return Profile.load(path), None
    found = _import(source, module, name)
    # Here, since it imports torch, which no profile needs.
    from torch import nn

    made = found if isinstance(found, nn.Module) or not callable(found) else found()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InvalidInputError(
            f"{source} gives {type(model).__name__}; want a torch.nn.Module, or a function that returns one, alone or "
            "with its inputs"
        )
    return model, inputs


def _save(plan: Plan, path: Path) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise InvalidInputError(f"the plan can't be written to {path}: {error}") from error
    typer.echo(f"written to {path}")


def _import(source: str, module: str, name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as python -m does; an installed command has it not
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and _is_torch(error):
            raise
        raise InvalidInputError(f"{source} can't be imported: {error}; want package.module:name") from error
    return found


def _console() -> Console:
    """Standard output; wide where it is a pipe or a file, whose width is nobody's."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def _number(text: str | None, option: str, *, least: float | None = None) -> float | None:
    """The number of GiB in `text`, a budget by the package's own rules or `least`."""
    if text is None:
        return None
    try:
        value: Any = float(text)
    except ValueError:
        value = text
    if value != least:
        budget_to_bytes(value, name=option)
    return value  # type: ignore[no-any-return]


def _bytes(text: str, option: str) -> int:
    value = _number(text, option)
    assert value is not None
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

    table = Table("stage", "options", title=f"{len(profile.stages)} stages, {len(profile.storages)} storages")
    for column in ("saves", "pinned", "inputs", "forward", "backward", "recompute"):
        table.add_column(column, justify="right")
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
    console = _console()
    console.print(table)
    keep_all = simulate(profile, (KEEP,) * len(profile.stages))
    smallest = smallest_peak(profile, time_limit_s=5)
    totals = Table(show_header=False, box=None)
    for label, text in (
        (
            "options",
            "k keep, s swap, r recompute, r+s with its inputs swapped, and how many others; --options lists them",
        ),
        ("keep-all peak", f"{format_bytes(keep_all.peak_bytes)} ({keep_all.peak_phase} of {keep_all.peak_stage})"),
        (
            "smallest feasible peak",
            format_bytes(smallest.peak_bytes)
            + ("" if smallest.proven else f" found in 5 s, at least {format_bytes(smallest.bound_bytes)}"),
        ),
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


_SHORT = {"keep": "k", "swap": "s", "recompute": "r", "recompute+swap": "r+s"}


def _menu(options: Sequence[Option]) -> str:
    """A menu in a few characters, so that stage names keep their room."""
    names = {option.name for option in options}
    others = len(names - set(_SHORT))
    return " ".join([short for name, short in _SHORT.items() if name in names] + ([f"+{others}"] if others else []))


def _nbytes(profile: Profile, storages: Sequence[int]) -> str:
    return format_bytes(sum(profile.storages[s].nbytes for s in storages))


def _show_options(profile: Profile) -> None:
    """Every option of the first stage of each kind."""
    table = Table("stage", "option", title="options, one stage of each kind")
    for column in ("held", "moved", "in forward", "in backward", "recompute"):
        table.add_column(column, justify="right")
    seen = set()
    for stage in profile.stages:
        if stage.kind in seen:
            continue
        seen.add(stage.kind)
        count = sum(other.kind == stage.kind for other in profile.stages)
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
    _console().print(table)


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
        ("swapped", f"{swapped(timeline)}: {format_seconds(busy['out'])} out, "
                    f"{format_seconds(busy['in'])} in"),
    ):  # fmt: skip
        table.add_row(label, escape(text))
    console = _console()
    console.print(table)
    worst = Table("phase", "stage", title="steps with the most bytes")
    worst.add_column("at start", justify="right")
    worst.add_column("peak", justify="right")
    for step in sorted(timeline.steps, key=lambda step: -step.peak_bytes)[:5]:
        worst.add_row(
            "again" if step.sweep else step.phase,
            escape(step.stage),
            format_bytes(step.start_bytes),
            format_bytes(step.peak_bytes),
        )
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
