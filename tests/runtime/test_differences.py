"""Steps that differ from the planned one: trained as without a plan, warned of once, counted, and errors if strict."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Transformer, assert_same, decided, gradients, plan_of, states_of_swapped
from torch import nn

from ckptplan.core.errors import PlanMismatchError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.profiling.profiler import profile
from ckptplan.runtime.guard import unplanned
from ckptplan.runtime.guard.differences import Differences
from ckptplan.runtime.handle import apply
from ckptplan.runtime.swap.record import Whereabouts
from ckptplan.training.measure import recorded_allocations

WIDTH, BATCH = 64, 32

pytestmark = pytest.mark.usefixtures("no_leak")

Step = Callable[[nn.Module, torch.Tensor, int], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH), nn.Dropout(0.1))
        self.masked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.masked:
            mask = torch.sigmoid(torch.randn_like(y).repeat(1, 4))
            y = (y.repeat(1, 4) * mask).unflatten(1, (4, WIDTH)).sum(1)
        return torch.tanh(y)


class Model(nn.Module):
    """A block that is called a number of times first, more blocks, and heads; one layer may be frozen."""

    def __init__(self, *, first: int = 1, middle: int = 1, frozen: bool = False) -> None:
        super().__init__()
        self.first_calls, self.middle_calls = first, middle
        self.first = Block()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].inner[2].requires_grad_(not frozen)
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 8), "b": nn.Linear(WIDTH, 8)})

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.first_calls):
            x = self.first(x)
        x = self.embed(x)
        for _ in range(self.middle_calls):
            x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](x)

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, head: str = "a", *, more: bool = False
    ) -> Any:
        features = self.features(x)
        y = self.heads[head](features)
        return (y, features) if more else y if labels is None else (y - labels).square()


def plain(**how: Any) -> tuple[nn.Module, torch.Tensor]:
    return Model(**how), torch.randn(BATCH, WIDTH)


def evaluating() -> tuple[nn.Module, torch.Tensor]:
    return Model().eval(), torch.randn(BATCH, WIDTH)


frozen = functools.partial(plain, frozen=True)
called_twice = functools.partial(plain, first=2, middle=2)


def text() -> tuple[nn.Module, torch.Tensor]:
    return Transformer(depth=3), torch.randint(0, 50, (4, 16))


Make = Callable[[], tuple[nn.Module, torch.Tensor]]


def built(make: Make) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    return make()


@functools.cache
def chain(make: Make) -> Profile:
    return profile(*built(make), menus=False)


@functools.cache
def planned(make: Make, what: str) -> Plan:
    plan = decided(chain(make), what)
    if what == "selective":  # the first product of each stage is saved
        modules = dict(built(make)[0].named_modules())
        ops = [() if isinstance(modules.get(n.partition("#")[0]), nn.Dropout) else (0,) for n in plan.stages]
        pairs = zip(plan.choices, ops, strict=True)
        choices = [dataclasses.replace(c, ops=found) if c.action == "recompute" else c for c, found in pairs]
        plan = dataclasses.replace(plan, choices=tuple(choices), saved_bytes=())
    return plan


def training(model: nn.Module, x: torch.Tensor, step: Step, steps: int) -> list[Any]:
    """Gradients and parameters of each step, and the generator's next numbers."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    out: list[Any] = []
    for k in range(steps):
        optimizer.zero_grad()
        step(model, x, k)
        out.append(gradients(model))
        optimizer.step()
    return [*out, [p.detach().clone() for p in model.parameters()], torch.rand(2)]


def differs(
    make: Make,
    plan: Plan,
    step: Step,
    kinds: set[str],
    match: str,
    *,
    steps: int = 5,
    counts: dict[str, int] | None = None,
) -> None:
    """The training goes on bitwise, one warning for each of `kinds`; an error that matches with `strict`."""
    want = training(*built(make), step, steps)
    model, x = built(make)
    with apply(model, plan, check="always") as handle, warnings.catch_warnings(record=True, action="always") as told:
        assert_same(training(model, x, step, steps), want)
        found = handle.stats().differences
    assert found.keys() == kinds
    assert counts is None or {kind: found[kind] for kind in counts} == counts
    texts = [str(each.message) for each in told if each.category is RuntimeWarning]
    assert len(texts) == len(kinds), texts
    assert all(each.startswith("the peak may exceed the budget: ") for each in texts)
    model, x = built(make)
    with apply(model, plan, strict=True), pytest.raises(PlanMismatchError, match=match):
        training(model, x, step, steps)
    assert "forward" not in vars(model)


def run(model: nn.Module, x: torch.Tensor, **more: Any) -> None:
    model(x, **more).square().mean().backward()


def tight(plan: Plan) -> Plan:
    """The plan with a budget of no more than its peak."""
    return dataclasses.replace(
        plan, budget_bytes=plan.peak_bytes, forward_peak_bytes=plan.peak_bytes, between_bytes=plan.peak_bytes // 2
    )


# What differs


def larger_batches(model: nn.Module, x: torch.Tensor, k: int) -> None:
    run(model, torch.cat([x, x]) if k in (2, 3) else x[: BATCH - k])


def longer_sequences(model: nn.Module, x: torch.Tensor, k: int) -> None:
    run(model, torch.cat([x, x.flip(1)], 1)[: 4 - k % 2] if k > 1 else x)


def masks(model: Any, x: torch.Tensor, k: int) -> None:
    """Stages save more from some step on."""
    for block in model.blocks[:2]:
        block.masked = k in (2, 4)
    run(model, x)


def more_calls(model: Any, x: torch.Tensor, k: int) -> None:
    model.first_calls = (1, 2, 1, 3, 1)[k]
    run(model, x)


def more_calls_of_what_is_called_twice(model: Any, x: torch.Tensor, k: int) -> None:
    model.middle_calls = (2, 3, 1, 4, 2)[k]
    run(model, x)


def head_in_the_loss(model: Any, x: torch.Tensor, k: int) -> None:
    hidden: list[torch.Tensor] = []
    hook = model.heads["a"].register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    loss = model(x).square().mean()
    hook.remove()
    if k % 2:
        for part in hidden[0].chunk(2):
            loss = loss + model.heads["a"](part).sin().mean()
    loss.backward()


def two_forwards(model: nn.Module, x: torch.Tensor, k: int) -> None:
    losses = [model(part).square().mean() for part in ((x, x[:7]) if k > 1 else (x,))]
    sum(losses).backward()  # type: ignore[union-attr]


def more_returned(model: nn.Module, x: torch.Tensor, k: int) -> None:
    output = model(x, more=k > 2)
    (output[0] if k > 2 else output).square().mean().backward()


def forwards_without_gradients(model: nn.Module, x: torch.Tensor, k: int) -> None:
    """A regulariser or a teacher beside a forward that waits; none where the graph before is gone, or ran backward."""
    model(x)
    with torch.no_grad():
        model(x)
    loss = model(x).square().mean()
    if k > 1:
        with torch.no_grad():
            wanted = model(x[:7])
        loss = loss + wanted.detach().mean()
        del wanted
    loss.backward()
    with torch.no_grad():
        model(x)


def micro_batches(model: nn.Module, x: torch.Tensor, k: int) -> None:
    for part in x.chunk(3):
        run(model, part)


def thawed(model: Any, x: torch.Tensor, k: int) -> None:
    model.blocks[1].inner[2].requires_grad_(k in (2, 3))
    run(model, x)
    assert (model.blocks[1].inner[2].weight.grad is not None) == (k in (2, 3))


def cut_at_first(model: Any, x: torch.Tensor, k: int) -> None:
    """By a `detach` behind a stage: what the stages save isn't planned then."""
    hook = model.first.register_forward_hook(lambda module, args, output: output.detach() if k % 3 == 0 else None)
    run(model, x)
    hook.remove()


def training_mode(model: nn.Module, x: torch.Tensor, k: int) -> None:
    run(model.train(k > 1), x)


def penalty(model: nn.Module, x: torch.Tensor, k: int) -> None:
    x = x.clone().requires_grad_(k > 1)
    loss = model(x).square().mean()
    if k > 1:
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum()
    loss.backward()


def graph_that_stays(model: nn.Module, x: torch.Tensor, k: int) -> None:
    output = model(x)
    output.square().mean().backward(retain_graph=k > 2)
    if k > 2:
        output.sin().mean().backward()


def transformed(model: nn.Module, x: torch.Tensor, k: int) -> None:
    if k % 2:
        p = {name: each.detach() for name, each in model.named_parameters()}
        found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().mean())(p)
        for name, each in model.named_parameters():
            each.grad = found.get(name)
    else:
        run(model, x)


def cast(model: nn.Module, x: torch.Tensor, k: int) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=k > 1):
        run(model, x)


def with_labels(model: nn.Module, x: torch.Tensor, k: int) -> None:
    run(model, x, labels=torch.ones(BATCH, 8) if k > 1 else None)


def other_head(model: nn.Module, x: torch.Tensor, k: int) -> None:
    run(model, x, head="b" if k > 1 else "a")


def replaced(model: Any, x: torch.Tensor, k: int) -> None:
    if k == 2:
        model.blocks[1] = copy.deepcopy(model.blocks[1])
        vars(model.blocks[1]).pop("forward", None)
    run(model, x)


@dataclasses.dataclass(frozen=True)
class Case:
    """Steps of a model that differ from its planned one; `saved`: swapped stages save more than planned."""

    step: Step
    kinds: dict[str, int | None]
    match: str
    whats: tuple[str, ...]
    make: Make = plain
    saved: bool = False
    tight: bool = False


CASES = (
    Case(larger_batches, {"stage": None}, "solve again with the largest shapes", ("swap", "segment"), saved=True),
    Case(longer_sequences, {"stage": None}, "solve again", ("recompute+swap", "selective"), text, saved=True),
    Case(masks, {"saved": 4}, "another path than the one profiled", ("keep", "swap", "recompute", "segment")),
    Case(more_calls, {"calls": 12}, "is called more than the 1 times a step", ("swap", "segment")),
    Case(more_calls_of_what_is_called_twice, {"calls": 6}, "more than the 2 times", ("recompute",), called_twice),
    Case(head_in_the_loss, {"calls": 4}, "'heads.a' is called more", ("keep", "segment")),
    Case(two_forwards, {"forwards": 3}, "a forward begins while 1 before it had no", ("swap", "segment"), tight=True),
    Case(more_returned, {"returned": 2}, "returns 2 tensors, .* more than the 1 of the", ("recompute",), tight=True),
    Case(forwards_without_gradients, {"beside": 3}, "runs while a forward waits for its backward", ("recompute",)),
    Case(micro_batches, {"gradients": 10}, "exist at the start of this forward", ("keep", "selective"), tight=True),
    Case(thawed, {"thawed": 2}, "was frozen when the plan", ("swap", "segment"), frozen, saved=True),
    Case(cut_at_first, {"attached": 3}, "the graph of stage 'first", ("swap", "segment")),
    Case(training_mode, {"mode": None}, "made for evaluation mode", ("swap", "recompute"), evaluating, saved=True),
    Case(penalty, {"graph": 3}, "makes a graph of its own", ("recompute+swap", "segment")),
    Case(graph_that_stays, {"graph": 2}, "a backward keeps its graph", ("swap", "segment"), tight=True),
    Case(transformed, {"transform": None}, r"inside a transform of torch.func", ("swap", "segment")),
    Case(cast, {"casts": None, "autocast": None}, "under autocast to bfloat16", ("swap", "selective"), saved=True),
    Case(with_labels, {"inputs": None}, "the model gets .*labels", ("recompute",)),
    Case(other_head, {"module": None}, "'heads.b' runs", ("swap",)),
    Case(replaced, {"new": None}, "module 'blocks.1' was added or replaced", ("recompute",)),
)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("case", "what"), [pytest.param(c, what, id=f"{c.step.__name__}-{what}") for c in CASES for what in c.whats]
)
@pytest.mark.long(
    but=[
        "masks-keep",
        "masks-swap",
        "masks-recompute",
        "more_calls-swap",
        "head_in_the_loss-keep",
        "two_forwards-swap",
        "thawed-segment",
        "forwards_without_gradients-recompute",
        "micro_batches-keep",
        "cut_at_first-swap",
        "penalty-segment",
        "graph_that_stays-swap",
        "transformed-swap",
        "cast-swap",
        "other_head-swap",
    ]
)
def test_steps_that_differ(case: Case, what: str) -> None:
    plan = planned(case.make, what)
    if "module" in case.kinds:
        plan = dataclasses.replace(plan, outside=())
    if case.tight:
        plan = tight(plan)
    kinds = {*case.kinds, *(["saved"] if case.saved and "swap" in what else [])}
    counts = {kind: count for kind, count in case.kinds.items() if count is not None}
    differs(case.make, plan, case.step, kinds, case.match, counts=counts)


@pytest.mark.parametrize("what", ["swap", "segment"])
@pytest.mark.long("segment")
def test_steps_that_fit_differ_in_nothing(what: str) -> None:
    """A graph that stays, and the first stage called again behind a forward, which may begin another step."""

    def step(model: Any, x: torch.Tensor, k: int) -> None:
        graph_that_stays(model, x, k + 2)
        loss = model(x).square().mean()
        if k % 2:
            loss = loss + model.first(x[: BATCH // 2]).sin().mean()
        loss.backward()

    plan = planned(plain, what)
    want = training(*built(plain), step, 4)
    model, x = built(plain)
    with apply(model, dataclasses.replace(plan, budget_bytes=10 * plan.peak_bytes), strict=True):
        assert_same(training(model, x, step, 4), want)


def test_steps_that_are_no_larger_differ_in_nothing() -> None:
    model, x = built(frozen)
    with apply(model, dataclasses.replace(planned(frozen, "swap"), outside=()), strict=True):
        run(model, x)
        model(x=x).square().mean().backward()
        run(model, x[:3], head="a")
        with torch.no_grad():
            model(x, torch.randn(BATCH, 8), "b")
        model.blocks.requires_grad_(False)
        run(model, x.clone().requires_grad_())


class Casting(Model):
    """Turns autocast on by itself, as accelerate has a model do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(*args, **kwargs).float()


@pytest.mark.parametrize("kind", [Model, Casting])
@pytest.mark.long
def test_a_plan_for_autocast(kind: type[Model]) -> None:
    model, x = kind(), torch.randn(BATCH, WIDTH)
    plans = {}
    for amp in (None, "bfloat16"):
        measured = profile(model, x, menus=False, amp=amp)
        plans[amp] = plan_of(measured, ["keep"] * len(measured.stages))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()

    def told(text: str) -> Any:
        return pytest.warns(RuntimeWarning, match=text)

    with apply(model, plans["bfloat16"], strict=True):
        step()
    with apply(model, plans[None]) as handle, told(r"under autocast to bfloat16, and .* solve with amp='bfloat16'"):
        step()
    assert handle.stats().differences["autocast"] == 1
    with apply(model, plans["bfloat16"]) as handle:
        if kind is Casting:
            run(model, x)
        else:
            with told("without autocast, and .* under autocast to bfloat16; solve without"), told("up to .* bfloat16"):
                run(model, x)
    with apply(model, plans["bfloat16"]), told("autocast is still on when backward begins"):
        cast(model, x, 2)


# What stages save


def held_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that are there when a forward has ended and weren't before."""
    kept: list[Any] = []
    nbytes = sum(nbytes for _, nbytes in recorded_allocations(lambda: kept.append(model(x).sum()))[0])
    kept[0].backward()
    model.zero_grad()
    return nbytes


def test_what_swapped_stages_save_beyond_the_plan_leaves() -> None:
    model, x = built(plain)
    plan = planned(plain, "swap")
    mask_bytes = 4 * BATCH * 4 * WIDTH

    def with_masks(masked: bool) -> int:
        for block in model.blocks[:2]:
            block.masked = masked
        return held_bytes(model, x)

    without, kept = with_masks(False), with_masks(True)
    assert kept - without >= 2 * mask_bytes  # without a plan they stay
    with apply(model, plan, check="off") as handle:
        as_planned = with_masks(False)
        before = handle.stats()
        with pytest.warns(RuntimeWarning, match="another path"):
            assert with_masks(True) <= as_planned
        left = handle.stats().since(before)
        assert left.swapped_out_bytes >= before.swapped_out_bytes + 2 * mask_bytes
        assert left.swapped_in_bytes == left.swapped_out_bytes
        assert with_masks(False) == as_planned


# Calls


def test_what_a_later_call_saves_has_left_when_the_forward_ends() -> None:
    """Also where the stage at which it is released as planned has run before that call."""
    plan = planned(plain, "swap")
    at = plan.stages.index("blocks.0")
    later = dataclasses.replace(plan.choices[at].transfers[0], release=at + 1, prefetch=at + 1)
    choices = [*plan.choices[:at], dataclasses.replace(plan.choices[at], transfers=(later,)), *plan.choices[at + 1 :]]
    model, x = built(plain)
    features = model.features
    model.features = lambda x: model.blocks[0](features(x))
    with apply(model, dataclasses.replace(plan, choices=tuple(choices)), check="off") as handle:
        with pytest.warns(RuntimeWarning, match="'blocks.0' is called more than the 1 times"):
            loss = model(x).sum()
        assert states_of_swapped(handle) == {Whereabouts.AWAY}
        loss.backward()


# The record


def test_a_kind_is_warned_of_once_for_each_plan() -> None:
    differences = Differences("warn")
    with pytest.warns(RuntimeWarning, match="the peak may exceed the budget: one"):
        differences.note("a", "one")
    for again in ("one", "one again"):
        differences.note("a", again)
    with pytest.warns(RuntimeWarning, match="two"):
        differences.note("b", "two")
    assert (differences.counts, differences.unplanned) == ({"a": 3, "b": 1}, {"a", "b"})
    differences.plan_again()
    assert (differences.counts, differences.unplanned) == ({"a": 3, "b": 1}, set())
    with pytest.warns(RuntimeWarning, match="one"):
        differences.note("a", "one")
    assert differences.counts["a"] == 4


def test_statistics_say_what_differed() -> None:
    model, x = built(plain)
    with apply(model, planned(plain, "recompute")) as handle:
        before = handle.stats()
        assert before.differences == {}
        assert "differences" not in str(before)
        with pytest.warns(RuntimeWarning, match="largest shapes"):
            run(model, torch.cat([x, x]))
        found = handle.stats()
        assert found.differences["stage"] > 1
        assert f"differences from the planned step: stage {found.differences['stage']}" in str(found)
        assert found.since(found).differences == {}
        assert found.since(before).differences == found.differences


@pytest.mark.parametrize("what", ["another model", "a loss without parameters", "a wrapper", "before the forward"])
@pytest.mark.long("another model")
def test_modules_that_the_loop_calls_behind_the_forward(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A momentum encoder that runs there is in no plan of the model alone."""
    monkeypatch.setattr(unplanned, "compiles", lambda: False)  # tests before may have compiled
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        if what == "before the forward":
            other(x)
        loss = (nn.Sequential(model) if what == "a wrapper" else model)(x).square().mean()
        if what == "another model" and k > 1:
            with torch.no_grad():
                wanted = other(x).mean()
            loss = loss + wanted
        if what == "a loss without parameters":
            loss = loss + nn.MSELoss()(loss, torch.zeros(()))
        loss.backward()

    plan = dataclasses.replace(planned(plain, "recompute"), foreign=())
    if what == "another model":
        differs(plain, plan, step, {"beside"}, "a Sequential that isn't the model's runs", counts={"beside": 1})
        plan = dataclasses.replace(plan, foreign=("Sequential", "Linear"))
    model, x = built(plain)
    with apply(model, plan, strict=True) as handle:
        training(model, x, step, 5)
        model(x)  # has no backward
        assert not handle.stats().differences
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.long
def test_classes_of_modules_that_only_the_loss_calls_are_in_a_profile() -> None:
    model, x = plain()
    teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    assert profile(model, x, menus=False).foreign == ()
    found = profile(model, x, menus=False, loss_fn=lambda y: (y.mean() - teacher(x).detach().mean()).square())
    assert found.foreign == ("Sequential", "Linear")
