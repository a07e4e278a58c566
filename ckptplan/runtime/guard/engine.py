"""Free the memory that a failed backward leaves in the autograd engine's queue.

NOTE [Leftovers of a failed backward]
When a node raises, the engine ends the backward, but the nodes that were ready to run stay in a queue: that of the
calling thread for nodes on the CPU, that of the device's thread for others. These nodes own the rest of the graph and
its activations. A queue returns the youngest node first, so if all later backwards run through younger graphs, the
leftovers stay in the queue for good. A backward through a graph that is older than theirs runs after them: the engine
takes the leftovers out of the queue first, finds that their backward has ended, and drops them.

Example: nodes are numbered as they are made, and a queue returns the highest number first. The root of `OldGraph` was
made first and has number 0. A backward fails and leaves node 57 in the queue. The next step's backward puts nodes 80 to
60 into the queue and takes all of them out again, while node 57 stays. `drop_leftovers` puts node 0 into the queue:
before that node comes out, node 57 does.

There is no callback for a failed backward, and it may fail before it reaches any stage. So this is done before every
forward.
"""

from __future__ import annotations

import threading

import torch
from torch.autograd import Variable


class OldGraph(threading.local):
    """A graph that is older than all graphs that the calling thread makes later; each thread has its own."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self._root = torch.zeros((), device=device, requires_grad=True).clone()
            self._gradient = torch.zeros((), device=device)

    def drop_leftovers(self) -> None:
        """Drop the nodes that failed backwards left in the queue; no backward may be running in this thread."""
        # Computes the gradient of the root with respect to itself: its node goes through the queue without running an
        # operation, so modes that count operations see none. Same as `torch.autograd.grad` without its checks, which
        # take longer than everything else here.
        Variable._execution_engine.run_backward(
            (self._root,), (self._gradient,), True, False, (self._root,), allow_unreachable=True, accumulate_grad=False
        )
