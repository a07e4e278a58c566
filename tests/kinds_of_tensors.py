"""Tensors of all kinds that autograd may save, to be told apart by digests and by spots."""

from __future__ import annotations

from collections.abc import Callable

import torch

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "three": lambda: torch.randn(3),
    "matrix": lambda: torch.randn(300, 301),
    "double": lambda: torch.randn(64, 64, dtype=torch.float64),
    "many blocks": lambda: torch.randn(2300, 4001),
    "booleans": lambda: torch.rand(100, 33) > 0.5,
    "bfloat16": lambda: torch.randn(33, 5).bfloat16(),
    "float8": lambda: torch.randn(33, 5).to(torch.float8_e4m3fn),
    "unsigned": lambda: torch.randint(9, (3, 5)).to(torch.uint16),
    "slice": lambda: torch.randn(50, 50)[::2, 1:31],
    "strided slice": lambda: torch.randn(50, 50, 4)[::2, 1:31, 1],
    "long rows of a slice": lambda: torch.randn(3, 9000)[:, 1:8999],
    "long columns": lambda: torch.randn(9000, 4)[:, :3],
    "transposed": lambda: torch.randn(40, 30).t(),
    "channels last": lambda: torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last),
    "behind an edge": lambda: torch.randn(1001)[1:],
    "bytes behind an edge": lambda: torch.randint(255, (1001,), dtype=torch.uint8)[3:],
}
