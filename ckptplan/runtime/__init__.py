"""Apply a plan to a model and run it: recompute, swap, the stores of swapped bytes, and verify."""
