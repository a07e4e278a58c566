"""Plan a Hugging Face model and check the plan: measured peak, step time and gradients beside the prediction.

python examples/hugging_face.py

The model is made from a configuration with random weights, so nothing is downloaded.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ckptplan

torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=128, vocab_size=256, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).train()
tokens = torch.randint(config.vocab_size, (4, 128))
inputs = {"input_ids": tokens, "labels": tokens}  # keyword arguments of the forward; the loss is output.loss

# The smallest peak among plans that are at most 10 % slower than keeping everything.
plan = ckptplan.solve(model, max_overhead=0.10, inputs=inputs, time_limit_s=3)
print(plan)

# Run the plain step and the planned one, and compare them.
found = ckptplan.verify(model, plan, inputs=inputs)
print(found)
assert found.gradients_equal
