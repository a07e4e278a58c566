"""CUDA streams, where there are any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def current_stream(device: torch.device) -> Any:
    """The stream that computes now on `device`; None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, `stream` computes, if there is one."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@contextlib.contextmanager
def run_on(stream: Any, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, `stream` computes, on `tensors` too, behind the stream that computes now, which goes on behind it."""
    now: Any = None if stream is None else current_stream(stream.device)
    if now == stream:
        yield
        return
    stream.wait_stream(now)
    for tensor in tensors:
        if tensor.device == stream.device:
            tensor.record_stream(stream)
    try:
        with on_stream(stream):
            yield
    finally:
        now.wait_stream(stream)
