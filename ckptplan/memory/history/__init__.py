"""PyTorch's recorded memory histories: read, undone to events, summed up."""
