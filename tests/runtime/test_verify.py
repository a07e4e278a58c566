"""What `verify` measures and says: bytes and times in separate steps, peaks by account, other paths than profiled."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_memory import DEVICE, WORKSPACE_BYTES, FakeMemory
from small_models import build, plan_of, planned
from torch import nn

import ckptplan
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Training
from ckptplan.core.units import format_bytes
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.profiling import profiler
from ckptplan.profiling.profiler import profile
from ckptplan.profiling.target import Target, find_target
from ckptplan.runtime import verify as verifying
from ckptplan.runtime.handle import apply
from ckptplan.runtime.observe.meter import Meter
from ckptplan.runtime.verify import Verification, verify
from ckptplan.tensors import accelerator
from ckptplan.tensors.storages import same_bits, unique_bytes
from ckptplan.training.measure import StepPeaks, held_tensors, recorded_allocations, step_peaks
from ckptplan.training.step import TrainingStep, default_loss, make_step


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Grows with every mark of a meter."""
    found: list[float] = []

    def clock() -> float:
        found.append(time.perf_counter())
        return found[-1]

    monkeypatch.setattr(Meter.__init__, "__defaults__", (None, clock))
    return found


@pytest.mark.parametrize(("allowed", "steps", "wanted"), [("none", 1, 4), ("all", 3, 10)])
def test_fewer_steps_are_timed_where_they_are_long(
    allowed: str, steps: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps that are compared and whose peaks are measured run in any case."""
    model, inputs = build("mlp")
    took_s = iter(range(1, 100))
    monkeypatch.setattr(verifying, "timed", lambda run, device: (run(), float(next(took_s)))[1])
    monkeypatch.setattr(verifying, "TIMED_S", {"none": 2.9, "all": 9.0}[allowed])  # the first two take 3
    ran: list[TrainingStep] = []
    real = verifying.run_step
    monkeypatch.setattr(verifying, "run_step", lambda *args: ran.append(args[0]) or real(*args))
    told: list[str] = []
    found = verify(model, planned("mlp", "recompute"), inputs, on_progress=told.append)
    assert found.gradients_equal
    assert found.timed_steps == steps
    assert len(ran) == wanted
    assert (found.plain_step_s, found.measured_step_s) == {"none": (1, 2), "all": (5, 6)}[allowed]
    assert ("median of 3 steps" if steps == 3 else "one step") in str(found)
    timing = [text for text in told if "timing" in text]
    assert timing == [f"timing {k + 1} of {steps} steps of each kind" for k in range((wanted - 4) // 2)]
    assert told[0] == "running a step to see what it reads"


def test_steps_inside_unmetered_are_as_most_of_a_training(marks: list[float]) -> None:
    model, inputs = build("mlp")

    def step() -> None:
        model.zero_grad()
        default_loss(model(inputs)).backward()

    with apply(model, planned("mlp", "recompute")) as handle:
        step()
        step()
        before, timed = len(marks), handle.stats().timed_steps
        with handle.unmetered():
            for _ in range(3):
                step()
        assert len(marks) == before
        assert handle.stats().timed_steps == timed
        step()
        assert len(marks) > before
        assert handle.stats().timed_steps == timed + 1


def test_other_paths_than_profiled_are_reported() -> None:
    """As where an operation's fake twin saves other storages than the real one: bytes decide, not positions."""
    model, inputs = build("transformer")
    plan = planned("transformer", "swap")
    found = verify(model, plan, inputs, repeats=1)
    assert found.other_paths == 0
    assert "saved something else" not in str(found)

    moving = sum(bool(choice.moves) for choice in plan.choices)
    assert moving > 1
    one_more = tuple(
        (*sizes, 1 << 30) if choice.moves else sizes
        for sizes, choice in zip(plan.saved_bytes, plan.choices, strict=True)
    )
    found = verify(model, dataclasses.replace(plan, saved_bytes=one_more), inputs, repeats=1)
    assert found.gradients_equal
    assert found.other_paths == found.stats.other_paths == moving
    assert f"{moving} runs of stages saved something else than profiled" in str(found)
    assert f"saved something else than profiled: {moving}" in str(found.stats)


def test_a_step_under_autocast() -> None:
    model, inputs = build("mlp")
    found = profile(model, inputs, amp="bfloat16")
    report = verify(model, plan_of(found, ["recompute"] * len(found.stages)), inputs, amp="bfloat16", repeats=1)
    assert report.gradients_equal
    assert report.other_paths == 0
    # 2 % and the random states, as for other plans of small models.
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= 1.02 * report.measured_peak_bytes + 2 * 5056
    with pytest.raises(ckptplan.InvalidInputError, match="amp='int8'"):
        verify(model, plan_of(found, ["keep"] * len(found.stages)), inputs, amp="int8")


def test_a_plan_that_an_earlier_version_saved_is_applied() -> None:
    """Made as tests/saved/README.md says, by another version of PyTorch than this may be."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Conv2d(i, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for i in (3, 8, 8, 8))
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 10))
    plan = Plan.load(Path(__file__).parents[1] / "saved" / "conv_plan.json.gz")
    fingerprint = dataclasses.replace(plan.fingerprint, torch_version=torch.__version__.partition("+")[0])
    found = verify(model, dataclasses.replace(plan, fingerprint=fingerprint), torch.randn(32, 3, 16, 16), repeats=1)
    assert found.gradients_equal
    assert found.measured_peak_bytes <= plan.budget_bytes
    assert found.stats.swapped_out_bytes == found.stats.swapped_in_bytes == plan.host_bytes
    assert found.other_paths == 0


# Peaks by account, on a device whose allocator is our model of CUDA's


@functools.cache
def chain() -> Profile:
    return profile(*subject(), menus=False)


def subject() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6))
    return nn.Sequential(*blocks), torch.randn(2000, 256)


@functools.cache
def uniform(action: Any) -> Plan:
    return plan_of(chain(), [action] * len(chain().stages))


def verified(plan: Plan, memory: FakeMemory, before: Callable[[], Any] = lambda: None) -> Verification:
    """`verify`, which takes the model for one on CUDA; all that it calls knows better."""
    model, x = subject()
    memory.hold(*held_tensors(model), x)
    before()
    with pytest.MonkeyPatch.context() as patch, memory.installed():
        patch.setattr(verifying, "model_device", lambda model: DEVICE)
        patch.setattr(verifying, "unique_bytes", lambda tensors, device: unique_bytes(tensors))
        return verify(model, plan, x, repeats=1)


@functools.cache
def alone(action: Any) -> Verification:
    return verified(uniform("recompute"), FakeMemory())


@pytest.mark.long
def test_each_account_has_its_own_peak() -> None:
    plan, found = uniform("recompute"), alone("recompute")
    measured = found.measured
    assert found.gradients_equal
    # As on the CPU, by the chain's own bytes: tensors alone, without cuBLAS's workspaces.
    assert 0.98 * plan.peak_bytes <= measured.requested_bytes <= plan.peak_bytes
    assert measured.workspace_bytes == WORKSPACE_BYTES
    assert 0 <= measured.other_bytes < 100  # the handle's own
    assert measured.allocated_bytes is not None
    assert measured.reserved_bytes is not None
    assert measured.requested_bytes + WORKSPACE_BYTES <= measured.allocated_bytes < measured.reserved_bytes
    assert (measured.reserved_bytes + measured.other_bytes) % (2 << 20) == 0
    # Tensors fit the budget and what is reserved doesn't, which is what counts.
    assert plan.budget_bytes < measured.reserved_bytes == measured.needed_bytes
    assert not found.within_budget
    assert found.plain is not None
    assert found.plain.requested_bytes == found.plain_peak_bytes != measured.requested_bytes
    text = str(found)
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["requested", "allocated", "reserved"]
    assert text.count("not predicted") == 2
    assert f"OVER the budget of {format_bytes(plan.budget_bytes)}" in text.splitlines()[3]
    assert f"{format_bytes(WORKSPACE_BYTES)}  of them cuBLAS's workspaces" in text


def test_a_prediction_beside_each_account() -> None:
    """As a plan that is solved for a model has it, by a replay of that model on the allocator's model."""
    model, x = subject()
    predicted = TrainingBytes(model, find_target(model, "a100-40gb")).peaks(
        make_step(model, Training(x)), uniform("recompute")
    )
    found = dataclasses.replace(
        alone("recompute"),
        predicted_allocated_bytes=predicted.allocated_bytes,
        predicted_reserved_bytes=predicted.reserved_bytes,
        budget_bytes=predicted.reserved_bytes,
    )
    measured, own = found.measured, found.measured.other_bytes
    assert found.predicted_peak_bytes == uniform("recompute").peak_bytes
    assert measured.requested_bytes == predicted.requested_bytes - WORKSPACE_BYTES
    assert measured.allocated_bytes is not None
    # The handle's own few numbers have blocks of 512 bytes.
    assert abs(measured.allocated_bytes - predicted.allocated_bytes) <= 8 * 512
    assert measured.reserved_bytes == predicted.reserved_bytes - own
    assert found.within_budget
    assert "within the budget" in str(found)
    assert "predicted +0.00%" in str(found).splitlines()[3]
    assert "not predicted" not in str(found)


def test_what_else_the_process_holds_is_told_apart() -> None:
    """Other tensors, an earlier peak, and the cache that it left: none of them is the plan's."""
    plan, memory = dataclasses.replace(uniform("recompute"), allocated_bytes=1, reserved_bytes=2), FakeMemory()

    def before() -> None:
        memory.allocate(64 << 20)
        memory.allocator.free(memory.allocate(1 << 30))
        assert memory.allocator.reserved_bytes > 1 << 30

    found = verified(plan, memory, before)
    before_that = alone("recompute").measured
    assert found.measured == dataclasses.replace(before_that, other_bytes=before_that.other_bytes + (64 << 20))
    assert f"{format_bytes(64 << 20)}  besides, held by the process" in str(found)
    assert (found.predicted_allocated_bytes, found.predicted_reserved_bytes) == (1, 2)


def test_workspaces_of_captured_graphs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory()
    memory.pool_id = (0, 1)
    monkeypatch.setattr(memory, "clear_workspaces", lambda: pytest.fail("a replay would write to freed memory"))
    model, x = subject()
    memory.hold(*held_tensors(model), x)
    with memory.installed():
        found = step_peaks(lambda: default_loss(model(x)).backward(), DEVICE, unique_bytes([*held_tensors(model), x]))
    assert found.workspace_bytes is None
    assert "cuBLAS" not in str(dataclasses.replace(alone("keep"), measured=found))


def test_on_the_cpu_there_is_one_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    model, inputs = build("mlp")
    found = verify(model, planned("mlp", "recompute"), inputs, repeats=1)
    assert found.measured == StepPeaks(found.measured_peak_bytes)
    assert found.measured.needed_bytes == found.measured_peak_bytes
    assert found.within_budget
    assert [line.split()[0] for line in str(found).splitlines()[1:4]] == ["peak", "plain", "step"]


def test_profiling_leaves_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[None] = []
    found = chain()
    monkeypatch.setattr(
        accelerator, "module", SimpleNamespace(empty_cache=lambda: given.append(None), is_initialized=lambda: False)
    )
    monkeypatch.setattr(profiler, "_profile", lambda *args: found)
    model, x = subject()
    for device, count in ((torch.device("cpu"), 0), (DEVICE, 1)):
        assert profiler.profile_step(TrainingStep(model, (x,)), Target(device)) is found
        assert len(given) == count


@pytest.mark.gpu
def test_a_device_s_own_accounts_are_as_predicted() -> None:
    model, x = (made.cuda() for made in subject())
    plan = plan_of(profile(model, x, menus=False), ["recompute"] * len(chain().stages))
    needs = TrainingBytes(model, find_target(model)).peaks(make_step(model, Training(x)), plan)
    told = dataclasses.replace(plan, allocated_bytes=needs.allocated_bytes, reserved_bytes=needs.reserved_bytes)
    found = verify(model, dataclasses.replace(told, budget_bytes=needs.reserved_bytes), x)
    measured = found.measured
    assert found.gradients_equal, found.differing
    assert found.other_paths == 0
    assert measured.workspace_bytes, "products of matrices take one"
    assert 0.98 * found.predicted_peak_bytes <= measured.requested_bytes <= found.predicted_peak_bytes, str(found)
    assert found.within_budget, str(found)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor(1.0), torch.tensor(2.0), False),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        (torch.zeros(3), -torch.zeros(3), False),
        (torch.ones(2, 3).t(), torch.ones(3, 2), True),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        (torch.ones(2, 2).to_sparse(), torch.ones(2, 2).to_sparse(), True),
        (torch.ones(2, 2).to_sparse(), torch.zeros(2, 2).to_sparse(), False),
        (torch.empty(0), torch.empty(0), True),
    ],
)
def test_tensors_are_compared_bit_for_bit(a: torch.Tensor, b: torch.Tensor, same: bool) -> None:
    """A single number, NaN, the sign of zero, another layout."""
    assert same_bits(a, b) is same


def test_released_blocks_from_before_count_nothing() -> None:
    """The profiler knows the blocks of an earlier recording by their addresses, at which others may be by now."""
    held: list[torch.Tensor] = []
    sizes = [1000 + 40 * n for n in range(300)]

    def allocate() -> None:
        held.extend(torch.empty(n) for n in sizes)

    allocate()
    events, _ = recorded_allocations(lambda: (held.clear(), allocate()))  # type: ignore[func-returns-value]
    assert [nbytes for _, nbytes in events] == [4 * n for n in sizes]
    seen = {t.data_ptr() for t in held}
    held.clear()
    allocate()
    assert {t.data_ptr() for t in held} & seen
    assert recorded_allocations(held.clear)[0] == []


@pytest.mark.parametrize(("kind", "begun"), [(torch.optim.AdamW, True), (torch.optim.Adafactor, False)])
def test_a_measured_step_has_the_optimizer_s_state_and_its_update(kind: Any, *, begun: bool) -> None:
    """Whether or not the optimizer has state, and the model gradients: both stay as they are."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    optimizer = kind(model.parameters())
    x = torch.randn(64, 64)
    plan = ckptplan.solve(model, budget="30%", inputs=x, optimizer=optimizer, time_limit_s=0.2, menus=False)
    if begun:
        model(x).mean().backward()
        optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    state = {i: dict(of) for i, of in optimizer.state_dict()["state"].items()}
    found = verify(model, plan, x, optimizer=optimizer, repeats=1)
    assert found.within_budget
    assert found.gradients_equal
    assert found.measured_peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=0.02)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert (p.grad is None and gradient is None) or torch.equal(p.grad, gradient)  # type: ignore[arg-type]
    now = optimizer.state_dict()["state"]
    assert now.keys() == state.keys()
    assert all(torch.equal(now[i][name], value) for i, of in state.items() for name, value in of.items())


class Clipped(torch.optim.SGD):
    """Gradients are clipped to the middle of their sizes, which the kernel finds in a copy of its own."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            most = p.grad.flatten().kthvalue(p.numel() // 2).values
            p.sub_(p.grad.clamp(max=most))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Clipped])
def test_the_peak_of_an_update_is_known_to_the_byte(kind: Any) -> None:
    """With what operations hold beside their results, and the output, which the training's variable holds."""
    model = nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 512), nn.Linear(512, 16))
    optimizer, x = kind(model.parameters()), torch.randn(4, 16)
    plan = ckptplan.solve(model, budget="100%", inputs=x, optimizer=optimizer, time_limit_s=0.2)
    found = verify(model, plan, x, optimizer=optimizer, repeats=1)
    assert found.within_budget
    assert found.measured_peak_bytes == found.predicted_peak_bytes == plan.peak_bytes


def test_an_update_that_runs_the_step_itself_is_an_error() -> None:
    model, inputs = build("transformer")
    with pytest.raises(
        ckptplan.InvalidInputError, match=r"LBFGS.step\(\) can't be called alone .*leave optimizer= out"
    ):
        verify(model, planned("transformer", "recompute"), inputs, optimizer=torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.AdamW])
def test_the_name_of_an_optimizer_is_refused(optimizer: Any) -> None:
    model, inputs = build("mlp")
    with pytest.raises(ckptplan.InvalidInputError, match="pass the optimizer itself"):
        verify(model, planned("mlp", "recompute"), inputs, optimizer=optimizer)
