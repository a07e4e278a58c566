"""Of a framework's loop, a profile's key has what a step can see, and no more."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from transformers import Trainer

from ckptplan.profiling.description import Description
from ckptplan.profiling.installed import NoKeyError
from ckptplan.profiling.loops import Loop

LOSS = frozenset(("compute_loss",))


class Loader:
    """Stands for Lightning's trainer."""

    def __init__(self, given: int) -> None:
        self.given, self.batches = given, iter([])

    @property
    def current_epoch(self) -> int:
        return self.given


def helped(loop: Any) -> Any:
    return loop.given


class Own(Trainer):
    """Its loss reads attributes by itself, by a method, by properties and by a function."""

    times = 1

    def __init__(self) -> None:
        self.scale, self.width, self.depth, self.given, self.unread, self.cached = 1.0, 2, 3, 4, 5, 6
        self.batches = iter([])  # can't be described
        self.args = None

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return self.scale * self.times + self.helper() + self.deep + helped(self) + self.once

    def helper(self) -> Any:
        return self.width

    @property
    def deep(self) -> Any:
        return self.depth

    @functools.cached_property
    def once(self) -> Any:
        return self.cached

    @property
    def fails(self) -> Any:
        raise RuntimeError

    def elsewhere(self) -> Any:
        return next(self.batches)


def key(value: Any) -> str:
    text = Description()
    text.add(value)
    text.finish()
    return text.digest


@pytest.mark.parametrize("name", ["scale", "width", "depth", "given", "unread", "cached", "batches"])
def test_what_the_loss_reads_counts(name: str) -> None:
    loop, other = Own(), Own()
    other.__dict__[name] = 100 if name != "batches" else iter([1])
    assert (key(Loop(loop, LOSS)) == key(Loop(other, LOSS))) == (name in ("unread", "batches"))


@pytest.mark.parametrize("name", ["compute_loss", "helper", "deep", "once", "times", "elsewhere"])
def test_code_that_the_loss_runs_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Loop(Own(), LOSS))

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.scale + self.width + 1

    made = {"deep": property(other), "once": functools.cached_property(other), "times": 2}
    monkeypatch.setattr(Own, name, made.get(name, other))
    assert (key(Loop(Own(), LOSS)) == before) == (name == "elsewhere")


def test_a_computed_name_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "helper", lambda self: getattr(self, self.helper.__name__[1:]))
    with pytest.raises(NoKeyError, match="any attribute of a loop"):
        key(Loop(Own(), LOSS))


def test_a_loop_in_other_variables_counts_as_a_whole() -> None:
    loop = Own()

    def step() -> Any:
        return loop.scale

    with pytest.raises(NoKeyError, match="iterator"):
        key(step)


@pytest.mark.parametrize(
    ("own", "counts"),
    [
        (lambda module: module.scale, False),
        (lambda module: module.trainer.given, True),
        (lambda module: module.current_epoch, True),
    ],
)
def test_the_loop_that_a_framework_keeps_in_the_model(own: Callable[[Any], Any], counts: bool) -> None:
    def module(given: int) -> LightningModule:
        made: Any = LightningModule()
        made._trainer, made.scale, made.own = Loader(given), 1.0, own
        return made  # type: ignore[no-any-return]

    assert (key(module(1)) != key(module(2))) == counts
