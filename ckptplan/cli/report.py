"""The command that writes reports."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ckptplan.cli.arguments import Budget, PlanFile, ProfileFile, to_bytes
from ckptplan.cli.output import check_writable
from ckptplan.core.frontier import Frontier
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.trace import Trace


def report(
    profile_file: ProfileFile,
    plan_file: PlanFile,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Where to write the report: FILE.html, or FILE.md for Markdown."
        ),
    ] = Path("plan.html"),
    budget_gb: Budget = None,
    frontier: Annotated[
        Path | None,
        typer.Option(metavar="FRONTIER.json", help="Plans for other budgets, from [bold]ckptplan frontier -o[/bold]."),
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0.1, help="Find plans for other budgets within so many seconds instead.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="TRACE.json", help="A measured step to draw, from [bold]ckptplan trace[/bold]."),
    ] = None,
) -> None:
    """Write a page on a plan: its memory over one step, each decision and why, and the price of other budgets.

    The page is one file that loads nothing from the network.

    Example: [bold]ckptplan report profile.json plan.json --time-limit 30 -o plan.html[/bold]
    """
    check_writable(output, "the report")
    profile, plan = Profile.load(profile_file), Plan.load(plan_file)
    if budget_gb is not None:
        plan = replace(plan, budget_bytes=to_bytes(budget_gb, "--budget-gb"))
    others = () if frontier is None else Frontier.load(frontier)
    step = None if trace is None else Trace.load(trace)
    words = ["ckptplan", "report", profile_file.name, plan_file.name]
    with Console(stderr=True).status("explaining"):
        made = plan.report(profile, frontier=others, time_limit_s=time_limit, trace=step, commands=[shlex.join(words)])
    made.save(output)
    typer.echo(f"written to {output}")
