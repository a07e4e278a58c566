"""Train within a memory budget: an ordinary PyTorch loop with one line added.

python examples/plain_loop.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import ckptplan

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 256),
    *(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256)) for _ in range(8)),
    nn.Linear(256, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = [(torch.randn(256, 64), torch.randint(10, (256,))) for _ in range(5)]
inputs, labels = batches[0]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Loss for planning: any loss that accepts the output of the model."""
    return F.cross_entropy(output, labels)


# Measure the model once, then plan for half of what a plan can save.
profile = ckptplan.profile(model, inputs, loss_fn=loss_of, optimizer=optimizer)
plans = ckptplan.frontier(profile, points=3, time_limit_s=3)  # smallest peak, something between, everything kept
budget_gb = (plans[0].peak_bytes + plans[-1].peak_bytes) / 2 / 2**30
plan = ckptplan.solve(profile, budget_gb, time_limit_s=3)
print(plan)

# Train. Gradients are bitwise those of plain training; only memory and time differ.
with ckptplan.apply(model, plan, profile=profile) as handle:
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")
    print(handle.stats())
