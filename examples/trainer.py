"""Train a Hugging Face model with the Trainer within a budget: one callback, and nothing else changed.

python examples/trainer.py

The model is made from a configuration with random weights, so nothing is downloaded.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ckptplan.integrations.transformers import ActivationPlanCallback

torch.manual_seed(0)
config = GPT2Config(n_layer=8, n_embd=64, n_head=4, n_positions=128, vocab_size=256)
model = GPT2LMHeadModel(config)
rows = torch.randint(config.vocab_size, (32, 128))
data = [{"input_ids": row, "labels": row} for row in rows]

# The budget is 30 % of the way from the smallest peak to everything kept. On a CPU swaps would go to the same memory.
callback = ActivationPlanCallback(budget="30%", time_limit_s=3, actions=("keep", "recompute"))
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(folder, max_steps=5, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no")
    Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
print(callback.summary())
