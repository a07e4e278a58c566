"""Tensors and their storages, views and positions, and the seam to the device and to private names of PyTorch."""
