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
from small_models import Transformer, assert_same, gradients, plan_of, scheduled, states_of_swapped
from torch import nn

from ckptplan.core.errors import PlanMismatchError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.profiling.profiler import profile
from ckptplan.runtime.guard import unplanned
from ckptplan.runtime.guard.differences import Differences
from ckptplan.runtime.handle import apply
from ckptplan.runtime.swap.record import Whereabouts
from ckptplan.training.measure import recorded_allocations

WHATS = ("keep", "swap", "recompute", "recompute+swap", "segment", "selective")
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

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, head: str = "a") -> torch.Tensor:
        y = self.heads[head](self.features(x))
        return y if labels is None else (y - labels).square()


def plain() -> tuple[nn.Module, torch.Tensor]:
    return Model(), torch.randn(BATCH, WIDTH)


def frozen() -> tuple[nn.Module, torch.Tensor]:
    return Model(frozen=True), torch.randn(BATCH, WIDTH)


def evaluating() -> tuple[nn.Module, torch.Tensor]:
    return Model().eval(), torch.randn(BATCH, WIDTH)


def called_twice() -> tuple[nn.Module, torch.Tensor]:
    return Model(first=2, middle=2), torch.randn(BATCH, WIDTH)


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
    stages = chain(make).stages
    if what == "segment":
        able = [i for i, stage in enumerate(stages) if stage.find("recompute") is not None]
        options = [stage.find("recompute") or stage.keep for stage in stages]
        plan = scheduled(chain(make), options, (Segment(able[0], able[-1]),))
    else:
        plan = plan_of(chain(make), ["recompute" if what == "selective" else what] * len(stages))  # type: ignore[list-item]
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
    with apply(model, plan, check="always") as handle, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
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


def surplus(what: str) -> set[str]:
    """Stages that move what they save, or the inputs that they hold for a recompute, move larger ones then."""
    return {"saved"} if "swap" in what else set()


# What stages get and save


@pytest.mark.parametrize("what", WHATS)
def test_larger_batches(what: str) -> None:
    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        run(model, torch.cat([x, x]) if k in (2, 3) else x[: BATCH - k])

    differs(plain, planned(plain, what), step, {"stage"} | surplus(what), "solve again with the largest shapes")


@pytest.mark.parametrize("what", WHATS)
def test_longer_sequences(what: str) -> None:
    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        run(model, torch.cat([x, x.flip(1)], 1)[: 4 - k % 2] if k > 1 else x)

    differs(text, planned(text, what), step, {"stage"} | surplus(what), "solve again with the largest shapes")


def masked(model: Any, x: torch.Tensor, k: int) -> None:
    for block in model.blocks[:2]:
        block.masked = k in (2, 4)
    run(model, x)


@pytest.mark.parametrize("what", WHATS)
def test_masks_that_stages_save_from_some_step_on(what: str) -> None:
    differs(plain, planned(plain, what), masked, {"saved"}, "another path than the one profiled", counts={"saved": 4})


@pytest.mark.parametrize("what", ["keep", "recompute", "segment"])
def test_a_kernel_that_is_chosen_by_values(what: str) -> None:
    """An LSTM saves more where its sequences have one length; how often it is looked for doesn't grow with steps."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lengths = torch.tensor([12, 16, 16, 15])
            self.front, self.lstm = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.front(x), self.lengths, True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=16)[0]

    def make() -> tuple[nn.Module, torch.Tensor]:
        return Recurrent(), torch.randn(4, 16, WIDTH)

    def step(model: Any, x: torch.Tensor, k: int) -> None:
        model.lengths = torch.tensor([14, 14, 14, 14] if k == 3 else [12, 16, 16, 15])
        run(model, x)

    differs(make, planned(make, what), step, {"saved"}, "stage 'lstm' saves .*another path", counts={"saved": 1})


def test_saved_tensors_that_hooks_hold_are_left_alone() -> None:
    """A checkpoint inside of a kept stage isn't run again to count what it saves."""

    class Checkpointed(Block):
        runs = 0

        def inside(self, x: torch.Tensor) -> torch.Tensor:
            type(self).runs += 1
            return super().forward(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inside, x, use_reentrant=False)

    model, x = nn.Sequential(Checkpointed(), Checkpointed()), torch.randn(BATCH, WIDTH)
    measured = profile(model, x, menus=False)
    with apply(model, plan_of(measured, ["keep"] * len(measured.stages)), strict=True):
        Checkpointed.runs = 0
        model(x).sum().backward()
        assert Checkpointed.runs == 4


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


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("make", [plain, called_twice])
@pytest.mark.parametrize("where", ["first", "middle"])
def test_modules_that_are_called_more_often(where: str, make: Make, what: str) -> None:
    most = 1 if make is plain else 2

    def step(model: Any, x: torch.Tensor, k: int) -> None:
        setattr(model, f"{where}_calls", (most, most + 1, 1, most + 2, most)[k])
        run(model, x)

    match = rf"is called more than the {most} times a step"
    more = {"calls": (1 + 2) * (4 if where == "first" else 2)}  # the first block's four modules are stages each
    differs(make, planned(make, what), step, {"calls"}, match, counts=more)


@pytest.mark.parametrize("what", WHATS)
def test_a_head_that_the_loss_calls_again(what: str) -> None:
    def step(model: Any, x: torch.Tensor, k: int) -> None:
        hidden: list[torch.Tensor] = []
        hook = model.heads["a"].register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
        loss = model(x).square().mean()
        hook.remove()
        if k % 2:
            for part in hidden[0].chunk(2):
                loss = loss + model.heads["a"](part).sin().mean()
        loss.backward()

    differs(plain, planned(plain, what), step, {"calls"}, "'heads.a' is called more", counts={"calls": 4})


@pytest.mark.parametrize("what", WHATS)
def test_the_first_stage_called_again_behind_the_forward(what: str) -> None:
    """It may be the beginning of another step, so it is no difference as long as it fits."""

    def step(model: Any, x: torch.Tensor, k: int) -> None:
        loss = model(x).square().mean()
        if k % 2:
            loss = loss + model.first(x[: BATCH // 2]).sin().mean()
        loss.backward()

    want = training(*built(plain), step, 4)
    model, x = built(plain)
    with apply(model, planned(plain, what), check="always"):
        assert_same(training(model, x, step, 4), want)


# Memory that is there besides


@pytest.mark.parametrize("what", WHATS)
def test_two_forwards_before_a_backward(what: str) -> None:
    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        losses = [model(part).square().mean() for part in ((x, x[:7]) if k > 1 else (x,))]
        sum(losses).backward()  # type: ignore[union-attr]

    plan = tight(planned(plain, what))
    differs(
        plain, plan, step, {"forwards"}, "a forward begins while 1 before it had no backward", counts={"forwards": 3}
    )


class Leaving(nn.Module):
    """Leaves layers out, so that what holds them is a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Middle() for _ in range(2))

    def forward(self, x: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, whole=whole)
        return x


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, *, whole: bool) -> torch.Tensor:
        for layer in self.layers if whole else ():
            x = layer(x).tanh()
        return self.norm(x).tanh()


def leaving() -> tuple[nn.Module, torch.Tensor]:
    return Leaving(), torch.randn(BATCH, WIDTH)


def test_layers_that_a_kept_stage_left_out_when_it_was_profiled() -> None:
    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        run(model, x, whole=k == 2)

    plan = dataclasses.replace(planned(leaving, "keep"), outside=(), uncalled=chain(leaving).uncalled)
    assert {"blocks.0", "blocks.1"} <= set(plan.stages)
    assert plan.uncalled == tuple(f"blocks.{i}.layers.{k}" for i in range(2) for k in range(2))
    differs(
        leaving, plan, step, {"module", "saved"}, r"'blocks\.0\.layers\.0' runs, which the planned step didn't call"
    )


def test_an_output_that_is_held_until_the_next_backward() -> None:
    held: list[torch.Tensor] = []

    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        output = model(x)
        output.square().mean().backward()
        held[:] = [output]

    plan = planned(plain, "recompute")
    plan = dataclasses.replace(plan, budget_bytes=plan.peak_bytes, forward_peak_bytes=0)
    differs(plain, plan, step, {"output"}, "is still held when backward begins", counts={"output": 4})


class Telling(Model):
    def forward(self, x: torch.Tensor, *, more: bool = False) -> Any:  # type: ignore[override]
        features = self.features(x)
        return (self.heads["a"](features), features) if more else self.heads["a"](features)


def test_a_model_that_returns_more_in_some_steps() -> None:
    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        output = model(x, more=k > 2)
        (output[0] if k > 2 else output).square().mean().backward()

    def telling() -> tuple[nn.Module, torch.Tensor]:
        return Telling(), torch.randn(BATCH, WIDTH)

    plan = tight(planned(telling, "recompute"))
    differs(
        telling, plan, step, {"returned"}, r"returns 2 tensors, .* more than the 1 of the first", counts={"returned": 2}
    )


def test_a_forward_without_gradients_beside_one_that_waits() -> None:
    """A regulariser or a teacher that begins later; none where the graph before it is gone, or ran backward."""

    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
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

    plan = planned(plain, "recompute")
    differs(plain, plan, step, {"beside"}, "runs while a forward waits for its backward", counts={"beside": 3})


@pytest.mark.parametrize("what", WHATS)
def test_micro_batches(what: str) -> None:
    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        for part in x.chunk(3):
            run(model, part)

    plan = tight(planned(plain, what))
    differs(plain, plan, step, {"gradients"}, "exist at the start of this forward", counts={"gradients": 10})


@pytest.mark.parametrize("what", WHATS)
def test_layers_that_are_thawed_and_frozen_again(what: str) -> None:
    def step(model: Any, x: torch.Tensor, k: int) -> None:
        thawed = k in (2, 3)
        model.blocks[1].inner[2].requires_grad_(thawed)
        run(model, x)
        assert (model.blocks[1].inner[2].weight.grad is not None) == thawed

    plan = planned(frozen, what)
    differs(
        frozen,
        plan,
        step,
        {"thawed", *(["saved"] if what == "swap" else [])},
        "was frozen when the plan",
        counts={"thawed": 2},
    )


@pytest.mark.parametrize("what", WHATS)
def test_a_graph_that_is_cut_at_first(what: str) -> None:
    """By a `detach` behind a stage, or without gradients up to there: what the stages save isn't planned then."""

    def step(model: Any, x: torch.Tensor, k: int) -> None:
        hook = model.first.register_forward_hook(lambda module, args, output: output.detach() if k % 3 == 0 else None)
        run(model, x)
        hook.remove()

    differs(plain, planned(plain, what), step, {"attached"}, "the graph of stage 'first", counts={"attached": 3})


@pytest.mark.parametrize("what", WHATS)
def test_training_mode_after_a_plan_made_in_evaluation_mode(what: str) -> None:
    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        run(model.train(k > 1), x)

    plan = planned(evaluating, what)
    differs(evaluating, plan, step, {"mode", *(["saved"] if what == "swap" else [])}, "made for evaluation mode")


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("what", WHATS)
def test_a_penalty_on_the_gradient(what: str) -> None:
    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        x = x.clone().requires_grad_(k > 1)
        loss = model(x).square().mean()
        if k > 1:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()

    differs(plain, planned(plain, what), step, {"graph"}, "makes a graph of its own", counts={"graph": 3})


@pytest.mark.parametrize("what", WHATS)
def test_a_graph_that_stays(what: str) -> None:
    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        output = model(x)
        output.square().mean().backward(retain_graph=k > 2)
        if k > 2:
            output.sin().mean().backward()

    plan = planned(plain, what)
    differs(plain, tight(plan), step, {"graph"}, "a backward keeps its graph", counts={"graph": 2})
    model, x = built(plain)
    with apply(model, dataclasses.replace(plan, budget_bytes=10 * plan.peak_bytes), strict=True):  # it fits
        training(model, x, step, 4)


@pytest.mark.parametrize("what", WHATS)
def test_a_function_transform_between_steps(what: str) -> None:
    def step(model: nn.Module, x: torch.Tensor, k: int) -> None:
        if k % 2:
            p = {name: each.detach() for name, each in model.named_parameters()}
            found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().mean())(p)
            for name, each in model.named_parameters():
                each.grad = found.get(name)
        else:
            run(model, x)

    differs(plain, planned(plain, what), step, {"transform"}, "inside a transform of torch.func")


def backward_in_autocast(model: nn.Module, x: torch.Tensor, k: int) -> None:
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


@pytest.mark.parametrize("what", ["swap", "recompute", "selective"])
@pytest.mark.parametrize(
    ("step", "kind", "match"),
    [
        (backward_in_autocast, "casts", "autocast is still on when backward begins"),
        (with_labels, "inputs", "the model gets .*labels"),
        (other_head, "module", "'heads.b' runs"),
        (replaced, "new", "module 'blocks.1' was added or replaced"),
    ],
)
def test_what_the_profiled_step_had_not(step: Step, kind: str, match: str, what: str) -> None:
    plan = dataclasses.replace(planned(plain, what), outside=())
    kinds = {kind}
    if kind == "casts":
        kinds |= {"autocast", "saved"} if what == "swap" else {"autocast"}  # casts of weights are saved
        match = "under autocast to bfloat16"
    differs(plain, plan, step, kinds, match, steps=5)


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


def test_counted_alone_or_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        differences = Differences()
        differences.note("a", "one")
    assert differences.counts == {"a": 1}
    for strict in (Differences("raise"),) * 2:
        with pytest.raises(PlanMismatchError, match=r"^one$"):
            strict.note("a", "one")


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


def test_classes_of_modules_that_only_the_loss_calls_are_in_a_profile() -> None:
    model, x = plain()
    teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    assert profile(model, x).foreign == ()
    found = profile(model, x, loss_fn=lambda y: (y.mean() - teacher(x).detach().mean()).square())
    assert found.foreign == ("Sequential", "Linear")
