"""A plan on a model: recompute, swap, the stores bytes go to, apply and verify."""
