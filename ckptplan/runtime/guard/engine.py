"""What a failed backward leaves in the autograd engine's queue, and how it goes.

NOTE [Leftovers of a failed backward]
When a node raises, the engine gives the backward up, but the nodes that were ready to run stay in the queue: of the
calling thread for nodes on the CPU, of the device's thread for others. They own the rest of the graph, activations and
all. A queue hands out the youngest node first, so they may stay behind whatever backwards follow, for good. A backward
through a graph that is older than theirs comes after them: the engine takes them out, sees that their backward is no
more, and drops them.

Nobody is told that a backward failed, which it may do before any stage's turn, so this is done before every forward.
"""

from __future__ import annotations

import threading

import torch
from torch.autograd import Variable


class OldGraph(threading.local):
    """A graph older than any that the calling thread makes after its first `drop_leftovers` (ages are per thread)."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self._root = torch.zeros((), device=device, requires_grad=True).clone()
            self._gradient = torch.zeros((), device=device)

    def drop_leftovers(self) -> None:
        """Empty the queue of what failed backwards left; nothing may be running backward in this thread."""
        # The gradient of the root for the root: its node comes out of the queue, and runs no operation that anybody
        # could count. This is `torch.autograd.grad` less its checks, which take longer than all the rest.
        Variable._execution_engine.run_backward(
            (self._root,), (self._gradient,), True, False, (self._root,), allow_unreachable=True, accumulate_grad=False
        )
