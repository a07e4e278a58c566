"""What a failed backward leaves in the autograd engine's queue, and how it goes.

NOTE [Leftovers of a failed backward]
When a node raises, the engine gives the backward up, but the nodes that were ready to run stay in the queue: of the
calling thread for nodes on the CPU, of the device's thread for others. They own the rest of the graph, activations and
all. A queue hands out the youngest node first, so they may stay behind whatever backwards follow, for good. A backward
through a graph that is older than theirs comes after them: the engine takes them out, sees that their backward is no
more, and drops them.

Nobody is told that a backward failed (it may do so before any stage's turn, and callbacks run all the same), so this is
done before every forward.
"""

from __future__ import annotations

import threading
from typing import Any

import torch


class _Nothing(torch.autograd.Function):
    """Passes no gradient on, so that running it takes no operation that somebody could count."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


class OldGraph(threading.local):
    """A graph older than any that the calling thread makes after its first `drop_leftovers` (ages are per thread)."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self._leaf = torch.zeros((), device=device, requires_grad=True)
            self._root = _Nothing.apply(self._leaf)
            self._gradient = torch.zeros_like(self._leaf)

    def drop_leftovers(self) -> None:
        """Empty the queue of what failed backwards left; nothing may be running backward in this thread."""
        torch.autograd.grad(self._root, self._leaf, self._gradient, retain_graph=True, allow_unused=True)
