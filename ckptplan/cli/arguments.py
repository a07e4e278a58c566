"""Arguments and options that several commands share, and the conversion of their text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.fsdp import FSDP
from ckptplan.core.option import ACTIONS, Action
from ckptplan.core.resident import ACTIVATIONS
from ckptplan.core.units import budget_to_bytes

EVERY_ACTION = ",".join(ACTIONS)
WHAT_STAGES_SAVE = ",".join(ACTIVATIONS)


Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_PROFILE",
        help="A profile (docs/formats.md), or [bold]package.module:name[/bold] of a model, of a function that makes "
        "one, or of one that makes model and inputs.",
    ),
]


_MODEL = typer.Argument(
    metavar="MODEL",
    help="[bold]package.module:name[/bold] of a model, of a function that makes one, or of one that makes model "
    "and inputs. A function may take the batch size, as [bold]n[/bold], [bold]batch[/bold] or "
    "[bold]batch_size[/bold]; otherwise the inputs' first dimension is the batch.",
)
ModelSource = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]


Config = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="A Hugging Face config, or its folder, in place of MODEL: nothing is downloaded, no code of it runs.",
    ),
]


Lora = Annotated[
    str | None,
    typer.Option(
        metavar="r=16,targets=q_proj,v_proj",
        help="Train adapters alone (peft). Also dropout=0.05; bits=4 (QLoRA) or bits=8 for quantized weights; upcast=no"
        " if the other weights stay in 16 bits, as with TRL.",
    ),
]


Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="Type of the weights: float32, bfloat16, float16; default: the file's, or as from_pretrained takes it.",
    ),
]


SequenceLength = Annotated[
    int | None, typer.Option("--seq", min=1, metavar="N", help="Tokens of a sample; with --config: 2048.")
]


TrainingArgumentsFile = Annotated[
    Path | None,
    typer.Option(
        "--training-arguments", metavar="FILE.json", help="A TrainingArguments file: batch, precision, optimizer."
    ),
]


AxolotlFile = Annotated[
    Path | None,
    typer.Option("--axolotl", metavar="FILE.yaml", help="An axolotl file: all of these; its base_model is a path."),
]


BatchSize = Annotated[
    int | None,
    typer.Option("--batch", min=1, metavar="B", help="Batch size; default: that of the inputs, or of the file."),
]


ProfileFile = Annotated[Path, typer.Argument(metavar="PROFILE.json", help="A profile (docs/formats.md).")]


PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan made by [bold]ckptplan solve -o[/bold].")]


# A text, so that the error for "12GB" is the package's own, which names the unit.
Budget = Annotated[str | None, typer.Option("--budget-gb", metavar="X", help="Device budget in units of 2**30 bytes.")]


HostLimit = Annotated[
    str | None, typer.Option(metavar="X", help="Limit on the host tier, in the same unit; default: no limit.")
]


DiskLimit = Annotated[
    str | None,
    typer.Option(
        metavar="X",
        help="Limit on the disk tier, in the same unit, for bytes beyond the host's limit; default: no disk.",
    ),
]


Actions = Annotated[str, typer.Option(help="Actions that stages may use, separated by commas.")]


Offload = Annotated[
    str,
    typer.Option(
        metavar="KINDS",
        help="What may be swapped, separated by commas: activations, weights, optimizer (state), gradients, or all.",
    ),
]


Together = Annotated[bool, typer.Option("--segments/--no-segments", help="Whether stages may be recomputed together.")]


Compiled = Annotated[
    bool, typer.Option("--compile", help="Compile a model's layers one by one while the plan is applied.")
]


TimeLimit = Annotated[float, typer.Option(min=0.1, help="Seconds the solver may take.")]


Gap = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SHARE",
        help="Stop at a plan proven to be within this share of the best one, 0.01 for 1 per cent.",
    ),
]


Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="PLAN.json", help="Where to write the plan.")]


Accumulate = Annotated[
    bool | None,
    typer.Option(
        "--accumulate/--no-accumulate",
        help="Steps start with gradients, as in gradient accumulation; default: if the model has gradients.",
    ),
]


TargetDevice = Annotated[
    str | None,
    typer.Option("--device", metavar="D", help="A known device (a100-40gb) or its file; default: the model's."),
]


OptimizerName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="sgd, momentum, rmsprop, adagrad, adam, adamw, muon, or a name of transformers' optim and axolotl's "
        "optimizer: adamw_torch_fused, adafactor, paged_adamw_8bit, ...",
    ),
]


Autocast = Annotated[str | None, typer.Option("--amp", metavar="TYPE", help="Autocast to float16 or bfloat16.")]


InDdp = Annotated[
    bool, typer.Option("--ddp", help="Gradients are reduced in buckets, as in distributed data parallel.")
]


Sharded = Annotated[
    str | None,
    typer.Option(
        "--fsdp",
        metavar="N",
        help="The model is sharded by FSDP2 over N ranks; batch and bytes are per rank. Settings follow by commas: "
        "8,param_dtype=bfloat16,replicas=2,reshard_after_forward=no.",
    ),
]


SwapFolder = Annotated[
    Path | None,
    typer.Option(
        "--swap-dir",
        metavar="FOLDER",
        help="Folder of the swap file of a CPU plan or of the disk tier; default: as in training.",
    ),
]


JsonOutput = Annotated[
    Path | None, typer.Option("--json", metavar="FILE.json", help="Also write what is printed to this file.")
]


Batches = Annotated[
    str,
    typer.Option(
        metavar="SIZES",
        help="Sizes of batches that run in turn, by commas; default: two steps on the model's inputs. A function "
        "may also return a list of batches as inputs.",
    ),
]


EmptiesCache = Annotated[
    bool, typer.Option("--empty-cache", help="The loop calls torch.cuda.empty_cache() after each step.")
]


MicroBatches = Annotated[int, typer.Option("--accumulation", min=1, metavar="N", help="Micro-batches per update.")]


HoldsOutput = Annotated[
    bool, typer.Option("--holds-output/--drops-output", help="The loop holds the output during backward.")
]


Keeps = Annotated[
    str, typer.Option(metavar="WHAT", help="What the loop holds until the next step: output, loss, batch, by commas.")
]


AppliedPlan = Annotated[Path | None, typer.Option("--plan", metavar="PLAN.json", help="The plan applied in training.")]


AllocatorConf = Annotated[
    str | None,
    typer.Option(
        "--allocator", metavar="SETTINGS", help="Settings of CUDA's allocator, as in PYTORCH_CUDA_ALLOC_CONF."
    ),
]


def number(text: str | None, option: str, *, least: float | None = None) -> float | None:
    """Return the number of GiB in `text`: a valid budget, or `least`."""
    if text is None:
        return None
    try:
        value: Any = float(text)
    except ValueError:
        value = text
    if value != least:
        budget_to_bytes(value, name=option)
    return value  # type: ignore[no-any-return]


def to_bytes(text: str, option: str) -> int:
    """Return the bytes of `text`, a number of GiB."""
    value = number(text, option)
    assert value is not None
    return budget_to_bytes(value, name=option)


def parts_of(text: str) -> list[str]:
    """Return the comma-separated parts of `text`, without spaces around them and without empty parts."""
    return [part.strip() for part in text.split(",") if part.strip()]


def to_counts(text: str, option: str) -> list[int]:
    """Return the numbers in `text`, separated by commas, each at least 1."""
    parts = parts_of(text)
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise InvalidInputError(
                f"{option} {text!r}: {part!r} is not a whole number, 1 or more; give numbers separated by commas"
            )
    return [int(part) for part in parts]


def to_fsdp(text: str | None) -> FSDP | None:
    """Return the settings in the text of `--fsdp`."""
    return None if text is None else FSDP.from_text(text)


def to_actions(text: str) -> tuple[Action, ...]:
    """Return the actions in `text`, separated by commas."""
    wanted = parts_of(text)
    unknown = [part for part in wanted if part not in ACTIONS]
    if unknown or not wanted:
        raise InvalidInputError(f"--actions {text!r}: choose from {', '.join(get_args(Action))}, separated by commas")
    return tuple(action for action in ACTIONS if action in wanted)
