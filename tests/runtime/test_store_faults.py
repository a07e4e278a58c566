"""What goes wrong around a store: full, damaged or lost files, threads that die, interrupts, forks, crashes."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import assert_same, build
from test_runtime import clean_step, plain_step, planned

from ckptplan import apply
from ckptplan.core.errors import InvalidInputError, SwapError
from ckptplan.profiling.times import links
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.record import (
    Record,
    Whereabouts,
    _LeavingGroup,
    finish_leaving,
    start_leaving,
    start_returning,
)
from ckptplan.runtime.swap.stores import DiskStore, disk

pytestmark = pytest.mark.usefixtures("no_leak")

CHUNKS = [None, 1000]  # straight from memory; through staging, as for a device


def store_in(directory: Path, chunk_bytes: int | None = None, **options: Any) -> DiskStore:
    return DiskStore(directory, chunk_bytes=chunk_bytes, **options)


def round_trip(store: Any) -> bool:
    source, target = torch.randn(2000), torch.empty(2000)
    ticket = store.start_out(source)
    store.finish_out(ticket)
    store.start_in(ticket, target)
    store.finish_in(ticket)
    store.free(ticket)
    return torch.equal(source, target)


def raises(number: int) -> Any:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


# Limits and disks


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_the_file_grows_to_its_limit_and_no_further(tmp_path: Path, chunk_bytes: int | None) -> None:
    store = store_in(tmp_path, chunk_bytes, capacity_bytes=8192, limit_bytes=20480)
    first, second = torch.randn(2048), torch.randn(2048)
    tickets = [store.start_out(first), store.start_out(second)]
    assert list(tmp_path.iterdir()) == [], "it has no name, so none is left of a process that is killed"
    assert store.reserved_bytes == store.peak_bytes == 16384
    with pytest.raises(SwapError, match=r"needs 24.00 KiB, the limit is 20.00 KiB; raise disk_gb="):
        store.start_out(first)
    assert os.fstat(store._file.fileno()).st_size == 16384
    for ticket, source in zip(tickets, (first, second), strict=True):
        target = torch.empty(2048)
        store.start_in(ticket, target)
        store.finish_in(ticket)
        assert torch.equal(target, source), "what was there before is untouched"
        store.free(ticket)
    assert round_trip(store)
    assert (store.reserved_bytes, store.peak_bytes) == (16384, 16384)
    tickets.clear()
    del ticket
    with pytest.raises(SwapError, match=r"limit is 20.00 KiB, and 16.00 KiB are free in pieces that are too small; "):
        store.start_out(torch.randn(6144))
    store.close()
    with pytest.raises(InvalidInputError, match="disk_gb"):
        store_in(tmp_path, chunk_bytes, capacity_bytes=8192, limit_bytes=8191)


def test_more_than_the_swap_space_holds() -> None:
    """With every copy checked: what stays on the device is right, and leaves again in a later step."""
    model, inputs = build("mlp")
    plan = planned("mlp", "swap")

    def step() -> list[torch.Tensor | None]:
        model.zero_grad()
        torch.manual_seed(0)
        model(torch.cat([inputs, inputs])).sum().backward()
        return [p.grad for p in model.parameters()]

    wanted = step()
    with pytest.raises(InvalidInputError, match="disk_gb"):
        apply(model, plan, disk_gb=plan.host_bytes / 2 / 2**30)
    enough = (plan.host_bytes + 4096 * sum(len(c.moves) for c in plan.choices)) / 2**30
    with apply(model, plan, disk_gb=enough, check="always") as handle:
        with warnings.catch_warnings(record=True, action="always") as said:
            found = step()
        assert sum("stay on the device, since the swap space is full" in str(each.message) for each in said) == 1
        assert all(map(torch.equal, found, wanted))
        assert handle.stats().differences["full"] > 0
        with warnings.catch_warnings(action="error"):
            found = step()  # said once
        assert all(map(torch.equal, found, wanted))
        moved = handle.stats().swapped_out_bytes
        assert_same(clean_step(model, inputs), plain_step("mlp"))
        assert handle.stats().swapped_out_bytes - moved == plan.host_bytes
    with apply(model, plan, disk_gb=enough, strict=True):
        kept = model(inputs).sum()  # a second graph alive would need a larger file
        with pytest.raises(SwapError, match="raise disk_gb="):
            clean_step(model, inputs)
        del kept
        assert_same(clean_step(model, inputs), plain_step("mlp"))


def test_no_disk_tier_on_the_cpu() -> None:
    import dataclasses

    model, _ = build("mlp")
    plan = planned("mlp", "swap")
    choices = tuple(dataclasses.replace(c, tier="disk") if c.moves else c for c in plan.choices)
    with pytest.raises(InvalidInputError, match="where the host tier is the swap file itself"):
        apply(model, dataclasses.replace(plan, choices=choices))


@pytest.mark.parametrize(
    ("chunk_bytes", "call", "number"),
    [(None, "pwrite", errno.ENOSPC), (None, "preadv", errno.EIO), (1000, "pwrite", errno.EIO), (1000, "preadv", 0)],
)
def test_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int | None, call: str, number: int
) -> None:
    """An error, also where less is written or read than asked for in the end; short ones go on where they stopped."""
    real, back = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: real(fd, view[:700], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: back(fd, [views[0][:900]], at))
    store = store_in(tmp_path, chunk_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, raises(number) if number else lambda fd, view, at: 0)
        said = f"{os.strerror(number)}.*{'swap_dir=' if number == errno.ENOSPC else 'discard this step'}"
        with pytest.raises(SwapError, match=said if number else "early"):
            round_trip(store)
    assert round_trip(store), "the next step is right"
    store.close()


def test_room_that_was_reserved_stays_usable_after_an_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path, capacity_bytes=8192)
    monkeypatch.setattr(os, "posix_fallocate", raises(errno.ENOSPC))
    first = store.start_out(torch.randn(2048))
    with pytest.raises(SwapError, match="no room"):
        store.start_out(torch.randn(2048))
    store.free(first)
    assert round_trip(store)
    store.close()


# Synchronous mode


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_synchronous_mode_leaves_no_copy_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int | None
) -> None:
    for name in ("_write", "_read"):
        real = getattr(disk, name)
        monkeypatch.setattr(disk, name, lambda *a, real=real: (time.sleep(0.02), real(*a)))
    store = store_in(tmp_path, chunk_bytes)
    store.synchronous = True
    source, target = torch.randn(2500), torch.empty(2500)
    ticket = store.start_out(source)
    assert ticket.out_done.event.is_set()
    store.start_in(ticket, target)
    assert ticket.in_done.event.is_set()
    assert torch.equal(source, target)
    store.free(ticket)
    monkeypatch.setattr(disk, "_write", raises(errno.EIO))
    with pytest.raises(SwapError, match="writing"):
        store.start_out(source)
    assert not store.used_bytes
    store.close()


# Threads that die, interrupts


@pytest.mark.timeout(300)  # far more than it takes: a hang is what fails
@pytest.mark.parametrize(("lane", "chunk_bytes"), [("_out", None), ("_in", 1000)])
def test_a_thread_that_dies_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: str, chunk_bytes: int | None
) -> None:
    go = threading.Event()
    name = "_write" if lane == "_out" else "_read"
    real = getattr(disk, name)
    store = store_in(tmp_path, chunk_bytes)
    source = torch.randn(200)
    first = store.start_out(source)
    store.finish_out(first)
    second = store.start_out(source)
    store.finish_out(second)
    with monkeypatch.context() as patch:
        patch.setattr(disk, name, lambda *a: (go.wait(), real(*a)))
        tickets = []
        for number in range(2):
            if lane == "_out":
                tickets.append(store.start_out(source))
            else:
                tickets.append((first, second)[number])
                store.start_in(tickets[-1], torch.empty(200))
            if number == 0:
                getattr(store, lane).jobs.put(None)  # the thread ends behind the first job; the second is queued
        dying = getattr(store, lane).thread
        go.set()
        dying.join()
    (store.finish_out if lane == "_out" else store.finish_in)(tickets[0])
    with pytest.raises(SwapError, match=r"thread ckptplan-swap-(out|in) has died"):
        (store.finish_out if lane == "_out" else store.finish_in)(tickets[1])
    for ticket in {first, second, *tickets}:
        store.free(ticket)
    assert round_trip(store), "another thread takes its place"
    store.close()


@pytest.mark.usefixtures("python_handles_interrupts")
@pytest.mark.parametrize("name", ["_write", "_read"])
def test_an_interrupt_while_waiting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("mlp")
    real, waiting, interrupted = getattr(disk, name), threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        if not waiting.is_set():
            waiting.set()
            interrupted.wait()
        real(*arguments)

    def interrupt() -> None:
        waiting.wait()
        time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)
        interrupted.set()

    with apply(model, planned("mlp", "swap")) as handle:
        store: Any = handle._applied.stores["host"]
        thread = threading.Thread(target=interrupt)
        with monkeypatch.context() as patch:
            patch.setattr(disk, name, slow)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                clean_step(model, inputs)
            thread.join()
        assert_same(clean_step(model, inputs), plain_step("mlp"))
        assert not store.used_bytes, "nothing is left of the step that was interrupted"


# Processes


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    here = Path(__file__).resolve()
    path = os.pathsep.join([*map(str, here.parents[:3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_file_systems_without_unnamed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refused(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
    store = store_in(tmp_path)
    assert list(tmp_path.iterdir()) == [], "it has no name from the start"
    assert round_trip(store)
    store.close()


FORK = """
    import gc, os, signal, threading, warnings, weakref
    warnings.simplefilter("ignore")
    import torch
    from small_models import assert_same, build
    from ckptplan import apply
    from ckptplan.core.errors import SwapError
    from test_runtime import clean_step, plain_step, planned

    model, inputs = build("mlp")
    handle = apply(model, planned("mlp", "swap"))
    store = handle._applied.stores["host"]
    loss = model(inputs).sum()
    store._out.submit(lambda: None).settle()  # behind all the others

    def file():
        return os.fstat(store._file.fileno()).st_mtime_ns, os.pread(store._file.fileno(), 1 << 22, 0)

    before = file()
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # ends it where it hangs
        try:
            store.start_out(torch.randn(5000))
        except SwapError as error:
            assert "forked from it" in str(error), error
        else:
            os._exit(3)
        try:
            loss.backward()
        except SwapError:
            pass
        else:
            os._exit(4)
        del loss
        gc.collect()
        handle.remove()
        # What runs at exit. Not the exit itself: libraries' own hang in a fork once a profile was recorded.
        weakref.finalize._exitfunc()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child failed or hung"
    assert file() == before
    loss.backward()
    model.zero_grad()
    del loss
    assert_same(clean_step(model, inputs), plain_step("mlp"))
    assert not store.used_bytes
    handle.remove()
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptplan")]
    print("right")
"""


def test_a_forked_process_leaves_its_parents_copies_alone() -> None:
    child = python(FORK)
    out, errors = child.communicate(timeout=600)
    assert child.returncode == 0, errors[-2000:]
    assert out == "right\n"


# Bandwidth


def test_a_link_through_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each direction alone."""
    made: list[DiskStore] = []

    def staged(device: torch.device, *, capacity_bytes: int, **_: Any) -> DiskStore:
        made.append(store_in(tmp_path, 30_000, capacity_bytes=capacity_bytes))
        return made[-1]

    monkeypatch.setattr(links, "make_store", staged)
    one_at_a_time = threading.Lock()

    def slow(real: Any, seconds: float) -> Any:
        def copy(*arguments: Any) -> None:
            with one_at_a_time:
                time.sleep(seconds)
                real(*arguments)

        return copy

    monkeypatch.setattr(disk, "_write", slow(disk._write, 0.02))
    monkeypatch.setattr(disk, "_read", slow(disk._read, 0.01))
    alone, together = links.measure_links(torch.device("cpu"), 60_000, tmp_path, "disk")
    # Two chunks a block: 60 kB in 40 ms out and 20 ms in, and 60 ms for both; a loaded machine only adds to these.
    assert 0.3e6 < alone.out_bytes_per_s <= 1.5e6
    assert 0.6e6 < alone.in_bytes_per_s <= 3e6
    assert together.out_bytes_per_s == together.in_bytes_per_s <= 1e6
    assert "at once run at" in (links.sharing_note("disk", alone, together) or "")
    assert links.sharing_note("disk", alone, alone) is None
    assert made[0].peak_bytes == 8 * 61_440


# Any order, any delay, any failure


class Disturbed:
    """Copies that are late by chance, each lane for itself, and now and then fail."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._lanes = {name: random.Random(rng.random()) for name in ("_write", "_read")}
        self._real = {name: getattr(disk, name) for name in self._lanes}
        self._share = share

    def __call__(self, name: str) -> Any:
        rng = self._lanes[name]

        def copy(*arguments: Any) -> None:
            time.sleep(rng.choice([0, 0, 0.001, 0.003]))
            self._real[name](*arguments)
            if rng.random() < self._share:
                raise OSError(errno.EIO, "on purpose")

        return copy


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    program=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 50)), max_size=60),
    rng=st.randoms(use_true_random=False),
    share=st.sampled_from([0.0, 0.2]),
    chunk_bytes=st.sampled_from(CHUNKS),
)
def test_any_program_of_records(
    tmp_path: Path, program: list[tuple[int, int]], rng: random.Random, share: float, chunk_bytes: int | None
) -> None:
    """Graphs alive in any number, in any state: right bytes or an error, no two in one place, all given back."""
    with pytest.MonkeyPatch.context() as patch:
        disturbed = Disturbed(rng, share)
        for name in ("_write", "_read"):
            patch.setattr(disk, name, disturbed(name))
        store = store_in(tmp_path, chunk_bytes)
        living: list[tuple[Record, torch.Tensor]] = []
        failures = 0
        for action, number in program:
            if action <= 1 or not living:
                wanted = torch.full((1 + 97 * number,), float(len(living) + number))
                record = Record(wanted.clone(), Counters())
                start_leaving([record], store)
                living.append((record, wanted))
                del record
            else:
                record, wanted = living[number % len(living)]
                try:
                    if action == 2:
                        finish_leaving([record])
                    elif action == 3:
                        start_returning([record])
                    elif action == 4:
                        record.finish_returning()
                    elif action == 5:
                        found = record.whole()
                        assert torch.equal(found, wanted), "wrong bytes"
                        del found
                    else:
                        del living[number % len(living)]
                except SwapError:
                    failures += 1
                    # The bytes are still here, or there is an error whenever they are asked for.
                    if record.state is Whereabouts.LEAVING:
                        assert torch.equal(record.whole(), wanted)
                    del living[number % len(living)]
                del record
            taken = [(begin, end) for begin, end, extent in store._arena._taken if extent() is not None]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken)), "two blocks overlap"
            assert len(taken) == len(living)
        assert share or not failures
        for record, wanted in living:
            try:
                found = record.whole()  # not within the assert, which would hold the record where this fails
            except SwapError:
                assert share
            else:
                assert torch.equal(found, wanted)
                del found
        living.clear()
        record = None  # type: ignore[assignment]
        assert not store.used_bytes
        store.close()


def test_a_file_stays_open_for_copies_that_are_queued(tmp_path: Path) -> None:
    """The last ticket may end in a worker's thread, which collects garbage, while copies wait behind the present one.

    Closed then, the file's number could be another file's, into which they would write; and the thread that writes
    would wait for the one that reads, which waits for a copy behind it.
    """
    store = DiskStore(tmp_path, capacity_bytes=1 << 20)
    gate, collected = threading.Event(), threading.Event()

    def collect(*_: Any) -> None:
        if not collected.is_set():
            gate.wait()
            gc.collect()
            collected.set()

    store.on_copy = collect
    out, back = torch.ones(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    tickets: list[Any] = [store.start_out(out), store.start_out(out)]
    store.start_in(tickets[1], back)
    returned = tickets[1].in_done
    tickets.append(tickets)  # a cycle, as graphs may be in
    store.close()
    gc.disable()
    try:
        del tickets, store
        gate.set()
        assert collected.wait(20)
        returned.wait("the copy in")
    finally:
        gc.enable()
    assert torch.equal(out, back)


def test_a_record_that_an_interrupt_left_unmade_is_deleted_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    Record.__new__(Record)
    _LeavingGroup.__new__(_LeavingGroup)
    assert not seen
