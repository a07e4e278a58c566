"""Actions in fixed proportions, spread evenly along a chain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GRID = 20
"""Parts into which a chain is divided: proportions are multiples of one part."""


def fractions() -> list[tuple[int, int, int]]:
    """Return all numbers of parts for three actions that add up to `GRID`, the first action's most first."""
    return [(a, b, GRID - a - b) for a in range(GRID, -1, -1) for b in range(GRID - a, -1, -1)]


def evenly(shares: Sequence[Sequence[int]], count: int) -> NDArray[np.int8]:
    """Return sequences of actions with these shares, each as even as can be.

    Item i takes the action whose share so far is furthest behind, the first among equals.

    Parameters
    ----------
    shares : sequence of sequence of int
        Shape (sequences, actions): parts of each action.
    count : int
        Items of each sequence.

    Returns
    -------
    array of int8
        Shape (sequences, count): the position of each item's action.
    """
    parts = np.asarray(shares, np.int64)
    total, rows = parts.sum(axis=1, keepdims=True), np.arange(len(parts))
    given = np.zeros_like(parts)
    out = np.zeros((len(parts), count), np.int8)
    for i in range(count):
        out[:, i] = (parts * (i + 1) - given * total).argmax(axis=1)
        given[rows, out[:, i]] += 1
    return out
