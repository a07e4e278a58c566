"""Trainings that fill the cache of profiles, or with an argument find all they need in it; run in its own process."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import test_lightning
import test_transformers
import test_trl
import torch_setup  # noqa: F401
from transformers import Trainer

from ckptplan.integrations.lightning import ActivationPlanner
from ckptplan.integrations.transformers import ActivationPlanCallback
from ckptplan.profiling import profiler


class NotFoundError(BaseException):
    """Raised where something is profiled that should be in the cache."""


def in_a_trainer(folder: Path, **how: Any) -> None:
    callback = ActivationPlanCallback(budget="30%", time_limit_s=0.2)
    test_transformers.trained(folder, callback, **how)


def in_lightning(folder: Path, **how: Any) -> None:
    test_lightning.fit(folder, ActivationPlanner(budget="20%", time_limit_s=0.2), max_steps=2, **how)


def refuse(*_: Any) -> None:
    raise NotFoundError


def main() -> None:
    warnings.simplefilter("ignore")
    test_trl.STEPS = 2
    if len(sys.argv) > 1:
        profiler._profile = refuse  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The first, a Trainer, reads values.
        test_trl.trained(folder, ActivationPlanCallback(budget="30%", time_limit_s=0.2), **test_trl.WAYS["lora"])
        in_lightning(folder)
        if len(sys.argv) == 1:
            return
        others: list[Any] = [
            lambda: in_a_trainer(folder, kind=Trainer, options={"label_smoothing_factor": 0.2}),
            lambda: in_lightning(folder, precision="bf16-mixed"),
        ]
        for other in others:
            try:
                other()
            except NotFoundError:
                continue
            sys.exit("a profile of another step was found")


if __name__ == "__main__":
    main()
