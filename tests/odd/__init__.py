"""Odd but legal models and training loops, by what is odd about them, and what becomes of them (see `harness`)."""

from odd import activations, errors, memory, parameters, state, surroundings

__all__ = ["activations", "errors", "memory", "parameters", "state", "surroundings"]
