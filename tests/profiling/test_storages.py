"""Results in storages larger than they need, and tensors that no operation makes, are counted as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from odd.layers import Folded
from odd.memory import tensor_in_an_argument_object
from small_models import assert_kept, plan_of, scheduled
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from toy_modules import Lambda

import ckptplan
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.segment import Segment
from ckptplan.profiling.bytes import storages
from ckptplan.profiling.bytes.storages import ruled_bytes
from ckptplan.profiling.profiler import profile

ATEN = torch.ops.aten


def folds() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Folded() for _ in range(3))), torch.randn(4, 4, 12, 12)


@pytest.mark.parametrize("by_rule", [True, False])
@pytest.mark.long("False")
def test_peaks_are_predicted_by_rule_and_by_what_operations_made(
    by_rule: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_rule:
        monkeypatch.setattr(storages, "_RULES", {})
    model, x = folds()
    measured = profile(model, x, menus=False)
    for action in ("swap", "recompute"):
        plan = plan_of(measured, [action] * len(measured.stages))
        found = assert_kept(model, plan, x)
        # Random states of recomputed stages weigh much in models as small as these.
        assert plan.peak_bytes - found.measured_peak_bytes <= 16 << 10
    assert ckptplan.estimate(model, x).peak_bytes >= found.plain_peak_bytes  # type: ignore[operator]


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (ATEN.col2im.default, (torch.rand(2, 36, 144), [12, 12], [3, 3], [1, 1], [1, 1], [1, 1])),
        (ATEN.col2im.default, (torch.rand(2, 8, 9), [8, 8], [2, 2], [1, 1], [0, 0], [3, 3])),
        *(
            (func, (torch.rand(8, 16), torch.rand(8, 16), *more, reduction))
            for func, *more in (
                (ATEN.mse_loss.default,),
                (ATEN.smooth_l1_loss.default,),
                (ATEN.soft_margin_loss.default,),
                (ATEN.binary_cross_entropy.default, None),
            )
            for reduction in (0, 1)
        ),
        (ATEN.mse_loss.default, (torch.rand(8, 16), torch.rand(16))),
    ],
    ids=lambda x: str(x) if not isinstance(x, tuple) else f"{[list(y.shape) if hasattr(y, 'shape') else y for y in x]}",
)
def test_rules_give_the_real_sizes(func: Any, args: tuple[Any, ...]) -> None:
    real = func(*args)
    (nbytes,) = ruled_bytes(func, args, {}, real)
    assert max(nbytes, real.numel() * 4) == real.untyped_storage().nbytes()


def test_a_device_that_is_not_here_has_them_by_rule() -> None:
    model, x = folds()
    chain = profile(model, x, device="a100-40gb", menus=False)
    assert max(s.nbytes for s in chain.storages) >= 4 * 4 * 9 * 144 * 4


# ---------------------------------------------------------------- checkpoints inside


class Checkpointed(nn.Module):
    """A layer that checkpoints by itself, one level or two."""

    def __init__(self, levels: int, *, reentrant: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(64, 256), nn.Linear(256, 64), nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(256)
        self.levels, self.reentrant = levels, reentrant

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(self.up(x)))

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(self._inner, x, use_reentrant=self.reentrant) if self.levels == 2 else self._inner(x)
        return self.drop(torch.tanh(self.down(inner)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self._block, x, use_reentrant=self.reentrant)
        return x + torch.sin(y)


@pytest.mark.parametrize(
    ("levels", "how"),
    [(1, "recompute+swap"), (1, "nested"), (2, "keep"), (2, "swap"), (2, "recompute"), (2, "segment")],
)
@pytest.mark.long("2-swap", "2-recompute")
def test_checkpoints_inside_stages(levels: int, how: Any) -> None:
    """Values, and peaks with the random states that each checkpoint keeps."""
    torch.manual_seed(0)
    taking = torch.get_rng_state
    model, x = nn.Sequential(nn.Linear(64, 64), *(Checkpointed(levels) for _ in range(3))), torch.randn(128, 64)
    measured = profile(model, x, menus=False)
    real = [i for i, stage in enumerate(measured.stages) if not stage.is_glue]
    if how in ("segment", "nested"):
        inner = (Segment(real[1], real[2]),) if how == "nested" else ()
        options = [stage.recompute or stage.keep for stage in measured.stages]
        plan = scheduled(measured, options, (Segment(real[0], real[-1], inner),))
    else:
        plan = plan_of(measured, [how] * len(measured.stages))
    found = assert_kept(model, plan, x)
    # Stages that run again have states of their own beside those of their checkpoints, not all at the peak.
    assert plan.peak_bytes - found.measured_peak_bytes <= 16 << 10
    assert torch.get_rng_state is taking


def test_reentrant_checkpoints_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), *(Checkpointed(1, reentrant=True) for _ in range(3)))
    with pytest.raises(UnsupportedModelError, match="pass use_reentrant=False, or leave the checkpoint out"):
        profile(model, torch.randn(128, 64))


def test_a_tensor_in_an_argument_object_is_held_for_another_run() -> None:
    """The runtime holds the object, which no tree of arguments looks into."""
    odd = tensor_in_an_argument_object()
    found = profile(odd.model, odd.inputs, menus=False)
    for stage in found.stages:
        if not stage.is_glue:
            again = stage.find("recompute")
            assert again is not None
            assert odd.inputs.nbytes in [found.storages[s].nbytes for s in again.pinned]


def test_states_of_a_stages_own_generators_are_held_for_another_run() -> None:
    def drawing(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x) * torch.rand(64, generator=self.generator))

    generators = (torch.Generator(), None, torch.Generator())
    model = nn.Sequential(*(Lambda(drawing, linear=nn.Linear(64, 64), generator=made) for made in generators))
    found = profile(model, torch.randn(128, 64), menus=False)
    state = torch.get_rng_state().nbytes
    held = [sum(found.storages[s].nbytes for s in stage.recompute.pinned) for stage in found.stages if stage.recompute]
    assert held == [2 * state, state, 2 * state]
