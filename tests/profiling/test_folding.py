"""Profiles of models of many equal layers, from a few layers run and from all: equal in every field."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from equal_layers import DEPTH, FORWARDS, Layers
from test_menus import by_made_up_times
from torch import nn
from torch.utils.checkpoint import checkpoint

import ckptplan
from ckptplan.core.link import Link
from ckptplan.core.plan import KEEP, Decision, Decisions
from ckptplan.core.request import Training
from ckptplan.distributed.absent import sharded
from ckptplan.profiling import profiler
from ckptplan.profiling.bytes import folding, replays, trace, unfolding
from ckptplan.profiling.bytes.folding import Periods, Run
from ckptplan.profiling.bytes.tracker import SegmentTrace
from ckptplan.profiling.profiler import traced_bytes
from ckptplan.profiling.target import Target, find_target
from ckptplan.profiling.times.timing import StageWork, Times
from ckptplan.training.step import make_step

Built = tuple[nn.Module, Any, dict[str, Any]]


class Residual(nn.Module):
    """A layer with dropout; `place` scales its result if `reads_place`, and otherwise only differs."""

    def __init__(self, width: int = 128, place: int = 0, *, reads_place: bool = False) -> None:
        super().__init__()
        self.layer_idx, self.reads_place = place, reads_place
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.down(nn.functional.dropout(torch.tanh(self.up(self.norm(x))), 0.1))
        return x + (made * (1 + self.layer_idx / 8) if self.reads_place else made)


class Hooked(Residual):
    """A layer of which some have more to do in backward alone."""

    def __init__(self, place: int, *hooked: int) -> None:
        super().__init__(place=place)
        self.hooked = hooked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.layer_idx in self.hooked:
            y.register_hook(lambda gradient: torch.cat([gradient, gradient]).sin()[: len(gradient)])
        return y


class HeldByHook(Residual):
    """A layer in which a hook on a tensor's gradient holds another tensor as long as the graph is there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        y = self.down(torch.tanh(self.up(x)))
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + x.detach() * 0)
        return x + y


class Heavy(torch.autograd.Function):
    """Makes a storage in backward that is larger with `much`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, much: bool) -> torch.Tensor:
        ctx.much = much
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return torch.cat([gradient] * (3 if ctx.much else 1))[: len(gradient)].clone(), None


class HeavyOnce(Residual):
    """A layer of which the third takes more memory in backward, which forward doesn't show."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Heavy.apply(super().forward(x), self.layer_idx == 2)


class Leaving(Residual):
    """A layer that keeps a tensor until the next step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.last = y.detach().exp()
        return y


class Dropping(Residual):
    """A layer that makes a graph, drops it, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.tanh(self.up(x))
        return super().forward(x) * torch.empty_like(x).bernoulli_(0.5, generator=self.generator)


class Writing(Residual):
    """A layer that writes to a parameter in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.down.weight.mul_(0.99)
        return super().forward(x)


class Collecting(nn.Module):
    """Returns the outputs of all layers."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Residual(place=k) for k in range(depth)), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        seen = [x]
        for layer in self.layers:
            seen.append(layer(seen[-1]))
        return self.head(seen[-1]), seen


class Normed(nn.Module):
    """A layer with buffers, which a recompute copies."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu_(self.norm(self.conv(x)))


class Checkpointed(Residual):
    """A layer that is checkpointed by itself: backward runs it again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Carrying(nn.Module):
    """Gives a tensor through all layers beside the one that they change, and a mask that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(32, 32)
        self.layers = nn.ModuleList(Biased() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        bias = self.bias(x)
        for layer in self.layers:
            x = layer(x, bias, mask)
        return x


class Biased(Residual):
    """A layer that reads two tensors besides its input."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x + bias * mask) * bias


class Masked(Residual):
    """A layer with a second result, whose graph saves the mask."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = super().forward(x)
        return x, x * mask


class Unused(nn.Module):
    """Drops its layers' second results, and holds each mask, which these alone saved, beyond them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(DEPTH))
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x.detach() > 0).float()
        for layer in self.layers:
            x, unused = layer(x, mask)
            del unused
            x = x * mask.mean()
            mask = (x.detach() > 0).float()
        return self.head(x)


def stack(*layers: nn.Module, **options: Any) -> Built:
    return (
        nn.Sequential(nn.Linear(32, 32), *layers, nn.Linear(32, 8)),
        torch.randn(16, 40, 32),
        {"menus": False, **options},
    )


def language(model: nn.Module, **options: Any) -> Built:
    tokens = torch.randint(2, 100, (2, 32))
    inputs = {"input_ids": tokens, "labels": tokens}
    if options.pop("hidden", False):
        inputs["output_hidden_states"] = True
    return model, inputs, options


ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "vocab_size": 100}


def gpt2(layers: int = 6, **options: Any) -> Built:
    config = transformers.GPT2Config(n_layer=layers, n_embd=64, n_head=2, n_positions=32, **ENDS)
    return language(transformers.GPT2LMHeadModel(config), **options)


def llama(layers: int = 6, **options: Any) -> Built:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1,
        **ENDS,
    )  # fmt: skip
    return language(transformers.LlamaForCausalLM(config), **options)


def bert(layers: int = 6, **options: Any) -> Built:
    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=96, num_attention_heads=2, **ENDS
    )
    return language(transformers.BertForMaskedLM(config), **options)


def t5(layers: int = 7, **options: Any) -> Built:
    config = transformers.T5Config(
        num_layers=layers, num_decoder_layers=layers, d_model=64, d_kv=16, d_ff=96, num_heads=2, pad_token_id=0,
        decoder_start_token_id=0, **ENDS,
    )  # fmt: skip
    return language(transformers.T5ForConditionalGeneration(config), **options)


def vit(layers: int = 6) -> Built:
    config = transformers.ViTConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=96, num_attention_heads=2, image_size=32,
        patch_size=8, num_labels=10,
    )  # fmt: skip
    images = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}
    return transformers.ViTForImageClassification(config), images, {}


def of_one_weight() -> Built:
    made = stack(*(Residual() for _ in range(8)))
    for layer in made[0][2:9]:
        layer.up.weight = made[0][1].up.weight
    return made


def frozen() -> Built:
    made = stack(*(Residual() for _ in range(12)))
    for layer in made[0][:4]:
        layer.requires_grad_(False)
    return made


class Case(NamedTuple):
    """A model, and whether its replays are written out of those of four layers."""

    build: Callable[[], Built]
    folded: bool = True


A100 = {"device": "a100-40gb", "amp": torch.bfloat16}
SHARDED = ckptplan.FSDP(4, param_dtype="bfloat16", reduce_dtype="float32")
CASES: dict[str, Case] = {
    "gpt2": Case(gpt2),
    "llama": Case(lambda: llama(menus=False)),
    "t5": Case(lambda: t5(menus=False)),
    "vit": Case(vit),
    "hidden states": Case(lambda: gpt2(hidden=True, menus=False)),
    "accumulating": Case(lambda: gpt2(accumulate=True, optimizer="adamw", menus=False)),
    "absent": Case(lambda: gpt2(menus=False, **A100)),
    "sharded": Case(lambda: llama(8, device="a100-40gb", fsdp=SHARDED, menus=False)),
    "sharded, whole": Case(lambda: bert(7, menus=False, fsdp=ckptplan.FSDP(3, reshard_after_forward=False))),
    "stack": Case(lambda: stack(*(Residual(place=k) for k in range(9)), menus=True)),
    "two in turn": Case(lambda: stack(*(Residual(64 + 64 * (k % 2)) for k in range(12)))),
    "others behind": Case(lambda: stack(*(Residual() for _ in range(8)), Residual(64), Residual())),
    "some frozen": Case(frozen),
    "leaving": Case(lambda: stack(*(Leaving() for _ in range(8)))),
    "dropping": Case(lambda: stack(*(Dropping() for _ in range(8)))),
    "all hooked": Case(lambda: stack(*(Hooked(k, *range(8)) for k in range(8)))),
    "held by hooks": Case(lambda: stack(*(HeldByHook() for _ in range(9)))),
    "nested": Case(lambda: stack(*(nn.Sequential(*(Residual() for _ in range(5))) for _ in range(5)))),
    "collecting": Case(lambda: (Collecting(8), torch.randn(16, 40, 32), {"loss_fn": lambda out: out[0].sum()})),
    "normed": Case(
        lambda: (nn.Sequential(nn.Conv2d(3, 16, 1), *(Normed() for _ in range(8))), torch.randn(4, 3, 16, 16), {})
    ),
    "checkpointed": Case(lambda: stack(*(Checkpointed() for _ in range(7)))),
    "unused": Case(lambda: (Unused(), torch.randn(16, 40, 32), {})),
    "carrying": Case(lambda: (Carrying(), (torch.randn(16, 40, 32), torch.randn(16, 40, 32)), {})),
    # Here some operation isn't that of another layer, or there are as many as layers, so all are run.
    "writing": Case(lambda: stack(*(Writing() for _ in range(8))), folded=False),
    "one hooked": Case(lambda: stack(*(Hooked(k, 5) for k in range(8))), folded=False),
    "heavy once": Case(lambda: stack(*(HeavyOnce(place=k) for k in range(8))), folded=False),
    "stacking": Case(
        lambda: (Collecting(8), torch.randn(16, 40, 32), {"loss_fn": lambda out: torch.stack(out[1]).sum()}),
        folded=False,
    ),
    "place read": Case(lambda: stack(*(Residual(place=k, reads_place=True) for k in range(8))), folded=False),
    "widths": Case(lambda: stack(*(Residual(64 + 16 * k) for k in range(8))), folded=False),
    "one weight": Case(of_one_weight, folded=False),
    "few": Case(lambda: stack(*(Residual() for _ in range(4))), folded=False),
    **{
        forward.__name__: Case(lambda forward=forward: (Layers(forward), torch.randn(2000, 16), {}), folded=False)  # type: ignore[misc]
        for forward in FORWARDS
    },
}


class Profiles(NamedTuple):
    """Profiles with layers left out and without, and whether the first one could do with those that were run."""

    few: ckptplan.Profile
    full: ckptplan.Profile
    folded: bool


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
        patch.setattr(profiler, "measure_links", lambda *args: Link(1e9, 1e9))
        yield patch


def built(name: str) -> Built:
    torch.manual_seed(0)
    model, inputs, options = CASES[name].build()
    return model.train(), inputs, options


@functools.cache
def profiles(name: str) -> Profiles:
    model, inputs, options = built(name)
    refused: list[bool] = []
    original = unfolding.Folding.replay

    def replayed(self: Any, *args: Any, **kwargs: Any) -> Any:
        refused.append(True)
        found = original(self, *args, **kwargs)
        refused.pop()
        return found

    with without_clocks() as patch:
        patch.setattr(unfolding.Folding, "replay", replayed)
        folds: list[bool] = []
        given_up: list[Any] = []
        give_up = unfolding.Folding.give_up
        patch.setattr(unfolding.Folding, "give_up", lambda self: given_up.append(give_up(self)))
        judged = unfolding.Folding.folds.fget  # type: ignore[attr-defined]
        patch.setattr(unfolding.Folding, "folds", property(lambda self: folds.append(judged(self)) or folds[-1]))
        few = ckptplan.profile(model, inputs, **options)
        folded = all(folds) and not given_up and not refused
        patch.setattr(unfolding, "find_runs", lambda model: [])
        full = ckptplan.profile(model, inputs, **options)
    return Profiles(few, full, folded)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_profiles_are_those_of_all_layers(name: str) -> None:
    few, full, folded = profiles(name)
    assert folded == CASES[name].folded
    ours, theirs = dataclasses.asdict(few), dataclasses.asdict(full)
    for field, value in theirs.items():
        assert ours[field] == value, field


@pytest.mark.parametrize("name", ["vit", "stack", "carrying", "two in turn"])
@pytest.mark.parametrize("choice", [KEEP, Decision("recompute")])
def test_replays_are_those_of_all_layers(name: str, choice: Decision) -> None:
    model, inputs, _ = built(name)
    step, target = make_step(model, Training(inputs)), find_target(model)
    stages = replays.find_stages(step, target).stages
    choices = (choice,) * len(stages)
    few = unfolding.Folding(step, stages, target).replay(choices, saves=True)
    full = replays.replay(step, Decisions(stages, choices), target)
    assert {g: simple(found) for g, found in few.backward.items()} == {g: simple(t) for g, t in full.backward.items()}
    assert len(few.gradients) == len(full.gradients)
    ours, theirs = (dataclasses.replace(found, backward={}, gradients=set()) for found in (few, full))
    assert ours == theirs


def simple(found: SegmentTrace) -> Any:
    """A trace without the names of the storages that backward makes: these are free."""
    live = list(itertools.accumulate((nbytes for _, nbytes, _ in found.changes), initial=found.start_bytes))
    ops = [([live[n] for n in op.at], op.key, len(op.made), len(op.written)) for op in found.ops]
    return live[0], live[-1], ops, len(found.present), found.wrapped_bytes


def test_only_four_layers_are_run_with_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[int, bool]] = []
    original = replays.replay

    def counted(step: Any, decisions: Decisions, *args: Any, saves: bool = True, **kwargs: Any) -> Any:
        runs.append((len(decisions.stages), saves))
        return original(step, decisions, *args, saves=saves, **kwargs)

    for module in (trace, unfolding):
        monkeypatch.setattr(module, "replay", counted)
    model, inputs, _ = built("stack")
    with without_clocks():
        ckptplan.profile(model, inputs)
    assert runs[:2] == [(6, False), (11, False)]  # with one layer before the nine, and one behind
    assert len(runs) > 2
    assert set(runs[2:]) == {(6, True)}


def test_only_four_layers_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, _ = built("every_fifth")
    timed: list[tuple[list[str], int]] = []
    original = profiler.time_stages

    def counted(step: Any, work: StageWork, *args: Any) -> Any:
        timed.append((list(work.kinds), len(step.model.layers)))
        return original(step, work, *args)

    monkeypatch.setattr(profiler, "time_stages", counted)
    found = ckptplan.profile(model, inputs)
    depth = len(model.layers)
    assert depth > 4
    folded = 4 if CASES["every_fifth"].folded else depth
    assert timed == [([f"layers.{i}" for i in range(folded)], folded)]
    stages = [stage for stage in found.stages if not stage.is_glue]
    assert [stage.name for stage in stages] == [f"layers.{i}" for i in range(depth)]


def test_glue_between_layers_that_are_left_out_has_times(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(glue_forward_s={0: 1.0, 1: 2.0, 2: 3.0}, glue_backward_s={1: 4.0}, forward_s={"kind": 5.0})
    full = times.unfolded((0, 1, 1, 1, 2))
    assert full.glue_forward_s == {0: 1.0, 1: 2.0, 2: 2.0, 3: 2.0, 4: 3.0}
    assert full.glue_backward_s == {1: 4.0, 2: 4.0, 3: 4.0}
    assert full.forward_s == times.forward_s


def test_layers_with_other_settings_inside_an_object_are_not_equal() -> None:
    class Settings:
        def __init__(self, rate: float) -> None:
            self.rate = rate
            self.owner = self  # a cycle

    class Set(Residual):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.settings = Settings(rate)

    equal, other = ([Set(0.1) for _ in range(4)] + [Set(rate) for _ in range(4)] for rate in (0.1, 0.2))
    assert [run.count for run in folding.find_runs(nn.ModuleList(equal))] == [8]
    assert folding.find_runs(nn.ModuleList(other)) == []


@pytest.mark.parametrize(("name", "saved"), [("vit", 1), ("few", 0), ("held by hooks", 0), ("unused", 0)])
def test_stages_that_are_alike_share_replays(name: str, saved: int) -> None:
    """By how many replays: how many options there are depends on the operations that this version of PyTorch runs."""
    model, inputs, options = built(name)
    counted: list[int] = []
    found = []
    run = trace._Tracing._run

    def noted(*args: Any, **kwargs: Any) -> Any:
        counted[-1] += 1
        return run(*args, **kwargs)

    for change in (
        {},
        {"_share": lambda *args: False},
        {"_Tracing._alike": lambda *args: ()},
    ):
        with without_clocks() as patch:
            counted.append(0)
            patch.setattr(trace._Tracing, "_run", noted)
            for target, value in change.items():
                patch.setattr(f"ckptplan.profiling.bytes.trace.{target}", value)
            found.append(ckptplan.profile(model, inputs, **options))
    assert found[0] == found[1] == found[2]
    shared, each, alone = counted
    assert shared == alone - saved
    assert each >= alone  # those that share prove to differ, so each option is run by all that have it


@pytest.mark.parametrize("name", ["stack", "every_fifth"])
def test_bytes_without_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, _ = built(name)

    def bytes_of() -> ckptplan.Profile:
        step = make_step(model, Training(inputs))
        return traced_bytes(step, torch.optim.AdamW(model.parameters()), find_target(model))

    few = bytes_of()
    monkeypatch.setattr(unfolding, "find_runs", lambda model: [])
    assert few == bytes_of()


# --- models of which all layers are run ---


def test_models_that_read_values_are_run_as_they_are() -> None:
    class Reading(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.0 if x.sum().item() > 1e9 else 2.0)

    CASES["reading"] = Case(lambda: stack(*(Reading() for _ in range(7))))
    few, full, folded = profiles("reading")
    assert not folded
    assert few == full


def test_a_step_of_its_own_is_run_as_it_is() -> None:
    model, x, _ = built("stack")
    CASES["stepping"] = Case(lambda: (model, None, {"step": lambda: model(x).sum()}))
    few, full, folded = profiles("stepping")
    assert not folded
    assert few == full


def test_paths_drawn_by_python_are_run_as_they_are() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Residual() for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).sin() if random.random() < 0.5 else layer(x)
            return x

    CASES["skipping"] = Case(lambda: (Skipping(), torch.randn(16, 40, 32), {}))
    random.seed(1)
    few, full, folded = profiles("skipping")
    assert not folded
    assert few == full


def test_units_with_other_settings_are_not_equal() -> None:
    """Also where they act in backward alone, which no forward shows."""
    layers = nn.Sequential(*(Residual() for _ in range(12)))
    with sharded(layers, ckptplan.FSDP(4, units=("Residual",))):
        assert [(run.count, run.kept) for run in folding.find_runs(layers)] == [(12, 5)]
        for name in ("set_reshard_after_backward", "set_requires_gradient_sync"):
            getattr(layers[6], name)(False, recurse=False)
            assert [run.count for run in folding.find_runs(layers)] == [6]
            getattr(layers[6], name)(True, recurse=False)
        layers[0].set_modules_to_backward_prefetch([layers[3]])
        assert folding.find_runs(layers) == []


# --- names and periods ---


def test_names_of_the_short_model_and_back() -> None:
    run = Run("model.h", 1, 16, 2, kept=4)
    names = (*(f"model.h.{i}.{part}" for i in range(18) for part in ("attn", "mlp")), "head")
    short = tuple(filter(None, map(run.shortened, names)))
    assert short == (*(f"model.h.{i}.{part}" for i in range(10) for part in ("attn", "mlp")), "head")
    periods = Periods.of(run, short)
    assert periods is not None
    assert periods.stages(short) == names
    assert periods.order == (0, 1, 1, 1, 1, 1, 2, 3)
    assert [periods.home(g) for g in (4, 5, 12, 13, 36, 37)] == [None, 0, 0, 1, 3, None]
    assert Periods.of(run, (*short[:4], *short[5:])) is None


def test_what_is_outside_refers_to_all_periods_or_to_the_ends() -> None:
    periods = Periods.of(Run("", 0, 6, 1, kept=4), "0123")
    assert periods is not None
    assert periods.begins == (1, 3, 5, 7, 9)
    seen = replays.Replay(forward={g: SegmentTrace() for g in range(9)})
    full = unfolding._Unfolded(seen, periods, periods.order)
    first, second, third, last = ((("forward", g, 4),) for g in (1, 3, 5, 7))
    assert full._spread([first, second, third, last], None) == [(("forward", g, 4),) for g in (1, 3, 5, 7, 9, 11)]
    assert full._spread([third, last], None) == [(("forward", g, 4),) for g in (9, 11)]
    with pytest.raises(unfolding.UnlikeLayersError):
        full._spread([first, second], None)
    assert full._spread([second, third], 3) == [(("forward", g, 4),) for g in (7, 9)]
    with pytest.raises(unfolding.UnlikeLayersError):
        full._spread([first], 4)  # which is the third one, two periods behind the first
