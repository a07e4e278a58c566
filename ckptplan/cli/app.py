"""The command line: `ckptplan --help`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ckptplan.cli import device, inspect, plan, report
from ckptplan.cli.arguments import WHAT_STAGES_SAVE, Compiled, Offload, TimeLimit, parts_of
from ckptplan.cli.output import INTERRUPTED, show_error, show_interrupt, show_users_error
from ckptplan.cli.subject import is_torch
from ckptplan.core.errors import CkptPlanError, InvalidInputError
from ckptplan.core.request import GONE
from ckptplan.core.version import __version__

GONE_COMMANDS = {
    "snapshot": "https://pytorch.org/memory_viz shows files of torch.cuda.memory._dump_snapshot, and ckptplan estimate"
    " --allocator SETTINGS what a training reserves with other settings"
}


class _Commands(TyperGroup):
    """Turns the package's own errors, and PyTorch's absence, into one line and exit code 2.

    An error in the user's code is shown without this package's part of the traceback, with exit code 1. Ctrl-C is one
    line and exit code 130. Anything else is a bug and keeps its traceback.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if instead := GONE_COMMANDS.get(cmd_name):
            raise InvalidInputError(f"there is no command {cmd_name} any more: {instead}")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CkptPlanError as error:
            show_error(str(error))
            raise typer.Exit(2) from error
        except ModuleNotFoundError as error:
            if not is_torch(error):
                raise
            show_error("this needs PyTorch, which isn't installed; install it with: pip install torch")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            show_interrupt(str(error))
            raise typer.Exit(INTERRUPTED) from error
        except Exception as error:
            option = getattr(error, "option_name", "")  # of click's error, which typer has under another name by now
            if instead := GONE.get(option.lstrip("-").replace("-", "_")):
                show_error(f"there is no option {option} any more: {instead}; leave it out")
                raise typer.Exit(2) from error
            if not show_users_error(error):
                raise
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # Locals of a training program can be gigabytes of tensors.
    pretty_exceptions_show_locals=False,
    help="Plan what a training step keeps, swaps and recomputes, to fit a memory budget at the least slowdown.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ckptplan {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def demo(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    steps: Annotated[int, typer.Option(min=3, help="Timed steps with each plan, and plain ones beside them.")] = 12,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds the solver may take.")] = 5.0,
) -> None:
    """Measure a byte-level model's steps within half its activation memory: plainly, with rules, and with a plan.

    A uniform and a greedy rule get the same budget. Exits with 1 if a loss or a gradient differs from plain training,
    or if a measured peak is above the budget.

    Example: [bold]ckptplan demo --device cpu[/bold]
    """
    # Imported here: it imports torch.
    from ckptplan.cli.demo import run

    if not run(device, steps=steps, time_limit_s=time_limit):
        raise typer.Exit(1)


def run(
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.")],
    budget: Annotated[str, typer.Option(help='"20 GiB", "50%" of the way to everything kept, or "auto".')] = "auto",
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as for python -m.")] = False,
    offload: Offload = WHAT_STAGES_SAVE,
    compiled: Compiled = False,
    time_limit: TimeLimit = 10.0,
) -> None:
    """Run a training script unchanged, and plan the model that it trains.

    Trainers of transformers and Lightning get their callback. In a plain loop, the first model that is called for
    training and has the parameters of an optimizer is planned. With torchrun and accelerate: -m ckptplan.run.

    Example: [bold]ckptplan run --budget 20GiB -- train.py --epochs 3[/bold]
    """
    # Imported here: it imports torch.
    from ckptplan.integrations.launch import launch, of_script

    how = {"budget": budget, "offload": parts_of(offload), "time_limit_s": time_limit} | (
        {"compile": True} if compiled else {}
    )
    try:
        launch(script[0], script[1:], as_module=module, **how)
    except CkptPlanError:
        raise
    except Exception as error:  # the script's, which ends as under `python`
        error = of_script(error)
        sys.excepthook(type(error), error, error.__traceback__)
        raise typer.Exit(1) from error


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "profile": plan.profile,
    "solve": plan.solve,
    "frontier": plan.frontier,
    "explain": plan.explain,
    "report": report.report,
    "show": inspect.show,
    "simulate": inspect.simulate_command,
    "compare": plan.compare,
    "calibrate": device.calibrate,
    "estimate": device.estimate,
    "trace": inspect.trace,
    "fit": device.fit,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.command("run", context_settings={"allow_interspersed_args": False})(run)
