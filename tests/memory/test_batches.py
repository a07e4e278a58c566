"""estimate() of batches in turn, against the CPU allocator's events and against reservations counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from measured_phases import assert_measured
from small_models import plan_of
from test_optimizers import ByParameter
from torch import nn
from toy_modules import InTurn, Lambda

import ckptplan
from ckptplan import Estimate, InvalidInputError, PlanMismatchError, UnsupportedModelError, estimate
from ckptplan.core.request import Training
from ckptplan.memory.allocator import EMPTY_CACHE, FREE, replay
from ckptplan.memory.batches import does_the_same
from ckptplan.training.step import make_step

MIB = 1 << 20


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


# --- an epoch sorted by length ---


def packed(length: int) -> dict[str, torch.Tensor]:
    """Two documents in one row, each with positions from 0 on."""
    tokens = torch.randint(0, 500, (1, length))
    positions = torch.cat([torch.arange(length // 4), torch.arange(length - length // 4)])[None]
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=500, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).train()  # type: ignore[no-any-return]


@pytest.mark.long
def test_an_epoch_of_packed_documents() -> None:
    model = gpt2()
    batches = [packed(length) for length in (96, 128, 32)]
    found = estimate(model, batches, optimizer=adamw)
    assert [p.batch for p in found.phases if p.name.startswith("forward")] == [1, 2, 3]
    assert_measured(found, model, batches, adamw(model.parameters()))


def reserved(inputs: Any, **how: Any) -> dict[str, float]:
    wide = InTurn(layer=nn.Linear(2048, 1536, bias=False), exp=Lambda(lambda _, y: y.exp()))
    found = estimate(wide, inputs, device="a100-40gb", optimizer="momentum", loss_fn=lambda y: y.sum(), **how)
    return {p.name: p.reserved_bytes / MIB for p in found.phases} | {"all": found.reserved_bytes / MIB}


def test_what_an_epoch_reserves_counted_by_hand() -> None:
    # In MiB: weight, its gradient and its momentum 12 each, cuBLAS's workspaces 20 and small tensors 2 throughout. A
    # long batch has x of 32, a product of 24 (freed in forward, taken again by its gradient) and an output of 24; a
    # short one half of each. The first update puts the momentum into one of the freed blocks of 24.
    first = 12 + 20 + 2 + 32 + 24 + 24 + 12
    long, short = torch.randn(4096, 2048), torch.randn(2048, 2048)
    twice, epoch = reserved(long), reserved([long, short])
    assert twice["backward"] == epoch["backward"] == first
    assert twice["all"] == first + 24  # one block of 24 is in parts when the second product or output is made
    assert epoch["all"] == first  # the short batch's tensors fit what is there
    twice, epoch = (reserved(inputs, empty_cache=True) for inputs in (long, [long, short]))
    between = 12 + 20 + 2 + 24  # the momentum's block is in use, and kept whole
    assert twice["all"] == twice["forward 2"] == between + 32 + 24 + 24
    assert epoch["all"] == first
    assert epoch["forward 2"] == between + 16 + 12
    assert epoch["backward 2"] == between + 16 + 12 + 12
    # From short to long nothing that is there is large enough, unless it is emptied.
    grown, emptied = (reserved([short, long], empty_cache=empties)["all"] for empties in (False, True))
    assert grown == (12 + 20 + 2 + 16 + 12 + 12 + 12) + 32 + 24 + 24
    assert emptied == (12 + 20 + 2 + 12) + 32 + 24 + 24 + 12


# --- what the loop does with them ---


class Language(nn.Module):
    """Returns its loss beside logits, and weighs tokens if weights are given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(tokens))
        if weights is not None:
            logits = logits * weights[..., None]
        return {"loss": nn.functional.cross_entropy(logits.view(-1, 50), tokens.view(-1)), "logits": logits.relu()}


def tokens(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(0, 50, (2, length)) for length in lengths]


def rebinding(parameters: Any) -> torch.optim.Optimizer:
    """Makes its state anew in each update."""

    def update(optimizer: Any, p: Any) -> None:
        state = optimizer.state[p]
        state["sum"] = state.get("sum", 0) + p.grad
        p.sub_(state["sum"], alpha=0.01)

    return ByParameter(parameters, update)


def sharing() -> list[Any]:
    """Batches that have a tensor in common."""
    weights = torch.ones(2, 32)
    return [(batch, weights) for batch in tokens(32, 32)]


LOOPS: dict[str, tuple[Callable[[], list[Any]], Any, dict[str, Any]]] = {
    "accumulating": (lambda: tokens(48, 16, 32, 8, 24, 40), adamw, {"accumulation_steps": 2, "set_to_none": False}),
    "keeping": (lambda: tokens(48, 16, 32, 8, 24, 40), adamw, {"accumulation_steps": 3, "keeps": ("batch",)}),
    "a smaller one in its place": (lambda: [*tokens(32), torch.zeros(2, 0, dtype=torch.long)], adamw, {}),
    "a tensor for each": (sharing, adamw, {"keeps": ("batch",)}),
    "many updates": (lambda: tokens(48, 16, 32, 32, 40), rebinding, {}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_does_with_its_batches(name: str) -> None:
    make, optimizer, how = LOOPS[name]
    model, batches = Language(), make()
    found = estimate(model, batches, optimizer=optimizer, **how)
    assert ("forward 2, accumulating 3" in [p.name for p in found.phases]) == (how.get("accumulation_steps") == 3)
    assert_measured(found, model, batches, optimizer(model.parameters()), **how)


# --- paths ---


class Experts(nn.Module):
    """Runs one expert for short batches, another for long ones, or the one that the values name."""

    def __init__(self, by_value: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, n) for n in (16, 64))
        self.by_value = by_value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second = bool(x[0, 0] > 0) if self.by_value else len(x) > 16
        return self.experts[second](x).exp()


@pytest.mark.long
def test_batches_that_take_other_paths() -> None:
    model, batches = Experts(), [torch.randn(n, 8) for n in (8, 24, 12, 32, 4)]
    found = estimate(model, batches, optimizer=adamw)  # each expert's state appears in its own first update
    assert_measured(found, model, batches, adamw(model.parameters()))
    with pytest.raises(UnsupportedModelError, match=r"batch 2 gives 'experts\.1\.bias' a gradient"):
        estimate(model, batches, optimizer=adamw, set_to_none=False)
    estimate(model, batches, optimizer=adamw, accumulate=True)  # all gradients are there from the start


def test_batches_of_one_shape_are_apart_where_values_are_read() -> None:
    model = Experts(by_value=True)
    batches = [torch.full((8, 8), value) for value in (-1.0, 1.0, -1.0, 1.0)]
    found = estimate(model, batches, optimizer=adamw)
    phases = [found.phase(name) for name in ("forward", "forward 2", "forward 3", "forward 4")]
    assert [phase.categories["saved activations"] for phase in phases] == [4 * 8 * n for n in (16, 64, 16, 64)]


def test_layouts_that_differ_are_recorded_apart() -> None:
    x = torch.randn(16, 16)
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    for other in (x.t(), x.double(), torch.randn(32, 16)[16:], x.expand(1, 16, 16)):
        steps = [make_step(model, Training(inputs)) for inputs in (x, other)]
        assert not does_the_same(steps[1], steps[0], reads=False)
    same = make_step(model, Training(torch.randn(16, 16)))
    mask = make_step(model, Training(torch.ones(16, 16)))  # whose values may be read
    assert not does_the_same(mask, make_step(model, Training(torch.ones(16, 16))), reads=False)
    first = make_step(model, Training(x))
    assert does_the_same(same, first, reads=False)
    assert not does_the_same(same, first, reads=True)
    assert does_the_same(make_step(model, Training(x)), first, reads=True)
    pair, alias = (make_step(model, Training(inputs)) for inputs in ((x, x.clone()), (x, x)))
    assert not does_the_same(pair, alias, reads=False)
    weight = make_step(model, Training(model[0].weight.detach()))
    assert not does_the_same(weight, first, reads=False)


# --- one batch, several, none ---


def test_a_second_epoch_has_the_optimizer_s_state() -> None:
    model, batches = Language(), tokens(32, 16)
    once, twice = (estimate(model, inputs, optimizer=adamw) for inputs in (batches, batches * 2))
    (note,) = once.notes
    assert "inputs=batches * 2" in note
    assert not twice.notes
    assert not estimate(model, batches, optimizer="sgd").notes  # it has no state
    state = once.phase("optimizer").end_bytes - once.phase("forward").start_bytes - batches[0].nbytes
    assert twice.phase("backward 3").peak_bytes == once.phase("backward").peak_bytes + state
    assert twice.peak_bytes == estimate(model, batches[0], optimizer=adamw).peak_bytes


def test_inference_is_of_each_batch() -> None:
    model, batches = Language(), tokens(32, 48)
    found = estimate(model, batches)
    for batch, name in zip(batches, ("inference", "inference 2"), strict=True):
        alone = estimate(model, batch).phase("inference")
        assert (found.phase(name).peak_bytes, found.phase(name).end_bytes) == (alone.peak_bytes, alone.end_bytes)


def test_the_batch_of_the_peak_is_named(tmp_path: Path) -> None:
    model, batches = Language(), tokens(16_000, 48_000, 32_000)
    found = estimate(model, batches, device="a100-40gb", empty_cache=True)
    assert (found.peak_batch, found.phase(found.reserved_phase).batch) == (2, 2)
    text = str(found)
    assert f"({found.peak_phase} of batch 2" in text
    assert "batches   3 in turn; batch 2 is [0][0] int64[2, 48000]" in text
    assert "until the next, and empties the allocator's cache after each step" in text
    found.save(tmp_path / "estimate.json")
    assert Estimate.load(tmp_path / "estimate.json") == found
    one = str(estimate(model, batches[0]))
    assert "of batch" not in one
    assert "batches  " not in one


# --- plans ---


@pytest.mark.parametrize("action", ["swap", "recompute"])
@pytest.mark.long("recompute")
def test_a_plan_for_the_largest_batch(action: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)))
    batches = [torch.randn(rows, 64) for rows in (64, 48, 4)]
    measured = ckptplan.profile(model, batches[0], menus=False)
    plan = plan_of(measured, [action] * len(measured.stages))
    found = estimate(model, batches, plan=plan, optimizer=adamw)
    with ckptplan.apply(model, plan):
        assert_measured(found, model, batches, adamw(model.parameters()))
    with pytest.raises(PlanMismatchError, match=r"batch 2 of inputs: .* float32\[65, 64\].*largest batch"):
        estimate(model, [batches[0], torch.randn(65, 64)], plan=plan)
    with pytest.raises(PlanMismatchError, match="holds for no tensor there"):
        estimate(model, [batches[0], {"input": batches[0], "other": batches[0]}], plan=plan)


def test_a_plan_and_a_batch_that_leaves_its_stages_out() -> None:
    model, batches = Experts(), [torch.randn(rows, 8) for rows in (960, 12, 14)]
    measured = ckptplan.profile(model, batches[0], menus=False)
    assert not any(name.startswith("experts.0") for name in (stage.name for stage in measured.stages))
    plan = plan_of(measured, ["recompute"] * len(measured.stages))
    found = estimate(model, batches, plan=plan, optimizer=adamw)
    with ckptplan.apply(model, plan):
        assert_measured(found, model, batches, adamw(model.parameters()))


# --- bad input ---


@pytest.mark.parametrize(
    ("inputs", "how", "says"),
    [
        ([], {}, "give at least one"),
        ([None, torch.zeros(2, 8)], {}, "batch 1 of inputs is None"),
        ([[torch.zeros(2, 8)]], {}, "batch 1 of inputs: inputs is a list of 1"),
        ([torch.zeros(2, 8), torch.zeros(2, 9)], {}, "while being estimated on batch 2"),
        ([torch.zeros(2, 8)] * 3, {"accumulation_steps": 2}, "3 batches, of which accumulation_steps=2"),
        (torch.zeros(2, 8), {"empty_cache": True}, "runs on the CPU"),
        ([torch.zeros(2, 8)], {"step": lambda: torch.zeros(())}, "leave out inputs="),
    ],
)
def test_bad_input(inputs: Any, how: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        estimate(Experts(), inputs, **how)


def test_plans_are_for_one_batch() -> None:
    for call in (ckptplan.profile, ckptplan.solve):
        with pytest.raises(InvalidInputError, match="pass the largest batch"):
            call(Experts(), inputs=[torch.zeros(2, 8), torch.zeros(4, 8)])  # type: ignore[operator]


def test_a_trace_can_empty_the_cache() -> None:
    events = [(0, 3 * MIB), (1, 30 * MIB), (1, FREE), (0, EMPTY_CACHE), (0, FREE), (0, EMPTY_CACHE)]
    assert (replay(events).reserved_bytes // MIB).tolist() == [20, 50, 50, 20, 20, 0]
