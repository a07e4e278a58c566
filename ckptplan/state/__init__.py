"""State that forward reads and changes besides tensors: recorded, and restored for a recompute."""
