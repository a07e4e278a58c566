"""Prediction of memory: the blocks that a step allocates, and the segments that the caching allocator reserves."""
