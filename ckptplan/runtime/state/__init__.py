"""State that forward reads and changes besides tensors: kept, and put back around a next run."""
