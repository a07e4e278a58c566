"""Variants of compiled stages: mixed over layers, within the budget, with the gradients of the user's own code."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Made, scheduled
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook
from toy_modules import InTurn, times

import ckptplan
from ckptplan.core.errors import InvalidInputError, PlanMismatchError, UnsupportedModelError
from ckptplan.core.option import Option
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import Training
from ckptplan.core.stage import Stage
from ckptplan.profiling.bytes.traced import TracedStage
from ckptplan.profiling.profiler import _Lanes, profile, replayed_bytes
from ckptplan.profiling.target import find_target
from ckptplan.profiling.times.timing import Times
from ckptplan.profiling.values.variants import _spread
from ckptplan.runtime.handle import apply
from ckptplan.runtime.verify import verify
from ckptplan.training import variants
from ckptplan.training.compiled import CompiledForPlan, ran_compiled, uncompiled_call
from ckptplan.training.step import make_step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


class Block(nn.Module):
    """With dropout, whose numbers the bare knob draws again, and a buffer that forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def model_of(how: str = "compile()", **settings: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = InTurn(stem=nn.Linear(16, 64), layers=times(4, Block), head=nn.Linear(64, 100)).train()
    for i, layer in enumerate(model.layers):
        if how == "compile()":
            layer.compile(**settings)
        elif how == "torch.compile":
            model.layers[i] = torch.compile(layer, **settings)
    return model, torch.randn(512, 16)


@pytest.fixture(scope="module")
def planned() -> Iterator[tuple[Any, torch.Tensor, Profile]]:
    torch._dynamo.reset()
    model, x = model_of()
    yield model, x, profile(model, x)
    torch._dynamo.reset()


def named(measured: Profile, *names: str) -> Plan:
    """The named options in turn over the layers."""
    options = [s.keep for s in measured.stages]
    layers = [i for i, s in enumerate(measured.stages) if s.name.startswith("layers.")]
    for n, i in enumerate(layers):
        options[i] = measured.stages[i].option(names[n % len(names)])
    return scheduled(measured, options, ())


def variants_of(measured: Profile, stage: str = "layers.1") -> list[Option]:
    return [o for s in measured.stages if s.name == stage for o in s.options if o.ratio and not o.moves]


def check(model: nn.Module, plan: Plan, x: Any, slack: float = 0.01) -> None:
    v = verify(model, plan, x, repeats=1)
    assert v.gradients_equal, v.differing
    assert v.stats.runs == v.stats.planned_runs
    assert v.stats.swapped_out_bytes == v.stats.swapped_in_bytes == plan.host_bytes
    assert v.measured_peak_bytes <= plan.peak_bytes <= v.measured_peak_bytes * (1 + slack)


def test_each_distinct_stage_has_variants_that_hold_less(planned: Any) -> None:
    _, _, measured = planned
    assert any("outputs and gradients of the model's own compiled code, bit for bit" in n for n in measured.notes)
    for name in (f"layers.{i}" for i in range(4)):
        found = variants_of(measured, name)
        assert 1 <= len(found) <= 6
        keep = next(s for s in measured.stages if s.name == name).keep
        held = [sum(measured.storages[s].nbytes for s in option.held) for option in (keep, *found)]
        assert held == sorted(held, reverse=True)
        assert len(set(held)) == len(held)
        assert all(0 < option.ratio < 1 and option.action == "recompute" for option in found)


MIXES = (
    ("compiled-1",),
    ("compiled-2", "keep"),
    ("compiled-1", "compiled-2", "recompute"),
    ("compiled-1+swap", "swap", "compiled-2+swap", "keep"),
    ("recompute+swap", "compiled-2"),
)


@pytest.mark.parametrize("names", MIXES, ids="-".join)
def test_mixed_variants_give_the_gradients_of_the_model_as_it_was_compiled(
    planned: Any, names: tuple[str, ...]
) -> None:
    model, x, measured = planned
    check(model, named(measured, *names), x)


def test_layers_of_a_kind_share_what_is_compiled(planned: Any) -> None:
    """Nothing is compiled for a plan that isn't for its profile: once per kind and ratio."""
    model, x, measured = planned
    before = counters["stats"]["unique_graphs"]
    check(model, named(measured, "compiled-1", "compiled-2"), x)
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.long
def test_a_training_goes_on_as_without_a_plan(planned: Any) -> None:
    """Over steps, by another batch size than the profile's too, and as before when the plan is gone."""
    model, x, measured = planned
    start = {name: t.clone() for name, t in model.state_dict().items()}

    differences: dict[str, int] = {}

    def trained(plan: Plan | None) -> dict[str, torch.Tensor]:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = None if plan is None else apply(model, plan)
        torch.manual_seed(1)
        for step in range(4):
            model(x if step < 3 else x[:384]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            differences.update(handle.stats().differences)
            handle.remove()
        return {name: t.clone() for name, t in model.state_dict().items()}

    plain = trained(None)
    with pytest.warns(RuntimeWarning, match=r"'layers\.0' was compiled again, for inputs of another shape"):
        under = trained(named(measured, "compiled-2", "compiled-1"))
    model.load_state_dict(start)
    assert [name for name in plain if not torch.equal(plain[name], under[name])] == []
    assert differences.keys() == {"recompiled"}  # a batch of another size


def test_where_a_variant_cannot_be_compiled_the_model_runs_as_it_was_compiled(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, measured = planned
    plan = named(measured, "compiled-1")
    gradients = [g.clone() for g in _gradients(model, x, None)[0]]
    monkeypatch.setattr(variants, "_variants", [])
    monkeypatch.setattr(variants, "_variant_of", weakref.WeakKeyDictionary())

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise torch._dynamo.exc.Unsupported("no")

    monkeypatch.setattr(variants, "uncompiled_call", lambda module: fails)
    monkeypatch.setattr(torch, "compile", lambda call, **how: call)
    with pytest.warns(RuntimeWarning, match="'layers.0' runs as the model was compiled"):
        got, differences = _gradients(model, x, plan)
    assert all(map(torch.equal, gradients, got))
    assert differences == {"compiled": 4}


def _gradients(model: Any, x: torch.Tensor, plan: Plan | None) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    torch.manual_seed(1)
    handle = None if plan is None else apply(model, plan)
    found = torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
    differences = {} if handle is None else dict(handle.stats().differences)
    if handle is not None:
        handle.remove()
    return found, differences


def test_replays_of_a_plan_from_another_run_note_its_variants_anew(planned: Any) -> None:
    model, x, measured = planned
    plan = named(measured, "compiled-1", "compiled-2+swap")
    replayed = replayed_bytes(make_step(model, Training(x)), plan, find_target(model))
    assert 0.98 * plan.peak_bytes <= replayed + measured.resident_bytes <= plan.peak_bytes


@pytest.mark.long
def test_a_plan_from_a_file_and_in_an_evaluation(planned: Any, tmp_path: Path) -> None:
    model, x, measured = planned
    plan = named(measured, "compiled-2")
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert {choice.ratio for choice in again.choices} == {0.0, variants_of(measured)[1].ratio}
    with apply(model, again):
        model.eval()
        with torch.no_grad():
            got = model(x)
        model.train()
    model.eval()
    with torch.no_grad():
        assert torch.equal(got, model(x))
    model.train()


@pytest.mark.usefixtures("few_variants")
@pytest.mark.long
def test_bf16_under_autocast_is_within_rounding() -> None:
    torch._dynamo.reset()
    model, x = model_of("torch.compile")
    measured = profile(model, x, amp="bfloat16")
    assert variants_of(measured, measured.stages[1].name)
    assert any("gradients within 2% of their largest element" in note for note in measured.notes)
    plan = named(measured, "compiled-1", "compiled-2")

    def ran(plan: Plan | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        torch.manual_seed(1)
        handle = None if plan is None else apply(model, plan)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        gradients = torch.autograd.grad(output.float().square().mean(), [*model.parameters()])
        if handle is not None:
            handle.remove()
        return output.detach(), [*gradients]

    (output, gradients), (other, others) = ran(None), ran(plan)
    assert torch.equal(output, other)
    for a, b in zip(gradients, others, strict=True):
        assert (a - b).abs().max() <= 2e-2 * a.abs().max()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"backend": "aot_eager"}, "another backend than inductor"), ({"dynamic": True}, "dynamic=True")],
    ids=["backend", "dynamic"],
)
@pytest.mark.long
def test_what_has_no_variants_says_so(settings: dict[str, Any], why: str) -> None:
    torch._dynamo.reset()
    model, x = model_of(**settings)
    measured = profile(model, x)
    assert any(why in note for note in measured.notes)
    assert not variants_of(measured)
    torch._dynamo.reset()


@pytest.mark.long
def test_without_menus_nothing_more_is_compiled() -> None:
    torch._dynamo.reset()
    model, x = model_of(backend="aot_eager")
    assert not any("variants" in note for note in profile(model, x, menus=False).notes)
    torch._dynamo.reset()


def test_a_plan_with_variants_needs_the_compiled_model(planned: Any) -> None:
    _, _, measured = planned
    eager, _ = model_of("")
    with pytest.raises(PlanMismatchError, match="compile"):
        apply(eager, named(measured, "compiled-1"))


def test_ratios_are_spread_over_the_bytes() -> None:
    listed = {0.9: 90, 0.8: 80, 0.7: 70, 0.6: 60, 0.5: 50, 0.4: 40, 0.3: 30, 0.2: 20, 0.1: 20, 0.01: 10}
    assert _spread(listed, 100) == [0.9, 0.7, 0.6, 0.4, 0.3, 0.01]
    assert _spread(listed, 45) == [0.4, 0.3, 0.2, 0.01]
    assert _spread({0.9: 100, 0.5: 99}, 100) == []


def test_sizes_that_differ_from_kind_to_kind_are_not_dynamic() -> None:
    """Of dynamic sizes there are no variants, and compiled convolutions fail in backward."""
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(inputs)
        return graph.forward

    for rows in (4, 6, 10):
        layer = nn.Linear(8, rows)
        torch.compile(uncompiled_call(layer), backend=backend)(layer, torch.ones(rows, 8))
    assert len(seen) >= 9
    assert not any(isinstance(size, torch.SymInt) for t in seen for size in (t, *t.shape))


@pytest.mark.parametrize("ratio", [-0.5, 1.5, float("nan"), "half"])
def test_ratios_are_checked(ratio: Any) -> None:
    with pytest.raises(InvalidInputError, match="ratio"):
        Option("compiled-1", (), (), 0, 0, recomputes=True, ratio=ratio)
    with pytest.raises(InvalidInputError, match="ratio"):
        Decision("recompute", ratio=ratio)
    with pytest.raises(InvalidInputError, match="ratio"):
        dataclasses.replace(Decision("keep"), ratio=0.5)


def is_compiled(model: nn.Module) -> bool:
    return any("_compiled_call_impl" in module.__dict__ for module in model.modules())


@pytest.mark.usefixtures("few_variants")
@pytest.mark.long
def test_layers_are_compiled_for_a_plan_and_for_no_longer(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model, x = model_of("")
    plan = ckptplan.solve(model, inputs=x, budget="40%", actions=("keep", "recompute"), compile=True)
    assert plan.fingerprint.compiled == tuple(f"layers.{i}" for i in range(4))  # what stands alone has nothing to fuse
    assert "4 layers of 1 kind are compiled" in plan.notes
    assert any(choice.ratio for choice in plan.choices)
    assert not is_compiled(model)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    check(model, loaded, x)
    assert not is_compiled(model)
    handle = apply(model, loaded)
    assert is_compiled(model)
    model(x).mean().backward()
    assert not handle.stats().differences
    handle.remove()
    assert not is_compiled(model)
    torch._dynamo.reset()


class Broken(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.usefixtures("few_variants")
@pytest.mark.long
def test_layers_that_the_compiler_cannot_take_whole_stay_as_they_are() -> None:
    torch._dynamo.reset()
    model, x = model_of("")
    model.layers[2] = Broken()
    plan = ckptplan.solve(model, inputs=x, budget="60%", compile=True, menus=False)
    assert plan.fingerprint.compiled == ("layers.0", "layers.1", "layers.3")
    assert any("'layers.2'" in note and "graph breaks" in note for note in plan.notes)
    torch._dynamo.reset()


def test_compile_needs_a_model_and_its_device() -> None:
    model, x = model_of("")
    with pytest.raises(InvalidInputError, match="compile=1"):
        ckptplan.solve(model, 1, inputs=x, compile=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="compile=1"):
        ckptplan.apply(model, budget_gb=1, compile=1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="compile=True needs NVIDIA A100"):
        ckptplan.solve(model, 1, inputs=x, compile=True, device="a100-40gb")
    chain = Profile.from_chain([0.1], [0.1], [1], [1], input_bytes=1)
    with pytest.raises(InvalidInputError, match="compile can't be given with a profile"):
        ckptplan.solve(chain, 1, compile=True)


def test_code_that_saves_less_may_be_faster_than_the_models_own() -> None:
    """The stage then takes the time of the fastest, and all else as much more."""
    own = Option("keep", (), (), 0, 0)
    variant = Option("compiled-1", (), (), 0, 0, recomputes=True, ratio=0.5)
    again = Option("recompute", (), (), 0, 0, recomputes=True)
    stage = TracedStage("a", "kind", (own, variant, again), (), None, has_backward=True)

    def timed(less_s: float) -> Stage:
        times = Times({"kind": 1.0}, {"kind": 2.0}, {("kind", 0.5): -less_s, ("kind", ()): 1.0})
        return _Lanes(times).timed(stage, 0, ())

    faster, same = timed(0.5), timed(0.01)  # what may be noise doesn't count
    assert faster.forward_s + faster.backward_s == 2.5
    assert [(o.recompute_s, o.overhead_s) for o in faster.options] == [(0.0, 0.5), (0.0, 0.0), (1.0, 0.5)]
    assert same.forward_s + same.backward_s == 3.0
    assert [(o.recompute_s, o.overhead_s) for o in same.options] == [(0.0, 0.0), (0.0, 0.0), (1.0, 0.0)]


def test_the_compiler_leaves_pythons_frames_alone(planned: Any) -> None:
    """An error inside of the compiler would leave its hook there, and callers then hold what they pass."""

    class Passed:
        pass

    def drops(value: Passed) -> bool:
        ref = weakref.ref(value)
        del value
        return ref() is None

    dropped = drops(Passed())  # pytest itself holds what is in an assertion
    assert dropped


@pytest.mark.usefixtures("few_variants")
@pytest.mark.parametrize("part", ["layers.2", "layers.2.down"])
@pytest.mark.long
def test_layers_with_hooks_are_not_compiled(part: str) -> None:
    """The compiler doesn't ask for hooks again, and would run another layer's code."""
    torch._dynamo.reset()
    model, x = model_of("")
    plan = ckptplan.solve(model, inputs=x, budget="60%", compile=True, menus=False)
    hook = model.get_submodule(part).register_forward_hook(lambda module, args, output: output * 3)
    with pytest.raises(PlanMismatchError, match="has hooks"):
        apply(model, plan)
    assert not is_compiled(model)
    again = ckptplan.solve(model, inputs=x, budget="60%", compile=True, menus=False)
    assert again.fingerprint.compiled == ("layers.0", "layers.1", "layers.3")
    assert any("'layers.2'" in note and "has hooks" in note for note in again.notes)
    hook.remove()
    torch._dynamo.reset()


@pytest.mark.usefixtures("few_variants")
@pytest.mark.long
def test_a_plan_replaces_another_for_which_layers_were_compiled() -> None:
    torch._dynamo.reset()
    model, x = model_of("")
    first, second = (
        ckptplan.solve(model, inputs=x, budget=budget, compile=True, menus=False) for budget in ("40%", "90%")
    )
    handle = ckptplan.apply(model, first)
    model(x).mean().backward()
    under = ckptplan.solve(model, inputs=x, budget="70%", compile=True, menus=False, accumulate=False)
    assert under.fingerprint.compiled == first.fingerprint.compiled
    model.zero_grad()
    handle = ckptplan.apply(model, second, replace=True)
    assert is_compiled(model)
    model(x).mean().backward()
    handle.remove()
    assert not is_compiled(model)
    torch._dynamo.reset()


class Two(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(y), y.square()

    def compile(self, optimizer: object) -> None:  # type: ignore[override]
        raise AssertionError("the layer's own, of another meaning")


@pytest.mark.usefixtures("few_variants")
@pytest.mark.long
def test_an_output_without_a_gradient_counts_as_zeros_in_backward() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = times(3, Two)
    model: Any = Made(lambda self, x: functools.reduce(lambda x, layer: layer(x)[0], self.layers, x), layers=layers)
    x = torch.randn(512, 64)
    plan = ckptplan.solve(model.train(), inputs=x, budget="100%", compile=True)
    assert plan.fingerprint.compiled == ("layers.0", "layers.1", "layers.2")
    check(model, plan, x)
    measured = verify(model, plan, x, repeats=1).measured_peak_bytes
    tight = ckptplan.solve(model, budget_gb=measured / 2**30, inputs=x, compile=True, actions=("keep", "recompute"))
    check(model, tight, x)
    torch._dynamo.reset()


@pytest.mark.usefixtures("few_variants")
@pytest.mark.long
def test_many_kinds_of_layers_are_traced_apart() -> None:
    """Not all by one code object, which the compiler gives up after some."""
    from ckptplan.training.partitioner import saved_bytes  # whose imports warn

    torch._dynamo.reset()
    for width in range(8, 8 + 2 * torch._dynamo.config.recompile_limit):
        block = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        assert saved_bytes(block, (torch.randn(4, width),), {}, (0.5,)).keys() == {0.5}
    torch._dynamo.reset()


class Scaled(Block):
    """The compiler compiles it anew for each of its scales."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Leaving(Block):
    """Leaves a part of its loss in an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.auxiliary = y.square().mean()
        return y


@pytest.mark.usefixtures("few_variants")
@pytest.mark.long
def test_notes_say_which_layers_are_compiled() -> None:
    torch._dynamo.reset()
    model, x = model_of("")
    model.layers = nn.ModuleList([*map(Scaled, (2, 3, 4)), Leaving()])
    with torch._dynamo.config.patch(recompile_limit=2):
        plan = ckptplan.solve(model, inputs=x, budget="60%", compile=True, menus=False)
    assert plan.fingerprint.compiled == ("layers.0", "layers.1")
    for text in (
        "2 layers of 1 kind are compiled",
        "'layers.2' and its like aren't compiled: the compiler has given it up (TORCH_LOGS=recompiles tells why)",
        "'layers.3' and its like aren't compiled: it leaves tensors with graphs in attributes",
    ):
        assert text in plan.notes
    check(model, plan, x, slack=0.05)  # the attribute's graph goes sooner than one of the loss
    torch._dynamo.reset()


NO_COMPILER = """
import torch, ckptplan
from torch.nn import GELU, Linear, Sequential
model = Sequential(*(Sequential(Linear(64, 256), GELU(), Linear(256, 64)) for _ in range(2)))
plan = ckptplan.solve(model, inputs=torch.ones(256, 64), budget="60%", compile=True)
assert plan.fingerprint.compiled == ()
assert any("No working C++ compiler found" in note for note in plan.notes), plan.notes
assert ckptplan.verify(model, plan, torch.ones(256, 64), repeats=1).gradients_equal
"""


@pytest.mark.long
def test_without_a_working_compiler_the_layers_stay_as_they_are() -> None:
    """In a process of its own: an error of the compiler's leaves its hook in Python's frames."""
    without = {"CXX": "/nonexistent/c++", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    environment = {**os.environ, **without, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", NO_COMPILER], check=True, env=environment, timeout=300)


@pytest.mark.long
def test_a_step_that_differentiates_its_forward_is_planned_uncompiled() -> None:
    model, x = model_of("")

    def step() -> Any:
        given = x.clone().requires_grad_()
        loss = model(given).square().mean()
        (gradient,) = torch.autograd.grad(loss, given, create_graph=True)
        return loss + gradient.square().sum()

    plan = ckptplan.solve(model, step=step, budget="100%", compile=True)
    assert plan.fingerprint.compiled == ()
    assert any("no layer is compiled: the step's forward runs a backward of its own" in note for note in plan.notes)


@pytest.mark.usefixtures("few_variants")
@pytest.mark.long
def test_layers_compiled_for_a_plan_run_as_they_are_where_compiled_code_would_differ() -> None:
    torch._dynamo.reset()
    model, x = model_of("")
    for layer in model.layers:
        layer.drop.p = 0.0  # whose numbers compiled code draws otherwise
    plan = ckptplan.solve(model, inputs=x, budget="60%", compile=True, menus=False)
    plain = ckptplan.solve(model, inputs=x, budget="60%", menus=False)
    handle = ckptplan.apply(model, plan)
    model(x).mean().backward()
    before = counters["stats"]["unique_graphs"]
    for rows in (64, 128, 192):  # an evaluation
        with torch.no_grad():
            model(x[:rows])
    with handle.paused():
        assert not is_compiled(model)
        hook = model.layers[0].register_forward_hook(lambda *args: None)
    hook.remove()
    assert ckptplan.estimate(model, x, accumulate=False).peak_bytes > 0
    assert counters["stats"]["unique_graphs"] == before

    def ran() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    hook = model.layers[1].down.register_forward_hook(lambda module, args, output: output * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = ran()
    assert any("'layers.1' was compiled and runs uncompiled: it has hooks" in str(w.message) for w in caught)
    handle.remove()
    for a, b in zip(ours, ran(), strict=True):  # compiled layers round otherwise
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    hook.remove()
    handle = ckptplan.apply(model, plan)
    hook = model.layers[1].register_forward_hook(lambda *args: None)
    with pytest.warns(RuntimeWarning, match="'layers.1' was compiled and runs uncompiled"):  # from the first step on
        ran()
    handle.remove()
    hook.remove()
    handle = ckptplan.apply(model, plan)
    handle = ckptplan.apply(model, plain, replace=True)
    assert not is_compiled(model)
    model.layers[0].compile()
    handle.remove()
    assert is_compiled(model)  # by the user
    torch._dynamo.reset()


def test_layers_compiled_for_a_plan_stay_compiled() -> None:
    """After an input that the layer itself refuses, and behind hooks of all modules."""
    torch._dynamo.reset()
    layer = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    call = CompiledForPlan(layer)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        call(torch.ones(4, 15))
    assert ran_compiled(call(torch.ones(4, 16)))
    seen: list[Any] = []
    hook = register_module_forward_hook(lambda module, args, output: seen.append(module))
    assert not ran_compiled(call(torch.ones(4, 16)))
    assert len(seen) == 3
    hook.remove()
    assert ran_compiled(call(torch.ones(4, 16)))
    torch._dynamo.reset()


@pytest.mark.usefixtures("few_variants")
@pytest.mark.long
def test_larger_inputs_are_planned_for_with_compiled_layers() -> None:
    torch._dynamo.reset()
    model, x = model_of("")
    plan = ckptplan.solve(model, inputs=x[:256], budget="50%", compile=True, time_limit_s=1.0)
    handle = ckptplan.apply(model, plan)
    with pytest.warns(RuntimeWarning, match=r"planned again for \[320, "):
        output = model(x[:300])
    nodes: list[Any] = [output.grad_fn]
    for node in nodes:
        nodes += [found for found, _ in node.next_functions if found is not None and found not in nodes]
    assert any(node.name().startswith("CompiledFunction") for node in nodes)
    output.mean().backward()
    assert handle.plan.fingerprint.compiled == plan.fingerprint.compiled
    assert len(handle.replans) == 1
    handle.remove()
    assert not is_compiled(model)
    torch._dynamo.reset()
