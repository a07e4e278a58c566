"""The command that writes reports."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from ckptplan.cli.arguments import Budget, to_bytes
from ckptplan.cli.output import check_writable
from ckptplan.core.display import progress
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.estimate import Estimate
from ckptplan.core.files import read_json
from ckptplan.core.frontier import Frontier
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.trace import Trace

Format = Literal["html", "md"]


Reported = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="The profile that the plan was made from, or an estimate by [bold]ckptplan estimate --json[/bold].",
    ),
]
ReportedPlan = Annotated[
    Path | None, typer.Argument(metavar="PLAN.json", help="The profile's plan; an estimate has none.")
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Where to write the report: FILE.html, or FILE.md for Markdown; default: report and the format.",
    ),
]
FrontierFile = Annotated[
    Path | None,
    typer.Option(metavar="FRONTIER.json", help="Plans for other budgets, from [bold]ckptplan frontier -o[/bold]."),
]
FrontierLimit = Annotated[
    float | None, typer.Option(min=0.1, help="Find plans for other budgets within this many seconds instead.")
]
TraceFile = Annotated[
    Path | None, typer.Option(metavar="TRACE.json", help="A measured step to draw, from [bold]ckptplan trace[/bold].")
]


def report(
    source: Reported,
    plan_file: ReportedPlan = None,
    output: ReportFile = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="What to write, where the file's name doesn't say so.")
    ] = None,
    budget_gb: Budget = None,
    frontier: FrontierFile = None,
    time_limit: FrontierLimit = None,
    trace: TraceFile = None,
) -> None:
    """Write a page on a plan: its memory over one step, each decision and why, and the price of other budgets.

    For an estimate: memory by phase, the tensors at the peak, and the devices with enough memory.

    The page is one file that loads nothing from the network.

    Example: [bold]ckptplan report profile.json plan.json --time-limit 30 -o plan.html[/bold]
    """
    from ckptplan.report.page.render import check_suffix

    output = output or Path(f"report.{form or 'html'}")
    if form is not None and output.suffix.lower() != f".{form}":
        raise InvalidInputError(f"--format {form} doesn't match the file name {output}; leave out one of them")
    check_suffix(output)
    check_writable(output, "the report")
    options = {
        "--budget-gb": budget_gb,
        "--frontier": frontier and frontier.name,
        "--time-limit": time_limit and f"{time_limit:g}",
        "--trace": trace and trace.name,
    }
    given = {name: value for name, value in options.items() if value}
    file = Path(source)
    if file.exists() and read_json(file, Profile.SCHEMA, Estimate.SCHEMA)["schema"] == Estimate.SCHEMA:
        extra = [*(["PLAN.json"] if plan_file else []), *given]
        if extra:
            raise InvalidInputError(f"{file} is an estimate; leave out the arguments for plans: {', '.join(extra)}")
        Estimate.load(file).report(commands=[f"ckptplan report {shlex.quote(file.name)}"]).save(output)
        typer.echo(f"written to {output}")
        return
    if plan_file is None:
        raise InvalidInputError(f"{source} has no plan; give it too: ckptplan report {shlex.quote(source)} PLAN.json")
    plan, profile = Plan.load(plan_file), Profile.load(source)
    if budget_gb is not None:
        budget_bytes = to_bytes(budget_gb, "--budget-gb")
        if budget_bytes > plan.budget_bytes:  # the bound holds for smaller budgets alone
            plan = replace(plan, lower_bound_s=0.0, status="feasible")
        plan = replace(plan, budget_bytes=budget_bytes)
    others = () if frontier is None else Frontier.load(frontier)
    step = None if trace is None else Trace.load(trace)
    words = ["ckptplan", "report", file.name if file.exists() else source, plan_file.name, *chain(*given.items())]
    with progress("explaining", console=Console(stderr=True)) as shown:
        made = plan.report(
            profile,
            frontier=others,
            time_limit_s=time_limit,
            trace=step,
            commands=[shlex.join(words)],
            on_progress=shown,
        )
    made.save(output)
    typer.echo(f"written to {output}")
