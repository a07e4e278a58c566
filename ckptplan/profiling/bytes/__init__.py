"""Bytes of a step, from runs without memory."""
