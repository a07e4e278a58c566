"""Estimate an epoch whose batches are sorted by length: what an A100 reserves for it, beside two of its longest steps.

python examples/sorted_epoch.py

The caching allocator keeps what it has reserved for one batch, and the next one's tensors may not fit into it. The
order of lengths decides how much that is, and so does a loop that empties the cache between its steps.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ckptplan

with torch.device("meta"):
    config = GPT2Config(n_embd=512, n_head=8, n_layer=1, vocab_size=5000, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()


def make_inputs(length: int) -> dict[str, torch.Tensor]:
    """Token ids and labels of a batch of 8 sequences."""
    tokens = torch.zeros(8, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


epoch = [make_inputs(length) for length in (1024, 640, 256)]
loops = {"two longest steps": epoch[0], "long to short": epoch, "short to long": epoch[::-1]}
print(f"{'':<20}{'peak':>12}{'reserved':>12}{'emptied':>12}  in MiB")
for name, inputs in loops.items():
    kept, emptied = (
        ckptplan.estimate(model, inputs, device="a100-40gb", optimizer="adamw", amp="bfloat16", empty_cache=empty_cache)
        for empty_cache in (False, True)
    )
    figures = (kept.peak_bytes, kept.reserved_bytes, emptied.reserved_bytes)
    print(f"{name:<20}" + "".join(f"{nbytes / 2**20:>12.0f}" for nbytes in figures))
