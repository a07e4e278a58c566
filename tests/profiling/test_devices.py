from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_examples import SIMPLE, example
from typer.testing import CliRunner

from ckptplan.cli.app import app
from ckptplan.core.device import OP_CLASSES, find_device
from ckptplan.core.errors import InvalidInputError
from ckptplan.profiling.bytes.operations import SeenOperations, TensorSpec, op_key
from ckptplan.profiling.times.calibrate import calibrate
from ckptplan.profiling.times.roofline import NOTHING, flops_rate, op_cost, op_seconds

aten = torch.ops.aten


def key(func: Any, *args: Any, **kwargs: Any) -> Any:
    return op_key(func, args, kwargs)


def keys_of(run: Any) -> list[Any]:
    with SeenOperations() as seen:
        run()
    return seen.keys


# --- the data file ---


def test_the_documented_device_loads_and_takes_the_documented_times(tmp_path: Path) -> None:
    path = tmp_path / "desk.json"
    path.write_text(example())
    desk = find_device(path)
    a = torch.empty(1000, 1000)
    assert op_seconds(key(aten.mm.default, a, a), desk) == pytest.approx(0.025, rel=1e-9)
    assert op_seconds(key(aten.add.Tensor, a, a), desk) == pytest.approx(0.0012, rel=1e-9)


# --- the roofline; SIMPLE reaches 1e10 operations and 1e9 bytes a second ---


def test_a_product_is_bound_by_operations_or_by_memory() -> None:
    # 2 * 1000 * 1000 * 1000 operations at 1e10 a second; 3 * 4e6 bytes would take 0.012 s.
    big = torch.empty(1000, 1000)
    assert op_seconds(key(aten.mm.default, big, big), SIMPLE, tf32=False) == pytest.approx(0.2)
    # 2 * 4 * 1000 * 1000 operations take 0.0008 s; 4e6 + 2 * 16e3 bytes take longer.
    flat = torch.empty(4, 1000)
    assert op_seconds(key(aten.mm.default, flat, big), SIMPLE, tf32=False) == pytest.approx(0.004032)
    # The bias of a linear layer is read as it is, not as it is broadcast.
    cost = op_cost(key(aten.addmm.default, torch.empty(1000), flat, big))
    assert (cost.kind, cost.flops, cost.nbytes) == ("matmul", 8_000_000, 4_000_000 + 36_000)


def test_a_class_reaches_its_share_and_a_type_its_own() -> None:
    a, b = torch.empty(2, 512, 512), torch.empty(2, 512, 512)
    flops = 2 * 2 * 512**3
    shared = replace(SIMPLE, efficiency={"matmul": 0.5, "matmul.float64": 0.25})
    bmm = key(aten.bmm.default, a, b)
    assert op_seconds(bmm, shared, tf32=False) == pytest.approx(flops / 0.5e10)
    assert op_seconds(bmm, shared, tf32=True) == pytest.approx(flops / 4e10)
    assert op_seconds(key(aten.bmm.default, a.double(), b.double()), shared) == pytest.approx(flops / 0.25e9)
    assert op_seconds(key(aten.bmm.default, a.half(), b.half()), shared) == pytest.approx(flops / 5e10)


def test_types_without_a_rate_follow_the_documented_rule() -> None:
    assert flops_rate(SIMPLE, torch.bfloat16) == flops_rate(SIMPLE, torch.int8) == 1e10
    assert flops_rate(SIMPLE, torch.float8_e4m3fn) == 1e11
    assert flops_rate(SIMPLE, torch.complex64) == 2.5e9
    assert flops_rate(SIMPLE, torch.float32, tf32=True) == 8e10
    assert flops_rate(replace(SIMPLE, flops_per_s={"float32": 1e10}), torch.float32, tf32=True) == 1e10


def test_float32_uses_tf32_where_the_settings_say_so() -> None:
    a, x, w = torch.empty(1024, 1024), torch.empty(4, 64, 32, 32), torch.empty(64, 64, 3, 3)
    product = key(aten.mm.default, a, a)
    conv = key(aten.convolution.default, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        for allowed in (False, True):
            matmul.allow_tf32 = cudnn.allow_tf32 = allowed
            assert op_seconds(product, SIMPLE) == op_seconds(product, SIMPLE, tf32=allowed)
            assert op_seconds(conv, SIMPLE) == op_seconds(conv, SIMPLE, tf32=allowed)
        assert op_seconds(product, SIMPLE, tf32=True) < op_seconds(product, SIMPLE, tf32=False)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def test_elementwise_operations_stream_each_byte_once() -> None:
    a = torch.empty(1000, 1000)
    # Two read and one written.
    assert op_cost(key(aten.add.Tensor, a, a)).nbytes == 12_000_000
    # A row that is broadcast is read once.
    row = torch.empty(1000)
    for other in (row, row.expand(1000, 1000)):
        assert op_cost(key(aten.add.Tensor, a, other)).nbytes == 8_004_000
    # In place: read and written; overwritten: not read.
    assert op_cost(key(aten.add_.Tensor, a, a)).nbytes == 12_000_000
    assert op_cost(key(aten.copy_.default, a, a)).nbytes == 8_000_000
    assert op_cost(key(aten.zeros_like.default, a)).nbytes == op_cost(key(aten.fill_.Scalar, a, 1)).nbytes == 4_000_000
    assert op_cost(key(aten._to_copy.default, a, dtype=torch.float16)).nbytes == 6_000_000
    shared = replace(SIMPLE, efficiency={"elementwise": 0.5})
    assert op_seconds(key(aten.mul.Tensor, a, a), shared) == pytest.approx(0.024)
    for func in (aten.gelu.default, aten.tanh_.default, aten.relu_.default, aten.clone.default):
        assert op_cost(key(func, a)).kind == "elementwise", func


def test_reductions_and_gathers() -> None:
    a = torch.empty(1000, 1000)
    cost = op_cost(key(aten.sum.dim_IntList, a, [1]))
    assert (cost.kind, cost.nbytes) == ("reduction", 4_004_000)
    assert op_cost(key(aten._softmax.default, a, -1, False)).kind == "reduction"
    # Ten rows and ten 8-byte indices are read, ten rows written; the table's other 990 are left alone.
    cost = op_cost(key(aten.embedding.default, a, torch.zeros(10, dtype=torch.int64)))
    assert (cost.kind, cost.nbytes) == ("other", 80_000 + 80)


@pytest.mark.parametrize("groups", [1, 4, 32])
def test_a_convolution_meets_every_element_of_its_output(groups: int) -> None:
    x, w = torch.empty(2, 32, 15, 15, requires_grad=True), torch.empty(64, 32 // groups, 3, 3, requires_grad=True)
    forward, backward = (k for k in keys_of(lambda: F.conv2d(x, w, stride=2, padding=1, groups=groups).sum().backward())
                         if op_cost(k).kind == "convolution")  # fmt: skip
    # 8 x 8 places of 64 channels, each of 9 * 32 / groups multiplications and additions; both gradients take the same.
    flops = 2 * 2 * 8 * 8 * 64 * 9 * 32 // groups
    assert op_cost(forward).flops == flops
    assert op_cost(backward).flops == 2 * flops
    nbytes = 4 * (2 * 32 * 225 + 64 * 9 * 32 // groups + 2 * 64 * 64)
    assert op_cost(forward).nbytes == nbytes
    assert op_seconds(forward, SIMPLE, tf32=False) == pytest.approx(max(flops / 1e10, nbytes / 1e9))


def test_attention_counts_two_products_forward_and_five_backward() -> None:
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    one = 2 * 2 * 4 * 16 * 16 * 8
    for causal, share in ((False, 1.0), (True, 17 / 32)):  # 1 + 2 + ... + 16 pairs of 16 * 16
        keys = keys_of(lambda causal=causal: F.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward())
        costs = [op_cost(k) for k in keys if op_cost(k).kind == "attention"]
        assert [cost.flops for cost in costs] == [2 * one * share, 5 * one * share]


@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"])
def test_attention_on_a_device_that_is_not_here(name: str) -> None:
    q = TensorSpec((2, 4, 128, 64), (4 * 128 * 64, 128 * 64, 64, 1), torch.float16, "cuda")
    func = getattr(aten, name).default
    more = (None, False) if "efficient" in name else ()
    _, spec = torch.utils._pytree.tree_flatten(((0, 0, 0, *more), {}))
    cost = op_cost((func, (q, q, q, *more), spec))
    assert (cost.kind, cost.flops) == ("attention", 4 * 2 * 4 * 128 * 128 * 64)
    assert cost.dtype == torch.float16


def test_recurrent_layers_and_grouped_products_compute() -> None:
    lstm = torch.nn.LSTM(64, 32, batch_first=True)
    (cost,) = (c for k in keys_of(lambda: lstm(torch.randn(4, 8, 64))) if (c := op_cost(k)).flops)
    assert cost.flops == 2 * 4 * 8 * 4 * 32 * (64 + 32)
    x, w = torch.empty(48, 64, dtype=torch.bfloat16), torch.empty(3, 64, 16, dtype=torch.bfloat16)
    grouped = key(aten._grouped_mm.default, x, w, torch.tensor([16, 32, 48], dtype=torch.int32))
    assert op_cost(grouped).flops == 2 * 48 * 64 * 16


def test_optimizer_steps_move_bytes() -> None:
    p = [torch.zeros(1000, 1000)]
    cost = op_cost(key(aten._foreach_add_.List, p, p))
    assert (cost.kind, cost.flops, cost.nbytes) == ("elementwise", 0, 12_000_000)
    parameter = torch.nn.Parameter(torch.ones(1000, 1000))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    (fused,) = (k for k in keys_of(optimizer.step) if "fused" in str(k[0]))
    # Parameter, gradient and both moments are read, all but the gradient written; 4 bytes count the steps.
    assert op_cost(fused).nbytes == 7 * 4_000_000 + 4
    many = key(aten._foreach_mul_.Scalar, [torch.ones(1)] * 50, 2.0)
    assert op_seconds(many, SIMPLE) == pytest.approx(1e-6)
    assert op_seconds(many, replace(SIMPLE, compute_capability=None)) == pytest.approx(50e-6)


def test_views_take_nothing_and_small_operations_the_launch() -> None:
    a = torch.empty(100, 100)
    for found in (
        key(aten.view.default, a, [10_000]),
        key(aten.t.default, a),
        key(aten.expand.default, a, [7, 100, 100]),
        key(aten.detach.default, a),
        key(aten.empty.memory_format, [1000, 1000]),
        key(torch.ops.prim.device.default, a),
        None,
    ):
        assert op_cost(found) is NOTHING
        assert op_seconds(found, SIMPLE) == 0.0
    assert op_seconds(key(aten.add.Tensor, torch.empty(2), 1), SIMPLE) == SIMPLE.launch_s


# --- calibration ---


@pytest.mark.long
def test_calibration_measures_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    # Next to no effort: how well it measures isn't tested here.
    arguments = ["calibrate", "-o", str(path), "--name", "here", "--device", "cpu", "--effort", "0.01"]
    result = CliRunner().invoke(app, arguments, env={"NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    found = find_device(path)
    assert found.name == "here"
    assert {"float32", "bfloat16", "float16", "float64"} == set(found.flops_per_s)
    assert set(found.efficiency) == set(OP_CLASSES)
    assert found.context_bytes == 0
    assert found.compute_capability is None
    assert found.launch_s > 0
    assert all(found.sources.get(name) for name in ("memory_bytes", "bytes_per_s", "latency_s", "launch_s"))
    for text in ("class attention", "memory bandwidth", "here", "written to"):
        assert text in result.stdout


@pytest.mark.long
def test_calibration_leaves_the_program_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.backends.cuda.matmul.fp32_precision, torch.is_grad_enabled()
    with torch.no_grad():
        calibrate("cpu", effort_s=0.01)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.backends.cuda.matmul.fp32_precision, torch.is_grad_enabled())


@pytest.mark.parametrize("device", ["meta", "quantum", "cuda:99"])
def test_what_cannot_be_measured_is_refused(device: str) -> None:
    with pytest.raises(InvalidInputError, match=device):
        calibrate(device)


@pytest.mark.gpu
def test_calibration_of_a_gpu() -> None:
    found = calibrate("cuda", effort_s=0.1)
    assert found.is_cuda
    assert found.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert 0 < found.context_bytes < found.memory_bytes  # other processes' bytes included: tests run side by side
