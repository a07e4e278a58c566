"""Plans on models whose stages are compiled, and refusals where the compiler would lead past a plan."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import pickle
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from small_models import scheduled
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters
from toy_modules import InTurn, Lambda, times

import ckptplan
from ckptplan.core.errors import PlanMismatchError, UnsupportedModelError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Training
from ckptplan.core.segment import Segment
from ckptplan.memory.estimate import TrainingBytes, estimate
from ckptplan.profiling.profiler import profile, traced_bytes
from ckptplan.profiling.target import find_target
from ckptplan.runtime.handle import apply
from ckptplan.runtime.patching import PatchedForward, installed
from ckptplan.runtime.verify import verify
from ckptplan.training.step import fingerprint, make_step

# What the compiler itself warns about is not ours; profiling with memory events warns on blocks from before.
pytestmark = pytest.mark.filterwarnings(
    *(f"ignore::{kind}" for kind in ("DeprecationWarning", "UserWarning", "FutureWarning"))
)

FORMS = ("compile()", "torch.compile")
ACTIONS = ("keep", "swap", "recompute", "recompute+swap")


class Block(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.drop = nn.Dropout(0.1)
        self.breaks = breaks
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
        with torch.no_grad():
            self.seen.add_(1)
        return x + self.drop(self.down(nn.functional.gelu(y)))


def model_of(*, breaks: bool) -> nn.Module:
    return InTurn(stem=nn.Linear(16, 64), layers=times(4, lambda: Block(breaks=breaks)), head=nn.Linear(64, 100))


def build(form: str = "", *, breaks: bool = False, backend: str = "aot_eager") -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = model_of(breaks=breaks).train()
    for i, layer in enumerate(model.layers):
        if form == "compile()":
            layer.compile(backend=backend)
        elif form == "torch.compile":
            model.layers[i] = torch.compile(layer, backend=backend)
    return model, torch.randn(512, 16)


@pytest.fixture(scope="module", params=FORMS)
def planned(request: pytest.FixtureRequest) -> Iterator[tuple[Any, torch.Tensor, Profile]]:
    torch._dynamo.reset()
    model, x = build(request.param)
    yield model, x, profile(model, x)
    torch._dynamo.reset()


def traced(model: nn.Module, x: torch.Tensor) -> Profile:
    """Its bytes; for what time doesn't enter."""
    return traced_bytes(make_step(model, Training(x)), None, find_target(model))


def plan_of(measured: Profile, *names: str, segments: tuple[Segment, ...] = ()) -> Plan:
    """The named options in turn over the stages."""
    options = [s.find(names[i % len(names)]) or s.keep for i, s in enumerate(measured.stages)]
    return scheduled(measured, options, segments)


def segment_of(measured: Profile) -> tuple[Segment, ...]:
    names = [s.name for s in measured.stages]
    return (Segment(names.index("layers.0"), names.index("layers.2")),)


def check(model: nn.Module, plan: Plan, x: Any, slack: float = 0.02) -> None:
    v = verify(model, plan, x, repeats=1)
    assert v.gradients_equal, v.differing
    assert v.stats.runs == v.stats.planned_runs
    assert v.stats.swapped_out_bytes == v.stats.swapped_in_bytes == plan.host_bytes
    assert v.measured_peak_bytes <= plan.peak_bytes <= (1 + slack) * v.measured_peak_bytes


@pytest.mark.long
def test_mixed_actions_and_segments_over_compiled_stages(planned: tuple[Any, torch.Tensor, Profile]) -> None:
    model, x, measured = planned
    before = dict(counters["stats"])
    check(model, plan_of(measured, "recompute+swap", "keep", "swap", "recompute"), x)
    check(model, plan_of(measured, "recompute", segments=segment_of(measured)), x)
    assert dict(counters["stats"]) == before, "compiled anew"
    # Nothing inside of compiled code is offered.
    assert {o.name for s in measured.stages if "layers" in s.name for o in s.options} == set(ACTIONS)
    # The peaks are not all the same; otherwise a plan that did nothing would pass.
    kept, swapped, again = (plan_of(measured, a) for a in ("keep", "swap", "recompute"))
    assert kept.host_bytes == 0 < 3_000_000 < swapped.host_bytes
    assert max(swapped.peak_bytes, again.peak_bytes) < 0.6 * kept.peak_bytes


@pytest.mark.long
def test_steps_under_autocast_do_not_compile_anew() -> None:
    torch._dynamo.reset()
    model, x = build("compile()")
    measured = profile(model, x, amp="bfloat16")
    plan = plan_of(measured, "recompute+swap", "swap", "recompute")

    def gradients() -> list[torch.Tensor]:
        out = []
        torch.manual_seed(1)
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().mean()
            loss.backward()
            out += [p.grad.clone() for p in model.parameters()]
        return out

    want = gradients()
    with apply(model, plan) as handle, torch.compiler.set_stance("fail_on_recompile"):
        got = gradients()
        assert handle.stats().swapped_out_bytes == 3 * plan.host_bytes > 0
    assert all(map(torch.equal, want, got))


@pytest.mark.parametrize("how", ["graph breaks", "disabled", "inside of stages", "inductor"])
@pytest.mark.long(but=["inside of stages"])
def test_other_ways_to_compile(how: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    form, backend = "" if how == "inside of stages" else "compile()", "inductor" if how == "inductor" else "aot_eager"
    model, x = build(form, breaks=how == "graph breaks", backend=backend)
    if how == "disabled":
        model.layers[1] = torch.compiler.disable(model.layers[1])
    elif how == "inside of stages":
        for layer in model.layers:
            layer.down.compile(backend="aot_eager")
    measured = traced(model, x)
    assert bool(counters["graph_break"]) == (how == "graph breaks")
    # What breaks saves tensors that come back one graph at a time.
    check(model, plan_of(measured, "swap", "recompute"), x, slack=0.05 if how in ("graph breaks", "disabled") else 0.02)
    torch._dynamo.reset()


def test_the_compiler_leaves_hooks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's own call isn't compiled, and what it calls would be: first of all our hooks."""
    torch._dynamo.reset()
    gc.collect()  # else it may come within the call, and the compiler looks at what weak sets do then
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    model, x = nn.Sequential(*layers).train(), torch.randn(512, 64)
    for layer in layers:
        layer.compile(backend="aot_eager")
    compiled: set[CodeType] = set()
    original = convert_frame._compile

    def noting(code: CodeType, *args: Any, **kwargs: Any) -> Any:
        compiled.add(code)
        return original(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", noting)
    model(x).mean().backward()
    without = set(compiled)  # from PyTorch 2.14 on a wrapper of the compiler's own
    check(model, plan_of(traced(model, x), "swap", "recompute+swap"), x)
    assert compiled == without


# --- what a model is afterwards ---


def test_everything_is_as_before(planned: tuple[Any, torch.Tensor, Profile]) -> None:
    model, x, measured = planned
    before = [dict(m.__dict__) for m in model.modules()]
    keys = list(model.state_dict())
    plan = plan_of(measured, "recompute", "swap")
    handle = apply(model, plan)
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    assert twin(x).shape == (512, 100)
    assert handle.stats().forwards == 0, "the copy follows the plan"
    pickled = pickle.loads(pickle.dumps(model))  # plain
    assert not any("_compiled_call_impl" in m.__dict__ for m in pickled.modules())
    assert pickled(x).shape == (512, 100)
    with handle.paused():
        model(x)
        assert handle.stats().forwards == 0
    model(x).mean().backward()
    assert handle.stats().forwards == 1
    handle.remove()
    assert [m.__dict__.keys() for m in model.modules()] == [d.keys() for d in before]
    for m, d in zip(model.modules(), before, strict=True):
        for key in ("forward", "_compiled_call_impl"):
            assert m.__dict__.get(key) is d.get(key)
    model(x).mean().backward()
    assert handle.stats().forwards == 1
    model.zero_grad()


# --- refusals ---


@pytest.fixture(scope="module")
def eager() -> tuple[Any, torch.Tensor, Plan]:
    torch._dynamo.reset()
    model, x = build()
    return model, x, plan_of(traced(model, x), "recompute")


def test_a_model_compiled_as_a_whole_is_refused(eager: tuple[Any, torch.Tensor, Plan]) -> None:
    _, x, plan = eager
    model, _ = build()
    for whole in (torch.compile(model, backend="aot_eager"), model):
        if whole is model:
            model.compile(backend="aot_eager")
        for refused in (lambda m=whole: profile(m, x), lambda m=whole: apply(m, plan)):
            with pytest.raises((UnsupportedModelError, PlanMismatchError), match=r"layer.compile\(\)|solve again"):
                refused()
    with pytest.raises(UnsupportedModelError, match=r"compiled as a whole.*layer.compile\(\)"):
        profile(model, x)


@pytest.mark.parametrize("how", ["torch.compile", "step", "layer.compile()", "layer"])
def test_compiling_after_apply_is_an_error_and_never_a_plan_that_does_nothing(
    eager: tuple[Any, torch.Tensor, Plan], how: str
) -> None:
    _, x, plan = eager
    model, _ = build()
    torch._dynamo.reset()
    with apply(model, plan):
        call: Any = model
        if how == "torch.compile":
            call = torch.compile(model, backend="aot_eager")
        elif how == "step":
            call = torch.compile(lambda given: model(given).mean().backward(), backend="aot_eager")
        elif how == "layer.compile()":
            model.layers[1].compile(backend="aot_eager")
        else:
            model.layers[1] = torch.compile(model.layers[1], backend="aot_eager")
        replaced = pytest.warns(RuntimeWarning, match="'layers.1' was added or replaced")
        with (
            replaced if how == "layer" else contextlib.nullcontext(),
            pytest.raises(UnsupportedModelError, match=r"compiled as one.*layer.compile\(\)"),
        ):
            call(x)


@pytest.mark.parametrize("planned", ["compile()"], indirect=True)
def test_compiling_a_compiled_stage_again_after_apply(planned: tuple[Any, torch.Tensor, Profile]) -> None:
    model, x, measured = planned
    compiled = model.layers[2]._compiled_call_impl
    with apply(model, plan_of(measured, "recompute")):
        model.layers[2].compile(backend="aot_eager")
        with pytest.raises(UnsupportedModelError, match="compiled anew"):
            model(x)
    model.layers[2]._compiled_call_impl = compiled


def test_a_region_over_several_stages_is_refused(eager: tuple[Any, torch.Tensor, Plan]) -> None:
    """A plan for stages that lie inside of what is compiled now belongs to another model."""
    _, _, plan = eager
    model, _ = build()
    model.layers[0].compile(backend="aot_eager")
    with pytest.raises(PlanMismatchError, match=r"with layers.0 compiled.*solve again"):
        apply(model, plan)


def test_estimates_know_compiled_stages(planned: tuple[Any, torch.Tensor, Profile]) -> None:
    model, x, measured = planned
    before = {name: t.clone() for name, t in model.state_dict().items()}
    plan = plan_of(measured, "recompute", "keep")
    assert estimate(model, x).peak_bytes == plan_of(measured, "keep").peak_bytes
    assert 0.99 * plan.peak_bytes <= estimate(model, x, plan=plan).peak_bytes <= plan.peak_bytes
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in before.items())


def test_absent_devices_want_the_uncompiled_model() -> None:
    model, x = build("compile()")
    with pytest.raises(UnsupportedModelError, match=r"'layers.0' is compiled.*uncompiled"):
        estimate(model, x, device="a100-40gb")
    with pytest.raises(UnsupportedModelError, match=r"'layers.0' is compiled.*uncompiled"):
        profile(model, x, device="a100-40gb")


def test_a_compiled_stage_that_writes_to_its_inputs_is_refused() -> None:
    torch._dynamo.reset()
    writes = Lambda(lambda self, x: torch.tanh(self.linear(x.mul_(2))), linear=nn.Linear(64, 64))
    model = nn.Sequential(nn.Linear(16, 64), writes, nn.Linear(64, 8)).train()
    model[1].compile(backend="aot_eager")
    with pytest.raises(UnsupportedModelError, match="'1' writes to its inputs"):
        profile(model, torch.randn(32, 16))


@dataclasses.dataclass
class Both:
    hidden: torch.Tensor
    aux: torch.Tensor


class Returning(Block):
    """Returns a plain object, for which the compiler's trees have no place."""

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> Any:
        y = super().forward(x)
        return Both(y, y.square().mean())


class Appending(Block):
    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> Any:
        y = super().forward(x)
        losses.append(y.square().mean())
        return y


class WithLosses(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(16, 64), times(2, kind), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, losses = self.stem(x), list[torch.Tensor]()
        for layer in self.layers:
            y = layer(x, losses)
            x = y.hidden if isinstance(y, Both) else y
            losses += [y.aux] if isinstance(y, Both) else []
        return self.head(x).square().mean() + sum(losses)


@pytest.mark.parametrize(
    ("kind", "why"), [(Returning, "returns a Both with tensors in it"), (Appending, "puts tensors into its arguments")]
)
def test_layers_with_outputs_that_a_replay_cannot_make(kind: Callable[[], nn.Module], why: str) -> None:
    torch._dynamo.reset()
    model, x = WithLosses(kind).train(), torch.randn(512, 16)
    plan = ckptplan.solve(model, inputs=x, budget="100%", compile=True, menus=False, time_limit_s=1.0)
    assert plan.fingerprint.compiled == ()
    assert any(why in note for note in plan.notes), plan.notes
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    with pytest.raises(UnsupportedModelError, match=f"compiled module 'layers.0' {why}.*leave this module uncompiled"):
        profile(model, x)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["as it is", "compile()"])
def test_a_part_of_a_block_that_the_model_calls_too_is_no_stage(how: str) -> None:
    torch._dynamo.reset()
    _, x = build()
    shared = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    model = InTurn(stem=nn.Linear(16, 64), layers=times(4, Block), final=shared, head=nn.Linear(64, 10))
    model.layers[0].norm = shared
    for layer in model.layers if how == "compile()" else ():
        layer.compile(backend="aot_eager")
    measured = traced(model, x)
    assert [s.name for s in measured.stages if not s.name.startswith("(")][:4] == [f"layers.{i}" for i in range(4)]
    check(model, plan_of(measured, "keep", "recompute"), x)
    torch._dynamo.reset()


def test_plans_know_the_backend() -> None:
    """Layers that another backend compiles save other bytes."""
    model, x = build("compile()")
    found = fingerprint(make_step(model, Training(x)))
    assert found.model.endswith("with layers.0, layers.1, layers.2, layers.3 compiled by aot_eager")
    with installed([PatchedForward(layer, lambda run, args, kwargs: run(*args, **kwargs)) for layer in model.layers]):
        assert fingerprint(make_step(model, Training(x))) == found
    for how, text in (
        ({}, "compiled"),
        ({"mode": "max-autotune-no-cudagraphs"}, "compiled with {'max_autotune': True"),
    ):
        for layer in model.layers:
            layer.compile(**how)
        other = fingerprint(make_step(model, Training(x)))
        assert other.model.partition("layers.3 ")[2].startswith(text)
        with pytest.raises(PlanMismatchError, match="aot_eager"):
            found.require(other)
    model.layers[1].compile(backend="aot_eager")
    mixed = fingerprint(make_step(model, Training(x)))
    model.layers[1].compile()
    model.layers[2].compile(backend="aot_eager")
    assert fingerprint(make_step(model, Training(x))) != mixed


@pytest.mark.parametrize("planned", ["compile()"], indirect=True)
def test_a_plan_with_compiled_stages_can_be_replayed_with_every_allocation(
    planned: tuple[Any, torch.Tensor, Profile],
) -> None:
    """What `solve` does on CUDA; the blocks add up to the profile's peak here."""
    model, x, measured = planned
    plan = plan_of(measured, "recompute", "swap")
    found = TrainingBytes(model, find_target(model)).reserved(make_step(model, Training(x)), plan)
    assert abs(found / plan.peak_bytes - 1) < 0.15  # with the update, without temporaries of eager operations


@pytest.mark.gpu
def test_compiled_stages_on_cuda() -> None:
    torch._dynamo.reset()
    model, x = build("compile()", backend="inductor")
    model, x = model.cuda(), x.cuda().repeat(64, 1)
    measured = profile(model, x)
    for action in ACTIONS:
        v = verify(model, plan_of(measured, action), x, repeats=1)
        assert v.gradients_equal, v.differing
        assert v.measured_peak_bytes <= v.predicted_peak_bytes
