"""Types of arguments that are PyTorch's; what plans without it imports them for type checking alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckptplan.core.device import Device

DeviceLike = str | Path | torch.device | Device | None
"""A torch device, or one that isn't in this machine: its name, the file that describes it, or its description."""

LossFn = Callable[[Any], torch.Tensor]
"""Maps a model's output to the loss."""

OptimizerLike = torch.optim.Optimizer | type[torch.optim.Optimizer] | str | Callable[..., torch.optim.Optimizer]
"""An optimizer, its class or a callable that makes it from parameters, or its name."""
