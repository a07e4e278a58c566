"""Host tensors beside a model on CUDA: lengths, indices, numbers, and what its forward moves by itself.

Without such a device: the model lies on `meta`, and its step is traced on fake tensors of `cuda:0`, forward alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import assert_kept, plan_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from toy_modules import Lambda, times

import ckptplan
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.request import Training
from ckptplan.profiling.bytes.fake import fake_parameters
from ckptplan.profiling.bytes.operations import op_key
from ckptplan.profiling.bytes.replays import fake_inputs
from ckptplan.profiling.bytes.tracker import Tracker
from ckptplan.profiling.bytes.workspace import _operands
from ckptplan.profiling.profiler import training_step
from ckptplan.profiling.target import Target
from ckptplan.runtime.guard.shapes import InputLimits
from ckptplan.tensors.storages import unique_bytes
from ckptplan.training.inputs import input_tensors
from ckptplan.training.step import TrainingStep, fingerprint

CUDA = torch.device("cuda", 0)
ROWS, WIDTH = 8, 1024


def on_both(self: Any, x: torch.Tensor, host: dict[str, torch.Tensor]) -> torch.Tensor:
    weights = torch.cumsum(host["weights"] * 2, 0)  # computed on the host
    total = (host["lengths"] + 1).sum()
    moved = (weights * total).to(x.device)
    return torch.tanh(self.linear(x) * host["scale"] + moved)


def in_turn(model: Any, x: torch.Tensor, host: dict[str, torch.Tensor]) -> torch.Tensor:
    for block in model.blocks:
        x = block(x, host)
    return x


def made() -> nn.Module:
    blocks = times(2, lambda: Lambda(on_both, linear=nn.Linear(WIDTH, WIDTH)))
    return Lambda(in_turn, blocks=blocks, order=torch.arange(64, device="cpu"))


def host() -> dict[str, torch.Tensor]:
    return {
        "lengths": torch.tensor([3, 1], dtype=torch.int64),
        "scale": torch.tensor(0.5),
        "weights": torch.ones(WIDTH),
    }


def test_lengths_and_numbers_on_the_host_are_no_error() -> None:
    with torch.device("meta"):
        model = made()
    with FakeTensorMode():
        elsewhere = torch.empty(ROWS, WIDTH, device="cuda")
    training, _ = training_step(model, Training((torch.empty(ROWS, WIDTH), host())), Target(CUDA))
    assert {t.device.type for t in training.tensors()} == {"cpu"}
    with pytest.raises(InvalidInputError, match=r"an input lies on cuda:0, the model on cpu; move one of them"):
        training_step(model, Training((elsewhere, host())), Target(torch.device("cpu")))


def test_they_take_no_bytes_of_the_device() -> None:
    with torch.device("meta"):
        model, x = made(), torch.empty(ROWS, WIDTH)
    tracker = Tracker(Target(CUDA))
    # Without gradients: autograd's nodes want the device itself.
    with fake_parameters(model, tracker), torch.no_grad():
        for parameter in model.parameters():
            tracker.outside(parameter)
        given = fake_inputs(TrainingStep(model, (x, host())), tracker.fake, tracker.outside)
        with tracker:
            output = given.model(*given.args)
    assert output.device == CUDA
    sizes = [nbytes for op in tracker.forward[0].ops for nbytes, _ in op.made.values()]
    result = ROWS * WIDTH * 4
    # Of each block the product, its scaling, the sum and the result; and the weights, which are moved there.
    assert sorted(sizes) == [WIDTH * 4] * 2 + [result] * 8
    assert tracker.live_bytes == result


def test_bytes_in_host_memory_are_not_the_device_s() -> None:
    tensors = [torch.empty(100, device="meta"), torch.empty(7), torch.arange(3)]
    assert unique_bytes(tensors, CUDA) == 400
    assert unique_bytes(tensors, torch.device("cpu")) == unique_bytes(tensors) == 400 + 28 + 24


def test_made_up_operands_lie_where_the_real_ones_do() -> None:
    """`_pack_padded_sequence` takes lengths on the host alone. Here `meta` is the device."""
    packing = torch.ops.aten._pack_padded_sequence.default
    key = op_key(packing, (torch.empty(2, 4, 3, device="meta"), torch.tensor([4, 2]), True), {})
    args, _ = _operands(key, torch.device("meta"))
    assert [t.device.type for t in args[:2]] == ["meta", "cpu"]


def test_plans_know_them_by_path_type_and_shape() -> None:
    args: tuple[Any, ...] = (torch.empty(ROWS, WIDTH), host())
    planned = input_tensors(args, {})
    assert [t.shape for t in planned] == [(ROWS, WIDTH), (2,), (), (WIDTH,)]
    limits = InputLimits(planned)
    assert limits.first_beyond(args, {}) is None
    more = {**host(), "lengths": torch.tensor([1, 2, 3])}
    beyond = limits.first_beyond((args[0], more), {})
    assert beyond is not None
    assert beyond[0].path == "[0][1]['lengths']"
    model = made()
    assert "int64[2]" in fingerprint(TrainingStep(model, args)).inputs


def masked(model: Any, x: torch.Tensor, host: dict[str, torch.Tensor]) -> torch.Tensor:
    """Looks rows up by indices on the host, and masks by lengths that it moves itself."""
    kept = torch.arange(x.shape[1], device=x.device) < host["lengths"].to(x.device)[:, None]
    x = x[host["order"]] * kept[..., None] * host["scale"]
    for block in model.blocks:
        x = block(x)
    return x


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_of_it_on_the_cpu_and_beside_a_device(kind: str) -> None:
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)
    torch.manual_seed(0)
    blocks = times(3, lambda: nn.Sequential(nn.Linear(256, 256), nn.Tanh()))
    model, x = Lambda(masked, blocks=blocks).to(device), torch.randn(16, 64, 256, device=device)
    given = {"lengths": torch.randint(1, 64, (16,)), "order": torch.randperm(16), "scale": torch.tensor(0.5)}
    chain = ckptplan.profile(model, (x, given))
    for action in ("keep", "recompute", "swap"):
        plan = plan_of(chain, [action] * len(chain.stages))
        assert_kept(model, plan, (x, given))
