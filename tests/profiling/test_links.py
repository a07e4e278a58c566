"""How links are measured: on a clock that passes only with work, so that every figure has one right value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy_modules import InTurn, Lambda

from ckptplan.core.link import Link
from ckptplan.profiling import profiler
from ckptplan.profiling.profiler import profile
from ckptplan.profiling.target import MIN_SWAP_BYTES, Target
from ckptplan.profiling.times import links
from ckptplan.runtime.swap.stores import Ticket, base

CPU = torch.device("cpu")


class Machine:
    """Products take so long for each multiplication; copies are over where they are waited for."""

    def __init__(self, flops_per_s: float, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.computed_s = 0.0
        self.products = 0
        machine = self

        def product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
            machine.products += 1
            seconds = 2 * a.shape[0] ** 3 / flops_per_s
            machine.computed_s += seconds
            machine.now += seconds

        class Store(base.Store):
            def finish_out(self, ticket: Ticket) -> None:
                machine.now += link.out_s(ticket.nbytes) + link.copy_s * len(ticket.sizes)

            def finish_in(self, ticket: Ticket, done: Any = None) -> None:
                machine.now += link.in_s(ticket.nbytes)

        monkeypatch.setattr(torch, "mm", product)
        monkeypatch.setattr(links, "_now", lambda device: machine.now)
        monkeypatch.setattr(links, "make_store", lambda *_, **__: Store())


@pytest.mark.parametrize("flops_per_s", [1e9, 1e11, 1e13, 1e15])
@pytest.mark.parametrize("rate", [1e8, 1e10, 5e10])
def test_compute_is_busy_for_about_as_long_as_copies(
    rate: float, flops_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the device: 4096 x 4096 took a CPU seconds, and a fast device less than the copies beside it."""
    machine = Machine(flops_per_s, Link(rate, rate), monkeypatch)
    compute = links.busy_for((16 << 20) / rate, CPU, 16 << 20)
    machine.computed_s, machine.products = 0.0, 0
    compute()
    assert machine.products <= 64
    copies_s = (16 << 20) / rate
    reached = 64 * 2 * 2048**3 / flops_per_s  # the largest product within 16 MiB, as often as allowed
    assert 0.5 * min(copies_s, reached) <= machine.computed_s <= max(1.5 * copies_s, 2 * 64**3 / flops_per_s)


@pytest.mark.parametrize(("latency_s", "copy_s"), [(0.0, 0.0), (2e-5, 0.0), (1e-4, 5e-6), (0.0, 2e-5)])
def test_costs_of_a_group_and_of_a_copy(latency_s: float, copy_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(1e12, Link(5e10, 5e10, latency_s, copy_s), monkeypatch)
    found = links.measure_costs(CPU)
    assert found.out_bytes_per_s == pytest.approx(5e10)
    assert found.latency_s == pytest.approx(latency_s, abs=1e-9)
    assert found.copy_s == pytest.approx(copy_s, abs=1e-9)
    assert found.least_bytes == pytest.approx(copy_s * 5e10, abs=100)


def test_costs_through_the_file(tmp_path: Path) -> None:
    found = links.measure_costs(CPU, tmp_path)
    assert found.out_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def sizes(least: int | None, monkeypatch: pytest.MonkeyPatch) -> dict[int, bool]:
    """Whether storages stay, by their sizes, where a link's storages are worth moving from `least` bytes on."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), Lambda(lambda _, x: x.exp()))]
    stage = InTurn(layers=nn.ModuleList(layers))
    with monkeypatch.context() as patch:
        if least is not None:
            target = Target(CPU, least_moved_bytes=least)
            patch.setattr(profiler, "find_target", lambda *_: target)
        chain = profile(stage, torch.randn(16, 64), menus=False)
    return {s.nbytes: s.stays for s in chain.storages if s.born >= 0 and not s.to_end}


def test_what_is_not_worth_its_copy_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MIN_SWAP_BYTES == 4096 == 16 * 64 * 4
    assert sizes(None, monkeypatch)[4096] is False
    assert sizes(4097, monkeypatch)[4096] is True
