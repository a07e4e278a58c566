"""Small models whose weights, optimizer state and gradients move, and plans that move all there is of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from made_plans import plan_of
from torch import nn

import ckptplan
from ckptplan.core.plan import Plan
from ckptplan.core.resident import Kind

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

WIDTH = 96


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(x) + self.up(self.dropout(self.down(x))))


def adapted() -> nn.Module:
    """Frozen weights and a turn at which activations are as large."""
    return nn.Sequential(*(Adapted() for _ in range(4)))


def trained() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))


def tied() -> nn.Module:
    """The first and the third layer share a weight; the fourth computes with a view of it."""
    model = trained()
    model[2][0].weight = model[0][0].weight
    return model


def flat() -> nn.Module:
    """All weights of a layer lie in one storage, with versions of their own."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    for layer in layers:
        whole = torch.cat([layer[0].weight.detach().flatten(), layer[2].weight.detach().flatten()])
        for part, linear in zip(whole.chunk(2), (layer[0], layer[2]), strict=True):
            linear.weight.data = part.view(WIDTH, WIDTH)  # type: ignore[union-attr]
    return nn.Sequential(*layers)


class Frozen(nn.Module):
    """Frozen layers without a graph in front of trained ones, and a large buffer that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)).requires_grad_(
            False
        )
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.mix = Mixing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.frozen:
            x = layer(x)
        return self.mix(self.head(x))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table


class Normed(Adapted):
    """As DoRA: the adapter's weight and the layer's have a norm whose graph forward drops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = (self.own.weight + self.up.weight @ self.down.weight).square().sum(1).sqrt().detach()
        return super().forward(x) / norm


MODELS: dict[str, Callable[[], nn.Module]] = {
    "adapted": adapted,
    "normed": lambda: nn.Sequential(*(Normed() for _ in range(4))),
    "trained": trained,
    "tied": tied,
    "flat": flat,
    "frozen": Frozen,
}


def built(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return MODELS[name](), torch.randn(24, WIDTH)


def moving_all(
    name: str, offload: tuple[Kind, ...], between: int = 0, *, make: Make | None = None, accumulate: bool = False
) -> Plan:
    """A plan that moves all there is of these kinds."""
    model, x = built(name)
    optimizer = None if make is None else make([p for p in model.parameters() if p.requires_grad])
    measured = ckptplan.profile(model, x, menus=False, optimizer=optimizer, accumulate=accumulate)
    measured = measured.offloading(offload, between)
    names = [next((o.name for o in s.options if o.moves and not o.recomputes), "keep") for s in measured.stages]
    plan = plan_of(measured, names)  # type: ignore[arg-type]
    assert plan.decided.weights
    return plan
