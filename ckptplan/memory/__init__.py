"""Memory predicted before it is spent: what a step allocates, and what the caching allocator makes of it."""
