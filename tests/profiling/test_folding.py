"""Profiles of models of many equal layers, from a few layers run and from all: equal in every field."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from equal_layers import DEPTH, FORWARDS, Layers
from test_dropped_graphs import Detached, Midway, Parts, Unused, loss_of
from test_menus import by_made_up_times
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy_modules import Lambda, Residual, times

import ckptplan
from ckptplan.core.link import Link
from ckptplan.distributed.absent import sharded
from ckptplan.profiling import profiler
from ckptplan.profiling.bytes import folding, unfolding
from ckptplan.profiling.target import Target
from ckptplan.profiling.times.timing import StageWork, Times

Built = tuple[nn.Module, Any, dict[str, Any]]


class Layer(nn.Module):
    """A layer with dropout; `place` scales its result if `reads_place`, and otherwise only differs."""

    def __init__(self, width: int = 128, place: int = 0, *, reads_place: bool = False) -> None:
        super().__init__()
        self.layer_idx, self.reads_place = place, reads_place
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.down(nn.functional.dropout(torch.tanh(self.up(self.norm(x))), 0.1))
        return x + (made * (1 + self.layer_idx / 8) if self.reads_place else made)


class Hooked(Layer):
    """A layer of which some have more to do in backward alone."""

    def __init__(self, place: int, *hooked: int) -> None:
        super().__init__(place=place)
        self.hooked = hooked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.layer_idx in self.hooked:
            y.register_hook(lambda gradient: torch.cat([gradient, gradient]).sin()[: len(gradient)])
        return y


class Heavy(torch.autograd.Function):
    """Makes a storage in backward that is larger with `much`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, much: bool) -> torch.Tensor:
        ctx.much = much
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return torch.cat([gradient] * (3 if ctx.much else 1))[: len(gradient)].clone(), None


class HeavyOnce(Layer):
    """A layer of which the third takes more memory in backward, which forward doesn't show."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Heavy.apply(super().forward(x), self.layer_idx == 2)


class Dropping(Layer):
    """A layer that makes a graph, drops it, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.tanh(self.up(x))
        return super().forward(x) * torch.empty_like(x).bernoulli_(0.5, generator=self.generator)


def normed_layer() -> Residual:
    """A layer with buffers, which a recompute copies."""
    return Residual(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))


class Checkpointed(Layer):
    """A layer that is checkpointed by itself: backward runs it again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def carrying(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Gives a tensor through all layers beside the one that they change, and a mask that was there before."""
    bias = model.bias(x)
    for layer in model.layers:
        x = layer(x, bias, mask)
    return x


class Biased(Layer):
    """A layer that reads two tensors besides its input."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x + bias * mask) * bias


def stack(*layers: nn.Module, **options: Any) -> Built:
    return (
        nn.Sequential(nn.Linear(32, 32), *layers, nn.Linear(32, 8)),
        torch.randn(16, 40, 32),
        {"menus": False, **options},
    )


def vit(layers: int = 6) -> Built:
    config = transformers.ViTConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=96, num_attention_heads=2, image_size=32,
        patch_size=8, num_labels=10,
    )  # fmt: skip
    images = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}
    return transformers.ViTForImageClassification(config), images, {"menus": False}


def collecting(loss_fn: Callable[[Any], torch.Tensor]) -> Built:
    """Returns the outputs of all layers."""

    def forward(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        seen = [x]
        for layer in model.layers:
            seen.append(layer(seen[-1]))
        return model.head(seen[-1]), seen

    model = Lambda(forward, layers=nn.ModuleList(Layer(place=k) for k in range(8)), head=nn.Linear(32, 8))
    return model, torch.randn(16, 40, 32), {"menus": False, "loss_fn": loss_fn}


def normed() -> Built:
    layers = nn.Sequential(nn.Conv2d(3, 16, 1), *times(8, normed_layer))
    return layers, torch.randn(4, 3, 16, 16), {"menus": False}


def of_one_weight() -> Built:
    made = stack(*times(8, Layer))
    for layer in made[0][2:9]:
        layer.up.weight = made[0][1].up.weight
    return made


def frozen() -> Built:
    made = stack(*times(12, Layer))
    for layer in made[0][:4]:
        layer.requires_grad_(False)
    return made


class Reading(Layer):
    """A layer that reads a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if x.sum().item() > 1e9 else 2.0)


def stepping() -> Built:
    model, x, _ = stack(*times(7, Layer))
    return model, None, {"step": lambda: model(x).sum(), "menus": False}


def at_random(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x).sin() if random.random() < 0.5 else layer(x)
    return x


class Case(NamedTuple):
    """A model, and whether its replays are written out of those of four layers."""

    build: Callable[[], Built]
    folded: bool = True


UNITS = ckptplan.FSDP(4, units=("Layer",), param_dtype="bfloat16")


def dropping_graphs(kind: type[Parts], *, folded: bool) -> Case:
    deep = type(kind.__name__, (kind,), {"depth": 7})
    return Case(lambda: (deep(), torch.randn(96, 32), {"menus": False, "loss_fn": loss_of}), folded)


def equal(**options: Any) -> Built:
    return stack(*(Layer(place=k) for k in range(8)), **options)


def special(forward: Callable[..., torch.Tensor]) -> Case:
    """Equal layers, some of which the model's forward treats otherwise."""
    return Case(lambda: (Layers(forward), torch.randn(2000, 16), {"menus": False}), folded=False)


CASES: dict[str, Case] = {
    "vit": Case(vit),
    "accumulating": Case(lambda: equal(accumulate=True, optimizer="adamw")),
    "absent": Case(lambda: equal(device="a100-40gb", amp=torch.bfloat16)),
    "sharded": Case(lambda: equal(device="a100-40gb", fsdp=UNITS)),
    "stack": Case(lambda: stack(*(Layer(place=k) for k in range(9)), menus=True)),
    "two in turn": Case(lambda: stack(*(Layer(64 + 64 * (k % 2)) for k in range(12)))),
    "some frozen": Case(frozen),
    "dropping": Case(lambda: stack(*times(8, Dropping))),
    "all hooked": Case(lambda: stack(*(Hooked(k, *range(8)) for k in range(8)))),
    "nested": Case(lambda: stack(*(nn.Sequential(*times(5, Layer)) for _ in range(5)))),
    "collecting": Case(lambda: collecting(lambda out: out[0].sum())),
    "normed": Case(normed),
    "graph dropped": dropping_graphs(Detached, folded=True),
    "checkpointed": Case(lambda: stack(*times(7, Checkpointed))),
    "carrying": Case(
        lambda: (
            Lambda(carrying, bias=nn.Linear(32, 32), layers=times(DEPTH, Biased)),
            tuple(torch.randn(2, 16, 40, 32)),
            {"menus": False},
        )
    ),
    # Here some operation isn't that of another layer, or there are as many as layers, so all are run.
    "graph dropped in another layer": dropping_graphs(Midway, folded=False),
    "graphs dropped behind all": dropping_graphs(Unused, folded=False),
    "one hooked": Case(lambda: stack(*(Hooked(k, 5) for k in range(8))), folded=False),
    "heavy once": Case(lambda: stack(*(HeavyOnce(place=k) for k in range(8))), folded=False),
    "stacking": Case(lambda: collecting(lambda out: torch.stack(out[1]).sum()), folded=False),
    "place read": Case(lambda: stack(*(Layer(place=k, reads_place=True) for k in range(8))), folded=False),
    "one weight": Case(of_one_weight, folded=False),
    "reading": Case(lambda: stack(*times(7, Reading)), folded=False),
    "a step of its own": Case(stepping, folded=False),
    **{forward.__name__: special(forward) for forward in (*FORWARDS, at_random)},
}


@contextlib.contextmanager
def without_clocks() -> Iterator[pytest.MonkeyPatch]:
    """All that is measured has made-up values, so that profiles differ in nothing else."""

    def time_stages(step: Any, work: StageWork, *args: Any) -> tuple[Times, Times, Any]:
        seconds = dict.fromkeys(work.kinds.values(), 1.0)
        recompute_s = {(kind, ops): 1.0 for kind, ways in work.again.items() for ops in ways}
        return Times(seconds, seconds, recompute_s), Times(), {}

    def workspaces(target: Target, keys: Iterable[Any]) -> tuple[dict[Any, int], list[str], dict[Any, Any]]:
        return {key: 1000 * len(key[1]) for key in keys if key is not None}, [], {}

    with by_made_up_times(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "time_stages", time_stages)
        patch.setattr(Target, "workspaces", workspaces)
        patch.setattr(profiler, "measure_costs", lambda *args: Link(1e9, 1e9))
        patch.setattr(profiler, "measure_links", lambda *args, **how: (Link(1e9, 1e9), Link(1e9, 1e9)))
        yield patch


def built(name: str) -> Built:
    torch.manual_seed(0)
    random.seed(1)
    model, inputs, options = CASES[name].build()
    return model.train(), inputs, options


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.long(
    but=[
        "all hooked",
        "normed",
        "graphs dropped behind all",
        "stacking",
        "every_fifth",
        "room_for_every_layer",
        "one_is_held",
        "some_are_left_out",
        "later_ones_share",
        "by_number",
        "grows_in_the_middle",
        "counts_calls",
        "at_random",
    ]
)
def test_profiles_are_those_of_all_layers(name: str) -> None:
    """And whether those of a few layers did."""
    model, inputs, options = built(name)
    judged = unfolding.Folding.folds.fget  # type: ignore[attr-defined]
    give_up, replay = unfolding.Folding.give_up, unfolding.Folding.replay
    folds: list[bool] = []
    given_up: list[Any] = []
    begun: list[bool] = []

    def replayed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun.append(True)
        found = replay(self, *args, **kwargs)
        begun.pop()
        return found

    with without_clocks() as patch:
        patch.setattr(unfolding.Folding, "replay", replayed)
        patch.setattr(unfolding.Folding, "give_up", lambda self: given_up.append(give_up(self)))
        patch.setattr(unfolding.Folding, "folds", property(lambda self: folds.append(judged(self)) or folds[-1]))
        few = ckptplan.profile(model, inputs, **options)
        folded = all(folds) and not given_up and not begun  # one that is refused isn't ended
        patch.setattr(unfolding, "find_runs", lambda model: [])
        full = ckptplan.profile(model, inputs, **options)
    assert folded == CASES[name].folded
    ours, theirs = dataclasses.asdict(few), dataclasses.asdict(full)
    for field, value in theirs.items():
        assert ours[field] == value, field


def test_only_four_layers_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, _ = built("stack")
    timed: list[list[str]] = []
    original = profiler.time_stages

    def counted(step: Any, work: StageWork, *args: Any) -> Any:
        timed.append(list(work.kinds))
        return original(step, work, *args)

    monkeypatch.setattr(profiler, "time_stages", counted)
    found = ckptplan.profile(model, inputs, menus=False)
    assert timed == [[str(k) for k in range(6)]]  # with one layer before those four, and one behind
    assert [stage.name for stage in found.stages if not stage.is_glue] == [str(k) for k in range(11)]


def test_layers_with_other_settings_inside_an_object_are_not_equal() -> None:
    class Settings:
        def __init__(self, rate: float) -> None:
            self.rate = rate
            self.owner = self  # a cycle

    class Set(Layer):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.settings = Settings(rate)

    equal, other = ([Set(0.1) for _ in range(4)] + [Set(rate) for _ in range(4)] for rate in (0.1, 0.2))
    assert [run.count for run in folding.find_runs(nn.ModuleList(equal))] == [8]
    assert folding.find_runs(nn.ModuleList(other)) == []


def test_units_with_other_settings_are_not_equal() -> None:
    """Also where they act in backward alone, which no forward shows."""
    layers = nn.Sequential(*times(12, Layer))
    with sharded(layers, UNITS):
        assert [(run.count, run.kept) for run in folding.find_runs(layers)] == [(12, 5)]
        for name in ("set_reshard_after_backward", "set_requires_gradient_sync"):
            getattr(layers[6], name)(False, recurse=False)
            assert [run.count for run in folding.find_runs(layers)] == [6]
            getattr(layers[6], name)(True, recurse=False)
        layers[0].set_modules_to_backward_prefetch([layers[3]])
        assert folding.find_runs(layers) == []
