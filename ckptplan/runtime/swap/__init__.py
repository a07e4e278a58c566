"""Saved tensors that leave the device between their forward and their backward."""
