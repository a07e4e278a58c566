"""Run the cases of a command one after the other, each in a process of its own, until all is done or time is up."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.gpu.cases import CASES, Case, find
from experiments.gpu.results import OutOfTime, Results

RESTARTS = 4
OUT_OF_TIME, NO_CUDA = 3, 4  # exit codes
GRACE_S = 10.0
"""A process that has begun something may end it in this time after the deadline."""


@dataclass(frozen=True, slots=True)
class Options:
    """What every command is given.

    Attributes
    ----------
    out : Path
        The folder of results.
    device : str
        "cuda" or "cpu".
    small : bool
        Sizes for trying the commands.
    deadline : float
        Seconds of `time.time()`.
    cases : tuple of str
    again : bool
        Run once more what failed.
    isolated : bool
        Each case in a process of its own.
    rivals, plans : bool
        Which contenders `measure` measures.
    warm_up, timed : int
        Steps of each contender.
    """

    out: Path
    device: str
    small: bool
    deadline: float
    cases: tuple[str, ...]
    again: bool = False
    isolated: bool = True
    rivals: bool = True
    plans: bool = True
    warm_up: int = 4
    timed: int = 12

    @property
    def results(self) -> Results:
        return Results(self.out, again=self.again, deadline=self.deadline)


def case_names(text: str | None, small: bool) -> tuple[str, ...]:
    """Names from the command line; by default all, of those that are alike one where all is small."""
    if text is not None:
        return tuple(find(name).name for name in text.split(","))
    return tuple(name for name, case in CASES.items() if case.rehearsed or not small)


def over_cases(module: str, options: Options) -> bool:
    """Call `module.run(case, options)` for each case; whether there was time for all of them."""
    for name in options.cases:
        if time.time() > options.deadline:
            return False
        if not options.isolated:
            if not _run(module, name, options):
                return False
        elif not _in_a_process(module, name, options):
            return False
    return True


PRELOADED = (
    *("torch", "torch._dynamo", "ckptplan.api", "experiments.gpu.measure", "experiments.gpu.probe"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "vit", "resnet", "t5")),
)


def _in_a_process(module: str, name: str, options: Options) -> bool:
    # The imports are made once. Should one of them have touched CUDA, which no copy of a process survives, each process
    # makes its own.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    for _ in range(RESTARTS):
        process = context.Process(target=_child, args=(module, name, options))
        process.start()
        try:
            process.join(max(options.deadline - time.time(), 0.0) + GRACE_S)
        finally:  # also when this process is asked to end
            cut_off = process.is_alive()
            if cut_off:
                process.kill()
                process.join()
                options.results.close_running(None)
        if cut_off:
            return False
        code = process.exitcode
        if code == 0:
            return True
        if code == OUT_OF_TIME:
            return False
        if code == NO_CUDA and context.get_start_method() == "forkserver":
            context = multiprocessing.get_context("spawn")
            continue
        # What the process died in is a result; a new one goes on behind it.
        options.results.close_running(f"the process ended with exit code {code}")
        print(f"{module.rpartition('.')[2]} {name}: the process ended with exit code {code}", flush=True)
    return True


def _child(module: str, name: str, options: Options) -> None:
    if options.device == "cuda":
        import torch

        try:
            torch.cuda.init()
        except RuntimeError as error:
            print(error, flush=True)
            raise SystemExit(NO_CUDA) from error
    raise SystemExit(0 if _run(module, name, options) else OUT_OF_TIME)


def _run(module: str, name: str, options: Options) -> bool:
    case: Case = find(name)
    if case.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts
    try:
        importlib.import_module(module).run(case, options)
    except OutOfTime:
        return False
    return True
