"""Menus inside a stage: the knapsack, what may be saved, exact bytes, and gradients under any mixture of options."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from small_models import assert_kept, scheduled
from torch import nn
from torch.nn import functional as F
from toy_modules import Lambda, times
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import ckptplan
from ckptplan.core.request import Limits
from ckptplan.core.stage import Stage
from ckptplan.profiling import profiler
from ckptplan.profiling.bytes import menus, trace
from ckptplan.profiling.bytes.menus import Op, SavedOps
from ckptplan.profiling.target import Target
from ckptplan.solving.planner import smallest_peak


class Mlp(nn.Module):
    """Views, an activation in place, and dropout, whose mask is drawn in place too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu_(self.up(self.norm(x)).view(-1, self.up.out_features))
        return x + F.dropout(self.down(hidden).view(x.shape), 0.1)


class Attending(nn.Module):
    """A transformer block with dropout on the attention, the residuals and the input."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.mix(F.dropout(self.norm(x), 0.125)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.125, is_causal=True)
        return self.mlp(x + self.out(mixed.transpose(1, 2).reshape(b, t, c)))


class Shared(nn.Module):
    """Three projections of one float32 tensor: autocast casts it for each, unless it is a leaf."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, 2 * width) for _ in range(3))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.tanh(self.q(x) * self.k(x)) + F.gelu(self.v(x)))).float()


def stack(block: Callable[[int], nn.Module], width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), block(width), block(width), nn.Linear(width, 10))


def attending() -> tuple[nn.Module, torch.Tensor]:
    return stack(Attending, 64), torch.randn(4, 64, 64)


def normed() -> tuple[nn.Module, torch.Tensor]:
    """Buffers that forward updates."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU())

    layers = nn.Conv2d(3, 16, 3, padding=1), block(), block(), nn.Conv2d(16, 1, 1)
    return nn.Sequential(*layers), torch.randn(4, 3, 32, 32)


BUILT = {"attending": attending, "normed": normed}


@contextlib.contextmanager
def by_made_up_times() -> Iterator[None]:
    """Menus by made-up times of operations and without regard to those of stages, so that nothing hangs on chance."""

    def times(target: Target, keys: Iterable[Any]) -> dict[Any, float]:
        dear = (torch.ops.aten.addmm.default, torch.ops.aten.convolution.default, torch.ops.aten.bmm.default)
        return {key: 0.0 if key[0].is_view else 1.0 + 9.0 * (key[0] in dear) for key in keys if key is not None}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "_beaten", lambda *args: False)
        patch.setattr(Target, "times", times)
        yield


@functools.cache
def profiled(name: str) -> tuple[nn.Module, torch.Tensor, ckptplan.Profile]:
    torch.manual_seed(0)
    model, inputs = BUILT[name]()
    with by_made_up_times():
        return model, inputs, ckptplan.profile(model, inputs)


def block_of(profile: ckptplan.Profile) -> Stage:
    """A block in the middle."""
    return max(profile.stages[: len(profile.stages) // 2 + 1], key=lambda stage: len(stage.options))


# --- the knapsack ---


def allowed(ops: Sequence[Op], chosen: tuple[int, ...]) -> bool:
    draws = [i for i, op in enumerate(ops) if op.random]
    kept = [i for i in draws if i in chosen]
    return (
        all(ops[i].savable for i in chosen)
        and all(i in chosen for i, op in enumerate(ops) if op.once)
        and kept == draws[len(draws) - len(kept) :]
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_that_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    ops = [
        Op(
            nbytes=rng.choice([0, 1, 2, 4, 4, 8, 16, rng.randrange(50)]),
            seconds=float(rng.choice([0, 1, 1, 2, 3, 8, rng.randrange(40)])),
            savable=rng.random() < 0.8,
            random=rng.random() < 0.25,
        )
        for _ in range(rng.randrange(1, 11))
    ]
    if seed % 3 == 0:
        ops.insert(rng.randrange(len(ops)), Op(5, 2.0, savable=rng.random() < 0.8, once=True))
    best: dict[int, float] = {}
    for n in range(len(ops) + 1):
        for chosen in itertools.combinations(range(len(ops)), n):
            if allowed(ops, chosen):
                nbytes = sum(ops[i].nbytes for i in chosen)
                best[nbytes] = max(best.get(nbytes, -1.0), sum(ops[i].seconds for i in chosen))
    want, most = [], -1.0
    for nbytes in sorted(best):
        if best[nbytes] > most:
            want.append((nbytes, best[nbytes]))
            most = best[nbytes]
    found = menus.front(ops)
    assert [(c.nbytes, c.saved_s) for c in found] == want
    for c in found:
        assert allowed(ops, c.ops)
        assert (c.nbytes, c.saved_s) == (sum(ops[i].nbytes for i in c.ops), sum(ops[i].seconds for i in c.ops))


def test_the_points_offered_follow_the_hull() -> None:
    #                bytes, time saved of 10: (2, 8) is by far the best; (3, 8.1) lies above the line from it to keep.
    choices = [
        SavedOps((), 0, 0.0),
        SavedOps((1,), 1, 3.0),
        SavedOps((2,), 2, 8.0),
        SavedOps((3,), 3, 8.1),
        SavedOps((4,), 9, 9),
    ]
    assert menus.choose(choices, total_s=10.0, keep_bytes=8) == [choices[2]]
    assert menus.choose(choices, total_s=10.0, keep_bytes=8, points=0) == []
    assert menus.choose(choices, total_s=10.0, keep_bytes=2) == []
    steps = [SavedOps((n,), n, 10 * (1 - 0.5**n)) for n in range(1, 9)]
    chosen = menus.choose(steps, total_s=10.0, keep_bytes=20)
    assert len(chosen) == menus.POINTS
    assert chosen[0] is not steps[-1]


# --- the menu of a block ---


@pytest.mark.long
def test_a_menu_may_divide_a_stage_in_three() -> None:
    _, _, profile = profiled("attending")
    stage = block_of(profile)
    parts = [o for o in stage.options if o.moves and len(o.moves) < len(o.saved)]
    assert [o.name for o in parts if not o.recomputes] == ["swap-1"]
    for option in parts:
        own = [s for s in option.saved if profile.storages[s].born == profile.stages.index(stage)]
        assert set(option.moved) < set(own)
    assert stage.option("swap-1").saved == stage.keep.saved


@pytest.mark.parametrize(("width", "menus"), [(8, True), (64, False)])
def test_tiny_stages_and_those_of_profiles_without_menus_have_the_plain_options(width: int, menus: bool) -> None:
    model, inputs = stack(Mlp, width), torch.randn(4, width, width)
    for stage in ckptplan.profile(model, inputs, menus=menus).stages:
        assert {o.name for o in stage.options} <= {"keep", "swap", "recompute", "recompute+swap"}


# --- options without a replay of their own ---


@pytest.mark.long
def test_options_without_a_replay_have_the_bytes_that_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, profile = profiled("attending")
    with by_made_up_times():
        monkeypatch.setattr(trace, "_UNSEEN", "")  # as if every storage had been unseen: each option gets a replay
        alike = ckptplan.profile(model, inputs)
    for one, other in zip(profile.stages, alike.stages, strict=True):
        for option in one.options:
            found = other.option(option.name)
            assert (found.held, found.moves) == (option.held, option.moves)
            assert (found.forward_bytes, found.backward_bytes) == (option.forward_bytes, option.backward_bytes)


# --- what really happens ---


@pytest.mark.long
def test_menus_under_autocast() -> None:
    """Whether a call casts its weights depends on autocast's cache: while profiling, and in each later step."""
    torch.manual_seed(0)
    model, inputs = stack(Shared, 64), torch.randn(4, 128, 64)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(inputs).float().mean() + model(2 * inputs).float().mean()  # the second finds all weights cast

    for how in ({"step": step}, {"inputs": inputs}):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="inputs" in how), by_made_up_times():
            profile = ckptplan.profile(model, **how)
            selective = [option.name for option in block_of(profile).options if option.ops]
            for name in ("keep", selective[-1]):
                plan = scheduled(profile, [stage.find(name) or stage.keep for stage in profile.stages])
                assert_kept(model, plan, **how)


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.long("normed")
def test_peaks_and_gradients_under_any_mixture_of_options(name: str) -> None:
    model, inputs, profile = profiled(name)
    assert any(option.ops for stage in profile.stages for option in stage.options)
    names = dict.fromkeys(option.name for stage in profile.stages for option in stage.options)
    mixtures = [[stage.find(n) or stage.keep for stage in profile.stages] for n in names]
    rng = random.Random(0)
    mixtures += [[rng.choice(stage.options) for stage in profile.stages] for _ in range(3)]
    state = torch.get_rng_state().numel()
    for options in mixtures:
        report = assert_kept(model, scheduled(profile, options), inputs)
        # 2 % over at most, and the random state of each stage that recomputes.
        most_bytes = 1.02 * report.measured_peak_bytes + 2 * state
        assert report.predicted_peak_bytes <= most_bytes, [option.name for option in options]


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Counts where its largest values are: on real tensors `one_hot` runs other operations than on fake ones."""
    y = self.linear(x)
    self.count.add_(nn.functional.one_hot(y.argmax(1), 256).sum(0))
    return x + torch.tanh(torch.sigmoid(y) * torch.exp(-y * y))


def test_operations_that_run_otherwise_than_traced_are_not_offered() -> None:
    def layer() -> nn.Module:
        return Lambda(counts, linear=nn.Linear(256, 256), count=torch.zeros(256, dtype=torch.long))

    model, inputs = nn.Sequential(*times(3, layer)), torch.randn(512, 256)
    profile = ckptplan.profile(model, inputs)
    least = smallest_peak(profile, Limits(actions=("keep", "recompute"))).peak_bytes
    plan = ckptplan.solve(profile, least / 2**30, actions=("keep", "recompute"), time_limit_s=1)
    assert "recompute" in {choice.action for choice in plan.choices}
    assert_kept(model, plan, inputs)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.long
def test_menus_hold_up_against_saving_attention_and_every_second_product(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the bytes of that rule, layers that mix two options of their menus run no more again; by an A100's times."""
    seen: list[tuple[list[str], list[menus.Op], float, int, list[menus.SavedOps]]] = []

    def list_ops(runs: Any, *rest: Any) -> list[menus.Op]:
        ops = menus.list_ops(runs, *rest)
        seen.append(([str(call.key[0]) for call in runs[0]], ops, 0.0, 0, []))
        return ops

    def choose(choices: Any, total_s: float, keep_bytes: int) -> list[menus.SavedOps]:
        found = menus.choose(choices, total_s, keep_bytes)
        seen[-1] = (*seen[-1][:2], total_s, keep_bytes, found)
        return found

    monkeypatch.setattr(trace, "list_ops", list_ops)
    monkeypatch.setattr(trace, "choose", choose)
    with torch.device("meta"):
        if kind == "gpt2":
            model: Any = GPT2LMHeadModel(GPT2Config(n_embd=2048, n_layer=2, n_head=16, vocab_size=512))
        else:
            model = LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=2048,
                    intermediate_size=5504,
                    num_hidden_layers=2,
                    num_attention_heads=16,
                    vocab_size=512,
                )
            )
    ids = torch.zeros(4, 1024, dtype=torch.long, device="meta")
    ckptplan.profile(model.train(), {"input_ids": ids, "labels": ids}, device="a100-40gb", amp="bfloat16")
    compared = 0
    for names, ops, total_s, keep_bytes, found in seen:
        saved, products = [], 0
        for op, name in zip(ops, names, strict=True):
            products += "mm" in name
            if op.savable and ("scaled_dot_product" in name or ("mm" in name and products % 2)):
                saved.append(op)
        nbytes, left_s = sum(op.nbytes for op in saved), total_s - sum(op.seconds for op in saved)
        points = [(0, total_s), *((c.nbytes, total_s - c.saved_s) for c in found), (keep_bytes, 0.0)]
        for (low, more_s), (high, less_s) in itertools.pairwise(points):
            if saved and low <= nbytes <= high:
                compared += 1
                assert more_s + (less_s - more_s) * (nbytes - low) / (high - low) <= left_s * (1 + 1e-9)
    assert compared
