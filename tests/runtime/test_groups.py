"""What a stage moves goes and comes as one group: how many waits, copies, events and searches that takes."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
from counting import bytecodes_in
from made_plans import one_transfer
from test_streams import KINDS, on_device

from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.packing import unpack
from ckptplan.runtime.swap.record import Whereabouts
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.stores import DiskStore, Store, disk

CPU = torch.device("cpu")


def session(store: Any, device: torch.device = CPU) -> SwapSession:
    return SwapSession({"host": store}, device, lambda storage: False, Counters())


def packed(run: SwapSession, index: int, tensors: list[torch.Tensor]) -> list[Any]:
    """What a stage saves, all of which leaves."""
    packing = run.packing()
    out = [packing.pack(t) for t in tensors]
    run.leave(index, packing.saved, one_transfer(tuple(range(len(tensors)))))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_counts_until_its_last_copy_is_done_and_returns_at_once(kind: str, tmp_path: Path) -> None:
    """As NOTE [Residency], rule 4, has it, and so the referee and the planner."""
    with on_device(2, kind, tmp_path) as (gpu, store):
        run = session(store, fake_cuda.DEVICE)
        tensors = [gpu.empty(n, torch.uint8) for n in (512, 4096, 1024)]
        held = packed(run, 0, tensors)
        del tensors
        assert gpu.in_use == 5632
        run.release(0)
        assert gpu.in_use == 0
        assert store.used_bytes == 5632
        run.prefetch(0)
        assert gpu.in_use == 5632
        assert {x.record.state for x in held} == {Whereabouts.RETURNING}
        del held
        gc.collect()
        assert store.used_bytes == gpu.in_use == 0


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_needed_early_comes_alone(kind: str, tmp_path: Path) -> None:
    """And the prefetch brings the others; one that has ended is no part of it."""
    with on_device(3, kind, tmp_path) as (gpu, store):
        run = session(store, fake_cuda.DEVICE)
        tensors = [gpu.empty(1000 * (i + 1), torch.uint8) for i in range(4)]
        for value, tensor in enumerate(tensors):
            gpu.fill(tensor, value)
        held = packed(run, 0, tensors)
        del tensors, tensor
        run.release(0)
        looks = [gpu.look(unpack(held[2]), 2)]
        away, here = Whereabouts.AWAY, Whereabouts.ON_DEVICE
        assert [x.record.state for x in held] == [away, away, here, away]
        del held[0]
        gc.collect()
        run.prefetch(0)
        assert [x.record.state for x in held] == [Whereabouts.RETURNING, Whereabouts.ON_DEVICE, Whereabouts.RETURNING]
        for _ in range(2):  # as through a graph that is kept
            looks += [gpu.look(unpack(x), value) for value, x in enumerate(held, 1)]
        assert run._counters.swapped_in_bytes == 2000 + 3000 + 4000
        gpu.synchronize()
        assert all(look() for look in looks)
        del held


@pytest.mark.parametrize("stages", [1, 50])
@pytest.mark.parametrize("make", [lambda _: Store(), DiskStore])
def test_bookkeeping_grows_with_the_storages(make: Callable[[Path], Any], stages: int, tmp_path: Path) -> None:
    """Python's instructions for a step's swapping, with so many storages and with twice as many."""

    def step(run: SwapSession, each: int) -> None:
        held = [packed(run, i, [torch.zeros(16) for _ in range(each)]) for i in range(stages)]
        for i in range(stages):
            run.release(i)
        for i in reversed(range(stages)):
            run.prefetch(i)
        for stage in held:
            for x in stage:
                unpack(x)

    taken = []
    for each in (100 // stages, 200 // stages):
        store = make(tmp_path)
        run = SwapSession({"host": store}, CPU, lambda storage: False, Counters(), [[64] * each] * stages)
        taken.append(bytecodes_in(functools.partial(step, run, each)))
        store.close()
    assert taken[1] < 2.2 * taken[0]


def test_a_wait_in_a_workers_thread_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that ends in a worker's thread, where nothing may wait: others of its batch still wait themselves."""
    real, begin = disk._read, threading.Event()
    ended = threading.Event()
    store = DiskStore(tmp_path)
    tensors = [torch.full((2048,), float(i)) for i in range(2)]
    run = session(store)
    held = packed(run, 0, tensors)
    del tensors
    run.release(0)

    def collects(*arguments: Any) -> None:
        begin.wait()
        if held:
            held.pop()  # the last reference
            ended.set()
            time.sleep(0.1)
        real(*arguments)

    monkeypatch.setattr(disk, "_read", collects)
    run.prefetch(0)
    first = held.pop(0)
    begin.set()
    ended.wait()
    assert torch.equal(unpack(first), torch.zeros(2048))
    del first
    store.close()
