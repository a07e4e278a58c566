"""Plan for a GPU that is not in this machine: what training needs there, the largest batch, and a plan.

python examples/absent_device.py

The model and its inputs lie on PyTorch's `meta` device, so neither takes memory. Bytes come from a traced step, times
from the published rates of the device. `ckptplan fit` does the same for every known device.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ckptplan

DEVICE = "rtx4090"

with torch.device("meta"):
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, vocab_size=8192, bos_token_id=0, eos_token_id=0)).train()


def make_inputs(batch: int) -> dict[str, torch.Tensor]:
    """Token ids and labels for `batch` sequences of 512 tokens."""
    tokens = torch.zeros(batch, 512, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


training = {"device": DEVICE, "optimizer": "adamw", "amp": "bfloat16"}

# Memory by phase and category, and the tensors at the peak.
print(ckptplan.estimate(model, make_inputs(16), **training))

# The largest batch within 4 GiB with everything kept. Without plan=False the largest one with a plan is sought as well,
# which takes minutes: every batch that is tried gets a plan of its own.
plain = ckptplan.max_batch_size(model, make_inputs, budget_gb=4, plan=False, **training)
print(f"\nlargest batch with everything kept\n{plain}")

# A plan for half as much again. It is checked again where it arrives: pass inputs= to ckptplan.apply there.
batch = plain.batch * 3 // 2
plan = ckptplan.solve(model, budget_gb=4, inputs=make_inputs(batch), time_limit_s=3, **training)
print(f"\na plan for batch {batch}\n{plan}")
