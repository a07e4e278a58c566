"""Models and profiles named on the command line."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ckptplan.core.display import progress
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.profile import Profile
from ckptplan.core.request import Training

_BATCH_NAMES = ("n", "batch", "batch_size")


def subject_of(source: str) -> tuple[Any, Any]:
    """Return the profile in a file, or the model named `module:name`, and its inputs or None."""
    path = Path(source)
    module, colon, name = source.partition(":")
    if path.exists() or not colon or "/" in source or not name.replace(".", "").isidentifier():
        if not path.exists():
            raise InvalidInputError(f"No such file: {source}; {_hint(source)}")
        return Profile.load(path), None
    found = _import(source, module, name)
    # Imported here: it imports torch, which no profile needs.
    from torch import nn

    made = found if isinstance(found, nn.Module) or not callable(found) else found()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InvalidInputError(
            f"{source} gives {type(model).__name__}; it must give a torch.nn.Module, or a function that returns one, "
            "alone or with its inputs"
        )
    return model, inputs


def _hint(source: str) -> str:
    """Return a hint for a name that is neither a file nor `module:name`."""
    beside = [p.name for p in Path(source).parent.glob("*") if p.is_file()] if Path(source).parent.is_dir() else []
    near = difflib.get_close_matches(Path(source).name, beside, n=1)
    if near:
        return f"did you mean {Path(source).with_name(near[0])}?"
    module, dot, name = source.rpartition(".")
    if dot and source.replace(".", "").isidentifier() and Path(source).suffix != ".json":
        return f"a model is named as package.module:name, so maybe {module}:{name}"
    return "give a profile's file, or package.module:name of a model or of a function that makes one"


def model_of(source: str) -> tuple[Any, Any]:
    """Return the model named `module:name` and its inputs (None: not given)."""
    if ":" not in source or Path(source).exists():
        raise InvalidInputError(
            f"{source} is not a model; give package.module:name of a model or of a function that makes one"
        )
    return subject_of(source)


def batches_of(source: str) -> tuple[Any, Callable[[int], Any], int]:
    """Return a model, a function from a batch size to its inputs, and the batch size of the inputs it came with."""
    import inspect

    from torch import nn
    from torch.utils import _pytree as pytree

    from ckptplan.profiling.workload.inputs import find_inputs, resized

    model, inputs = model_of(source)
    if inputs is None:
        import torch

        args, kwargs, _ = find_inputs(model, torch.device("cpu"))
        inputs = args or kwargs
    if isinstance(inputs, list):
        raise InvalidInputError(
            f"{source} gives a list of {len(inputs)} batches as inputs; sizes can be given for one batch alone, so "
            "leave them out, or return one batch"
        )
    builder = _import(source, *source.split(":", 1))
    parameter = None
    if callable(builder) and not isinstance(builder, nn.Module):
        names = inspect.signature(builder).parameters
        parameter = next((name for name in _BATCH_NAMES if name in names), None)
    sizes = [t.shape[0] for t in pytree.tree_leaves(inputs) if hasattr(t, "shape") and len(t.shape)]
    if not sizes:
        raise InvalidInputError(f"{source} gives no input with a first dimension; give one whose first is the batch")

    def make(n: int) -> Any:
        if parameter is None:
            return resized(inputs, n)
        made = builder(**{parameter: n})
        if not (isinstance(made, tuple) and len(made) == 2):
            raise InvalidInputError(f"{source}({parameter}={n}) must return a pair of model and inputs")
        return made[1]

    return model, make, int(sizes[0])


@dataclass(frozen=True)
class Files:
    """Options that describe a training in place of a model, as `ckptplan.cli.arguments` has them."""

    config: str | None
    lora: str | None
    dtype: str | None
    seq: int | None
    training_arguments: Path | None
    axolotl: Path | None

    def check(self, source: str | None) -> None:
        """Raise `InvalidInputError` unless either a model is named, or a config."""
        if (source is None) == (self.config is None and self.axolotl is None):
            raise InvalidInputError("give a MODEL (package.module:name), or --config or --axolotl in its place")
        if source is not None and any(value is not None for value in vars(self).values()):
            raise InvalidInputError(
                "--config, --lora, --dtype, --seq, --training-arguments and --axolotl go without a MODEL"
            )

    def described(self, batch: int | None, training: Training) -> tuple[Any, Callable[[int], Any], int, Training]:
        """Return the model, a function from a batch size to its inputs, the batch size, and the training.

        The description is printed, with notes. Options override files.
        """
        from ckptplan.integrations import configs

        asked: dict[str, Any] = {name: getattr(training, name) for name in ("optimizer", "amp", "accumulate", "fsdp")}
        job = configs.ConfiguredTraining(self.config or "", batch, self.seq, lora=self.lora, dtype=self.dtype, **asked)
        for path, read in (
            (self.training_arguments, configs.read_training_arguments),
            (self.axolotl, configs.read_axolotl),
        ):
            job = job if path is None else job.over(read(path))
        job = job.as_trained()
        model = configs.make_model(job)
        (make_inputs, length), batch = configs.make_inputs(model, job.length), job.batch or 1
        typer.echo(
            f"{configs.described(model)}; {batch} x {f'{length} tokens' if length else 'one image'}; optimizer "
            f"{job.optimizer}, autocast {job.amp or 'off'}"
        )
        for note in job.notes:
            typer.echo(f"note: {note}")
        return model, make_inputs, batch, job.training


def profile_of(source: str) -> Profile:
    """Return the profile in a file, or that of a model."""
    subject, inputs = subject_of(source)
    if isinstance(subject, Profile):
        return subject
    from ckptplan.profiling.profiler import profile

    with progress("profiling", console=Console(stderr=True)) as shown:
        return profile(subject, inputs, on_progress=shown)


def _import(source: str, module: str, name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as python -m does; an installed command doesn't
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and is_torch(error):
            raise
        raise InvalidInputError(f"{source} can't be imported: {error}; give package.module:name") from error
    return found


def is_torch(error: ImportError) -> bool:
    """Return whether the missing module is PyTorch."""
    return (error.name or "").partition(".")[0] == "torch"
