"""Checks while training: digests of what is saved, compared with what comes back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kinds_of_tensors import TENSORS
from small_models import build, plan_for, plan_of, planned, step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckptplan
from ckptplan import CheckError
from ckptplan.profiling.times import timing
from ckptplan.profiling.values.watched import WatchedState
from ckptplan.runtime.guard import check, spots
from ckptplan.runtime.guard.check import FIRST, Checks
from ckptplan.runtime.handle import apply
from ckptplan.runtime.recompute import call as recompute
from ckptplan.runtime.swap.stores import disk
from ckptplan.state import surroundings
from ckptplan.state.cells import Snapshot
from ckptplan.training.measure import peak_above_start, recorded_allocations
from ckptplan.training.step import default_loss

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("no_leak")


def digest(tensor: torch.Tensor) -> list[int] | None:
    checks = Checks(CPU, always=True)
    made = checks.take(tensor)
    checks.close()
    return None if made is None else made.values


# Digests


@pytest.mark.parametrize("name", TENSORS)
def test_a_digest_tells_places_signs_and_bits(name: str) -> None:
    torch.manual_seed(0)
    tensor = TENSORS[name]()
    rng, first = random.Random(0), digest(tensor)
    assert digest(tensor) == first
    bits = tensor.view(spots.INTEGERS[tensor.itemsize])
    places = [tuple(rng.randrange(size) for size in bits.shape) for _ in range(20)]
    for a, b in zip(places[::2], places[1::2], strict=True):
        there, here = bits[a].clone(), bits[b].clone()
        bits[a], bits[b] = here, there
        assert (digest(tensor) == first) == bool(there == here)
        bits[a], bits[b] = there, here
        bits[a] ^= 1
        assert digest(tensor) != first
        bits[a] ^= 1
    if tensor.is_floating_point() and tensor.itemsize > 1:
        assert digest(tensor.neg_()) != first
        tensor.neg_()
    assert digest(tensor) == first


@pytest.mark.parametrize("size", [2, 64, 197])
def test_permutations_have_digests_of_their_own(size: int) -> None:
    """All have the same sums along the tensor's own dimensions."""
    torch.manual_seed(0)
    orders = {tuple(torch.randperm(size).tolist()) for _ in range(50)}
    assert len({tuple(digest(torch.eye(size, dtype=torch.float64)[list(order)]) or ()) for order in orders}) == len(
        orders
    )


def test_bits_count() -> None:
    wave = torch.randn(100, 100, dtype=torch.float64)
    first = digest(wave)
    wave[3, 4].neg_()
    assert digest(wave) != first
    wave[70, 80].neg_()
    assert digest(wave) != first
    assert digest(torch.tensor([0.0, 1.0])) != digest(torch.tensor([-0.0, 1.0]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(nans[:1]) != digest(nans[1:])
    assert digest(nans) == digest(nans.clone())
    assert digest(torch.empty(0)) == digest(torch.empty(3, 0))
    z = torch.randn(5, 6, dtype=torch.complex64)
    assert digest(z) == digest(z.conj()) != digest(z.conj().resolve_conj())
    x = torch.randn(4, 1, 5)
    assert digest(x.expand(4, 7, 5)) == digest(x)


def test_what_is_no_plain_tensor_is_left_out() -> None:
    left_out = [
        torch.randn(3, 3).to_sparse(),
        torch.empty(3, device="meta"),
        nn.UninitializedParameter(),
    ]
    assert [digest(t) for t in left_out] == [None] * len(left_out)


def test_digests_take_no_memory_and_nobody_sees_them() -> None:
    tensors = [make() for make in TENSORS.values()]
    checks = Checks(CPU, always=True)
    with _Counting() as seen:
        assert recorded_allocations(lambda: [checks.take(t) for t in tensors])[0] == []
    assert seen.count == 0


class _Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


# Which steps


def test_sampled_steps() -> None:
    """The first three, then one in a hundred on average, at places that suit any number of passes in a step."""
    checks = Checks(CPU, always=False)
    checked = [n for n in range(1, 5001) if checks.begin(("stage",)) is checks]
    assert checked[:3] == [1, 2, 3]
    assert 47 <= len(checked[3:]) <= 53
    assert {n % 4 for n in checked} == {0, 1, 2, 3}
    assert all(isinstance(Checks(CPU, always=True).begin(()), Checks) for _ in range(9))


def test_what_is_checked_is_counted() -> None:
    model, inputs = build("mlp")
    plan = planned("mlp", "recompute")
    with apply(model, plan) as handle:
        for _ in range(5):
            step(model, inputs)
        stats = handle.stats()
    assert (stats.forwards, stats.checked_forwards) == (5, 3)
    assert stats.compared_tensors > 3 * stats.planned_recomputed_stages
    assert f"checked forwards: 3; {stats.compared_tensors} tensors were as in forward" in str(stats)
    with apply(model, plan, check="off") as handle:
        step(model, inputs)
        assert handle.stats().compared_tensors == 0
        assert "checked" not in str(handle.stats())


# Nothing differs


@pytest.mark.parametrize("what", ["recompute", "swap", "segment"])
def test_a_step_with_digests_or_spots_takes_no_more_memory(what: str) -> None:
    model, inputs = build("transformer")
    peaks, compared = {}, {}
    for when in ("off", "always", "sampled"):
        with apply(model, planned("transformer", what), check=when) as handle:  # type: ignore[arg-type]
            for _ in range(FIRST if when == "sampled" else 1):
                step(model, inputs)
            before = handle.stats().compared_tensors
            model.zero_grad()
            peaks[when] = peak_above_start(lambda: step(model, inputs))
            compared[when] = handle.stats().compared_tensors - before
    assert compared["always"] > compared["off"] == 0
    assert peaks["always"] <= peaks["off"]
    assert peaks["sampled"] <= peaks["off"]


def test_digests_are_read_early_where_many_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_DIGESTS", 7)
    model, inputs = build("transformer")
    with apply(model, planned("transformer", "segment"), check="always") as handle:
        step(model, inputs)
        assert handle.stats().compared_tensors > 7


class Remembering(nn.Module):
    """Has state of its own, and draws nothing, which threads share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.seen = nn.Linear(8, 8), nn.BatchNorm1d(8), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(self.seen))
        return self.norm(torch.tanh(self.linear(x))) * (1 + 0.1 * len(self.seen))


@pytest.mark.parametrize(("what", "how"), [("recompute", "threads"), ("swap", "in turn")])
def test_models_trained_at_once(what: str, how: str) -> None:
    """Each with a plan of its own."""
    x = torch.randn(64, 8)
    models = [nn.Sequential(Remembering(), Remembering(), Remembering()) for _ in range(3)]
    twins = [copy.deepcopy(model) for model in models]
    found = [default_loss(model(x)) for model in twins]
    with contextlib.ExitStack() as plans:
        for model in models:
            profile = ckptplan.profile(model, x, loss_fn=default_loss, menus=False)
            plans.enter_context(apply(model, plan_of(profile, [what] * len(profile.stages)), check="always"))  # type: ignore[list-item]
        if how == "threads":
            with ThreadPoolExecutor(len(models)) as threads:
                list(threads.map(lambda model: default_loss(model(x)).backward(), models))
        else:
            losses = [default_loss(model(x)) for model in models]
            for i in (1, 0, 2):
                losses[i].backward()
    for model, twin, loss in zip(models, twins, found, strict=True):
        loss.backward()
        same = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in same)
        assert [m.seen for m in model] == [m.seen for m in twin] == [[0]] * 3


def test_checks_go_with_the_plan() -> None:
    model, inputs = build("mlp")
    handle = apply(model, planned("mlp", "recompute"), check="always")
    loss = default_loss(model(inputs))
    checks = weakref.ref(handle._applied.controller.checks)
    handle.remove()
    assert checks()._benches == {}  # type: ignore[union-attr]
    loss.backward()  # a graph that is alive goes on
    del handle, loss
    gc.collect()
    assert checks() is None


# Something differs


class Stage(nn.Module):
    """One of three stages, with a place for something odd."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("scale", torch.ones(32))
        self.state = [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * self.scale) * x

    def written(self) -> None:
        pass


def model_of(kind: type[nn.Module] = Stage) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(3))), torch.randn(64, 32)


@contextlib.contextmanager
def finds(*words: str) -> Iterator[None]:
    with pytest.raises(CheckError) as caught:
        yield
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert caught.value.stage in text
    assert caught.value.tensor in text


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the check finds or keeps Python state, and buffers that are written without a version."""
    monkeypatch.setattr(timing, "why_not_again", lambda *_: None)
    monkeypatch.setattr(WatchedState, "changed", lambda self: [])
    monkeypatch.setattr(recompute._State, "_was_seen_written", lambda *_: False)
    monkeypatch.setattr(Snapshot, "put", lambda self, instead=None: lambda: None)


class Averaging(Stage):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.data.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


class Counting(Stage):
    calls = [0]  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return super().forward(x * self.calls[0])


class Edited(Stage):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        result = torch.tanh(made * self.scale) * x
        made.data.zero_()
        return result


LEAKED: dict[int, torch.Tensor] = {}


class Leaking(Stage):
    """Its second run writes to the buffer itself, past the copy that it was given."""

    def __init__(self) -> None:
        super().__init__()
        LEAKED[id(self)] = self.scale
        self.register_buffer("unused", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            LEAKED[id(self)].add_(1)
            self.scale.add_(1)
        return torch.tanh(self.linear(x)) * x


def edit(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.data.mul_(2)


@pytest.mark.parametrize(
    ("kind", "what", "odd", "words"),
    [
        (Stage, "recompute", "written", ("stage '1'", "its parameter 'linear.weight'", "fused optimizer", "drop them")),
        (Averaging, "selective", "", ("its buffer 'scale'", "versions don't show")),
        (Counting, "segment", "", ("that autograd saves in it, float32 [64, 32]", "Python state")),
        (Leaking, "recompute", "", ("its buffer 'scale'", "changed it once more")),
        (Stage, "segment", "edited", ("its input number 0, float32 [64, 32]", "in a hook")),
        (Edited, "selective", "", ("the saved output of its operation number 0",)),
    ],
)
def test_what_differs_is_named(kind: type[Stage], what: str, odd: str, words: tuple[str, ...], unguarded: None) -> None:
    """Before the optimizer steps; the next step is right again."""
    model, x = model_of(kind)
    if odd == "edited":
        model[0].register_forward_hook(edit)
    with apply(model, plan_for(model, x, what)):
        loss = model(x).mean()
        if odd == "written":
            model[1].linear.weight.data.mul_(1.5)
        with finds(*words):
            loss.backward()
        if odd == "written":
            step(model, x)


class Leaving(Stage):
    """Each run leaves something that no output shows."""

    def leave(self) -> Any:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.leave()
        return super().forward(x)


def toggle(stage: Leaving) -> None:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


LEFT: dict[str, tuple[Callable[[Leaving], Any], str]] = {
    "list": (lambda stage: stage.state.append(1.0), "what it keeps in a list"),
    "attribute": (lambda stage: setattr(stage, "last", object()), "what it keeps in Leaving.last"),
    "buffer": (lambda stage: setattr(stage, "scale", stage.scale.clone()), "what it keeps in Leaving._buffers"),
    "hook": (lambda stage: stage.linear.register_forward_hook(print), "what it keeps in Linear._forward_hooks"),
    "Python's": (lambda stage: random.random(), "the state of a random generator"),
    "torch's": (lambda stage: torch.rand(1), "the state of a random generator"),
    "flag": (toggle, "PyTorch's flag 'deterministic algorithms'"),
}


@pytest.mark.parametrize(("name", "what"), list(zip(LEFT, itertools.cycle(["recompute", "segment"]), strict=False)))
def test_what_a_recompute_leaves_behind(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave, words = LEFT[name]
    plan = plan_for(*model_of(), what)
    model, x = model_of(Leaving)
    plan = dataclasses.replace(plan, fingerprint=ckptplan.profile(model, x, menus=False).fingerprint)
    for kind in (recompute._State, recompute.ModuleTables, surroundings.Surroundings):
        monkeypatch.setattr(kind, "put", lambda self, undo, tensors=(): None)
    monkeypatch.setattr(Leaving, "leave", leave)
    try:
        with apply(model, plan), finds(words, "changed it once more"):
            step(model, x)
    finally:
        torch.use_deterministic_algorithms(False)


def test_bytes_that_come_back_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("mlp")
    real = disk._read

    def spoilt(fd: int, view: memoryview, offset: int) -> None:
        real(fd, view, offset)
        view[5] ^= 1

    monkeypatch.setattr(disk, "_read", spoilt)
    with apply(model, planned("mlp", "swap")), finds("that it had swapped out", "a copy was overtaken"):
        step(model, inputs)


def test_what_a_failed_backward_has_compared_is_forgotten() -> None:
    model, x = model_of()
    with apply(model, plan_for(model, x, "recompute")) as handle:
        output = model(x.requires_grad_())
        x.register_hook(lambda _: 1 / 0)  # type: ignore[func-returns-value]
        with pytest.raises(ZeroDivisionError):
            output.mean().backward()
        assert handle._applied.controller.checks._pairs
        with torch.no_grad():
            model(x)
        model(x)
        assert handle._applied.controller.checks._pairs == []
