"""Train with accelerate within a budget, with gradient accumulation and bfloat16.

python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import ckptplan

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
config = GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=128, vocab_size=256)
model = GPT2LMHeadModel(config).train()
optimizer = torch.optim.AdamW(model.parameters())
rows = [{"input_ids": row, "labels": row} for row in torch.randint(config.vocab_size, (32, 128))]
loader = torch.utils.data.DataLoader(rows, batch_size=4)

# After prepare the model has the precision in which it trains; with accumulation, steps begin with gradients.
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
plan = ckptplan.solve(
    model, budget="30%", inputs=next(iter(loader)), optimizer=optimizer.optimizer, accumulate=True, time_limit_s=3
)
print(plan)
with ckptplan.apply(model, plan) as handle:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    print(handle.stats())
