"""Commands about devices: calibrate, estimate, fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ckptplan.cli.arguments import (
    WHAT_STAGES_SAVE,
    Accumulate,
    AllocatorConf,
    AppliedPlan,
    Autocast,
    AxolotlFile,
    Batches,
    BatchSize,
    Config,
    Dtype,
    EmptiesCache,
    HoldsOutput,
    InDdp,
    JsonOutput,
    Keeps,
    Lora,
    MicroBatches,
    Offload,
    OptimizerName,
    OptionalModel,
    SequenceLength,
    Sharded,
    SwapFolder,
    TargetDevice,
    TrainingArgumentsFile,
    parts_of,
    to_bytes,
    to_counts,
    to_fsdp,
)
from ckptplan.cli.output import check_writable, terminal, writing
from ckptplan.cli.subject import Files, batches_of, model_of
from ckptplan.cli.tables import fit_table
from ckptplan.core.display import progress
from ckptplan.core.plan import Plan
from ckptplan.core.request import Training
from ckptplan.core.resident import checked_offload


def calibrate(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.json", help="Where to write the description.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the description; default: the device's own.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    swap_dir: SwapFolder = None,
    effort: Annotated[
        float,
        typer.Option(
            min=0.01, max=60, metavar="SECONDS", help="Measured time per quantity, of which there are a dozen."
        ),
    ] = 0.6,
) -> None:
    """Measure this machine's memory, rates and link; the file describes it as a device to plan for elsewhere.

    Example: [bold]ckptplan calibrate -o here.json --name workstation[/bold]
    """
    check_writable(output, "the device")
    # Imported here: it imports torch.
    from ckptplan.profiling.times.calibrate import calibrate, summary

    with progress("measuring", console=Console(stderr=True)) as shown:
        found = calibrate(device, name=name, swap_dir=swap_dir, effort_s=effort, on_progress=shown)
    table = Table("what", "measured", "share of the peak", title=escape(f"{found.name}: {found.description}"))
    for row in summary(found):
        table.add_row(*map(escape, row))
    terminal().print(table)
    if output is not None:
        with writing("the device", output):
            found.save(output)
        typer.echo(f"written to {output}")


def estimate(
    source: OptionalModel = None,
    config: Config = None,
    lora: Lora = None,
    dtype: Dtype = None,
    seq: SequenceLength = None,
    training_arguments: TrainingArgumentsFile = None,
    axolotl: AxolotlFile = None,
    batch: BatchSize = None,
    device: TargetDevice = None,
    optimizer: OptimizerName = None,
    amp: Autocast = None,
    accumulate: Accumulate = None,
    ddp: InDdp = False,
    fsdp: Sharded = None,
    batches: Batches = "",
    empty_cache: EmptiesCache = False,
    accumulation: MicroBatches = 1,
    holds_output: HoldsOutput = True,
    keeps: Keeps = "",
    plan_file: AppliedPlan = None,
    allocator: AllocatorConf = None,
    json_file: JsonOutput = None,
) -> None:
    """Estimate the memory of training a model, by phase and category, without allocating it.

    Example: [bold]ckptplan estimate train:build --device a100-40gb --optimizer adamw --amp bfloat16[/bold], or
    [bold]ckptplan estimate --axolotl qlora.yaml --device rtx4090[/bold]
    """
    check_writable(json_file, "the estimate")
    plan = None if plan_file is None else Plan.load(plan_file)
    sizes = to_counts(batches, "--batches")
    files = Files(config, lora, dtype, seq, training_arguments, axolotl)
    files.check(source)
    training = Training(optimizer=optimizer, amp=amp, accumulate=accumulate, fsdp=to_fsdp(fsdp))
    make_inputs: Any = None
    if source is None:
        model, make_inputs, batch, training = files.described(batch, training)
    elif sizes or batch:
        model, make_inputs, _ = batches_of(source)
    else:
        model, inputs = model_of(source)
    if make_inputs is not None:
        inputs = [make_inputs(size) for size in sizes] if sizes else make_inputs(batch)
    from ckptplan.memory.estimate import estimate

    with progress("estimating", console=Console(stderr=True)) as shown:
        found = estimate(
            model,
            inputs,
            device=device,
            optimizer=training.optimizer,
            amp=training.amp,
            accumulate=training.accumulate,
            ddp=ddp,
            fsdp=training.fsdp,
            accumulation_steps=accumulation,
            holds_output=holds_output,
            keeps=parts_of(keeps),
            plan=plan,
            allocator=allocator,
            empty_cache=empty_cache,
            on_progress=shown,
        )
    typer.echo(str(found))
    if json_file is not None:
        with writing("the estimate", json_file):
            found.save(json_file)


def fit(
    source: OptionalModel = None,
    config: Config = None,
    lora: Lora = None,
    dtype: Dtype = None,
    seq: SequenceLength = None,
    training_arguments: TrainingArgumentsFile = None,
    axolotl: AxolotlFile = None,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="D", help="Only this device, by name or by the file that describes it; may be repeated."),
    ] = None,
    budget_gb: Annotated[
        str | None, typer.Option(metavar="X", help="Budget in place of each device's memory, in units of 2**30 bytes.")
    ] = None,
    optimizer: OptimizerName = None,
    amp: Autocast = None,
    accumulate: Accumulate = None,
    fsdp: Sharded = None,
    batch: BatchSize = None,
    offload: Offload = WHAT_STAGES_SAVE,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for each plan.")] = 0.5,
) -> None:
    """Show for each known device whether a batch fits, the largest batch, and the plan and slowdown for it.

    Example: [bold]ckptplan fit train:build --optimizer adamw --amp bfloat16[/bold], or
    [bold]ckptplan fit --config llama/config.json --lora r=16,targets=q_proj,v_proj --seq 4096 --amp bfloat16[/bold]
    """
    from ckptplan.core.device import find_device, known_devices

    budget = None if budget_gb is None else to_bytes(budget_gb, "--budget-gb")
    wanted = [find_device(name) for name in device] if device else list(known_devices().values())
    wanted = list({found.name: found for found in wanted}.values())
    files = Files(config, lora, dtype, seq, training_arguments, axolotl)
    files.check(source)
    training = Training(optimizer=optimizer, amp=amp, accumulate=accumulate, fsdp=to_fsdp(fsdp))
    if source is not None:
        model, make_inputs, given = batches_of(source)
    else:
        model, make_inputs, given, training = files.described(batch, training)
    from ckptplan.fitting.survey import survey
    from ckptplan.profiling.workload.optimizer_names import notes_on
    from ckptplan.profiling.workload.optimizers import make_optimizer

    with progress("estimating", console=Console(stderr=True)) as shown:
        rows = survey(
            model,
            make_inputs,
            wanted,
            batch or given,
            training,
            budget_bytes=budget,
            offload=checked_offload(parts_of(offload)),
            time_limit_s=time_limit,
            on_progress=shown,
        )
    # Many terminals cut a wider table.
    Console(width=100, highlight=False).print(fit_table(rows, batch=batch or given))
    for note in [] if training.optimizer is None else notes_on(make_optimizer(training.optimizer, model)):
        typer.echo(f"note: {note}")
