"""Weights that are away between their forward and their backward: bits, bytes, and whoever reads them meanwhile."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from made_plans import plan_of, plan_with
from small_models import assert_kept
from torch import nn
from weight_models import MODELS, WIDTH, Frozen, built

import ckptplan
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.resident import PARTS
from ckptplan.core.schedule import residency
from ckptplan.core.segment import Segment
from ckptplan.runtime.swap.stores.base import ArenaStore
from ckptplan.tensors.storages import is_away
from ckptplan.training.measure import recorded_allocations


def profiled(name: str, between: int = 0) -> Profile:
    if name not in _PROFILES:
        _PROFILES[name] = ckptplan.profile(*built(name), menus=False)
    return _PROFILES[name].offloading(("activations", "weights"), between)


_PROFILES: dict[str, Profile] = {}


def moved(name: str, option: str = "weights", between: int = 0) -> Plan:
    """A plan that moves the weights of every stage; some frozen ones are away between steps as well."""
    measured = profiled(name, between)
    names = [next(n for n in (option, "weights", "keep") if stage.find(n)) for stage in measured.stages]
    return plan_of(measured, names)  # type: ignore[arg-type]


def steps(model: nn.Module, x: torch.Tensor, count: int = 3, **kwargs: Any) -> list[torch.Tensor]:
    """Losses, gradients and parameters of some steps with AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    torch.manual_seed(1)
    found = []
    for _ in range(count):
        loss = step(model, x, **kwargs)
        found += [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        found += [p.detach().clone() for p in model.parameters() if p.requires_grad]
    return found


def step(
    model: nn.Module, x: torch.Tensor, between: Callable[[nn.Module], object] = lambda model: None
) -> torch.Tensor:
    loss = model(x).square().mean()
    between(model)
    loss.backward()
    return loss.detach()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.fixture
def loud() -> Iterator[None]:
    """Any difference from the planned step is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def cases(*options: str) -> Any:
    """Models, decisions and parts of the weights that are away between steps, of those models that have frozen ones."""
    found = [
        (name, option, between)
        for name in MODELS
        for option in options
        for between in ((0, 1, PARTS) if name in ("adapted", "normed") else (0,))
    ]
    return pytest.mark.parametrize(("name", "option", "between"), found)


@cases("keep", "weights", "swap", "recompute+weights", "recompute+swap")
@pytest.mark.usefixtures("loud")
def test_steps_are_as_without_a_plan(name: str, option: str, between: int) -> None:
    if option == "keep" and not between:
        return
    wanted = steps(*built(name))
    model, x = built(name)
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    plan = moved(name, option, between)
    assert plan.decided.weights
    with ckptplan.apply(model, plan, check="always") as handle:
        assert same(steps(model, x), wanted)
        moves = plan.decided.weights
        late = sum(m.resident.nbytes for m in moves if m.resident.returns == 0)  # which are there in the first step
        assert handle.stats().swapped_in_bytes >= 3 * sum(m.resident.nbytes for m in moves) - late
        assert len(away(model)) == sum(m.resident.returns is not None for m in plan.decided.weights)
    after = [p for p in model.parameters() if not p.requires_grad]
    assert same([p.detach() for p in after], frozen)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def away(model: nn.Module) -> list[str]:
    """Names of the parameters that are away."""
    return [name for name, p in model.named_parameters() if type(p) is not nn.Parameter]


@cases("keep", "weights", "recompute+weights", "recompute+swap")
def test_the_peak_is_that_of_the_plan(name: str, option: str, between: int) -> None:
    plan = moved(name, option, between)
    found = assert_kept(built(name)[0], plan, built(name)[1])
    assert found.measured_peak_bytes > 0.95 * plan.peak_bytes


READS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda m: {k: v.clone() for k, v in m.state_dict().items()},
    "save": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "pickle": lambda m: pickle.loads(pickle.dumps(list(m.parameters()))),
    "deepcopy": lambda m: [p.sum() for p in copy.deepcopy(list(m.parameters()))],
    "norms": lambda m: [p.norm() for p in m.parameters()],
    "foreach": lambda m: torch._foreach_norm(list(m.parameters())),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "array": lambda m: [np.asarray(p.detach()).sum() for p in m.parameters()],
    "numbers": lambda m: [p.flatten()[0].item() for p in m.parameters()],
    "text": lambda m: repr(list(m.parameters())),
    "data": lambda m: [p.data.clone() for p in m.parameters()],
    "storage": lambda m: [p.untyped_storage().nbytes() for p in m.parameters()],
    "averaged": lambda m: [torch.zeros_like(p).lerp_(p, 0.5) for p in m.parameters()],
    "evaluation": lambda m: _evaluated(m),
    "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (torch.ones(2, WIDTH),)),
    "thread": lambda m: _in_a_thread(lambda: [p.sum() for p in m.parameters()]),
}


def _evaluated(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.ones(2, WIDTH)), model.train()


def _in_a_thread(run: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def plain(found: Any) -> Any:
    """Values that `==` compares."""
    if isinstance(found, torch.Tensor):
        return found.tolist()
    if isinstance(found, (list, tuple)):
        return [plain(each) for each in found]
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    return found if isinstance(found, (str, float, int, np.floating)) else None


@pytest.mark.filterwarnings("ignore:the peak may exceed")
@pytest.mark.parametrize("read", READS)
def test_who_reads_a_weight_between_steps_finds_it(read: str) -> None:
    def run(plan: Plan | None) -> list[Any]:
        model, x = built("adapted")
        with contextlib.nullcontext() if plan is None else ckptplan.apply(model, plan, check="always"):
            found: list[Any] = []
            for _ in range(3):
                found += plain(steps(model, x, 1))
                state = torch.get_rng_state()
                found.append(plain(READS[read](model)))
                torch.set_rng_state(state)
        return found

    assert run(moved("adapted", "weights", PARTS)) == run(None)


@pytest.mark.filterwarnings("ignore:the peak may exceed")
@pytest.mark.parametrize("read", READS)
def test_who_reads_a_weight_that_is_away_finds_it(read: str) -> None:
    found: list[Any] = []

    def between(model: nn.Module) -> None:
        state = torch.get_rng_state()
        found.append(plain(READS[read](model)))
        torch.set_rng_state(state)

    wanted = steps(*built("adapted"), between=between)
    count = len(found)
    model, x = built("adapted")
    with ckptplan.apply(model, moved("adapted"), check="always"):
        assert same(steps(model, x, between=between), wanted)
    assert found[:count] == found[count:]


@pytest.mark.usefixtures("loud")
def test_what_reads_no_values_leaves_them_away() -> None:
    model, x = built("adapted")

    def between(model: nn.Module) -> None:
        before = away(model)
        assert len(before) == 4
        model.zero_grad()
        for p in model.parameters():
            assert p.grad is None
            assert p.dtype is torch.float32
            assert p.device.type == "cpu"
            assert p.is_leaf
            assert p.is_floating_point()
            assert p.numel() == p.shape.numel()
            if p.requires_grad:
                p.register_hook(lambda g: g).remove()
        torch.optim.SGD(model.parameters(), 0.1).zero_grad()
        assert away(model) == before

    with ckptplan.apply(model, moved("adapted"), check="off"):
        steps(model, x, between=between)


def test_frozen_weights_that_are_written_to_between_steps() -> None:
    """A moving average, through .data, which no version shows."""

    def run(planned: bool) -> list[torch.Tensor]:
        model, x = built("adapted")
        handle = ckptplan.apply(model, moved("adapted"), check="always") if planned else None
        found = []
        for _ in range(4):
            torch.manual_seed(2)
            found += [step(model, x), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            for layer in model:
                layer.own.weight.data.lerp_(layer.down.weight.T @ layer.up.weight.T, 0.1)
        if handle is not None:
            handle.remove()
        return [*found, *(p.detach() for p in model.parameters())]

    assert same(run(planned=True), run(planned=False))


@pytest.mark.filterwarnings("ignore:the peak may exceed")
def test_a_view_that_the_program_keeps_keeps_its_weight() -> None:
    wanted = steps(*built("adapted"))
    model, x = built("adapted")
    views = [p.detach() for p in model.parameters()]
    with ckptplan.apply(model, moved("adapted"), check="always") as handle:
        assert same(steps(model, x, between=lambda m: [v.sum() for v in views]), wanted)
        assert "weights alias" in handle.stats().differences


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_after_an_error_all_are_there(when: str) -> None:
    model, x = built("adapted")
    before = [p.detach().clone() for p in model.parameters()]
    with ckptplan.apply(model, moved("adapted")) as handle:
        if when == "forward":
            hook = model[3].register_forward_pre_hook(lambda *_: 1 / 0)
        else:
            hook = model[0].down.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model, x)
        hook.remove()
        assert same([p.detach() for p in model.parameters()], before)
        with handle.resident():
            model.zero_grad()
            loss = model(x).square().mean()
            assert not away(model)
            loss.backward()
        assert same([p.detach() for p in model.parameters()], before)


@pytest.mark.usefixtures("loud")
def test_an_encoder_without_a_graph_leaves_when_it_has_run() -> None:
    wanted = steps(*built("frozen"))
    model, x = built("frozen")
    names = {name for name, _ in model.named_parameters() if name.startswith("frozen") and name.endswith("weight")}
    plan = moved("frozen")
    front = [move.resident for move in plan.decided.weights if move.stage < 0]
    assert {name for resident in front for name in resident.names} == names
    seen: list[set[str]] = []

    def look(*_: object) -> None:
        seen.append(names & {name for name, p in model.named_parameters() if is_away(p)})

    model.head[0].register_forward_hook(look)  # type: ignore[index, union-attr]
    model.head[0].weight.register_hook(look)  # type: ignore[index, union-attr]
    with ckptplan.apply(model, plan, check="always") as handle:
        assert same(steps(model, x, between=look), wanted)
        assert seen == [names] * 9
        assert not away(model)
        with torch.no_grad():
            twice = [model(x), model(x)]
        assert same(twice[:1], twice[1:])
        with handle.resident():
            model(x).square().mean().backward()
        assert not any(seen[9:])


def test_an_encoder_that_a_trained_layer_calls_again_stays() -> None:
    """What is read behind the first stage too can't be away then."""

    class Twice(Frozen):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.frozen[0](x)

    model = Twice()
    found = ckptplan.profile(model, torch.randn(4, WIDTH), menus=False).residents
    assert [r.names for r in found if not r.users] == [("frozen.1.0.weight",)]


def test_removed_between_forward_and_backward() -> None:
    model, x = built("adapted")
    torch.manual_seed(3)
    step(model, x)
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    handle = ckptplan.apply(model, moved("adapted"))
    torch.manual_seed(3)
    loss = model(x).square().mean()
    assert away(model)
    handle.remove()
    assert not away(model)
    loss.backward()
    assert same([p.grad for p in model.parameters() if p.grad is not None], wanted)


def _replaced(model: nn.Module, x: torch.Tensor) -> None:
    """Parameters get other memory between two forwards, and both losses run backward."""
    first = model(x).square().mean()
    for p in model.parameters():
        p.data = p.data * 0.5
    (first + model(x).square().mean()).backward()


def _called(model: nn.Module, x: torch.Tensor) -> None:
    """The model is called with other parameters beside its own."""
    others = {name: (p.detach() * 1.1).requires_grad_() for name, p in model.named_parameters()}
    loss = model(x).square().mean() + torch.func.functional_call(model, others, (x,)).square().mean()
    loss.backward()
    for p, other in zip(model.parameters(), others.values(), strict=True):
        if p.grad is not None and other.grad is not None:
            p.grad += other.grad


def _regularised(model: nn.Module, x: torch.Tensor) -> None:
    """A graph that has saved the parameters waits while forward runs."""
    penalty = sum(p.square().sum() for p in model.parameters())
    loss = model(x).square().mean()
    penalty.backward()  # type: ignore[union-attr]
    loss.backward()


def _written(model: nn.Module, x: torch.Tensor) -> None:
    """One row is written to between steps, which no version shows."""
    step(model, x)
    next(model.parameters()).data[3] = 0.25
    step(model, x)


def _in_halves(model: nn.Module, x: torch.Tensor) -> None:
    """Two backwards through one forward."""
    y = model(x)
    y[:8].sum().backward(retain_graph=True)
    y[8:].square().sum().backward()


def _together(model: nn.Module, x: torch.Tensor) -> None:
    losses = [model(x * k).square().mean() for k in (1, 2)]
    for loss in losses:
        loss.backward()


@pytest.mark.filterwarnings("ignore:the peak may exceed")
@pytest.mark.parametrize("name", ["adapted", "trained", "tied", "flat"])
@pytest.mark.parametrize("train", [_replaced, _called, _regularised, _written, _in_halves, _together])
def test_odd_steps(train: Callable[[nn.Module, torch.Tensor], None], name: str) -> None:
    def run(plan: Plan | None) -> list[torch.Tensor]:
        model, x = built(name)
        handle = None if plan is None else ckptplan.apply(model, plan, check="always")
        for _ in range(2):
            torch.manual_seed(2)
            train(model, x)
        if handle is not None:
            handle.remove()
        return [*(p.grad for p in model.parameters() if p.grad is not None), *(p.detach() for p in model.parameters())]

    assert same(run(moved(name)), run(None))


def _interrupted_at(count: int, run: Callable[[], Any]) -> bool:
    """Raise a KeyboardInterrupt at a line of weights.py; return whether there was such a line."""
    left = count

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("swap/weights.py"):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(True)  # Python leaves a `with torch.no_grad()` unended where its end is interrupted
    return left <= 0


@pytest.mark.parametrize("between", [0, PARTS])
def test_an_interrupt_in_the_end_of_no_grad_leaves_gradients_on(between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object, *_: object) -> None:
        if torch.is_grad_enabled():
            return
        raise KeyboardInterrupt

    model, x = built("adapted")
    with ckptplan.apply(model, moved("adapted", "weights", between), check="always"):
        with monkeypatch.context() as patch:
            patch.setattr(torch.no_grad, "__exit__", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(x)
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("between", [0, PARTS])
def test_interrupts_at_any_line_leave_all_weights_right(between: int) -> None:
    wanted = [p.detach().clone() for p in built("adapted")[0].parameters()]
    plan = moved("adapted", "weights", between)
    at, more = 1, True
    while more:
        model, x = built("adapted")
        handle = ckptplan.apply(model, plan, check="off")
        more = _interrupted_at(at, lambda model=model, x=x: step(model, x))  # type: ignore[misc]
        handle.remove()
        assert not away(model)
        assert same([p.detach() for p in model.parameters()], wanted)
        at += 23
    assert at > 200


@pytest.mark.parametrize("between", [0, PARTS])
@pytest.mark.parametrize("way", ["start_out", "finish_out", "start_in", "finish_in"])
def test_a_copy_that_fails_once_loses_nothing(way: str, between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = steps(*built("adapted"))
    model, x = built("adapted")
    plan = moved("adapted", "weights", between)
    with ckptplan.apply(model, plan, check="off"):
        with monkeypatch.context() as patch:
            real, failed = getattr(ArenaStore, way), []

            def fails_once(*args: Any, **kwargs: Any) -> Any:
                if not failed:
                    failed.append(way)
                    raise ckptplan.SwapError("the disk")
                return real(*args, **kwargs)

            patch.setattr(ArenaStore, way, fails_once)
            with pytest.raises(ckptplan.SwapError):
                step(model, x)
        model.zero_grad()
        assert same(steps(model, x), wanted)
    assert not away(model)


def test_a_kept_stage_that_saves_more_than_planned_is_warned_of() -> None:
    model, x = built("adapted")
    plan = moved("adapted")
    for layer in model:  # type: ignore[attr-defined]
        layer.dropout.forward = lambda y: y.exp().sin() * y.cos()
    with ckptplan.apply(model, plan, check="off") as handle:
        with pytest.warns(RuntimeWarning, match="saved"):
            step(model, x)
        assert "saved" in handle.stats().differences


@pytest.mark.usefixtures("loud")
def test_weights_move_under_a_second_plan_too() -> None:
    """A plan that was removed owns no weight, though its handle is alive and allocations are recorded."""
    model, x = built("adapted")
    former = ckptplan.apply(model, moved("adapted"), check="off")
    step(model, x)
    former.remove()
    model.zero_grad()
    recorded_allocations(lambda: None)
    with ckptplan.apply(model, moved("adapted"), check="off") as handle:
        step(model, x)
        recorded_allocations(lambda: None)
        model.zero_grad()
        step(model, x)
        assert handle.stats().swapped_in_bytes > 0


@pytest.mark.parametrize("between", [0, PARTS])
@pytest.mark.parametrize("name", ["adapted", "trained", "tied"])
@pytest.mark.usefixtures("loud")
def test_segments_whose_weights_were_away_run_again(name: str, between: int) -> None:
    measured = profiled(name, between)
    options = [s.find("recompute+swap") or s.keep for s in measured.stages]
    segments = (Segment(0, 1), Segment(2, 3))
    moves = residency(measured, options, segments).moves
    choices = tuple(
        Decision.moving(o.action, m, i, min(i | 1, 3), o.name) if m else Decision(o.action, option=o.name)
        for i, (o, m) in enumerate(zip(options, moves, strict=True))
    )
    plan = plan_with(measured, choices, segments=segments)
    assert plan.decided.weights
    wanted = steps(*built(name))
    model, x = built(name)
    with ckptplan.apply(model, plan, check="always"):
        assert same(steps(model, x), wanted)
    found = assert_kept(built(name)[0], plan, built(name)[1])
    assert found.measured_peak_bytes > 0.9 * plan.peak_bytes


def merged(model: nn.Module) -> None:
    with torch.no_grad():
        for layer in model:  # type: ignore[attr-defined]
            layer.own.weight += layer.up.weight @ layer.down.weight


def overwritten(model: nn.Module) -> None:
    for layer in model:  # type: ignore[attr-defined]
        layer.own.weight.data.mul_(1.1)


def replaced(model: nn.Module) -> None:
    for layer in model:  # type: ignore[attr-defined]
        layer.own.weight = nn.Parameter(layer.own.weight.detach().clone() * 1.1, requires_grad=False)


@pytest.mark.filterwarnings("ignore:the peak may exceed")
@pytest.mark.parametrize("write", [merged, overwritten, replaced])
@pytest.mark.parametrize("option", ["keep", "weights"])
@pytest.mark.parametrize("inside", [False, True])
def test_writes_to_frozen_weights_between_steps(write: Callable[..., None], option: str, inside: bool) -> None:
    """As in merging adapters, with all weights on the device or not, and an evaluation behind it."""

    def run(plan: Plan | None) -> list[torch.Tensor]:
        model, x = built("adapted")
        found = []
        with contextlib.nullcontext() if plan is None else ckptplan.apply(model, plan, check="always") as handle:
            for _ in range(3):
                found += steps(model, x, 1)
                with handle.resident() if inside and plan is not None else contextlib.nullcontext():  # type: ignore[union-attr]
                    write(model)
                with torch.no_grad():
                    found += [model(x), model(x)]
        return [*found, *(p.detach() for p in model.parameters())]

    assert same(run(moved("adapted", option, PARTS)), run(None))


@pytest.mark.parametrize("plan", ["weights", "swap"])
def test_a_frozen_layer_that_writes_to_its_weight_in_forward(plan: str) -> None:
    def run(plan: Plan | None) -> list[torch.Tensor]:
        model, x = built("adapted")
        number = 0

        def write(module: nn.Module, args: Any) -> None:
            if number == 2:
                module.weight.data.mul_(1.1)  # type: ignore[operator, union-attr]

        for layer in model:  # type: ignore[attr-defined]
            layer.own.register_forward_pre_hook(write)
        found = []
        with contextlib.nullcontext() if plan is None else ckptplan.apply(model, plan, check="always"):
            for number in range(4):  # noqa: B007
                found += steps(model, x, 1)
        return found

    assert same(run(moved("adapted", plan)), run(None))


def test_a_trained_weight_written_to_before_backward_is_an_error_as_without_a_plan() -> None:
    model, x = built("trained")
    with ckptplan.apply(model, moved("trained")), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = model(x).square().mean()
        with torch.no_grad():
            model[2][0].weight.mul_(2)  # type: ignore[index]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.filterwarnings("ignore:the peak may exceed")
def test_another_thread_evaluates_meanwhile() -> None:
    wanted = steps(*built("adapted"), count=6)
    model, x = built("adapted")
    reference = copy.deepcopy(model)
    stop, found = threading.Event(), list[torch.Tensor]()

    def evaluate() -> None:
        with torch.no_grad():
            while not stop.is_set():
                found.append(model[0].own(x))  # type: ignore[index, operator]

    with ckptplan.apply(model, moved("adapted", "weights", PARTS), check="always"):
        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            assert same(steps(model, x, count=6), wanted)
        finally:
            stop.set()
            thread.join()
    assert found
    assert all(torch.equal(each, reference[0].own(x)) for each in found)  # type: ignore[index, operator]


@pytest.mark.usefixtures("loud")
def test_a_recomputed_stage_whose_weights_began_to_return_before_it() -> None:
    measured = profiled("trained")
    options = [s.find("recompute+swap") or s.keep for s in measured.stages]
    choices = tuple(
        Decision.moving(o.action, m, i, 3, o.name) if m else Decision(o.action, option=o.name)
        for i, (o, m) in enumerate(zip(options, residency(measured, options).moves, strict=True))
    )
    wanted = steps(*built("trained"), count=30)
    model, x = built("trained")
    with ckptplan.apply(model, plan_with(measured, choices), check="off"):
        assert same(steps(model, x, count=30), wanted)


class _Keeping(torch.autograd.Function):
    """Its node has a view of the weight in an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        ctx.view = view
        return x @ view.view(WIDTH, WIDTH).T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient @ ctx.view.view(WIDTH, WIDTH), None


class _Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 10, requires_grad=False)
        self.add = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH * WIDTH))
        self.keeps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.weight.view(-1)
        if self.keeps:
            self.__dict__["last"] = view
        return torch.tanh(_Keeping.apply(x, view) + self.add(x) * self.scale.mean())


@pytest.mark.filterwarnings("ignore:the peak may exceed")
@pytest.mark.parametrize("keeps", [False, True])
def test_a_view_in_a_node_of_the_graph_that_others_keep_as_well_keeps_its_weight(*, keeps: bool) -> None:
    def viewed() -> tuple[nn.Sequential, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(_Viewed() for _ in range(4)))
        for layer in model:
            layer.keeps = keeps  # type: ignore[assignment]
        return model, torch.randn(24, WIDTH)

    def penalised(plan: Plan | None) -> tuple[list[torch.Tensor], int]:
        model, x = viewed()
        handle = None if plan is None else ckptplan.apply(model, plan, check="always")
        loss = model(x).square().mean()
        if keeps:
            loss = loss + sum((layer.last * layer.scale).sum() for layer in model) * 1e-3  # type: ignore[operator, union-attr, misc]
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [loss.detach(), *gradients], 0 if handle is None else handle.stats().swapped_in_bytes

    measured = ckptplan.profile(*viewed(), menus=False).offloading(("weights",))
    plan = plan_of(measured, ["weights" if stage.find("weights") else "keep" for stage in measured.stages])
    found, moved_bytes = penalised(plan)
    assert same(found, penalised(None)[0])
    frozen = 4 * WIDTH * WIDTH * 4
    all_bytes = sum(move.resident.nbytes for move in plan.decided.weights)
    assert moved_bytes == all_bytes - frozen * keeps


@pytest.mark.filterwarnings("ignore:the peak may exceed")
def test_weights_in_shared_memory_stay() -> None:
    wanted = steps(*built("adapted"))
    model, x = built("adapted")
    model.share_memory()
    with ckptplan.apply(model, moved("adapted")) as handle:
        assert same(steps(model, x), wanted)
        assert handle.stats().swapped_in_bytes == 0
        assert "weights memory" in handle.stats().differences


class _Slotted(nn.Parameter):
    __slots__ = ("extra",)


def test_a_parameter_with_slots_is_profiled() -> None:
    model, x = built("adapted")
    model[1].own.weight = _Slotted(torch.randn(WIDTH, WIDTH), requires_grad=False)  # type: ignore[union-attr, index]
    found = ckptplan.profile(model, x, menus=False)
    assert ("1.own.weight",) in [resident.names for resident in found.residents]
