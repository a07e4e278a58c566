"""A number names the same saved storage in the profile and in the step (NOTE [Positions] in tensors/positions.py)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from made_plans import one_transfer, scheduled
from test_menus import Attending, by_made_up_times
from torch import nn
from toy_modules import Lambda, Residual

import ckptplan
from ckptplan.core.errors import InvalidInputError, PlanMismatchError
from ckptplan.profiling.bytes.fake import fake_parameters
from ckptplan.profiling.bytes.tracker import Tracker
from ckptplan.profiling.target import Target, find_target
from ckptplan.runtime.guard.differences import Differences
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.packing import Held, Packing
from ckptplan.runtime.swap.record import Whereabouts
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.stores import NULL_STORES
from ckptplan.tensors.accelerator import with_index

HERE = torch.device("meta")  # a device beside the CPU that needs no memory
CUDA = torch.device("cuda", 0)


def block(width: int) -> Residual:
    return Residual(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_what_a_stage_makes_on_a_cuda_device_has_positions(device: str) -> None:
    """Without a gradient, which a build for the CPU can't record on fake CUDA tensors."""
    with HERE:
        layers, x = block(64), torch.empty(4, 16, 64)
    tracker = Tracker(Target(torch.device(device)))
    with fake_parameters(layers, tracker), torch.no_grad():
        given = tracker.fake(x)
        for tensor in (given, *layers.parameters()):
            tracker.outside(tensor)
        with tracker:
            assert layers(given).device == CUDA
    made = {op.key[0]._opname: list(op.made.values()) for op in tracker.forward[0].ops if op.made}  # no views
    tokens = 4 * 16
    assert made == {
        "native_layer_norm": [(tokens * 64 * 4, True), (512, True), (512, True)],
        "addmm": [(tokens * 64 * 4, True)],
        "gelu": [(tokens * 128 * 4, True)],
        "add": [(tokens * 64 * 4, True)],
    }


def test_a_device_has_its_index_from_the_first() -> None:
    assert with_index(torch.device("cuda")) == CUDA
    assert with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert with_index(torch.device("cpu")) == torch.device("cpu")
    assert Target(torch.device("cuda")).device == CUDA
    model = nn.Linear(4, 4)
    assert find_target(model, "cpu:0").device == torch.device("cpu")
    with pytest.raises(InvalidInputError, match="'cpu:1', but the model is on 'cpu'"):
        find_target(model, "cpu:1")


def session() -> SwapSession:
    return SwapSession(NULL_STORES, HERE, lambda storage: False, Counters())


def pack(session: SwapSession, tensors: list[torch.Tensor]) -> tuple[Packing, list[Held]]:
    packing = session.packing()
    return packing, [packing.pack(t) for t in tensors]


@pytest.mark.parametrize("seeds_at", [HERE, torch.device("cpu")])
def test_seeds_shift_no_position_wherever_they_lie(seeds_at: torch.device) -> None:
    """Attention's last results are row sums and two numbers, or row sums, a random state and a number."""
    x, rows = torch.empty(64, 64, device=HERE), torch.empty(8, device=HERE)
    numbers = [torch.empty((), dtype=torch.int64, device=seeds_at) for _ in range(2)]
    state = [torch.empty(2, dtype=torch.uint64, device=seeds_at), torch.empty((), dtype=torch.uint64, device=seeds_at)]
    for seeds in (numbers, state, []):
        now = session()
        packing, packed = pack(now, [x, *seeds, rows])
        assert all(p.tensor() is s for p, s in zip(packed[1:], seeds, strict=False))
        now.leave(0, packing.saved, one_transfer((0, 1)))
        assert [p.record and p.record.nbytes for p in packed] == [64 * 64 * 4, *(None for _ in seeds), 8 * 4]


def test_what_lies_elsewhere_has_a_position_and_stays_there() -> None:
    """A fake kernel may say the device where the real one gives a tensor on the host."""
    elsewhere, large = torch.arange(1000), torch.empty(64, 64, device=HERE)
    now = session()
    packing, (first, second) = pack(now, [elsewhere, large])
    now.leave(0, packing.saved, one_transfer((1,)))
    assert first.tensor() is elsewhere
    assert second.record is not None
    assert second.record.state is Whereabouts.LEAVING
    packing, _ = pack(now, [elsewhere, large])
    now.leave(0, packing.saved, one_transfer((0,)))
    assert now._counters.differences.counts == {"saved": 1}
    assert first.record is None
    strict = SwapSession(NULL_STORES, HERE, lambda storage: False, Counters(differences=Differences("raise")))
    packing, _ = pack(strict, [elsewhere, large])
    with pytest.raises(PlanMismatchError, match=r"storage number 1 of the stage.* which is not on meta"):
        strict.leave(0, packing.saved, one_transfer((0,)))


def test_a_number_that_its_own_node_saves_goes_with_the_graph() -> None:
    """Its own result, which no position counts: without a backward nothing may keep it."""
    now = SwapSession({}, torch.device("cpu"), lambda storage: False, Counters())
    module = Lambda(lambda self, x: x * self.weight.exp(), weight=nn.Parameter(torch.ones(())))
    gc.collect()
    gc.disable()
    try:
        packing = now.packing()
        with packing.hooks():
            output = module(torch.ones(3))
        held = [weakref.ref(each) for each in packing.saved]
        now.leave(0, packing.saved, ())
        assert [alive() is not None for alive in held] == [True] * len(held)
        assert len(held) > 1
        del output
        assert [alive() is not None for alive in held] == [False] * len(held)
    finally:
        gc.enable()


def attending(scale: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Attending(128 * scale) for _ in range(3))), torch.randn(2 * scale, 64 * scale, 128 * scale)


def normalizing(scale: int) -> tuple[nn.Module, torch.Tensor]:
    width = 16 * scale
    blocks = (nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU()) for _ in range(3))
    x = torch.randn(8, width, 32, 32).to(memory_format=torch.channels_last)
    return nn.Sequential(*blocks).to(memory_format=torch.channels_last), x


@pytest.mark.parametrize(
    ("made", "device", "amp"),
    [
        (attending, "cpu", None),
        *(
            pytest.param(made, "cuda", amp, marks=pytest.mark.gpu)
            for made in (attending, normalizing)
            for amp in (None, "bfloat16")
        ),
    ],
)
@pytest.mark.long("attending-cpu-None")
def test_the_whole_menu_keeps_to_the_profiled_positions(
    made: Callable[[int], tuple[nn.Module, torch.Tensor]], device: str, amp: str | None
) -> None:
    """On CUDA attention's seeds lie on the host or the device, and batch norm has a reserve, as its kernel has it."""
    torch.manual_seed(0)
    model, x = made(1 if device == "cpu" else 4)
    model, x = model.to(device), x.to(device)
    with by_made_up_times():
        profile = ckptplan.profile(model, x, amp=amp)
    middle = next(stage for stage in profile.stages if stage.name == "1")
    names = [option.name for option in middle.options]
    assert {"keep", "swap", "recompute", "recompute+swap"} <= set(names)
    assert any(name.startswith("selective") for name in names)
    for name in names:
        plan = scheduled(profile, [stage.find(name) or stage.keep for stage in profile.stages])
        with ckptplan.apply(model, plan) as handle:
            for _ in range(2):
                with torch.autocast(device, torch.bfloat16, enabled=amp is not None):
                    loss = model(x).float().mean()
                loss.backward()
            assert handle._applied.controller.counters.other_paths == 0, name
