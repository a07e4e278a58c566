"""Memory runs out in a planned step: PyTorch's own error passes through, with a note."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_memory import DEVICE, FakeMemory
from small_models import assert_same, build, call, gradients, measured, plan_of, planned
from torch import nn

import ckptplan
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.units import format_bytes
from ckptplan.report.predicted import planned_bytes
from ckptplan.runtime.guard import oom
from ckptplan.runtime.swap.stores import disk
from ckptplan.tensors.accelerator import device_bytes
from ckptplan.training.step import default_loss

pytestmark = pytest.mark.usefixtures("no_leak")


def fails(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(CUDA_TEXT)


def failing_from(call: int, original: Callable[..., Any], times: int = 1, error: Any = None) -> Callable[..., Any]:
    """Fails so many times from that call on, counted from 0, and passes through otherwise."""
    calls = (n for n in itertools.count())  # unlike a number, nothing puts it back

    def run(*args: Any, **kwargs: Any) -> Any:
        if call <= next(calls) < call + times:
            raise error or torch.OutOfMemoryError(CUDA_TEXT)
        return original(*args, **kwargs)

    return run


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
    up = model.layers[2].up
    forward = up.forward
    patches: dict[str, tuple[Any, str, Any]] = {
        "forward": (up, "forward", fails),
        "recompute": (up, "forward", failing_from(1, forward)),
        "backward": (up, "forward", lambda x: _FailsBackward.apply(forward(x))),
        "copy back": (disk.DiskStore, "start_in", fails),
        "worker": (disk, "_read", failing_from(0, disk._read, 1000, MemoryError())),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*patches[where])
        yield


PLACES = {
    "forward": ("keep", "forward", "layers.2", "forward"),
    "recompute": ("recompute", "backward", "layers.2", "recompute"),
    "backward": ("keep", "backward", "layers.2", "backward"),
    "copy back": ("swap", "backward", None, "copy back"),
    "worker": ("swap", "backward", None, "copy back"),
}


def note(error: BaseException) -> str:
    """The one note of an error."""
    (text,) = error.__notes__
    return text


@pytest.mark.parametrize("where", PLACES)
def test_the_note_says_where_it_was(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next step is right, whose graph and swap space are all there is."""
    action, phase, stage, doing = PLACES[where]
    model, inputs = build("transformer")
    plan, profile = planned("transformer", action), measured("transformer")
    handle = ckptplan.apply(model, plan, profile=profile)
    with (
        pytest.raises((torch.OutOfMemoryError, ckptplan.SwapError)) as raised,
        handle,
        failing(model, where, monkeypatch),
    ):
        call(model, inputs).backward()
    said = note(raised.value)
    found = re.match(r"ckptplan: out of device memory in (\w+) of stage '([^']*)'(?: \((.*?)\))?", said)
    assert found is not None, said
    assert (found[1], found[3] or found[1]) == (phase, doing)
    assert stage is None or found[2].startswith(stage)
    assert ("GiB were requested" in said) == (where != "worker")
    start, peak = planned_bytes(profile, plan, found[1], plan.stages.index(found[2]))  # type: ignore[arg-type]
    assert f"planned   {format_bytes(peak)} at the peak of this moment, {format_bytes(start)} at its start" in said
    assert "solve with a smaller budget_gb=" in said
    del raised
    model.zero_grad()
    with ckptplan.apply(model, plan):
        torch.manual_seed(3)
        call(model, inputs).backward()
    plain, _ = build("transformer")
    torch.manual_seed(3)
    call(plain, inputs).backward()
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_behind_the_last_stage_and_in_the_update(index: int) -> None:
    model, inputs = build("transformer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        output = model(inputs)
        loss = (_FailsBackward.apply(output) if index == 0 else output).sum()
        loss.backward()
        optimizer.step()

    if index == 1:
        model.get_submodule("head").register_forward_hook(fails)
    if index == 2:
        optimizer.register_step_pre_hook(fails)
    if index == 3:
        optimizer.register_step_post_hook(fails)

    with pytest.raises(torch.OutOfMemoryError) as raised, ckptplan.apply(model, planned("transformer", "keep")):
        step()
    said = note(raised.value)
    wanted = "in backward of stage '(after layers.3)'", "in forward of stage 'layers.3'", "in the optimizer's update"
    assert wanted[min(index, 2)] in said
    assert ("use an optimizer with less state" in said) == (index > 1)


def test_a_backward_of_another_model_has_no_note() -> None:
    model, inputs = build("mlp")
    other = _FailsBackward.apply(torch.ones(3, requires_grad=True)).sum()
    handle = ckptplan.apply(model, planned("mlp", "keep"))
    call(model, inputs).backward()
    with pytest.raises(torch.OutOfMemoryError) as raised, handle:
        other.backward()
    assert not hasattr(raised.value, "__notes__")


def test_a_note_is_there_before_the_handle_goes() -> None:
    """Of a forward, whose caller may catch the error; a backward's kernel fails where no code of the package runs."""
    model, inputs = build("mlp")
    model.get_submodule("1.0").register_forward_hook(fails)
    with ckptplan.apply(model, planned("mlp", "keep")):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            model(inputs)
        assert "out of device memory in forward" in note(raised.value)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_caught_error_keeps_no_tensor(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loop whose own frame goes on, say with a smaller batch."""
    model, inputs = build("transformer")
    x = model.get_submodule("embedding")(inputs)
    held = weakref.ref(x)
    with (
        contextlib.suppress(torch.OutOfMemoryError),
        ckptplan.apply(model, planned("transformer", "keep")),
        failing(model, where, monkeypatch),
    ):
        (default_loss(model(inputs)) + x.sum()).backward()
    del x
    assert held() is None


def test_an_error_that_nothing_catches_has_the_note(capsys: pytest.CaptureFixture[str]) -> None:
    model, inputs = build("mlp")
    with ckptplan.apply(model, planned("mlp", "keep")):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            _FailsBackward.apply(model(inputs)).sum().backward()
        assert not hasattr(raised.value, "__notes__")
        sys.excepthook(raised.type, raised.value, raised.tb)
    text = capsys.readouterr().err
    assert text.index("CUDA out of memory") < text.index("ckptplan: out of device memory in backward")


def test_a_note_that_fails_is_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("mlp")
    model.get_submodule("1").register_forward_hook(fails)
    monkeypatch.setattr(oom, "capacity_bytes", functools.partial(raises, RuntimeError("the device is lost")))
    with pytest.raises(torch.OutOfMemoryError) as raised, ckptplan.apply(model, planned("mlp", "keep")):
        model(inputs)
    assert note(raised.value) == "ckptplan: out of memory; finding the place failed: the device is lost"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("shapes differ")])
def test_other_errors_pass_through(error: BaseException) -> None:
    model, inputs = build("mlp")
    model.get_submodule("1").register_forward_hook(functools.partial(raises, error))
    with pytest.raises(type(error)) as raised, ckptplan.apply(model, planned("mlp", "recompute")):
        call(model, inputs).backward()
    assert raised.value is error
    assert not hasattr(error, "__notes__")


def raises(error: BaseException, *_: Any) -> None:
    raise error


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 52)
    assert oom.exhaustion(raised.value) is raised.value
    assert oom.requested_bytes(raised.value) == 4 << 52
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
CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.50 GiB" + USUAL
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
    ("text", "nbytes"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 MiB" + USUAL, 2 * MIB),
        ("CUDA out of memory. Tried to allocate 20.00 MiB" + OTHERS, 20 * MIB),
        ("CUDA out of memory. Tried to allocate 20.00 MiB" + OLDER, 20 * MIB),
        ("HIP out of memory. Tried to allocate 20.00 MiB" + USUAL, 20 * MIB),
        (CUDA_TEXT, 2560 * MIB),
        ("CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
         "limit. Requested size: 20.00 MiB", 20 * MIB),
        (ASYNCHRONOUS, 640 * MIB),
        ("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
         "20971520 bytes. Error code 12 (Cannot allocate memory)", 20 * MIB),
        ("CUDA error: out of memory", None),
    ],
)  # fmt: skip
def test_what_was_asked_for(text: str, nbytes: int | None) -> None:
    assert oom.requested_bytes(torch.OutOfMemoryError(text)) == nbytes


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
        low = int(22.1 * 2**30)
        unused = 0 if text is ASYNCHRONOUS else int(1.02 * 2**30)
        assert found == DeviceBytes(now.requested_bytes + low - now.allocated_bytes, low, low + unused)
        memory.allocate(10 * 2**30)
        assert oom.live_bytes(error, DEVICE) == device_bytes(DEVICE)


def test_on_cuda_tensors_are_counted() -> None:
    """Not the blocks that they lie in; the handle takes its device for one on CUDA."""
    model, inputs = build("mlp")
    memory: Any = FakeMemory()
    memory.mem_get_info = lambda device: (11 * MIB, 24 << 30)
    memory.get_per_process_memory_fraction = lambda device: 1.0
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    with ckptplan.apply(model, planned("mlp", "keep")) as handle, memory.installed():
        call(model, inputs).backward()
        handle._applied.device = DEVICE
        memory.allocate(5 * MIB + 100)
        now = device_bytes(DEVICE)
        oom.add_note(handle._applied, error)
    said = note(error)
    over = now.requested_bytes - handle.plan.peak_bytes
    assert ": 20.00 MiB were requested" in said
    assert f"tensors   {format_bytes(now.requested_bytes)}, with the request +{format_bytes(over)} to the plan" in said
    assert (
        f"reserved  {format_bytes(now.reserved_bytes)} of at most {format_bytes(11 * MIB + now.reserved_bytes)}" in said
    )
    assert "no plan changes the memory after backward" in said


def live(nbytes: int) -> DeviceBytes:
    return DeviceBytes(nbytes, nbytes + MIB, nbytes + 2 * MIB)


@pytest.mark.parametrize(
    ("phase", "on_host", "over", "asked", "capacity", "text"),
    [
        ("backward", True, None, None, 1 << 30, "smaller host_gb="),
        ("update", False, 0, None, 1 << 30, "optimizer with less state"),
        ("forward", False, 3 * MIB, MIB, 1 << 30, "a budget 3.00 MiB smaller"),
        ("forward", False, -MIB, None, 1 << 30, "outside PyTorch's allocator"),
        ("forward", False, -MIB, 20 * MIB, 1 << 30, "free memory is in fragments: set"),
        ("forward", False, -MIB, 20 * MIB, 100 * MIB, "the device has less memory than the budget"),
    ],
)
def test_the_remedy(phase: Any, on_host: bool, over: int | None, asked: int | None, capacity: int, text: str) -> None:
    """Fragments are no overrun: tensors are within the plan, and the device is large enough for it."""
    found = oom._remedy(phase, on_host, over, live(90 * MIB), asked, capacity, 1 << 30)
    assert text in found


def test_planned_bytes_are_those_of_the_replay() -> None:
    """The worst of all places is the plan's peak, with sweeps counted to the stage that they are run for."""
    profile = measured("transformer")
    lean = ckptplan.solve(profile, max_overhead=100.0, time_limit_s=0.5)
    for plan in (planned("transformer", "keep"), planned("transformer", "recompute"), lean):
        seen = [planned_bytes(profile, plan, "update", 0)[1]]
        for phase in ("forward", "backward"):
            stages: list[int | None] = [i for i, s in enumerate(profile.stages) if not s.is_glue]
            seen += [planned_bytes(profile, plan, phase, i)[1] for i in (0, *stages, None)]  # type: ignore[arg-type]
        assert max(seen) == plan.peak_bytes


@pytest.mark.gpu
def test_a_device_that_is_really_full() -> None:
    """Most of the process's share of the device is taken by something else."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 1024)) for _ in range(8))
    ).to(device)
    x = torch.randn(16384, 1024, device=device)
    profile = ckptplan.profile(model, x)
    plan = plan_of(profile, ["keep"] * len(profile.stages))
    gc.collect()
    torch.cuda.empty_cache()
    room = profile.resident_bytes + (plan.peak_bytes - profile.resident_bytes) * 3 // 4
    already = torch.cuda.memory_allocated() - profile.resident_bytes  # library workspaces
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((room + already) / total, device)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised, ckptplan.apply(model, plan, profile=profile):
            call(model, x).backward()
        assert "reserved" in note(raised.value)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
