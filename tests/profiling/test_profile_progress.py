"""What profiles and estimates say of their progress."""

from __future__ import annotations

import torch
from torch import nn

import ckptplan
from ckptplan.core.progress import Message


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))


def assert_counted(seen: list[str], doing: str) -> None:
    """Parts of the work are counted from 1, and none is beyond the last."""
    parts = [text for text in seen if isinstance(text, Message) and text.startswith(doing)]
    assert parts
    assert parts[0].done == 1
    for text in parts:
        assert text.done is not None
        assert text.total is not None
        assert 1 <= text.done <= text.total
        assert f"{text.done} of {text.total}" in text


def test_a_profile_counts_replays_and_stages() -> None:
    seen: list[str] = []
    ckptplan.profile(model(), torch.randn(2, 8), on_progress=seen.append)
    assert_counted(seen, "tracing")
    assert_counted(seen, "timing")


def test_an_estimate_counts_its_passes() -> None:
    seen: list[str] = []
    ckptplan.estimate(model(), torch.randn(2, 8), optimizer="adamw", on_progress=seen.append)
    assert_counted(seen, "recording")
