"""Models and inputs on `meta` are planned and estimated like those with values, where nothing reads values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.core.errors import InvalidInputError, UnsupportedModelError

PLACES = [("meta", "cpu"), ("cpu", "meta"), ("meta", "meta")]


class Positions(nn.Module):
    """Makes tensors where its input or its weights lie, and moves them between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
        self.register_buffer("table", torch.zeros(16, 32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        below = (places[None] <= places[:, None]).to(self.words.weight.device)
        x = self.words(ids) + self.table[places] + places[:, None].float().to(self.words.weight.device)
        return self.layers(x.to(ids.device) + below.any())


def build(model_on: str, inputs_on: str) -> tuple[nn.Module, torch.Tensor]:
    with torch.device(model_on):
        model = Positions()
    return model, torch.zeros(2, 16, dtype=torch.long, device=inputs_on)


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.long
def test_estimates_are_those_with_values(device: str) -> None:
    expected = ckptplan.estimate(*build("cpu", "cpu"), device=device, optimizer="adamw")
    for places in PLACES:
        assert ckptplan.estimate(*build(*places), device=device, optimizer="adamw").phases == expected.phases


def test_plans_for_a_device_that_is_not_here() -> None:
    plans = [
        ckptplan.solve(model, budget_gb=1, inputs=x, device="h100", menus=False)
        for model, x in (build("cpu", "cpu"), build("meta", "meta"))
    ]
    assert plans[0].peak_bytes == plans[1].peak_bytes
    assert plans[0].choices == plans[1].choices


def test_times_can_not_be_measured() -> None:
    model, x = build("cpu", "meta")
    with pytest.raises(InvalidInputError, match=r"times are measured by running .* device="):
        ckptplan.profile(model, x, device="cpu")


def test_a_model_that_reads_values_is_refused() -> None:
    class Reads(Positions):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * int(ids.sum().item())

    with torch.device("meta"):
        model = Reads()
    with pytest.raises(UnsupportedModelError, match=r"lie on 'meta', without any"):
        ckptplan.estimate(model, torch.zeros(2, 16, dtype=torch.long, device="meta"), device="cpu")


def test_a_parameter_of_each_device_is_named() -> None:
    model, x = build("cpu", "cpu")
    model.words.to("meta")  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModelError, match=r"'words.weight' on meta, 'layers.0.0.weight' on cpu"):
        ckptplan.estimate(model, x)
