"""What a stage moves goes and comes as one group: how many waits, copies, events and searches that takes."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
from counting import bytecodes_in
from fake_cuda import FakeStream
from made_plans import one_transfer
from test_streams import KINDS, made, on_device

from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.packing import unpack
from ckptplan.runtime.swap.record import Record, Whereabouts, finish_leaving, start_leaving, start_returning
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.stores import DiskStore, Store, disk
from ckptplan.runtime.swap.stores.arena import Arena
from ckptplan.runtime.swap.stores.workers import CopyJob, Worker

CPU = torch.device("cpu")


def session(store: Any, device: torch.device = CPU) -> SwapSession:
    return SwapSession({"host": store}, device, lambda storage: False, Counters())


def packed(run: SwapSession, index: int, tensors: list[torch.Tensor]) -> list[Any]:
    """What a stage saves, all of which leaves."""
    packing = run.packing()
    out = [packing.pack(t) for t in tensors]
    run.leave(index, packing.saved, one_transfer(tuple(range(len(tensors)))))
    return out


COUNTED: dict[str, tuple[tuple[Any, str], ...]] = {
    "pinned": ((FakeStream, "wait_event"), (FakeStream, "record_event")),
    "disk": ((Worker, "submit"), (CopyJob, "wait")),  # a worker's own streams run when they happen to
}


@contextlib.contextmanager
def counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Waits, events and jobs inside, of this thread."""
    seen: Counter[str] = Counter()
    here = threading.current_thread()

    def counting(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def run(*args: Any) -> Any:
            seen[name] += threading.current_thread() is here
            return real(*args)

        return run

    with monkeypatch.context() as patch:
        for owner, name in COUNTED[kind]:
            patch.setattr(owner, name, counting(owner, name))
        yield seen


@pytest.mark.parametrize("kind", KINDS)
def test_waits_events_and_jobs_are_as_many_for_fifty_storages_as_for_two(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for count in (2, 50):
        with on_device(1, kind, tmp_path) as (gpu, store):
            run = session(store, fake_cuda.DEVICE)
            tensors = [gpu.empty(512, torch.uint8) for _ in range(count)]
            for value, tensor in enumerate(tensors):
                gpu.fill(tensor, value)
            steps = []
            with counted(kind, monkeypatch) as seen:
                held = packed(run, 0, tensors)
                del tensors, tensor
                for step in (run.release, run.prefetch):
                    steps.append(dict(seen))
                    seen.clear()
                    step(0)
                steps.append(dict(seen))
                seen.clear()
                looks = [gpu.look(unpack(x), value) for value, x in enumerate(held)]
                steps.append(dict(seen))
            gpu.synchronize()
            assert all(look() for look in looks)
            del held
        found.append(steps)
    assert found[0] == found[1]
    out, release, _, back = found[0]
    assert (release, back) == (
        ({"wait_event": 1}, {"wait_event": 1}) if kind == "pinned" else ({"wait": 1}, {"wait": 1})
    )
    assert kind == "disk" or out["record_event"] <= 3  # compute's, the copies in's, the group's own


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
        assert [x.record.state for x in held] == [
            Whereabouts.AWAY,
            Whereabouts.AWAY,
            Whereabouts.ON_DEVICE,
            Whereabouts.AWAY,
        ]
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_groups_in_random_order(seed: int, kind: str, tmp_path: Path) -> None:
    """Groups of several graphs, on several streams; records of one group at different points of their lives."""
    looks: list[Callable[[], bool]] = []
    with on_device(seed, kind, tmp_path) as (gpu, store):
        gpu.poison = True
        streams = [gpu.default, gpu.Stream()]
        values = itertools.cycle(range(1, 200))
        groups: list[tuple[list[tuple[Record, int]], fake_cuda.FakeStream]] = []
        for _ in range(40 if kind == "pinned" else 20):
            if gpu.rng.random() < 0.3 or not groups:
                home = gpu.rng.choice(streams)
                with gpu.stream(home):
                    now = [(Record(made(gpu, value), Counters()), value) for value in itertools.islice(values, 3)]
                    start_leaving([record for record, _ in now], store)
                groups.append((now, home))
                del now
                continue
            members, home = groups[gpu.rng.randrange(len(groups))]
            chosen = [member for member in members if gpu.rng.random() < 0.8]
            with gpu.stream(gpu.rng.choice(streams)):
                action = gpu.rng.randrange(5)
                if action == 0:
                    finish_leaving([record for record, _ in chosen])
                elif action == 1:
                    start_returning([record for record, _ in chosen])
                elif action == 2:
                    gpu.current_stream().wait_stream(home)
                    for record, value in chosen:
                        if record._watch is None:  # else the caller's own order, which this test leaves out
                            looks.append(gpu.look(record.whole(), value))
                    with contextlib.suppress(NameError):
                        del record
                elif action == 3 and members:
                    with gpu.stream(home):  # the memory of what hasn't left is the caller's to order
                        del chosen
                        del members[gpu.rng.randrange(len(members))]
                else:
                    made(gpu, 255)
                chosen = []
            groups = [group for group in groups if group[0]]
            del members
        gpu.synchronize()
        for members, home in groups:
            with gpu.stream(home):
                looks += [gpu.look(record.whole(), value) for record, value in members]
        gpu.synchronize()
        groups.clear()
        members.clear()
    assert all(look() for look in looks)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_lie_where_they_lay_in_the_step_before(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One behind the other, without a search, but for graphs that are alive beside the step."""
    with on_device(4, kind, tmp_path) as (gpu, store):

        def step(*sizes: int) -> list[Any]:
            run = session(store, fake_cuda.DEVICE)
            return [packed(run, i, [gpu.empty(n, torch.uint8) for n in (size, 700)]) for i, size in enumerate(sizes)]

        def offsets(graph: list[Any]) -> list[int]:
            return [held[0].record.group.ticket.offsets[0] for held in graph]

        with monkeypatch.context() as patch:

            def searched(*_: Any) -> None:
                raise AssertionError("a step searches for a gap")

            patch.setattr(Arena, "_first_gap", searched)
            for sizes in ((2000, 512, 1500), (900, 3000, 100)):
                for _ in range(3):
                    graph: list[Any] | None = step(*sizes)
                    ends = itertools.accumulate(-(-n // 512) * 512 + 1024 for n in sizes)
                    assert offsets(graph) == [0, *ends][:-1]  # type: ignore[arg-type]
                    graph = None
                    gc.collect()
        graph = step(2000, 512, 1500)
        beside = step(2000, 512, 1500)
        taken = sorted((o, o + n) for g in (graph, beside) for o, n in zip(offsets(g), (3072, 1536, 2560), strict=True))
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
        graph = beside = None  # type: ignore[assignment]
        gc.collect()


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
