"""The CUDA stores and the states of a swapped storage on a device that runs late and in any allowed order."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import stream_programs
import torch
from fake_cuda import FakeCuda
from fake_kernels import Device
from made_plans import one_transfer

import ckptplan
from ckptplan.core.errors import InvalidInputError, SwapError
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.packing import Held, unpack
from ckptplan.runtime.swap.record import Record, finish_leaving, start_leaving, start_returning
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.stores import DiskStore, PinnedStore, handing_over, keep_pinned_memory, pinned

SEEDS = range(6)
SIZES = (100, 512, 3000, 5000)
KINDS = ("pinned", "disk")


@contextlib.contextmanager
def on_device(seed: int, kind: str, directory: Path, **options: Any) -> Iterator[tuple[FakeCuda, Any]]:
    """A fake device and a store on it, closed when the block ends."""
    gpu = FakeCuda(seed)
    with gpu.installed():
        store: Any
        if kind == "pinned":
            store = PinnedStore(fake_cuda.DEVICE, capacity_bytes=8192, **options)
        else:
            store = DiskStore(directory, capacity_bytes=8192, device=fake_cuda.DEVICE, chunk_bytes=1024, **options)
        compute = gpu.rng.choice([gpu.default, gpu.Stream()])  # not always the one that was current before
        try:
            with gpu.stream(compute):
                yield gpu, store
            gpu.synchronize()
        finally:
            store.close()
    gc.collect()
    assert gpu.registered == {}, "page-locked memory is left"
    assert gpu.in_use == 0, "device memory is left"
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptplan")]


def made(gpu: FakeCuda, value: int) -> torch.Tensor:
    """A tensor that a kernel fills with `value`."""
    tensor = gpu.empty(gpu.rng.choice(SIZES), torch.uint8)
    gpu.fill(tensor, value)
    return tensor


def record_of(gpu: FakeCuda, value: int) -> Record:
    return Record(made(gpu, value), Counters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_records_of_several_streams(seed: int, kind: str, tmp_path: Path) -> None:
    """Storages saved on one stream, sent away, released, fetched, used and dropped while others compute."""
    looks: list[Callable[[], bool]] = []
    with on_device(seed, kind, tmp_path) as (gpu, store):
        gpu.poison = True
        streams = [gpu.default, *(gpu.Stream() for _ in range(3))]
        values = itertools.cycle(range(1, 200))
        living: list[tuple[Record, int, fake_cuda.FakeStream, fake_cuda.FakeStream | None]] = []
        record: Record | None

        def drop(chosen: int) -> None:
            record, _, _, untold = living.pop(chosen)
            if untold is not None and record._watch is not None:
                for stream in streams:
                    untold.wait_stream(stream)

        for _ in range(80 if kind == "pinned" else 40):
            action = gpu.rng.randrange(8)
            if action <= 1 or not living:
                home, value = gpu.rng.choice(streams), next(values)
                with gpu.stream(gpu.rng.choice([home, *streams])):
                    tensor = gpu.empty(gpu.rng.choice(SIZES), torch.uint8)
                    here = gpu.current_stream()
                with gpu.stream(home):
                    home.wait_stream(here)
                    # A user tells the allocator, or knows that the graph holds the tensor until all is done.
                    told = gpu.rng.random() < 0.5
                    if told:
                        tensor.record_stream(home)  # type: ignore[arg-type]
                    gpu.fill(tensor, value)
                    record = Record(tensor, Counters())
                with gpu.stream(gpu.rng.choice(streams)):
                    start_leaving([record], store)
                living.append((record, value, home, None if told else here))
                record = tensor = None  # type: ignore[assignment]
                continue
            chosen = gpu.rng.randrange(len(living))
            record, value, home, untold = living[chosen]
            with gpu.stream(gpu.rng.choice(streams)):
                if action == 2:
                    finish_leaving([record])
                elif action == 3:
                    made(gpu, 255)
                elif action == 4:
                    start_returning([record])
                elif action in (5, 6):
                    here = gpu.current_stream()
                    here.wait_stream(home)  # the user's own order: what is saved there is used here
                    if untold is None and record._watch is not None:
                        record._watch.record_stream(here)  # type: ignore[arg-type]
                    looks.append(gpu.look(record.whole(), value))
                if action == 5 and gpu.rng.random() < 0.5:
                    finish_leaving([record])
                if action in (6, 7):
                    record = None
                    drop(chosen)
            record = None
        gpu.synchronize()
        looks += [gpu.look(kept.whole(), value) for kept, value, _, _ in living]
        gpu.synchronize()
        living.clear()
    assert looks
    assert all(look() for look in looks)


@pytest.mark.parametrize("kind", KINDS)
def test_synchronous_mode_leaves_no_copy_under_way(kind: str, tmp_path: Path) -> None:
    with on_device(1, kind, tmp_path) as (gpu, store):
        store.synchronous = True
        source, target = made(gpu, 7), None
        ticket = store.start_out(source)
        assert not any(s.queue for s in gpu.streams)
        store.finish_out(ticket)
        target = gpu.empty(source.numel(), torch.uint8)
        gpu.fill(source, 255)
        store.start_in(ticket, target)
        assert not any(s.queue for s in gpu.streams)
        store.finish_in(ticket)
        assert bytes(target.tolist()) == fake_cuda.pattern(7, target.numel())
        store.free(ticket)
        del source, target


def test_pool_is_exact_bounded_and_given_back(tmp_path: Path) -> None:
    """Blocks are multiples of 512 bytes of any size; the area is what was asked for; growth stops at the limit."""
    with on_device(0, "pinned", tmp_path, limit_bytes=16384) as (gpu, store):
        assert store.reserved_bytes == 8192
        assert len(gpu.registered) == 1
        sources = [gpu.empty(n, torch.uint8) for n in (5000, 3000)]  # 5120 + 3072: no power of two in sight
        tickets = [store.start_out(source) for source in sources]
        assert store.reserved_bytes == store.peak_bytes == 8192
        third = store.start_out(sources[0])
        assert store.peak_bytes == 13312
        assert store.reserved_bytes == 8192 + 5120
        with pytest.raises(SwapError, match=r"limit is 16.00 KiB; raise host_gb="):
            store.start_out(sources[0])
        assert store.reserved_bytes == 13312
        for ticket in (*tickets, third):
            store.finish_out(ticket)
            store.free(ticket)
        again = store.start_out(sources[1])
        assert store.peak_bytes == 13312
        assert store.reserved_bytes == 13312
        store.finish_out(again)
        store.close()
        assert len(gpu.registered) == 2, "a block is still in use"
        store.free(again)
        assert gpu.registered == {}
        del sources


def test_without_page_locking_ordinary_memory_serves() -> None:
    gpu = FakeCuda(0)
    gpu.register_code = 2
    with gpu.installed():
        with pytest.warns(RuntimeWarning, match=r"page-locking .* failed \(CUDA error 2\).*ulimit") as warned:
            store = PinnedStore(fake_cuda.DEVICE, capacity_bytes=4096)
        assert len(warned) == 1
        looks = []
        for value in range(1, 9):  # grows on the way: no further warning, which would be an error here
            record = record_of(gpu, value)
            start_leaving([record], store)
            finish_leaving([record])
            looks.append((gpu.look(record.whole(), value), record))
        gpu.synchronize()
        assert all(look() for look, _ in looks)
        assert gpu.registered == {}
        del looks, record
        store.close()


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_failed_copy_leaves_nothing_running(direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write or read that fails in the middle: no copy goes on behind it, and the next ones are right."""
    from ckptplan.runtime.swap.stores import disk

    real, calls = getattr(disk, "_write" if direction == "out" else "_read"), 0

    def fails(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(5, "on purpose")
        real(*arguments)

    for seed in range(3):
        calls = 0
        with on_device(seed, "disk", tmp_path) as (gpu, store):
            record = Record(gpu.empty(5000, torch.uint8), Counters())
            gpu.fill(record.whole(), 3)
            with monkeypatch.context() as patch:
                patch.setattr(disk, "_write" if direction == "out" else "_read", fails)
                start_leaving([record], store)
                if direction == "in":
                    finish_leaving([record])
                wait = functools.partial(finish_leaving, [record]) if direction == "out" else record.whole
                with pytest.raises(SwapError, match="on purpose"):
                    wait()
                del wait
            # The failed copy's own stream is done: nothing of it can hit what is put there next.
            assert not any(s.queue for s in (run.__self__._stream for run in store._run.values()))
            del record
            again = record_of(gpu, 5)
            start_leaving([again], store)
            finish_leaving([again])
            look = gpu.look(again.whole(), 5)
            gpu.synchronize()
            assert look()
            del again


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_leaves_goes_to_the_tier_of_its_decision(tier: Any, tmp_path: Path) -> None:
    with on_device(3, "pinned", tmp_path) as (gpu, pinned):
        stores = {"host": pinned, "disk": DiskStore(tmp_path, device=fake_cuda.DEVICE, chunk_bytes=1024)}
        session = SwapSession(stores, fake_cuda.DEVICE, lambda storage: False, Counters())  # type: ignore[arg-type]
        tensor = made(gpu, 6)
        held = Held(tensor), Held(tensor)
        session.leave(0, [held[0]], one_transfer((0,)), tier)
        session.leave(1, [held[1]], one_transfer((0,)), "host" if tier == "disk" else "disk")  # it has gone already
        del tensor
        assert {name for name, store in stores.items() if store.used_bytes} == {tier}
        session.release(0)
        session.prefetch(0)
        looks = [gpu.look(unpack(each), 6) for each in held]
        gpu.synchronize()
        assert all(look() for look in looks)
        del held
        stores["disk"].close()


def test_a_forked_copy_of_a_store_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_device(0, "pinned", tmp_path) as (gpu, store):
        source, target = made(gpu, 4), gpu.empty(5000, torch.uint8)
        ticket = store.start_out(source)
        store.start_in(ticket, target[: source.numel()])
        store.finish_in(ticket)
        registered, issued = dict(gpu.registered), [s.issued for s in gpu.streams]
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: store._pid + 1)
            uses = [(store.start_out, source), (store.start_in, ticket, source)]
            for use, *arguments in [*uses, (store.finish_out, ticket), (store.finish_in, ticket)]:
                with pytest.raises(SwapError, match="forked from it"):
                    use(*arguments)
            del uses, use, arguments
            endings = [each.peek() for each in weakref.finalize._registry]  # type: ignore[attr-defined]
            ((_, at_exit, arguments, *_),) = [ending for ending in endings if ending[0] is store._arena]
            del endings
            at_exit(*arguments)
            store.free(ticket)
        assert gpu.registered == registered
        assert [s.issued for s in gpu.streams] == issued
        store.free(ticket)
        del source, target


def test_pinned_memory_is_kept_as_long_as_asked_for() -> None:
    """For the next store of about the size, and no longer than the block; the smallest that is large enough comes."""
    gpu = FakeCuda(0)
    with gpu.installed():
        with keep_pinned_memory():
            for capacity, registrations, reserved in (
                (8192, 1, 8192),
                (8192, 1, 8192),
                (6144, 1, 8192),
                (2048, 2, 2048),  # not a quarter of what is there
                (10240, 3, 10240),  # the larger one and the rest of it
            ):
                store = PinnedStore(fake_cuda.DEVICE, capacity_bytes=capacity)
                assert (gpu.registrations, store.reserved_bytes) == (registrations, reserved)
                store.close()
            with pytest.raises(InvalidInputError, match="host_gb"):
                PinnedStore(fake_cuda.DEVICE, capacity_bytes=8192, limit_bytes=4096)
            limited = PinnedStore(fake_cuda.DEVICE, capacity_bytes=7168, limit_bytes=7168)
            assert limited.reserved_bytes == 7168
            open_one = PinnedStore(fake_cuda.DEVICE, capacity_bytes=8192)
            assert len(gpu.registered) > 2
        assert sum(gpu.registered.values()) == limited.reserved_bytes + open_one.reserved_bytes
        limited.close()
        open_one.close()
        assert gpu.registered == {}


@pytest.mark.parametrize("seed", range(4))
def test_a_store_that_takes_over_anothers_memory(seed: int) -> None:
    """Both copy through the same memory, each on its streams, until the graphs of the first are gone."""
    looks: list[Callable[[], bool]] = []
    gpu = FakeCuda(seed)
    with gpu.installed():
        gpu.poison = True
        first = PinnedStore(fake_cuda.DEVICE, capacity_bytes=32768)
        values = itertools.cycle(range(1, 200))
        living: list[tuple[Record, int]] = []

        def train(store: PinnedStore) -> None:
            for _ in range(30):
                if len(living) < 3:
                    value = next(values)
                    record = Record(made(gpu, value), Counters())
                    start_leaving([record], store)
                    finish_leaving([record])
                    living.append((record, value))
                    del record
                else:
                    record, value = living.pop(gpu.rng.randrange(len(living)))
                    if gpu.rng.random() < 0.7:
                        looks.append(gpu.look(record.whole(), value))
                    else:
                        start_returning([record])
                    del record

        train(first)
        with handing_over({"host": first}):
            second = PinnedStore(fake_cuda.DEVICE, capacity_bytes=20480)
            train(second)
            first.close()
        train(second)
        assert gpu.registrations == 1
        living.clear()
        second.close()
        assert gpu.registered == {}
    assert looks
    assert all(look() for look in looks)


def test_a_plan_in_anothers_place_locks_no_pages() -> None:
    """Nor does it need both plans' memory at once; and with a handle all of it goes."""
    model = copy.deepcopy(stream_programs.built(0)[0])
    plans = [stream_programs.random_plan(0, random.Random(seed)) for seed in range(12)]
    larger, smaller = sorted(plans, key=lambda plan: plan.host_bytes)[:-3:-1]
    assert larger.host_bytes / 2 <= smaller.host_bytes < larger.host_bytes
    gpu = Device(0)
    with gpu.installed():
        for p in model.parameters():
            p.data = gpu.put(p)
        with ckptplan.apply(model, larger) as handle:
            assert sum(gpu.registered.values()) == -(-larger.host_bytes // 512) * 512
            handle._applied.controller.remove()
            handle._applied.put(smaller)
            assert handle.plan == smaller
            assert gpu.registrations == 1
        assert gpu.registered == {}
        for p in model.parameters():
            p.data = torch.empty(0)


def test_the_plain_model_is_right_however_late_the_device_is() -> None:
    """So that whatever differs under a plan is the plan's: `test_safeguards.py` trains it under plans."""
    wanted = stream_programs.train(Device.prompt(0), 0, None)
    for seed in range(2):
        run = stream_programs.train(Device(seed), 0, None)
        assert stream_programs.differing(run, wanted) == 0
        assert run.left_bytes == 0


def test_a_store_waits_for_copies_out_of_the_one_before() -> None:
    """A graph that went while it left: its late copy must not land on what the next store wrote there."""
    for seed in range(40):
        gpu = FakeCuda(seed)
        with gpu.installed():
            first = PinnedStore(fake_cuda.DEVICE, capacity_bytes=4096)
            dropped, kept, back = (torch.empty(4096, dtype=torch.uint8, device=fake_cuda.DEVICE) for _ in range(3))
            gpu.fill(dropped, 1)
            first.free(first.start_out(dropped))
            with handing_over({"host": first}):
                second = PinnedStore(fake_cuda.DEVICE, capacity_bytes=4096)
                first.close()
            gpu.fill(kept, 50)
            ticket = second.start_out(kept)
            second.finish_out(ticket)
            second.start_in(ticket, back)
            second.finish_in(ticket)
            right = gpu.look(back, 50)
            gpu.synchronize()
            assert right(), seed
            second.free(ticket)
            second.close()


def test_memory_goes_when_all_devices_that_copied_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, devices = FakeCuda(0), [torch.device("cuda", 0), torch.device("cuda", 1)]
    with gpu.installed():
        made, waited = gpu.streams[:], []
        monkeypatch.setattr(fake_cuda.FakeStream, "synchronize", lambda stream: waited.append(stream))
        with keep_pinned_memory():
            PinnedStore(devices[0], capacity_bytes=4096).close()
            store = PinnedStore(devices[1], capacity_bytes=4096)
        assert gpu.registrations == 1
        store.close()
        assert set(waited) == set(gpu.streams).difference(made), "those of both stores"
        assert not gpu.registered


def test_more_host_memory_than_there_is() -> None:
    with pytest.raises(SwapError, match=r"no host memory for .*lower host_gb="):
        pinned._pages(1 << 60)
