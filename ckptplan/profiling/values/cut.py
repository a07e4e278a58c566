"""Tensors cut from their graphs, so that a call can run forward and backward by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Join(torch.autograd.Function):
    """Make a tensor without a graph depend on an anchor, sharing its memory, fit to be modified in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient.new_zeros(())


def joined(tensor: torch.Tensor, anchors: list[torch.Tensor]) -> torch.Tensor:
    """`tensor` without its graph, with a new one that ends at an anchor, which is added to `anchors`."""
    anchors.append(torch.zeros((), device=tensor.device, requires_grad=True))
    # `data`, not `detach()`: marking it dirty must not count as a write to what the user's graph saved.
    return _Join.apply(tensor.data, anchors[-1])  # type: ignore[no-any-return]


def fresh(anchors: list[torch.Tensor], made: dict[int, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Map from tensors to cut ones, for the arguments of a call that is made again.

    Parameters
    ----------
    anchors : list of Tensor
        Gets the anchors at which the new graphs end.
    made : dict
        Gets the result for each tensor by its identity: an argument given twice stays one tensor.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = joined(tensor, anchors) if tensor.requires_grad else tensor.detach()
        return made[id(tensor)]

    return cut
