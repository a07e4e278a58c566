"""The measured side of every memory estimate, against models whose bytes can be counted by hand."""

from __future__ import annotations

import torch
from measured_phases import PhaseBytes, measure_phases
from torch import nn

from ckptplan.core.request import Training
from ckptplan.training.step import make_step

NAMES = ["loaded", "forward", "backward", "optimizer", "forward 2", "backward 2", "optimizer 2"]
NUMBER = 8 + 4
"""A Python number among the operands is a tensor of 8 bytes for a moment, and its cast to float32 another of 4."""


def test_every_phase_of_an_mlp_with_momentum() -> None:
    n, i, h, o = 30, 50, 70, 20
    model = nn.Sequential(nn.Linear(i, h), nn.Tanh(), nn.Linear(h, o))
    target = torch.randn(n, o)  # not counted, since the loss function holds it
    step = make_step(model, Training(torch.randn(n, i), loss_fn=lambda output: (output * target).sum()))
    measured = measure_phases(step, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    first, second = 4 * (i * h + h), 4 * (h * o + o)
    weights = first + second
    x, hidden, output, loss = 4 * n * i, 4 * n * h, 4 * n * o, 4
    forward_end = hidden + output + loss  # tanh saves its result; the first layer's own result is gone
    forward_peak = max(2 * hidden, hidden + 2 * output + loss)  # the product lives until the loss function returns
    # Gradients of the hidden, the output and the loss; what is live while each one is made:
    backward_peak = max(
        forward_end + loss + output + hidden + second,  # the second layer's backward
        forward_end + loss + second + 2 * hidden,  # tanh's
        output + 2 * loss + second + hidden + first,  # the first layer's, with no more need of the hidden
    )
    start = weights + x
    later = start + weights  # with momentum
    assert [p.name for p in measured.phases] == NAMES
    assert measured.phases == (
        PhaseBytes("loaded", 0, weights, weights),
        PhaseBytes("forward", weights, start + forward_end, start + forward_peak),
        PhaseBytes("backward", start + forward_end, start + weights, start + backward_peak),
        # The first update copies the gradients as momentum, before they go.
        PhaseBytes("optimizer", start + weights, later, start + 2 * weights),
        PhaseBytes("forward 2", later, later + forward_end, later + forward_peak),
        PhaseBytes("backward 2", later + forward_end, later + weights, later + backward_peak),
        PhaseBytes("optimizer 2", later + weights, later, later + weights + NUMBER),
    )
    assert measured.unexplained_bytes == 0


class Hoarder(nn.Module):
    """Keeps a tensor it hasn't registered."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.hoard: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hoard is None:
            self.hoard = torch.ones(5, 8)
        return self.linear(x) * self.hoard


def test_what_nobody_registered_is_unexplained() -> None:
    measured = measure_phases(make_step(Hoarder(), Training(torch.randn(5, 8))))
    assert measured.unexplained_bytes == 4 * 5 * 8
