"""What is known of CUDA's kernels without a device: which attention runs, what batch norm keeps, what is run alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import uniform
from torch import nn
from toy_modules import InTurn, Lambda

import ckptplan
from ckptplan.core.plan import KEEP, Decisions
from ckptplan.core.request import Training
from ckptplan.profiling.bytes import fake
from ckptplan.profiling.bytes.fake import FakeWorld
from ckptplan.profiling.bytes.kernels import _prefers_cudnn
from ckptplan.profiling.bytes.replays import find_stages, replay
from ckptplan.profiling.target import find_target
from ckptplan.training.step import make_step

aten = torch.ops.aten


class Attention(nn.Module):
    def __init__(self, *, masked: bool = False, dropout: float = 0.0, head: int = 64) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 3 * 4 * head), nn.Linear(4 * head, 256)
        self.masked, self.dropout, self.head = masked, dropout, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, self.head)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool) if self.masked else None
        scores = nn.functional.scaled_dot_product_attention(q, k, v, mask, self.dropout, not self.masked)
        return self.out(scores.transpose(1, 2).flatten(2))


def attended(device: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[str, list[list[int]]]:
    """The kernel that a device which isn't here takes, and per stage the bytes of what has a position."""
    model, x = nn.Sequential(*(Attention(**options) for _ in range(2))).to(dtype), torch.randn(2, 128, 256, dtype=dtype)
    target, step = find_target(model, device), make_step(model, Training(x))
    names = find_stages(step, target).stages
    seen = replay(step, Decisions(names, (KEEP,) * len(names)), target)
    keys = [op.key[0] for trace in seen.backward.values() for op in trace.ops if isinstance(op.key, tuple)]
    kernels = {str(func).split("_")[-3] for func in keys if "attention_backward" in str(func)}
    saved = [[seen.sizes[s] for s, counts in sids.items() if counts] for sids in seen.saved.values()]
    return " ".join(sorted(kernels)), saved


recent = pytest.mark.skipif(torch.__version__ < (2, 11), reason="cuDNN's attention is the default from 2.11 on")


@recent
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_that_may_replace_one_another_save_alike(masked: bool) -> None:
    """Seeds and states are apart: a plan made for one kernel counts as the step does under another."""
    kernel, saved = attended("h100", masked=masked)
    assert kernel == "cudnn"
    other, expected = attended("a100-40gb", masked=masked)
    assert other == ("efficient" if masked else "flash")
    assert saved == expected
    assert attended("rtx4090", masked=masked) == (other, expected)


@recent
def test_cudnn_attends_where_it_can() -> None:
    assert attended("h100", dropout=0.125)[0] == "cudnn"
    assert attended("h100", dropout=0.1)[0] == "flash"  # no multiple of 1/16
    assert attended("h100", head=256)[0] == "flash"
    assert attended("h100", torch.float32)[0] == "efficient"
    torch.use_deterministic_algorithms(True)
    try:
        assert attended("h100")[0] == "flash"
    finally:
        torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert attended("h100")[0] == "flash"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@recent
def test_an_old_cudnn_and_the_users_wish_leave_flash_attention_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _prefers_cudnn((9, 0))
    assert _prefers_cudnn((10, 3))
    assert not _prefers_cudnn((12, 0))
    for version, wanted in ((91002, False), (91900, True)):
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
            assert _prefers_cudnn((9, 0)) == wanted
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert not _prefers_cudnn((9, 0))


def test_what_a_kernel_keeps_beside_its_results_is_learned_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN's batch norm: its fake twin says that it keeps nothing, and how much depends on the layout."""
    ran: list[torch.Size] = []

    @torch.library.custom_op("ckptplan_test::normalize", mutates_args=())
    def normalize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append(x.shape)
        dense = x.is_contiguous(memory_format=torch.channels_last)
        return x.clone(), torch.empty(1000 if dense else 0, dtype=torch.uint8)

    @normalize.register_fake
    def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), x.new_empty(0, dtype=torch.uint8)

    assert aten.cudnn_batch_norm.default in fake._MISREPORTED
    monkeypatch.setattr(fake, "_MISREPORTED", {torch.ops.ckptplan_test.normalize.default})
    world = FakeWorld()
    x = world.fake(torch.empty(2, 4, 3, 3))
    with torch.no_grad(), world:
        last = x.to(memory_format=torch.channels_last)
        kept = [torch.ops.ckptplan_test.normalize(t)[1].numel() for t in (last, x, last, x)]
    assert kept == [1000, 0, 1000, 0]
    assert len(ran) == 2  # each kind once


class _Unsteady(torch.autograd.Function):
    """As cuDNN's attention: its backward gives other bits each time."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _Unsteady.calls += 1
        return gradient * (1 + 2.0**-20 * _Unsteady.calls)


def test_a_kernel_that_gives_other_bits_each_time_is_told_from_a_wrong_gradient() -> None:
    model = InTurn(
        first=nn.Linear(32, 32), tanh=nn.Tanh(), other=Lambda(lambda _, x: _Unsteady.apply(x)), last=nn.Linear(32, 32)
    )
    x = torch.randn(16, 32)
    plan = uniform(model, x, "recompute")
    found = ckptplan.verify(model, plan, x, repeats=1)
    assert found.differing == found.plain_differing == ("first.weight", "first.bias")
    assert "two plain steps differ in first.weight, first.bias" in str(found)
    steady = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    found = ckptplan.verify(steady, uniform(steady, x, "recompute"), x, repeats=1)
    assert found.plain_differing == ()
    assert "two plain steps" not in str(found)
