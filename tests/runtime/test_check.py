"""Checks while training: digests of what is saved, compared with what comes back."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kinds_of_tensors import TENSORS
from made_plans import plan_of
from odd.harness import BATCH, WIDTH
from odd.layers import buffer, layer_of
from small_models import Operations, build, plan_for, planned, step
from torch import nn

import ckptplan
from ckptplan import CheckError
from ckptplan.profiling.times import timing
from ckptplan.profiling.values.watched import WatchedState
from ckptplan.runtime.guard import digests, spots
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
    left_out = [torch.randn(3, 3).to_sparse(), torch.empty(3, device="meta"), nn.UninitializedParameter()]
    assert [digest(t) for t in left_out] == [None] * len(left_out)


def test_digests_take_no_memory_and_nobody_sees_them() -> None:
    tensors = [make() for make in TENSORS.values()]
    checks = Checks(CPU, always=True)
    with Operations() as seen:
        assert recorded_allocations(lambda: [checks.take(t) for t in tensors])[0] == []
    assert seen.names == []


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
@pytest.mark.long("segment")
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
    monkeypatch.setattr(digests, "_DIGESTS", 7)
    model, inputs = build("transformer")
    with apply(model, planned("transformer", "segment"), check="always") as handle:
        step(model, inputs)
        assert handle.stats().compared_tensors > 7


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


def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(m.linear(x) * m.scale) * x


def stage(run: Callable[..., torch.Tensor] = scaled, **kept: Any) -> type[nn.Module]:
    return layer_of(run, scale=buffer(lambda: torch.ones(WIDTH)), state=lambda: [1.0], **kept)


def model_of(kind: type[nn.Module]) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(3))), torch.randn(BATCH, WIDTH)


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


def averaging(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.scale.data.lerp_(x.detach().mean(0), 0.1)
    return scaled(m, x)


CALLS = [0]


def counting(m: Any, x: torch.Tensor) -> torch.Tensor:
    CALLS[0] += 1
    return scaled(m, x * CALLS[0])


def edited(m: Any, x: torch.Tensor) -> torch.Tensor:
    made = m.linear(x)
    result = torch.tanh(made * m.scale) * x
    made.data.zero_()
    return result


def leaking(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Its second run writes to the buffer itself, past the copy that it was given."""
    with torch.no_grad():
        LEAKED[id(m)].add_(1)
        m.scale.add_(1)
    return torch.tanh(m.linear(x)) * x


LEAKED: dict[int, torch.Tensor] = {}


def edit(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.data.mul_(2)


@pytest.mark.parametrize(
    ("run", "what", "odd", "words"),
    [
        (
            scaled,
            "recompute",
            "written",
            ("stage '1'", "its parameter 'linear.weight'", "fused optimizer", "drop them"),
        ),
        (averaging, "selective", "", ("its buffer 'scale'", "versions don't show")),
        (counting, "segment", "", ("that autograd saves in it, float32 [64, 32]", "Python state")),
        (leaking, "recompute", "", ("its buffer 'scale'", "changed it once more")),
        (scaled, "segment", "edited", ("its input number 0, float32 [64, 32]", "in a hook")),
        (edited, "selective", "", ("the saved output of its operation number 0",)),
    ],
)
def test_what_differs_is_named(run: Any, what: str, odd: str, words: tuple[str, ...], unguarded: None) -> None:
    """Before the optimizer steps; the next step is right again."""
    model, x = model_of(stage(run))
    LEAKED.update({id(m): m.scale for m in model})
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


def toggle(m: Any) -> None:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


LEFT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda m: m.state.append(1.0), "what it keeps in a list"),
    "attribute": (lambda m: setattr(m, "last", object()), "what it keeps in Stage.last"),
    "buffer": (lambda m: setattr(m, "scale", m.scale.clone()), "what it keeps in Stage._buffers"),
    "hook": (lambda m: m.linear.register_forward_hook(print), "what it keeps in Linear._forward_hooks"),
    "Python's": (lambda m: random.random(), "the state of a random generator"),
    "torch's": (lambda m: torch.rand(1), "the state of a random generator"),
    "flag": (toggle, "PyTorch's flag 'deterministic algorithms'"),
}


@pytest.mark.parametrize(("name", "what"), list(zip(LEFT, itertools.cycle(["recompute", "segment"]), strict=False)))
def test_what_a_recompute_leaves_behind(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run leaves something that no output shows, from its first step under the plan on."""
    leave, words = LEFT[name]
    begun = []

    def leaving(m: Any, x: torch.Tensor) -> torch.Tensor:
        if begun:
            leave(m)
        return scaled(m, x)

    model, x = model_of(stage(leaving))
    plan = plan_for(model, x, what)
    begun.append(True)
    for kind in (recompute._State, recompute.ModuleTables, surroundings.Surroundings):
        monkeypatch.setattr(kind, "put", lambda self, undo, tensors=(): None)
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
    model, x = model_of(stage())
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


class Edited(nn.Module):
    """The second stage copies what it reads: nothing holds the first one's output until backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y.data.mul_(0.9)
        return self.second(y)[0]


@pytest.mark.parametrize(
    ("decision", "what"), [("recompute", "tensor number ."), ("swap", "a tensor that it swaps out")]
)
@pytest.mark.long("recompute-tensor number .")
def test_a_write_to_what_is_freed_before_backward_is_found(decision: str, what: str) -> None:
    model, x = Edited(), torch.randn(64, 8, 8)
    chain = ckptplan.profile(model, x, menus=False)
    plan = plan_of(chain, [decision if stage.name.startswith("first") else "keep" for stage in chain.stages])
    with apply(model, plan), pytest.raises(CheckError, match=f"'first.*': {what}.* written to after the stage"):
        model(x).sum().backward()
