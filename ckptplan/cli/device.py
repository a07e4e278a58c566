"""Commands about devices: calibrate, estimate, fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ckptplan.cli.arguments import Accumulate, Autocast, ModelSource, OptimizerName, to_bytes
from ckptplan.cli.output import terminal
from ckptplan.cli.subject import batches_of, model_of
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.request import Training
from ckptplan.report.tables import FitRow, fit_table

if TYPE_CHECKING:  # it imports torch
    from ckptplan.fitting.survey import DeviceFit


def calibrate(
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
    terminal().print(table)
    if output is not None:
        try:
            found.save(output)
        except OSError as error:
            raise InvalidInputError(f"the device can't be written to {output}: {error}") from error
        typer.echo(f"written to {output}")


def estimate(
    source: ModelSource,
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
    model, inputs = model_of(source)
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


def fit(
    source: ModelSource,
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

    budget = None if budget_gb is None else to_bytes(budget_gb, "--budget-gb")
    wanted = [find_device(name) for name in device] if device else list(known_devices().values())
    wanted = list({found.name: found for found in wanted}.values())
    model, make_inputs, given = batches_of(source)
    from ckptplan.fitting.survey import survey

    with Console(stderr=True).status("estimating") as status:
        rows = survey(
            model,
            make_inputs,
            wanted,
            batch or given,
            Training(optimizer=optimizer, amp=amp, accumulate=accumulate),
            budget_bytes=budget,
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
