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


# Measure the model once, plan for half of what a plan can save, and try the plan: peak, time and gradients.
profile = ckptplan.profile(model, inputs, loss_fn=loss_of, optimizer=optimizer)
plan = ckptplan.solve(profile, budget="50%", time_limit_s=3)
print(plan)
print(ckptplan.verify(model, plan, inputs, loss_of, optimizer=optimizer))

# Train. Gradients are bitwise those of plain training; only memory and time differ.
with ckptplan.apply(model, plan, profile=profile) as handle:
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")
    print(handle.stats())
