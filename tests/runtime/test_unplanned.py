"""What a step takes that its plan was made without is noticed, and what it was made with isn't."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ckptplan
from ckptplan.core.errors import PlanMismatchError
from ckptplan.core.plan import Plan


class Model(nn.Module):
    """Layers behind a frozen one, two heads, and a loss where there are labels."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.scale = nn.Tanh()
        self.embed = nn.Linear(16, 16).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4))
        self.heads = nn.ModuleDict({"a": nn.Linear(16, 4), "b": nn.Linear(16, 64)})
        self.depth = depth

    def forward(self, x: torch.Tensor, task: str = "a", labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.scale(self.embed(x))
        for layer in self.layers[: self.depth]:
            x = layer(x)
        y = self.heads[task](x)
        return y if labels is None else (y - labels).square()


X = torch.randn(8, 16)


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    return ckptplan.solve(Model(), 1, inputs=(X,))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def train(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    for _ in range(3):
        model(*args, **kwargs).mean().backward()


def deeper(model: Model) -> None:
    model.depth = 4
    train(model, X)


def replaced(model: Model) -> None:
    model.layers[1] = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    train(model, X)


def in_autocast(model: Model) -> None:
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X).mean()
        loss.backward()


def backward_in_autocast(model: Model) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        train(model, X)


def test_the_step_that_was_planned(model: Model, plan: Plan) -> None:
    with ckptplan.apply(model, plan):
        train(model, X)
        train(model, x=X)
        train(model, X[:3], task="a")
        with torch.no_grad():
            model(X, "b", torch.randn(8, 64))
        model.layers.requires_grad_(False)  # less than planned
        train(model, X.clone().requires_grad_())


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda model: train(model, X, "b"), "'heads.b' runs, which the planned step didn't call"),
        (deeper, "'layers.3"),
        (
            lambda model: train(model, X, labels=torch.randn(8, 4)),
            "gets .*labels.* float32.8, 4., and the plan was",
        ),
        (replaced, "module 'layers.1' was added or replaced since the plan was applied"),
    ],
    ids=["module", "layer", "input", "replaced"],
)
def test_what_is_noticed_and_told_once(run: Callable[[Model], None], text: str, model: Model, plan: Plan) -> None:
    with ckptplan.apply(model, plan, on_larger="follow"), pytest.warns(RuntimeWarning, match=text) as told:
        run(model)
    assert len([each for each in told if "may exceed the budget" in str(each.message)]) == 1
    with ckptplan.apply(model, plan, strict=True), pytest.raises(PlanMismatchError):
        run(model)
    assert "forward" not in vars(model.heads["b"])


class Casting(Model):
    """Turns autocast on by itself, as accelerate has a model do."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(*args, **kwargs).float()


@pytest.mark.parametrize("kind", [Model, Casting])
def test_a_plan_for_autocast(kind: type[Model]) -> None:
    model = kind()
    plan = ckptplan.solve(model, 1, inputs=(X,), amp="bfloat16")
    assert plan.fingerprint.autocast == "bfloat16"
    with ckptplan.apply(model, plan):
        in_autocast(model)
    with (
        ckptplan.apply(kind(), ckptplan.solve(kind(), 1, inputs=(X,)), on_larger="follow") as handle,
        pytest.warns(RuntimeWarning, match=r"under autocast to bfloat16, and .* without; solve with amp='bfloat16'"),
    ):
        in_autocast(handle._applied.model)  # type: ignore[arg-type]
    assert handle.stats().differences == {"autocast": 3}
    with ckptplan.apply(model, plan, on_larger="follow"):
        if kind is Casting:
            train(model, X)
        else:
            with (
                pytest.warns(
                    RuntimeWarning, match="without autocast, and .* under autocast to bfloat16; solve without"
                ),
                pytest.warns(RuntimeWarning, match=r"float32\[8, 16\]; the plan holds for up to .* bfloat16"),
            ):
                train(model, X)
    with (
        ckptplan.apply(model, plan, on_larger="follow"),
        pytest.warns(RuntimeWarning, match="autocast is still on when backward begins"),
    ):
        backward_in_autocast(model)
    with torch.autocast("cpu", torch.bfloat16):
        plan = ckptplan.solve(kind(), 1, inputs=(X,))
    assert plan.fingerprint.autocast == "bfloat16"


class Lazy(Model):
    """Makes a module in its first forward, also in the profiled step, after which profiling takes it away."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not hasattr(self, "act"):
            self.act = nn.Tanh()
        return self.act(super().forward(*args, **kwargs))


def test_modules_that_the_first_forward_makes_are_planned_and_later_ones_are_noticed() -> None:
    model = Lazy()
    with ckptplan.apply(model, ckptplan.solve(Lazy(), 1, inputs=(X,)), on_larger="follow"):
        train(model, X)
        train(model, X)
        model.layers[2] = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        with pytest.warns(RuntimeWarning, match="module 'layers.2' was added or replaced"):
            train(model, X)  # forwards 7 to 9


def test_thawed_parameters_are_noticed(model: Model, plan: Plan) -> None:
    text = r"'embed.weight' was frozen when the plan was applied"
    with ckptplan.apply(model, plan, strict=True):
        model.embed.requires_grad_(True)
        with pytest.raises(PlanMismatchError, match=text):
            model(X)
        model.embed.requires_grad_(False)
        train(model, X)
    with ckptplan.apply(model, plan, on_larger="follow"):
        model.embed.requires_grad_(True)
        with pytest.warns(RuntimeWarning, match=text) as told:
            train(model, X)
        assert len(told) == 1
        model.embed.requires_grad_(False)
        train(model, X)
    assert model.embed.weight.grad is not None


def test_modules_that_a_stage_calls_are_planned() -> None:
    """Which modules a stage reaches isn't told by where they lie."""

    class Reaches(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.linear, self.shared = nn.Linear(16, 16), [shared]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shared[0](self.linear(x))

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
            self.layers = nn.Sequential(*(Reaches(self.shared) for _ in range(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    model = Parent()
    with ckptplan.apply(model, ckptplan.solve(model, 1, inputs=(X,))):
        train(model, X)
