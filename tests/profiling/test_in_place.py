"""What backward does in place on real tensors, and out of place on subclasses such as fake ones, is counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from measured_phases import measure_phases
from torch import nn
from torch.nn import functional as F
from toy_modules import Lambda

import ckptplan
from ckptplan.core.request import Training
from ckptplan.training.step import make_step

SIDE = 32
EVEN = torch.arange(0, SIDE, 2)
ROWS = EVEN[:, None].expand(-1, SIDE)
OTHER = torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
MASK = OTHER > 0.5


class OutOfPlace(torch.autograd.Function):
    """A formula in Python, which does what it says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, EVEN)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.new_zeros(SIDE, SIDE).index_add(0, EVEN, gradient)


def _written(x: torch.Tensor) -> torch.Tensor:
    return x[: SIDE // 2]


# fmt: off
FORMULAS: dict[str, Callable[[torch.Tensor], Any]] = {
    # in place on zeros
    "index": lambda x: x[EVEN],
    "index_select": lambda x: x.index_select(0, EVEN),
    "take": lambda x: x.take(EVEN),
    "gather": lambda x: x.gather(0, ROWS),
    "sort": lambda x: x.sort()[0],
    "max of rows": lambda x: x.max(0)[0],
    "masked_select": lambda x: x.masked_select(MASK),
    "trace": lambda x: x.trace(),
    # in place on other results
    "clamp": lambda x: x.clamp(OTHER * 0.1, OTHER * 2),
    "maximum": lambda x: torch.maximum(x, OTHER * 2),
    "minimum of two": lambda x: torch.minimum(x, x.flip(0)),
    "fmax": lambda x: torch.fmax(x, OTHER * 2),
    "fmin": lambda x: torch.fmin(x, OTHER * 2),
    "clamp_min": lambda x: x.clamp_min(OTHER * 0.1),
    "clamp_max": lambda x: x.clamp_max(OTHER * 2),
    "cross entropy's target": lambda x: F.binary_cross_entropy(OTHER, x.sigmoid()),
    "cross entropy of logits": lambda x: F.binary_cross_entropy_with_logits(x, OTHER),
    "with weights": lambda x: F.binary_cross_entropy_with_logits(x, OTHER, weight=OTHER, pos_weight=OTHER),
    "cumprod with a zero": lambda x: (x * (OTHER > 0.1)).cumprod(0),
    # of all elements
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    # out of place on real tensors too
    "a formula in Python": OutOfPlace.apply,
    "index_put": lambda x: x.index_put((EVEN,), _written(x)),
    "put": lambda x: x.put(EVEN, x[0, : SIDE // 2]),
    "index_add": lambda x: x.index_add(0, EVEN, _written(x)),
    "scatter": lambda x: x.scatter(0, ROWS, _written(x)),
    "scatter_add": lambda x: x.scatter_add(0, ROWS, _written(x)),
}
# fmt: on


@pytest.mark.parametrize("name", FORMULAS)
def test_backward_takes_what_real_tensors_take(name: str) -> None:
    torch.manual_seed(0)
    given = nn.Parameter(torch.rand(SIDE, SIDE))
    model: Any = Lambda(lambda self: self.formula(self.x.exp()).sin().sum(), x=given, formula=FORMULAS[name])
    found = ckptplan.estimate(model, ())
    (real,) = (p for p in measure_phases(make_step(model, Training(())), steps=1).phases if p.name == "backward")
    beside_bytes = found.phase("loaded").end_bytes - model.x.nbytes  # what the formula reads of this module's variables
    peak_bytes = found.phase("backward").peak_bytes - beside_bytes
    assert peak_bytes == real.peak_bytes
    assert found.phase("backward").end_bytes - beside_bytes == real.end_bytes
