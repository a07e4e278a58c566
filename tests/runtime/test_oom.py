"""Memory runs out in a planned step: what is reported, that the step is undone, and run again with a leaner plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_memory import DEVICE, FakeMemory
from small_models import build, measured, plan_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ckptplan
from ckptplan import InfeasibleBudgetError, InvalidInputError, OutOfMemoryError, Plan
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.shortage import Shortage
from ckptplan.memory.allocator import CachingAllocator
from ckptplan.report.shortage import Correction, corrections, planned_bytes
from ckptplan.runtime.accelerator import device_bytes
from ckptplan.runtime.guard import oom
from ckptplan.runtime.observe.measure import held_tensors
from ckptplan.runtime.step import default_loss
from ckptplan.runtime.swap.stores import disk

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 39.39 GiB of which 1.06 GiB is "
    "free. Of the allocated memory 30.25 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
    "unallocated."
)


pytestmark = pytest.mark.usefixtures("no_leak")


def planned(name: str, action: Any) -> Plan:
    return plan_of(measured(name), [action] * len(measured(name).stages))


def step_of(model: nn.Module, inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        loss = default_loss(model(inputs))
        loss.backward()
        return loss.detach()

    return step


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything a step may change."""
    found = {f"p {n}": p.detach().clone() for n, p in model.named_parameters()}
    found.update({f"g {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    found.update({f"b {n}": b.clone() for n, b in model.named_buffers()})
    return {**found, "random": torch.get_rng_state()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], but: tuple[str, ...] = ()) -> None:
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if n not in but and not torch.equal(found[n], wanted[n])] == []


def plain_step(name: str) -> dict[str, torch.Tensor]:
    """The state after one plain step."""
    model, inputs = build(name)
    torch.manual_seed(3)
    step_of(model, inputs)()
    return state(model)


class Device(TorchDispatchMode):
    """A device of `capacity_bytes`: an operation whose results don't fit beside what is alive fails."""

    def __init__(self, capacity_bytes: int, present: list[torch.Tensor]) -> None:
        super().__init__()
        self.capacity_bytes = capacity_bytes
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in present:
            self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> int:
        if storage._cdata in self._alive:
            return 0
        self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return storage.nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            del self._alive[key]
        storages = [t.untyped_storage() for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        added = sum(self._add(storage) for storage in storages)
        live = sum(nbytes for _, nbytes in self._alive.values())
        if live > self.capacity_bytes and added:
            for storage in storages:
                self._alive.pop(storage._cdata, None)
            raise torch.OutOfMemoryError(f"device out of memory. Tried to allocate {added} bytes.")
        self.peak_bytes = max(self.peak_bytes, live)
        return result


def fails(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(CUDA_TEXT)


class Once:
    """Fails the first `times` times it is asked, then passes through."""

    def __init__(self, original: Callable[..., Any], after: int = 0, times: int = 1, what: Any = None) -> None:
        self._original, self._after, self._left = original, after, times
        self._what = what or torch.OutOfMemoryError(CUDA_TEXT)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._after:
            self._after -= 1
        elif self._left:
            self._left -= 1
            raise self._what
        return self._original(*args, **kwargs)


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return fails()


@contextlib.contextmanager
def failing(model: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory runs out once at the given place of the transformer's step."""
    with monkeypatch.context() as patch:
        layer = model.layers[2]
        if where == "forward":
            patch.setattr(layer.up, "forward", fails)
        elif where == "recompute":
            patch.setattr(layer.up, "forward", Once(layer.up.forward, after=1))
        elif where == "backward":
            up = layer.up.forward
            patch.setattr(layer.up, "forward", lambda x: _FailsBackward.apply(up(x)))
        elif where == "copy out":
            patch.setattr(disk.DiskStore, "start_out", fails)
        elif where == "copy back":
            patch.setattr(disk.DiskStore, "start_in", fails)
        elif where == "worker":
            patch.setattr(disk, "_read", Once(disk._read, times=1000, what=MemoryError()))
        yield


PLACES = {
    "forward": ("keep", "forward", "layers.2", "forward"),
    "recompute": ("recompute", "backward", "layers.2", "recompute"),
    "backward": ("keep", "backward", "layers.2", "backward"),
    "copy out": ("swap", "forward", None, "copy out"),
    "copy back": ("swap", "backward", None, "copy back"),
    "worker": ("swap", "backward", None, "copy back"),
}


@pytest.mark.parametrize("earlier", [0, 11], ids=lambda n: f"after {n} steps")
@pytest.mark.parametrize("where", PLACES)
def test_reported_undone_and_the_next_step_is_right(where: str, earlier: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some steps, too: later ones are no longer all measured."""
    action, phase, stage, doing = PLACES[where]
    model, inputs = build("transformer")
    plan = planned("transformer", action)
    graphs: list[weakref.ref[Any]] = []
    with ckptplan.apply(model, plan, on_oom="report", profile=measured("transformer")) as handle:
        for _ in range(earlier):
            default_loss(model(inputs)).backward()
        model.zero_grad()
        torch.manual_seed(3)
        before = state(model)

        def step() -> torch.Tensor:
            output = model(inputs)
            graphs.append(weakref.ref(output))
            loss = default_loss(output)
            loss.backward()
            return loss.detach()

        with failing(model, where, monkeypatch), pytest.raises(OutOfMemoryError) as raised:
            handle.step(step)
        assert_same(state(model), before, but=("random",))
        assert [ref() for ref in graphs] == [None] * len(graphs)
        assert handle._applied.controller.swapped() == {}
        assert all(store.used_bytes == 0 for store in handle._applied.stores.values())  # type: ignore[attr-defined]
        found = raised.value.shortage
        assert (found.phase, found.doing) == (phase, doing)
        assert stage is None or found.stage.startswith(stage)
        assert (found.requested_bytes is None) == (where == "worker")
        start, peak = planned_bytes(measured("transformer"), plan, found.phase, plan.stages.index(found.stage))
        assert (found.planned_start_bytes, found.planned_bytes) == (start, peak)
        assert found.repeatable
        text = str(raised.value)
        assert f"out of device memory in {phase} of stage {found.stage!r}" in text
        assert isinstance(raised.value.__cause__, (torch.OutOfMemoryError, ckptplan.SwapError))

        torch.manual_seed(3)
        handle.step(step)
        assert_same(state(model), plain_step("transformer"))


def test_where_in_the_swapped_step_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have left when the third copy back fails; the report counts them by state."""
    model, inputs = build("transformer")
    with ckptplan.apply(model, planned("transformer", "swap"), on_oom="report") as handle:
        once = Once(disk.DiskStore.start_in, after=2)
        monkeypatch.setattr(disk.DiskStore, "start_in", lambda *args, **options: once(*args, **options))
        with pytest.raises(OutOfMemoryError) as raised:
            handle.step(step_of(model, inputs))
    found = raised.value.shortage
    assert found.planned_start_bytes is None
    assert found.planned_bytes == handle.plan.peak_bytes
    assert found.swapped_out_bytes == found.planned_swapped_bytes == handle.plan.host_bytes
    away = sum(nbytes for state, _, nbytes in found.swapped if state == "away")
    assert 0 < away < found.swapped_out_bytes
    assert found.swapped_in_bytes + away <= found.swapped_out_bytes


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_loss_has_its_own_place(index: int) -> None:
    """Behind the last stage: forward and backward of the loss, and what follows the backward."""
    model, inputs = build("transformer")

    def step() -> None:
        output = model(inputs)
        if index == 0:
            fails()
        loss = (_FailsBackward.apply(output) if index == 1 else output).sum()
        loss.backward()
        fails()

    profile = measured("transformer")
    plan = planned("transformer", "keep")
    with (
        ckptplan.apply(model, plan, on_oom="report", profile=profile) as handle,
        pytest.raises(OutOfMemoryError) as raised,
    ):
        handle.step(step)
    found = raised.value.shortage
    assert found.phase == ("forward", "backward", "update")[index]
    if index == 2:
        assert "after backward" in str(found)
    else:
        assert found.stage == ("layers.3", "(after layers.3)")[index]  # the head is glue here


@pytest.mark.parametrize("mode", ["raise", "report", "replan"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), RuntimeError("shapes differ"), SystemExit()])
def test_other_errors_pass_through(mode: Any, error: BaseException) -> None:
    model, inputs = build("mlp")
    with ckptplan.apply(model, planned("mlp", "recompute"), on_oom=mode, profile=measured("mlp")) as handle:

        def step() -> None:
            step_of(model, inputs)()
            raise error

        with pytest.raises(type(error)) as raised:
            handle.step(step)
        assert raised.value is error
        assert error.__cause__ is None
        assert all(p.grad is not None for p in model.parameters())


def test_raise_leaves_the_error_alone() -> None:
    model, _ = build("mlp")
    with ckptplan.apply(model, planned("mlp", "recompute")) as handle:
        with pytest.raises(torch.OutOfMemoryError, match=r"2\.50 GiB") as raised:
            handle.step(fails)
        assert raised.value.__cause__ is None


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 52)
    assert oom.exhaustion(raised.value) is raised.value
    assert oom.requested_bytes(raised.value) == (4 << 52, 4 << 52)
    assert not oom.is_host_memory(torch.OutOfMemoryError(CUDA_TEXT))
    assert oom.is_host_memory(MemoryError())
    assert oom.exhaustion(RuntimeError("CUDA error: out of memory")) is not None
    assert oom.exhaustion(RuntimeError("CUDA error: an illegal memory access was encountered")) is None
    copy = ckptplan.SwapError("reading failed")
    assert oom.exhaustion(copy) is None
    copy.__cause__ = OSError(28, "No space left on device")
    assert oom.exhaustion(copy) is None
    copy.__cause__ = MemoryError()
    assert oom.exhaustion(copy) is copy.__cause__


# What the allocator's messages say

MIB = 1 << 20
REST = (
    ". GPU 0 has a total capacity of 23.64 GiB of which 11.56 MiB is free. {process}Of the allocated memory 22.10 GiB "
    "is allocated by PyTorch, {pools}and 1.02 GiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting {variable}=expandable_segments:True to avoid fragmentation."
)
USUAL = REST.format(process="", pools="", variable="PYTORCH_CUDA_ALLOC_CONF")
OTHERS = REST.format(
    process="Process 4711 has 14.75 GiB memory in use. Including non-PyTorch memory, this process has 8.00 GiB memory "
    "in use. 20.00 GiB allowed; ",
    pools="with 512.00 MiB allocated in private pools (e.g., CUDA Graphs), ",
    variable="PYTORCH_ALLOC_CONF",
)
OLDER = " (GPU 0; 15.78 GiB total capacity; 14.56 GiB already allocated; 12.00 MiB free; 14.67 GiB reserved in total)"
ASYNCHRONOUS = (
    "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 22.10 GiB\n"
    "Requested               : 640.00 MiB\nDevice limit            : 23.59 GiB\nFree (according to CUDA): 7.12 MiB\n"
    "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 MiB" + USUAL, 1, MIB),
        ("CUDA out of memory. Tried to allocate 20.00 MiB" + USUAL, MIB + 1, 20 * MIB),
        ("CUDA out of memory. Tried to allocate 20.00 MiB" + OTHERS, MIB + 1, 20 * MIB),
        ("CUDA out of memory. Tried to allocate 20.00 MiB" + OLDER, MIB + 1, 20 * MIB),
        ("HIP out of memory. Tried to allocate 20.00 MiB" + USUAL, MIB + 1, 20 * MIB),
        ("CUDA out of memory. Tried to allocate 10.00 MiB" + USUAL, 10 * MIB - 511, 10 * MIB),
        ("CUDA out of memory. Tried to allocate 1024.00 MiB" + USUAL, 1022 * MIB + 1, 1024 * MIB),
        # 2.50 GiB are 2554.88 to 2565.12 MiB, so segments of 2556 to 2564.
        ("CUDA out of memory. Tried to allocate 2.50 GiB" + USUAL, 2554 * MIB + 1, 2564 * MIB),
        ("CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
         "limit. Requested size: 20.00 MiB", MIB + 1, 20 * MIB),
        ("CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
         "limit. Requested size: 3.00 MiB", 3 * MIB - 5242, 3 * MIB + 5242),
        (ASYNCHRONOUS, 640 * MIB - 5242, 640 * MIB + 5242),
        ("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
         "20971520 bytes. Error code 12 (Cannot allocate memory)", 20 * MIB, 20 * MIB),
    ],
)  # fmt: skip
def test_what_was_asked_for(text: str, least: int, most: int) -> None:
    assert oom.requested_bytes(torch.OutOfMemoryError(text)) == (least, most)


def test_what_was_asked_for_lies_in_the_range() -> None:
    """Whatever segment our model of the allocator takes for it, and PyTorch's message rounds."""
    rng = random.Random(0)
    edges = [
        1,
        512,
        MIB - 512,
        MIB,
        MIB + 1,
        10 * MIB - 512,
        10 * MIB,
        10 * MIB + 1,
        18 * MIB + 1,
        20 * MIB,
        20 * MIB + 1,
    ]
    for request in [*edges, 20 * MIB, 20 * MIB + 1, *(int(2 ** rng.uniform(0, 36)) for _ in range(300))]:
        allocator = CachingAllocator()
        allocator.allocate(0, request)
        segment = allocator.reserved_bytes
        text = f"{segment / MIB:.2f} MiB" if segment <= 1 << 30 else f"{segment / (1 << 30):.2f} GiB"
        found = oom.requested_bytes(torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {text}. GPU 0"))
        assert found is not None
        assert found[0] <= request <= found[1], (request, text)


def test_another_size_of_common_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "large_segment_size_mb:64,expandable_segments:True")
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB" + USUAL)
    assert oom.requested_bytes(error) == (MIB + 1, 64 * MIB)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB" + USUAL)
    assert oom.requested_bytes(error) == (18 * MIB + 1, 20 * MIB)


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to allocate 20.00 MiB" + USUAL, ASYNCHRONOUS])
def test_what_was_held_then(text: str) -> None:
    """By the counters, and what the frames dropped since then by the message, less what it rounds."""
    error, memory = torch.OutOfMemoryError(text), FakeMemory()
    assert oom.live_bytes(error, torch.device("cpu")) is None
    with memory.installed():
        memory.allocate(20 * 2**30 + 100)  # its block has a rest of 1 MiB and more
        now = device_bytes(DEVICE)
        assert now.requested_bytes < now.allocated_bytes <= now.reserved_bytes
        found = oom.live_bytes(error, DEVICE)
        low = math.ceil(22.095 * 2**30)
        unused = 0 if text is ASYNCHRONOUS else math.ceil(1.015 * 2**30)
        assert found == DeviceBytes(now.requested_bytes + low - now.allocated_bytes, low, low + unused)
        memory.allocate(10 * 2**30)
        assert oom.live_bytes(error, DEVICE) == device_bytes(DEVICE)


class _Noted(nn.Module):
    """Notes the memory of its output in the first step; the one in the last stage fails then."""

    def __init__(self, made: list[StorageWeakRef], left: list[int], *, fails: bool) -> None:
        super().__init__()
        self.seen = made, left
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, left = self.seen
        output = x.tanh()
        if len(left) == 1:
            made.append(StorageWeakRef(output.untyped_storage()))
            if self.fails:
                raise torch.OutOfMemoryError("device out of memory. Tried to allocate 64 bytes.")
        return output


def test_the_step_runs_again_without_the_tensors_of_the_failed_one() -> None:
    """Not even with what a stage was given, which leads to all before it: the frame of its call has a copy of that."""
    torch.manual_seed(0)
    made: list[StorageWeakRef] = []
    left: list[int] = []
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 64), _Noted(made, left, fails=i == 2), nn.Linear(64, 8)) for i in range(3))
    )
    inputs = torch.randn(64, 8)
    profile = ckptplan.profile(model, inputs)

    def step() -> None:
        left.append(sum(not ref.expired() for ref in made))
        step_of(model, inputs)()

    plan = plan_of(profile, ["keep"] * len(profile.stages))
    with (
        ckptplan.apply(model, plan, on_oom="replan", profile=profile) as handle,
        pytest.warns(RuntimeWarning, match="out of memory"),
    ):
        handle.step(step)
    assert len(made) == 3
    assert left == [0, 0]


def test_a_report_on_cuda_counts_tensors() -> None:
    """Not the blocks that they lie in; the handle takes its device for one on CUDA."""
    model, inputs = build("mlp")
    memory: Any = FakeMemory()
    memory.mem_get_info = lambda device: (11 * MIB, 24 << 30)
    memory.get_per_process_memory_fraction = lambda device: 1.0

    def step() -> None:
        step_of(model, inputs)()
        memory.allocate(5 * MIB + 100)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    with ckptplan.apply(model, planned("mlp", "keep"), on_oom="report") as handle, memory.installed():
        handle._applied.device = DEVICE
        before = memory.allocate(3 * MIB + 100)
        with pytest.raises(OutOfMemoryError) as raised:
            handle.step(step)
        memory.allocator.free(before)
    found = raised.value.shortage
    assert found.live_before_bytes == 3 * MIB + 100
    assert (found.requested_least_bytes, found.requested_bytes) == (MIB + 1, 20 * MIB)
    assert found.live_bytes is not None
    assert found.allocated_bytes is not None
    assert found.reserved_bytes is not None
    assert 8 * MIB + 200 <= found.live_bytes < found.allocated_bytes < found.reserved_bytes
    assert found.allocated_bytes - found.live_bytes >= 2 * 412  # of these two blocks alone
    assert found.over_bytes == found.live_bytes + MIB + 1 - found.planned_bytes
    assert found.capacity_bytes == 11 * MIB + found.reserved_bytes


def test_fragments_are_no_overrun() -> None:
    """Between 1 and 20 MiB were asked for, and blocks have rests: neither is more than the plan has."""
    plan = dataclasses.replace(planned("transformer", "keep"), budget_bytes=1 << 30)
    common: dict[str, Any] = {
        "requested_bytes": 20 * MIB,
        "requested_least_bytes": MIB + 1,
        "budget_bytes": plan.budget_bytes,
        "planned_bytes": 900 * MIB,
        "live_bytes": 890 * MIB,
        "allocated_bytes": 905 * MIB,
        "reserved_bytes": 1020 * MIB,
        "capacity_bytes": 1 << 30,
    }
    found = shortage(**common)
    assert found.over_bytes == -9 * MIB + 1
    text = str(found)
    assert "between 1.00 MiB and 20.00 MiB were requested" in text
    assert "15.00 MiB rounding of blocks and 115.00 MiB fragments" in text
    assert "free memory is in fragments: set PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    assert corrections(measured("transformer"), plan, found)[0].profile is not None
    assert "expandable segments have few" in str(shortage(**common, expandable_segments=True))
    # More than planned for certain, by tensors alone.
    over = shortage(**{**common, "live_bytes": 901 * MIB})
    assert over.over_bytes == 2 * MIB + 1
    assert "solve with a budget 2.00 MiB smaller" in str(over)
    # Asked of the driver, past PyTorch's allocator.
    beside = shortage(**{**common, "requested_bytes": None, "requested_least_bytes": None})
    assert "a library or the driver" in str(beside)


# Undoing


def test_running_statistics_and_counters_are_as_before() -> None:
    for name in ("conv_norm", "routed"):
        model, inputs = build(name)
        with ckptplan.apply(model, planned(name, "recompute"), on_oom="report") as handle:
            for _ in range(2):  # copies of every buffer in the first step, of those that are updated afterwards
                handle.step(step_of(model, inputs))
                model.zero_grad()
                before = state(model)
                objects = [id(b) for b in model.buffers()]

                def step(model: nn.Module = model, inputs: Any = inputs) -> None:
                    step_of(model, inputs)()
                    assert any(not torch.equal(v, before[n]) for n, v in state(model).items() if n[0] == "b")  # noqa: B023
                    fails()

                with pytest.raises(OutOfMemoryError):
                    handle.step(step)
                assert_same(state(model), before, but=("random",))
                assert [id(b) for b in model.buffers()] == objects


@pytest.mark.parametrize("style", ["none", "zero", "accumulate", "untouched", "late zero"])
def test_gradients(style: str) -> None:
    """As NOTE [Undoing a step], rule 2, has it; and the retried step's are those of a plain one."""

    def run(model: nn.Module, inputs: Any, fail: Callable[[], None]) -> None:
        if style == "none":
            model.zero_grad()
        if style == "zero":
            model.zero_grad(set_to_none=False)
        loss = default_loss(model(inputs))
        if style == "late zero":
            model.zero_grad(set_to_none=False)
        if style == "untouched":
            fail()
        loss.backward()
        fail()

    model, inputs = build("mlp")
    torch.manual_seed(3)
    for _ in range(2):
        run(model, inputs, lambda: None)
    wanted = state(model)

    model, inputs = build("mlp")
    with ckptplan.apply(model, planned("mlp", "recompute"), on_oom="report") as handle:
        torch.manual_seed(3)
        handle.step(lambda: run(model, inputs, lambda: None))
        first, generator = state(model), torch.get_rng_state()
        with pytest.raises(OutOfMemoryError) as raised:
            handle.step(lambda: run(model, inputs, fails))
        grads = [p.grad for p in model.parameters()]
        assert raised.value.shortage.gradients_lost == (style == "accumulate")
        if style in ("none", "accumulate"):
            assert grads == [None] * len(grads)
        elif style == "untouched":
            assert_same(state(model), first, but=("random",))
        else:
            assert not any(g.any() for g in grads)  # type: ignore[union-attr]
        if style != "accumulate":
            torch.set_rng_state(generator)
            handle.step(lambda: run(model, inputs, lambda: None))
            assert_same(state(model), wanted)
        else:
            assert "begin the accumulation again" in str(raised.value)


@pytest.mark.filterwarnings("ignore:Using backward", "ignore:.*a backward makes a graph of its own")
def test_a_gradient_that_was_added_to_out_of_place_is_lost() -> None:
    model, inputs = build("mlp")
    with ckptplan.apply(model, planned("mlp", "keep"), on_oom="report") as handle:

        def step(fail: Callable[[], None] = lambda: None) -> None:
            default_loss(model(inputs)).backward(create_graph=True)
            fail()

        handle.step(step)
        with pytest.raises(OutOfMemoryError) as raised:
            handle.step(lambda: step(fails))
        assert raised.value.shortage.gradients_lost
        model.zero_grad()
    gc.collect()


class _HungryAdam(torch.optim.Adam):
    """Runs out of memory in its update, before or after it has written."""

    after = False
    on = True

    def step(self, closure: Any = None) -> Any:
        if self.on and not self.after:
            for p in self.param_groups[0]["params"][:2]:
                self.state[p]["step"] = torch.zeros(())
            fails()
        super().step(closure)
        if self.on and self.after:
            fails()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("mode", ["report", "replan"])
def test_in_the_update(after: bool, mode: Any) -> None:
    model, inputs = build("mlp")
    optimizer = _HungryAdam(model.parameters())
    optimizer.after = after
    with ckptplan.apply(model, planned("mlp", "keep"), on_oom=mode, profile=measured("mlp")) as handle:

        def step() -> None:
            optimizer.zero_grad()
            step_of(model, inputs)()
            optimizer.step()

        torch.manual_seed(3)
        before = state(model)
        with pytest.raises(OutOfMemoryError) as raised:
            handle.step(step)
        found = raised.value.shortage
        assert (found.phase, found.doing, found.half_updated) == ("update", "update", after)
        assert "in the optimizer's update" in str(found)
        assert handle.replans == ()  # no plan changes what an update needs
        assert not optimizer.state
        if after:
            assert "half updated" in str(found)
            return
        assert_same(state(model), before, but=("random",))
        optimizer.on = False
        torch.manual_seed(3)
        handle.step(step)
    twin, inputs = build("mlp")
    plain = torch.optim.Adam(twin.parameters())
    torch.manual_seed(3)
    step_of(twin, inputs)()
    plain.step()
    assert_same(state(model), state(twin))


def test_older_optimizer_state_that_was_written_to() -> None:
    model, inputs = build("mlp")
    optimizer = _HungryAdam(model.parameters())
    optimizer.on, optimizer.after = False, True
    with ckptplan.apply(model, planned("mlp", "keep"), on_oom="report") as handle:

        def step() -> None:
            optimizer.zero_grad()
            step_of(model, inputs)()
            optimizer.step()

        handle.step(step)
        values = [s["exp_avg"] for s in optimizer.state.values()]
        optimizer.on = True
        with pytest.raises(OutOfMemoryError) as raised:
            handle.step(step)
        assert raised.value.shortage.half_updated
        assert [s["exp_avg"] for s in optimizer.state.values()] == values


# Planning again


@functools.cache
def leanest(name: str) -> Plan:
    return ckptplan.solve(measured(name), max_overhead=100.0, time_limit_s=2.0)


def seen_peak(name: str, plan: Plan) -> int:
    """The peak of a planned step as `Device` counts."""
    model, inputs = build(name)
    device = Device(1 << 60, [*held_tensors(model), inputs])
    with ckptplan.apply(model, plan), device:
        step_of(model, inputs)()
    return device.peak_bytes


@pytest.mark.parametrize("name", ["transformer", "conv_norm", "tied"])
@pytest.mark.parametrize("share", [0.1, 0.7])
def test_replans_until_it_fits(name: str, share: float) -> None:
    """Dropout is on; the step that runs at last is the plain one bit for bit, buffers and generator included."""
    rich = planned(name, "keep")
    most, least = seen_peak(name, rich), seen_peak(name, leanest(name))
    assert least < most
    model, inputs = build(name)
    device = Device(int(least + share * (most - least)), [*held_tensors(model), inputs])
    with ckptplan.apply(model, rich, on_oom="replan", profile=measured(name), retries=10, time_limit_s=2.0) as handle:
        torch.manual_seed(3)
        with device, pytest.warns(RuntimeWarning, match="out of memory in"):
            handle.step(step_of(model, inputs))
        assert_same(state(model), plain_step(name))
        assert len(handle.replans) > 0
        peaks = [rich.peak_bytes, *(r.after.peak_bytes for r in handle.replans)]
        assert peaks == sorted(peaks, reverse=True)
        assert len(set(peaks)) == len(peaks)
        assert handle.plan is handle.replans[-1].after
        assert device.peak_bytes <= device.capacity_bytes
        tried = len(handle.replans)
        model.zero_grad()
        before = handle.stats()
        with device:
            handle.step(step_of(model, inputs))  # fits at once
        assert len(handle.replans) == tried
        added = handle.stats().since(before)
        assert added.runs == added.planned_runs
        assert added.swapped_in_bytes == handle.plan.host_bytes
    assert "forward" not in vars(model)


class Noisy(nn.Module):
    """Draws from its own generator, counts its calls, and hooks its weight in the first one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(64, 64), torch.Generator().manual_seed(seed)
        self.calls, self.counts = 0, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.counts[0] += 1
        if self.calls == 1:
            self.linear.weight.register_hook(lambda gradient: gradient * 0.5)
        noise = torch.randn(x.shape, generator=self.generator)
        return x + torch.tanh(self.linear(x + noise)) / (self.calls + self.counts[0])


def test_a_step_that_runs_again_finds_the_state_of_modules_as_it_was() -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Noisy(seed) for seed in range(6)))

    def step() -> None:
        loss = model(x).square().mean()
        if failures.pop():
            raise torch.OutOfMemoryError("Tried to allocate 16.00 KiB.")
        loss.backward()

    x = torch.randn(256, 64)
    plain, model = made(), made()
    plain(x).square().mean().backward()
    profile = ckptplan.profile(made(), x)
    failures = [False, True]
    keep = plan_of(profile, ["keep"] * len(profile.stages))
    with ckptplan.apply(model, keep, on_oom="replan", profile=profile, time_limit_s=1.0) as handle:
        with pytest.warns(RuntimeWarning, match="out of memory in"):
            handle.step(step)
        assert len(handle.replans) == 1
    assert [(stage.calls, stage.counts) for stage in model] == [(1, [1])] * 6
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_no_more_than_the_allowed_plans() -> None:
    model, inputs = build("transformer")
    profile = measured("transformer")
    with ckptplan.apply(model, planned("transformer", "keep"), on_oom="replan", profile=profile, retries=2) as handle:
        count = 0

        def step() -> None:
            nonlocal count
            count += 1
            model(inputs)
            raise torch.OutOfMemoryError("Tried to allocate 1.00 KiB.")

        torch.manual_seed(3)
        before = state(model)
        with pytest.warns(RuntimeWarning), pytest.raises(OutOfMemoryError, match="2 plans") as raised:
            handle.step(step)
        assert (count, raised.value.replans, len(handle.replans)) == (3, 2, 2)
        assert_same(state(model), before)


def test_no_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end backward holds all gradients, which no plan changes."""
    model, inputs = build("mlp")
    lean = leanest("mlp")
    with ckptplan.apply(model, lean, on_oom="replan", profile=measured("mlp")) as handle:
        with monkeypatch.context() as patch:
            forward = model[0][3].forward
            patch.setattr(model[0][3], "forward", lambda x: _FailsBackward.apply(forward(x)))
            with pytest.raises(InfeasibleBudgetError, match="smallest") as raised:
                handle.step(step_of(model, inputs))
        assert isinstance(raised.value.__cause__, OutOfMemoryError)
        assert isinstance(raised.value.__cause__.__cause__, torch.OutOfMemoryError)
        assert handle.plan is lean
        torch.manual_seed(3)
        handle.step(step_of(model, inputs))
        assert_same(state(model), plain_step("mlp"))


def test_a_lean_moment_that_ran_out_gets_leaner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is bound elsewhere, by what no plan changes; what is predicted stays within it."""
    model, inputs = build("mlp")
    profile, kept = measured("mlp"), planned("mlp", "keep")
    rich = dataclasses.replace(kept, budget_bytes=kept.peak_bytes)
    assert rich.peak_bytes == leanest("mlp").peak_bytes
    with ckptplan.apply(model, rich, on_oom="replan", profile=profile, retries=1) as handle:
        monkeypatch.setattr(model[3][0], "forward", Once(model[3][0].forward))
        torch.manual_seed(3)
        with pytest.warns(RuntimeWarning, match="forward of '3'"):
            handle.step(step_of(model, inputs))
        assert_same(state(model), plain_step("mlp"))
        after = handle.plan
    peaks = [planned_bytes(profile, plan, "forward", 3)[1] for plan in (rich, after)]
    assert peaks[1] <= 0.95 * peaks[0]  # a twentieth: the message's 2.5 GiB are far beyond what is there
    assert after.peak_bytes == ckptplan.simulate(profile, after).peak_bytes <= rich.peak_bytes
    assert ckptplan.validate(profile, after, after.budget_bytes) == ()
    assert after.gap >= 0


def test_an_accumulating_step_gets_a_leaner_plan_for_the_next() -> None:
    """Its former gradients can't be had back, so it isn't run again."""
    model, inputs = build("transformer")
    rich = planned("transformer", "keep")
    with ckptplan.apply(model, rich, on_oom="replan", profile=measured("transformer")) as handle:
        step = step_of(model, inputs)
        handle.step(step)
        ahead = step_of(model, inputs)

        def fails_in_backward() -> None:
            layer = model.layers[1]
            layer.forward, original = (lambda x: _FailsBackward.apply(original(x))), layer.forward
            try:
                ahead()
            finally:
                layer.forward = original

        with pytest.warns(RuntimeWarning), pytest.raises(OutOfMemoryError, match="next step on") as raised:
            handle.step(fails_in_backward)
        assert raised.value.shortage.gradients_lost
        assert len(handle.replans) == 1
        assert all(p.grad is None for p in model.parameters())


def test_a_step_without_its_handle_goes_its_own_way() -> None:
    model, inputs = build("mlp")
    handle = ckptplan.apply(model, planned("mlp", "keep"), on_oom="replan", profile=measured("mlp"))
    with handle.paused(), pytest.raises(torch.OutOfMemoryError):
        handle.step(fails)
    handle.remove()
    with pytest.raises(torch.OutOfMemoryError):
        handle.step(fails)
    assert handle.replans == ()
    step_of(model, inputs)()


def test_bad_arguments() -> None:
    model, _ = build("mlp")
    plan = planned("mlp", "keep")
    with pytest.raises(InvalidInputError, match="on_oom='ignore'"):
        ckptplan.apply(model, plan, on_oom="ignore")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="profile=p"):
        ckptplan.apply(model, plan, on_oom="replan")
    for retries in (0, -1, 1.5, True):
        with pytest.raises(InvalidInputError, match="retries="):
            ckptplan.apply(model, plan, on_oom="replan", profile=measured("mlp"), retries=retries)  # type: ignore[arg-type]
    with pytest.raises(ckptplan.PlanMismatchError):
        ckptplan.apply(model, plan, on_oom="replan", profile=measured("conv_norm"))
    assert "forward" not in vars(model[0])


# The corrected model


def shortage(**changed: Any) -> Shortage:
    """One of the transformer's with everything kept, as a GPU would report it."""
    profile, plan = measured("transformer"), planned("transformer", "keep")
    index = next(i for i, name in enumerate(plan.stages) if name.startswith("layers.2"))
    start, peak = planned_bytes(profile, plan, "backward", index)
    given: dict[str, Any] = {
        "phase": "backward",
        "stage": plan.stages[index],
        "doing": "backward",
        "tier": "device",
        "requested_bytes": 1000,
        "requested_least_bytes": 1000,
        "budget_bytes": plan.budget_bytes,
        "planned_bytes": peak,
        "planned_start_bytes": start,
        "live_bytes": peak - 1000,
        "allocated_bytes": peak - 1000,
        "reserved_bytes": peak,
        "capacity_bytes": plan.budget_bytes + 10_000_000,
        "live_before_bytes": profile.resident_bytes,
        "expandable_segments": False,
        "model_bytes": 0,
        "process_bytes": 0,
        "swapped": (),
        "recomputed_stages": 0,
        "planned_recomputed_stages": 0,
        "swapped_out_bytes": 0,
        "swapped_in_bytes": 0,
        "planned_swapped_bytes": 0,
        "gradients_lost": False,
        "half_updated": False,
    }
    return Shortage(**{**given, **changed})


def test_measured_bytes_beyond_the_prediction_go_where_they_were() -> None:
    profile, plan = measured("transformer"), planned("transformer", "keep")
    found = shortage()
    over = plan.budget_bytes  # no plan-independent slack is left
    more = shortage(live_bytes=found.planned_bytes - 1000 + over, live_before_bytes=profile.resident_bytes + over // 4)
    assert more.over_bytes == over
    (correction,) = corrections(profile, plan, more)
    assert (correction.limit_bytes, correction.leaner_than_bytes) == (plan.budget_bytes, None)
    kind = {s.name: s.kind for s in profile.stages}
    outside, here = over // 4, over - over // 4
    for k, s in enumerate(profile.stages):
        extra = here if s.kind == kind[more.stage] else 0
        assert correction.profile.base_forward_bytes[k] == profile.base_forward_bytes[k] + outside
        assert correction.profile.base_backward_bytes[k] == profile.base_backward_bytes[k] + outside + extra
    assert sum(s.kind == kind[more.stage] for s in profile.stages) == 4
    assert correction.profile.update_peak_bytes == profile.update_peak_bytes + outside
    assert "smaller" in str(more)
    assert "+" in str(more)


def test_a_device_that_has_less_than_the_budget() -> None:
    profile, plan = measured("transformer"), planned("transformer", "keep")
    found = shortage(capacity_bytes=shortage().planned_bytes - 50)
    assert corrections(profile, plan, found) == (Correction(profile, found.planned_bytes - 50),)
    assert "smaller budget_gb" in str(found)


def test_what_would_seem_to_fit_needs_at_most_so_much_less_as_was_asked_for() -> None:
    profile, plan = measured("transformer"), planned("transformer", "keep")
    fragmented = shortage()
    lower, charged, smaller = corrections(profile, plan, fragmented)
    planned_there = fragmented.planned_bytes
    assert lower == Correction(profile, planned_there - 1000, planned_there)
    assert (charged.limit_bytes, charged.leaner_than_bytes, charged.means) == (plan.budget_bytes, None, profile)
    index = plan.stages.index(fragmented.stage)
    assert planned_bytes(charged.profile, plan, "backward", index)[1] == plan.budget_bytes + 1000
    assert smaller == Correction(profile, plan.peak_bytes - 1000, plan.peak_bytes)
    assert "expandable_segments" in str(fragmented)
    none = {"live_bytes": None, "reserved_bytes": None, "capacity_bytes": None, "live_before_bytes": None}
    assert corrections(profile, plan, shortage(**none)) == (lower, charged, smaller)
    unsaid = corrections(profile, plan, shortage(**none, requested_bytes=None))
    assert unsaid[0].limit_bytes == planned_there - planned_there // 20


def test_what_is_left_for_tensors_is_not_the_whole_budget() -> None:
    """Of a plan on CUDA the budget is one of reserved bytes."""
    profile, plan = measured("transformer"), planned("transformer", "keep")
    found = shortage()
    roomy = dataclasses.replace(plan, budget_bytes=plan.budget_bytes + 4096, reserved_bytes=plan.peak_bytes + 4096)
    assert [c.limit_bytes for c in corrections(profile, roomy, found)] == [
        c.limit_bytes for c in corrections(profile, plan, found)
    ]


def test_planned_bytes_are_those_of_the_replay() -> None:
    """The worst of all places is the plan's peak, with sweeps counted to the stage that they are run for."""
    profile = measured("transformer")
    lean = leanest("transformer")
    for plan in (planned("transformer", "keep"), planned("transformer", "recompute"), lean):
        seen = [planned_bytes(profile, plan, "update", 0)[1]]
        for phase in ("forward", "backward"):
            stages: list[int | None] = [i for i, s in enumerate(profile.stages) if not s.is_glue]
            seen += [planned_bytes(profile, plan, phase, i)[1] for i in (0, *stages, None)]  # type: ignore[arg-type]
        assert max(seen) == plan.peak_bytes


@pytest.mark.gpu
def test_a_device_that_is_really_full() -> None:
    """Most of the process's share of the device is taken by somebody else; the planned step is replanned around it."""
    pytest.importorskip("ortools")
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 1024)) for _ in range(8))
    ).to(device)
    x = torch.randn(16384, 1024, device=device)

    def gradients(run: Callable[[Callable[[], Any]], Any]) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        run(step_of(model, x))
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = gradients(lambda step: step())
    model.zero_grad()
    profile = ckptplan.profile(model, x)
    plan = plan_of(profile, ["keep"] * len(profile.stages))
    gc.collect()
    torch.cuda.empty_cache()
    room = profile.resident_bytes + (plan.peak_bytes - profile.resident_bytes) * 3 // 4
    already = torch.cuda.memory_allocated() - profile.resident_bytes  # the wanted gradients, library workspaces
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((room + already) / total, device)
    try:
        with ckptplan.apply(model, plan, on_oom="report", profile=profile) as handle:
            with pytest.raises(OutOfMemoryError) as raised:
                gradients(handle.step)
            found = raised.value.shortage
            assert found.live_bytes is not None
            assert found.capacity_bytes is not None
            assert found.live_bytes <= found.capacity_bytes
            assert "reserved" in str(raised.value)
            assert all(p.grad is None for p in model.parameters())
        del raised, found  # the frames of its traceback hold the step's tensors
        gc.collect()
        with ckptplan.apply(model, plan, on_oom="replan", profile=profile) as handle:
            with pytest.warns(RuntimeWarning, match="out of memory"):
                found_gradients = gradients(handle.step)
            assert handle.plan.peak_bytes < plan.peak_bytes
        assert all(torch.equal(a, b) for a, b in zip(found_gradients, wanted, strict=True))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
