"""What only a CUDA device can show: stream order, pinned memory, the allocator's peaks, backward in another thread."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read when cuBLAS starts; without it a matrix product may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from small_models import assert_same
from torch import nn

import ckptplan
from ckptplan import Plan, Profile
from ckptplan.baselines._build import build, named, smallest_peak
from ckptplan.profiling.times.links import measure_links
from ckptplan.runtime.swap.stores import DiskStore, PinnedStore, Ticket, pinned
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.measure import held_tensors

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SLEEP_CYCLES = 10_000_000  # 5-10 ms at 1-2 GHz: longer than a stage of these models
MIXES = {"swap": ("swap",), "recompute": ("recompute",), "mixed": ("swap", "swap", "recompute", "keep")}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.nn.functional.gelu(self.up(self.norm(x)))))


def net() -> nn.Module:
    return nn.Sequential(*(Block(256) for _ in range(8)))


def conv_net() -> nn.Module:
    """Batch statistics and in-place activations."""
    blocks = (
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)) for _ in range(6)
    )
    return nn.Sequential(*blocks)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Bitwise equality needs every one of these on CUDA."""
    torch.use_deterministic_algorithms(True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.backends.cudnn.deterministic = False
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy starts late, so that whoever does not wait for it finds the wrong bytes."""
    for name, stream in (("start_out", "_out"), ("start_in", "_in")):
        original = getattr(PinnedStore, name)

        def slow(self: Any, *args: Any, original: Any = original, stream: str = stream, **options: Any) -> Any:
            with torch.cuda.stream(getattr(self, stream)):
                torch.cuda._sleep(SLEEP_CYCLES)
            return original(self, *args, **options)

        monkeypatch.setattr(PinnedStore, name, slow)


def make(kind: Callable[[], nn.Module] = net) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = kind().to(DEVICE).train()
    x = torch.randn(2048, 256, device=DEVICE) if kind is net else torch.randn(8, 16, 32, 32, device=DEVICE)
    return model, x


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def profiled(model: nn.Module, x: torch.Tensor) -> Profile:
    """Of the very step that is trained: another loss holds other bytes."""
    return ckptplan.profile(model, x, loss_fn=loss_of)


def plan_for(profile: Profile, mix: str) -> Plan:
    """The tightest plan in which stages take the actions of `mix` in turn."""
    wanted = [MIXES[mix][i % len(MIXES[mix])] for i in range(len(profile.stages))]
    choice = named(profile, wanted)
    return build(profile, choice, smallest_peak(profile, choice).bytes, mix)


def planned(mix: str) -> tuple[Any, torch.Tensor, Plan]:
    model, x = make()
    return model, x, plan_for(profiled(model, x), mix)


def step(model: nn.Module, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """One step; what it frees is overwritten before backward, as the next layer's kernels would."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = loss_of(model(x))
    junk = [torch.full((1 << 20,), float("nan"), device=DEVICE) for _ in range(8)]
    del junk
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def train(model: nn.Module, x: torch.Tensor, steps: int = 4) -> list[list[torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for seed in range(steps):
        found.append(step(model, x, seed))
        optimizer.step()
    return found


@pytest.mark.parametrize(("mix", "kind"), [("swap", net), ("recompute", conv_net), ("mixed", net), ("mixed", conv_net)])
def test_gradients_are_bitwise_those_of_the_plain_model(
    mix: str, kind: Callable[[], nn.Module], slow_copies: None
) -> None:
    model, x = make(kind)
    wanted = train(model, x)
    buffers, state = [b.clone() for b in model.buffers()], torch.cuda.get_rng_state(DEVICE)
    model, x = make(kind)
    plan = plan_for(profiled(model, x), mix)
    with ckptplan.apply(model, plan) as handle:
        found = train(model, x)
        stats = handle.stats()
    assert_same(found, wanted)
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), state)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert mix != "swap" or plan.host_bytes > 0
    assert (stats.swapped_out_bytes > 0) == (plan.host_bytes > 0)
    assert stats.swapped_in_bytes == stats.swapped_out_bytes
    if mix != "swap":
        assert stats.recomputed_stages == 4 * stats.planned_recomputed_stages > 0


@pytest.mark.parametrize("mix", MIXES)
def test_peak_is_within_the_budget(mix: str) -> None:
    """Of the bytes that were requested: allocated ones count whole blocks, with rests of up to 1 MiB left unsplit."""
    model, x, plan = planned(mix)
    held = unique_bytes([*held_tensors(model), x])

    def run() -> None:
        loss = loss_of(model(x))
        loss.backward()
        model.zero_grad()

    with ckptplan.apply(model, plan):
        run()  # libraries take their workspaces once
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        assert after["requested_bytes.all.current"] == before
    assert held + after["requested_bytes.all.peak"] - before <= plan.budget_bytes
    found = ckptplan.verify(model, plan, inputs=x, loss_fn=loss_of)
    assert found.gradients_equal, found.differing
    assert found.other_paths == 0
    # The plan is of a profile alone, whose budget is one of tensors.
    assert found.measured_peak_bytes <= plan.peak_bytes, str(found)


def test_profiling_leaves_no_trace() -> None:
    model, x = make()
    model(x).sum().backward()
    before = [t.clone() for t in held_tensors(model)]
    generators = torch.get_rng_state(), torch.cuda.get_rng_state(DEVICE)
    ckptplan.profile(model, x)
    assert all(torch.equal(a, b) for a, b in zip(held_tensors(model), before, strict=True))
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), generators[1])
    gc.collect()
    torch.cuda.synchronize()


def test_compute_on_another_stream(slow_copies: None) -> None:
    model, x, plan = planned("mixed")
    wanted = [step(model, x, seed) for seed in range(3)]
    side = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with ckptplan.apply(model, plan), torch.cuda.stream(side):
        found = [step(model, x, seed) for seed in range(3)]
    torch.cuda.current_stream(DEVICE).wait_stream(side)
    assert_same(found, wanted)


def test_backward_twice_through_one_graph(slow_copies: None) -> None:
    model, x, plan = planned("swap")

    def twice() -> list[torch.Tensor]:
        torch.manual_seed(0)
        loss = loss_of(model(x))
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, parameters)]

    wanted = twice()
    with ckptplan.apply(model, plan):
        assert_same([twice()], [wanted])


@pytest.mark.parametrize("mix", ["recompute", "mixed"])
def test_clean_step_after_an_exception_in_backward(mix: str, slow_copies: None) -> None:
    model, x, plan = planned(mix)
    wanted = step(model, x, 5)
    middle = model[3].down.weight  # type: ignore[index]

    def fail(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    with ckptplan.apply(model, plan) as handle:
        hook = middle.register_hook(fail)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="on purpose"):
            step(model, x, 5)
        hook.remove()
        assert_same([step(model, x, 5)], [wanted])
        gc.collect()
        stores = handle._applied.stores  # a plan that moves nothing has none
        assert sorted(stores) == (["host"] if plan.host_bytes else [])
        assert not any(store.used_bytes for store in stores.values())


def test_graphs_that_are_dropped_half_way(slow_copies: None) -> None:
    model, x, plan = planned("swap")
    wanted = step(model, x, 1)
    with ckptplan.apply(model, plan) as handle:
        for seed in range(3):
            torch.manual_seed(seed)
            model.zero_grad()
            out = model(x)  # copies are under way when it goes
            del out
            assert_same([step(model, x, 1)], [wanted])
        assert len(handle._applied.stores["host"]._arena.blocks) == 1  # type: ignore[attr-defined]


def test_a_plan_needs_no_more_pinned_memory_than_it_says_and_remove_gives_it_back() -> None:
    model, x, plan = planned("swap")
    handle = ckptplan.apply(model, plan, host_gb=plan.host_bytes / 2**30)
    store = handle._applied.stores["host"]
    area = store._arena.blocks[0][1]  # type: ignore[attr-defined]
    assert area.is_pinned()
    assert area.numel() == plan.host_bytes
    for seed in range(3):
        step(model, x, seed)
    assert store.reserved_bytes == plan.host_bytes  # type: ignore[attr-defined]
    loss = loss_of(model(x))
    handle.remove()
    assert area.is_pinned()  # a living graph still needs it
    del store
    loss.backward()
    del loss
    gc.collect()
    assert not area.is_pinned()


# --- the store alone ---


def store(capacity_bytes: int) -> contextlib.closing[PinnedStore]:
    return contextlib.closing(PinnedStore(DEVICE, capacity_bytes=capacity_bytes))


def returned(tier: PinnedStore, ticket: Ticket, wanted: torch.Tensor) -> torch.Tensor:
    """Where it comes back to; the copy in may not even have begun."""
    target = torch.empty_like(wanted)
    tier.start_in(ticket, target)
    tier.finish_in(ticket)
    tier.free(ticket)
    return target


@pytest.mark.parametrize("capacity_bytes", [1, 1 << 20, 1 << 26])
def test_extents_are_reused_in_order(capacity_bytes: int, slow_copies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SLEEP_CYCLES", 500_000)
    rng = random.Random(0)
    living: list[tuple[Ticket, torch.Tensor]] = []
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    with store(capacity_bytes) as tier:
        for number in range(300):
            if living and rng.random() < 0.5:
                ticket, wanted = living.pop(rng.randrange(len(living)))
                waiting.append((returned(tier, ticket, wanted), wanted))
            else:
                dtype = (torch.int32, torch.bool, torch.complex64)[number % 3]
                wanted = torch.randint(0, 2 + number, (rng.randint(1, 1 << 18),), device=DEVICE).to(dtype)
                source = wanted.clone()
                living.append((tier.start_out(source), wanted))
                tier.finish_out(living[-1][0])
                source.fill_(-1)  # after the release point the block belongs to others
        waiting += [(returned(tier, ticket, wanted), wanted) for ticket, wanted in living]
        assert all(torch.equal(target, wanted) for target, wanted in waiting)


def test_blocks_are_not_reused_under_a_copy(slow_copies: None) -> None:
    with store(1 << 22) as tier:
        source = torch.full((1 << 20,), 7.0, device=DEVICE)
        ticket = tier.start_out(source)
        tier.finish_out(ticket)
        address = source.data_ptr()
        del source
        again = torch.full((1 << 20,), float("nan"), device=DEVICE)
        assert again.data_ptr() == address, "the allocator is expected to hand the block out again at once"
        assert torch.equal(returned(tier, ticket, again), torch.full_like(again, 7.0))


def test_pinned_memory_is_on_the_host_whatever_the_default_device_and_goes_where_nobody_closes_its_store() -> None:
    with torch.device(DEVICE):
        tier = PinnedStore(DEVICE, capacity_bytes=1 << 20)
    area = tier._arena.blocks[0][1]
    assert area.device.type == "cpu"
    assert area.is_pinned()
    del tier
    gc.collect()
    assert not area.is_pinned()


def test_page_locking_that_fails_leaves_the_device_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    with store(1 << 20) as tier:
        taken = tier._arena.blocks[0][1]
        with monkeypatch.context() as patch:
            patch.setattr(pinned, "_pages", lambda nbytes: taken)  # registered already
            with pytest.warns(RuntimeWarning, match="page-locking"):
                ordinary = PinnedStore(DEVICE, capacity_bytes=1 << 20)
        ordinary.close()
        assert taken.is_pinned()
        assert torch.ones(1000, device=DEVICE).sum().item() == 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_round_trip_through_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """Through chunks of which a block has many, while compute overwrites what was freed."""
    tier = DiskStore(tmp_path, device=DEVICE, chunk_bytes=1 << 16)
    waiting = []
    for number in range(20):
        wanted = torch.randint(0, 2, (100_003 + number,), device=DEVICE).to(dtype)
        source = torch.zeros_like(wanted)
        torch.cuda._sleep(SLEEP_CYCLES)
        source.copy_(wanted)  # late: the copy out must wait for it
        ticket = tier.start_out(source)
        tier.finish_out(ticket)
        del source
        target = torch.empty_like(wanted)
        torch.cuda._sleep(SLEEP_CYCLES)
        target.fill_(True)  # late: the copy in must wait for it
        tier.start_in(ticket, target)
        tier.finish_in(ticket)
        waiting.append((target, wanted))
        tier.free(ticket)
    assert all(torch.equal(target, wanted) for target, wanted in waiting)
    tier.close()


@pytest.mark.parametrize(
    ("mix", "mode", "tiers"),
    [("swap", {}, ("host", "disk")), ("mixed", {}, ("disk",)), ("mixed", {"synchronous": True}, ("host", "disk"))],
)
def test_gradients_with_a_disk_tier(mix: str, mode: dict[str, bool], tiers: tuple[str, ...], tmp_path: Path) -> None:
    model, x = make()
    wanted = train(model, x)
    model, x, plan = planned(mix)
    choices = [dataclasses.replace(c, tier=tiers[i % len(tiers)]) if c.moves else c for i, c in enumerate(plan.choices)]
    # The tiers' bytes are the solver's to say; all of them is enough for either.
    plan = dataclasses.replace(plan, choices=tuple(choices), disk_bytes=plan.host_bytes)
    with ckptplan.apply(model, plan, swap_dir=tmp_path) as handle:
        assert_same(train(model, x), wanted)
        assert handle._applied.stores["disk"].peak_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_damage_in_pinned_memory_is_found() -> None:
    model, x, plan = planned("swap")
    with ckptplan.apply(model, plan, check="always") as handle:
        loss = loss_of(model(x))
        torch.cuda.synchronize()
        handle._applied.stores["host"]._arena.blocks[0][1].bitwise_not_()  # type: ignore[attr-defined]
        with pytest.raises(ckptplan.CheckError, match="that it had swapped out"):
            loss.backward()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_links_are_plausible(tier: str, tmp_path: Path) -> None:
    links = measure_links(DEVICE, 32 << 20, tmp_path, "disk") if tier == "disk" else measure_links(DEVICE, 8 << 20)[:1]
    for link in links:
        # To the host, PCIe 3 at a few lanes to NVLink-C2C; files are slower.
        least = 1e7 if tier == "disk" else 5e8
        assert least < link.out_bytes_per_s < 1e12
        assert least < link.in_bytes_per_s < 1e12
    model, x = make()
    found = ckptplan.profile(model, x, swap_dir=tmp_path if tier == "disk" else None)
    assert (found.disk is not None) == (tier == "disk")


ATTENTION = """
    import torch
    from torch import nn
    import ckptplan
    from ckptplan.baselines._build import build, named, smallest_peak

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(256, 768)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return x + nn.functional.scaled_dot_product_attention(q, k, v, {how}).transpose(1, 2).flatten(2)

    with torch.device("cuda"):
        model = nn.Sequential(*(Block() for _ in range(3))).to(torch.{dtype})
        x = torch.randn(4, 256, 256).to(torch.{dtype})
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_profile_of_attention_with_dropout(dtype: str) -> None:
    # In a process of its own: fused attention reads its random seed on the host, and a wrong one ends the process.
    code = ATTENTION.replace("{how}", "dropout_p=0.1, is_causal=True").replace("{dtype}", dtype)
    run_alone(code + "    ckptplan.profile(model, x)\n    torch.cuda.synchronize()\n")


def run_alone(code: str) -> str:
    """What a program prints in a process of its own."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


FIRST_ATTENTION = (
    ATTENTION.replace("{how}", "").replace("{dtype}", "bfloat16")
    + """
    if "{plan}":
        with ckptplan.apply(model, ckptplan.Plan.load("{plan}")):
            model(x).sum().backward()
    elif "{save}":
        profile = ckptplan.profile(model, x)
        choice = named(profile, ["keep" if stage.is_glue else "recompute" for stage in profile.stages])
        build(profile, choice, smallest_peak(profile, choice).bytes, "recompute").save("{save}")
    else:
        model(x).sum().backward()
    print(torch._C._get_sdp_priority_order())
"""
)


def test_a_process_whose_first_attention_is_planned_runs_pytorchs_kernels(tmp_path: Path) -> None:
    """On Hopper PyTorch puts cuDNN's first when attention runs for the first time; no reading before takes it back."""
    saved = str(tmp_path / "plan.json")
    orders = [
        run_alone(FIRST_ATTENTION.replace("{plan}", plan).replace("{save}", save))
        for plan, save in (("", ""), ("", saved), (saved, ""))
    ]
    assert orders[0] == orders[1] == orders[2]
