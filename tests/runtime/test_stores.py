from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_plans import one_transfer

from ckptplan.core.errors import SwapError
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.packing import unpack
from ckptplan.runtime.swap.record import Record, start_leaving
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.stores import DiskStore, disk
from ckptplan.runtime.swap.stores.arena import Arena, Extent
from ckptplan.training.measure import recorded_blocks


def open_files() -> set[str]:
    return {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    }


def swap_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("ckptplan")]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    made = DiskStore(tmp_path)
    yield made
    made.close()


@settings(max_examples=25)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * 4096)), max_size=60), st.randoms(use_true_random=False))
def test_extents_never_overlap_and_are_free_when_nobody_holds_them(
    steps: list[tuple[bool, int]], rng: random.Random
) -> None:
    """In one block that grows, as a file does, and in separate ones, as page-locked memory has."""
    for separate in (False, True):
        arena = Arena(4096)
        grow = functools.partial(grown, separate)
        taken: list[tuple[Extent, int]] = []
        for take, nbytes in steps:
            if take or not taken:
                extent = arena.take(nbytes, grow)
                end = extent.offset + arena.rounded(nbytes)
                assert all(end <= e.offset or e_end <= extent.offset for e, e_end in taken)
                assert end <= next(block for block, _ in arena.blocks if extent.offset < block), "across blocks"
                taken.append((extent, end))
                del extent
            else:
                del taken[rng.randrange(len(taken))]
            assert arena.used_bytes == sum(end - e.offset for e, end in taken)
        taken.clear()
        if arena.blocks:
            assert arena.take(arena.blocks[0][0], grow).offset == 0


def grown(separate: bool, arena: Arena, start: int, size: int) -> int:
    begin = arena.reserved_bytes if separate else start
    arena.blocks = [*(arena.blocks if separate else ()), (begin + size, None)]
    return begin


def test_every_step_puts_its_groups_at_the_same_offsets_whatever_leaves_beside() -> None:
    """A plan's bytes are enough for it, also after steps of other shapes."""

    def full(*_: object) -> int:
        raise SwapError("the arena is full")

    arena = Arena(1)
    arena.blocks = [(12, None)]
    shapes = [(6, 4, 2), (3, 4, 5), (12,), (1, 1, 10)]
    for order in itertools.permutations(shapes):
        for sizes in (*order, *order):
            held = [arena.take(nbytes, full) for nbytes in sizes]
            assert [extent.offset for extent in held] == list(itertools.accumulate(sizes, initial=0))[:-1]
            del held
    first = [arena.take(4, full) for _ in range(3)]
    with pytest.raises(SwapError):
        arena.take(1, full)
    del first[1]
    assert [arena.take(2, full).offset, arena.take(4, full).offset] == [4, 4], "in the gap"


def test_extents_survive_an_interrupt_anywhere() -> None:
    """Whatever line an exception comes from, nothing stays taken and nothing is given out twice."""
    arena = Arena(4096)
    grow = functools.partial(grown, False)
    kept = arena.take(4096, grow)

    def interrupt_at(number: int) -> Any:
        seen = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == number:
                raise KeyboardInterrupt
            return trace

        return trace

    before = sys.gettrace()
    gc.disable()  # others' callbacks would be interrupted
    try:
        number = quiet = 0
        while quiet < 3:  # how many lines there are depends on what was cut short before
            number += 1
            sys.settrace(interrupt_at(number))
            try:  # nothing else that is called may be traced
                arena.take(4096, grow)
                quiet += 1
            except KeyboardInterrupt:
                quiet = 0
            sys.settrace(None)
            assert arena.used_bytes == 4096
            other = arena.take(4096, grow)
            assert other.offset != kept.offset
            del other
    finally:
        gc.enable()
        sys.settrace(before)
    assert number > 10


def test_a_dropped_store_ends_its_threads(tmp_path: Path) -> None:
    before, files = swap_threads(), open_files()
    store = DiskStore(tmp_path)
    ticket = store.start_out(torch.randn(5000))
    done = ticket.out_done
    del store, ticket
    gc.collect()
    done.settle()  # the copy under way holds the file
    for thread in threading.enumerate():
        if thread.name.startswith("ckptplan-swap"):
            thread.join(20)
    assert swap_threads() == before
    assert open_files() == files
    assert list(tmp_path.iterdir()) == []


CPU = torch.device("cpu")


def session(store: DiskStore) -> SwapSession:
    return SwapSession({"host": store}, CPU, lambda storage: False, Counters())


def saved_exp(run: SwapSession, moves: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(0, 1, 4096, requires_grad=True)
    with run.stage(0, one_transfer(moves)):
        y = x.exp()  # saves its result
    return x, y


def test_who_drops_a_record_frees_its_bytes_though_they_are_being_copied(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recordings see the calling thread alone, so a release in the worker's would count as memory that is held."""
    copying, dropped = threading.Event(), threading.Event()

    def late(fd: int, view: memoryview, offset: int) -> None:
        copying.set()
        assert dropped.wait(30)

    def step() -> None:
        records = [Record(torch.randn(1 << 14), Counters(), None)]
        start_leaving(records, store)
        assert copying.wait(30)
        threading.Timer(0.05, dropped.set).start()
        records.clear()

    monkeypatch.setattr(disk, "_write", late)
    torch.randn(8)  # what the first draw makes
    events, _ = recorded_blocks(step)
    assert sum(nbytes for _, nbytes, _ in events) == 0
    assert max(nbytes for _, nbytes, _ in events) == 4 << 14


@pytest.mark.parametrize("stride", [(64, 64, 8, 1), (64, 1, 8, 1), (64, 7, 8, 1)])
def test_strides_of_dimensions_of_size_1_come_back(store: DiskStore, stride: tuple[int, ...]) -> None:
    """A convolution chooses its memory format by them, and with it its kernel and its result's strides."""
    run = session(store)
    packing = run.packing()
    packed = packing.pack(torch.empty_strided((32, 1, 8, 8), stride).fill_(1))
    run.leave(0, packing.saved, one_transfer((0,)))
    run.release(0)
    assert unpack(packed).stride() == stride


@pytest.mark.parametrize(
    ("moves", "through", "released"), [((), "itself", False), ((0,), "detached", True), ((0,), "view", False)]
)
def test_modified_before_it_left(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, moves: tuple[int, ...], through: str, released: bool
) -> None:
    """Kept under hooks, or swapped with the copy under way: PyTorch's error, not a wrong gradient."""
    real = disk._write
    monkeypatch.setattr(disk, "_write", lambda *a: (time.sleep(0.05), real(*a)))
    run = session(store)
    _, y = saved_exp(run, moves)
    loss = y.sum()
    with torch.no_grad():
        {"itself": y, "detached": y.detach(), "view": y[10:20]}[through].mul_(2)
    del y
    if released:
        run.release(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_modified_after_it_left(store: DiskStore) -> None:
    run = session(store)
    x, y = saved_exp(run, (0,))
    loss, want = y.sum(), y.detach().clone()
    run.release(0)
    with torch.no_grad():
        y.mul_(2)
    loss.backward()
    assert torch.equal(x.grad, want)


def test_what_a_stage_before_holds_leaves_as_well(store: DiskStore) -> None:
    """A storage that several stages save is moved by the last of them alone, and then no stage keeps it here."""
    x = torch.randn(64, 64, requires_grad=True)
    run = session(store)
    with run.stage(0, one_transfer(())):
        base = x * 1
        loss = (base[:, :10] * 2).exp().sum() + (base.t()[3:] ** 2).sum()
    with run.stage(1, one_transfer((0,))):
        loss = loss + base.square().sum()
    want = torch.autograd.grad(loss, x, retain_graph=True)[0]
    watch = torch.multiprocessing.reductions.StorageWeakRef(base.untyped_storage())
    del base
    run.release(1)
    assert watch.expired(), "the device bytes are gone"
    assert torch.equal(torch.autograd.grad(loss, x)[0], want)


def test_an_address_used_again_is_another_storage(store: DiskStore) -> None:
    """After a round trip the storage is a new one; what comes to lie at the old address must not be taken for it."""
    x = torch.linspace(0, 1, 4096, requires_grad=True)
    run = session(store)
    first, wanted = None, None
    addresses, again = set(), False
    for index in range(500):
        if again and index >= 20:
            break
        with run.stage(index, one_transfer((0,))):
            y = (x * (index + 1)).exp()
        again |= y.untyped_storage()._cdata in addresses
        addresses.add(y.untyped_storage()._cdata)
        loss, want = y.sum(), y.detach() * (index + 1)
        del y
        run.release(index)
        filler = [torch.empty(1) for _ in range(8)]  # takes the address, so that the bytes return elsewhere
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], want)
        del filler
        if first is None:
            first, wanted = loss, want
        assert torch.equal(torch.autograd.grad(first, x, retain_graph=True)[0], wanted)
    assert again, "no address came twice, so this showed nothing"
