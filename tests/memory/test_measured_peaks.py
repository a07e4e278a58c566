"""Reserved bytes of plans that trained on a GPU, predicted on `meta`, beside those that its allocator counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import ckptplan
from ckptplan.core.request import Training
from ckptplan.memory.estimate import TrainingBytes

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from experiments.gpu import cases, solving  # noqa: E402

RESULTS = ROOT / "experiments" / "results" / "gpu"


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        # ckptplan.hf takes 256 MiB more with segments at rising addresses than at falling ones; rung-05 takes 2.2 GiB
        # more where the output is held while the optimizer makes its state.
        ("llama-4x4096", {"ckptplan.hf": "hf", "ckptplan.pooch": "pooch"}),
        ("llama-4x4096-expandable", {"ckptplan.rung-05": "offload", "pooch.pooch": "pooch", "ckptplan.rung-09": "trl"}),
    ],
)
def test_predicted_peaks_are_those_of_the_device(name: str, plans: dict[str, str]) -> None:
    measured = json.loads((RESULTS / "h200.json").read_text())["cases"][name]["measure"]
    case = cases.find(name)
    step, target = solving._on_meta(case, False, "h200")
    training = Training(optimizer=case.optimizer, amp=case.amp)
    sizes = TrainingBytes(step.model, target, training, case.allocator)
    for plan, group in plans.items():
        peaks = measured[f"plans.{group}"]["contenders"][plan]["peaks"]
        # What was there before the step: the memory that the check of each applied plan takes.
        most = peaks["reserved_bytes"] + peaks["other_bytes"]
        found = sizes.peaks(step, ckptplan.Plan.load(RESULTS / "plans" / name / f"{plan}.json"))
        assert found.requested_bytes == pytest.approx(peaks["requested_bytes"] + peaks["workspace_bytes"], rel=1e-5)
        # A segment of 2 MiB for the check of a second plan, which isn't planned.
        assert 0 <= most - found.reserved_bytes <= 2 << 20, plan
