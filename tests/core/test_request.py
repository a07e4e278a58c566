"""What is trained and what a plan may use: checked once, whichever call they are given to."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

import ckptplan
from ckptplan.core import request
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.profile import Profile
from ckptplan.core.request import (
    Limits,
    PlanKeywords,
    SolveKeywords,
    StepKeywords,
    Training,
    require_known,
)
from ckptplan.core.units import GIB

pytestmark = pytest.mark.planning

CHAIN = Profile.from_chain([0.01] * 3, [0.02] * 3, [1 << 20] * 3, [4 << 20] * 3, input_bytes=1 << 20)


def test_keywords_name_the_fields_of_the_objects() -> None:
    """Tiers are given in units of 2**30 bytes, and `inputs` stands first in most calls."""
    of_limits = {field.name.replace("_bytes", "_gb") for field in fields(Limits)}
    assert PlanKeywords.__optional_keys__ == of_limits  # type: ignore[attr-defined]
    of_training = {field.name for field in fields(Training)}
    assert StepKeywords.__optional_keys__ == of_training - {"inputs"}  # type: ignore[attr-defined]
    both = StepKeywords.__optional_keys__ | PlanKeywords.__optional_keys__  # type: ignore[attr-defined]
    assert SolveKeywords.__optional_keys__ == both  # type: ignore[attr-defined]


@pytest.mark.parametrize("described", [Training, Limits])
def test_every_option_is_documented(described: type) -> None:
    text = inspect.getdoc(described) or ""
    assert [f.name for f in fields(described) if f"\n{f.name} : " not in text] == []  # type: ignore[arg-type]


def test_an_unknown_keyword_names_the_nearest_or_all() -> None:
    for name, near in (("segment", "segments"), ("budget_gbs", "budget_gb")):
        with pytest.raises(InvalidInputError, match=rf"solve\(\) has no option '{name}'; did you mean '{near}'\?"):
            ckptplan.solve(CHAIN, **{name: 1})  # type: ignore[call-overload]
    with pytest.raises(InvalidInputError, match=r"explain\(\) has no option 'zzz'; its options are actions, gap,"):
        require_known(ckptplan.explain, {"zzz": 1}, request.SearchKeywords)


def test_options_become_the_objects() -> None:
    options: dict[str, Any] = {"host_gb": 0.5, "actions": ["keep", "swap"], "on_progress": None, "amp": "bfloat16"}
    limits, training = Limits.of(options), Training.of(options, "tokens")
    assert (limits.host_bytes, limits.disk_bytes, limits.actions) == (GIB // 2, None, ("keep", "swap"))
    limits.on_progress("nobody listens")
    assert (training.inputs, training.amp, training.given()) == ("tokens", "bfloat16", ["inputs", "amp"])
    assert Limits.of({"host_gb": 0}).host_bytes == 0
    assert not Training().has_forward
    names = {"bf16": "bfloat16", "fp16": "float16", "torch.float16": "float16", None: None}
    assert {given: Training(amp=given).amp for given in names} == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actions": ("swap",)}, "'keep' is missing"),
        ({"actions": 3}, "actions=3: give 'keep'"),
        ({"segments": "no"}, "segments='no'; it is True or False"),
        ({"host_gb": "12GB"}, "host_gb='12GB'"),
        ({"disk_gb": 1}, "disk_gb=1 without host_gb"),
        ({"time_limit_s": True}, "time_limit_s=True must be"),
        ({"gap": -0.01}, "gap=-0.01 must be a number, 0 or more"),
        ({"on_plan": 5}, "on_plan=5 is not callable"),
        ({"in_flight": 2}, r"no option .in_flight. any more: .* leave room for what the others hold"),
        ({"cache": False}, r"no option .cache. any more: .* plan_file= keeps a plan for the next run"),
        ({"seed": -1}, "seed=-1 must be a whole number, from 0 to 2147483647"),
        ({"workers": 0}, "workers=0 must be"),
        ({"step": print, "inputs": 1}, "leave out inputs= and loss_fn="),
        ({"step": 1}, "step=1 is not callable"),
        ({"loss_fn": 1}, "loss_fn=1 is not callable"),
        ({"amp": "float64"}, "amp='float64': autocast is to"),
        ({"accumulate": "yes"}, "accumulate='yes'; it is True, False or None"),
    ],
)
def test_limits_and_trainings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    training = {field.name for field in fields(Training)}
    with pytest.raises(InvalidInputError, match=message):
        Training(**options) if options.keys() & training else ckptplan.solve(CHAIN, 1, **options)
