"""Layouts of results that are remembered are those that the fake kernels return."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import assert_kept, build
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from toy_modules import Lambda, times

import ckptplan
from ckptplan.profiling.bytes.layouts import Layouts
from ckptplan.profiling.bytes.operations import Operands, OpKeys, op_key

ATEN = torch.ops.aten


class Counted:
    """An operation that counts how often its kernel runs."""

    def __init__(self, func: Any) -> None:
        self.func, self.runs = func, 0
        self.namespace, self.tags = func.namespace, func.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.func(*args, **kwargs)


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    made = FakeTensorMode()
    made.cache_enabled = False
    with made:
        yield made


def described(results: Any, operands: list[torch.Tensor]) -> list[Any]:
    """The results' layouts and attributes, which of them are operands, and which tensors have one storage."""
    found = []
    tensors = [*operands, *(t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor))]
    for tensor in tensors[len(operands) :]:
        layout = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset()
        same = [t is tensor for t in tensors]
        shared = [t.untyped_storage()._cdata == tensor.untyped_storage()._cdata for t in tensors]
        plain = {name: each for name, each in vars(tensor).items() if not isinstance(each, torch.Tensor)}
        found.append((type(tensor), plain, layout, tensor.untyped_storage().nbytes(), same, shared))
    return [type(results), *found]


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def three_times(mode: FakeTensorMode, call: Callable[[], Call]) -> tuple[int, list[list[Any]]]:
    """How often the kernel ran for three such calls, and what each of them returned."""
    layouts, counted = Layouts(), Counted(call()[0])
    found = []
    for _ in range(3):
        _, args, kwargs = call()
        operands = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        found.append(described(layouts.run(mode, counted, args, kwargs), operands))
    return counted.runs, found


def _resized() -> torch.Tensor:
    tensor = torch.empty(3, 4)
    tensor.resize_(2, 2)
    return tensor


UNTOLD: dict[str, Callable[[], Call]] = {
    "conjugate": lambda: (ATEN.mul.Tensor, (torch.empty(3, dtype=torch.complex64).conj(), 2.0), {}),
    "returns a conjugate": lambda: (ATEN._conj.default, (torch.empty(3, dtype=torch.complex64),), {}),
    "operand changes": lambda: (ATEN.squeeze_.dim, (torch.empty(3, 1), 1), {}),
    "operand grows": lambda: (ATEN.mul.out, (torch.empty(3), torch.empty(3)), {"out": torch.empty(0)}),
    "known value": lambda: (ATEN.add.Tensor, (torch.tensor(2.0), torch.tensor(3.0)), {}),
    "larger storage": lambda: (ATEN.resize_.default, (_resized(), [3]), {}),
    "generator": lambda: (ATEN.bernoulli.default, (torch.empty(3),), {"generator": torch.Generator()}),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_a_kernel_runs_each_time_if_its_call_does_not_tell_the_result(mode: FakeTensorMode, name: str) -> None:
    runs, found = three_times(mode, UNTOLD[name])
    assert runs == 3
    assert found[0] == found[1] == found[2]


def test_the_key_of_a_call_is_made_once_and_is_its_own(mode: FakeTensorMode) -> None:
    """Python calls 1, 1.0 and True equal, as well as 0.0 and -0.0; text made of keys tells stages apart."""
    keys = OpKeys()
    x, calls = (
        torch.empty(3, 4),
        ((), (1,), (1.0,), (True,), (0.0,), (-0.0,), ([1, 2],), ((1, 2),), (None,), (slice(2),)),
    )
    for tensor, rest in itertools.product((x, x[1:], x[1:].t(), torch.empty(3, 4, dtype=torch.float64)), calls):
        for kwargs in ({}, {"alpha": 1}, {"alpha": 1.0}, {"beta": 1}, {"dtype": torch.float32}):
            call = (ATEN.add.Tensor, (tensor, *rest), kwargs)
            found = [keys.of(*call, Operands(*call[1:])) for _ in range(2)]
            assert list(map(repr, found)) == [repr(op_key(*call))] * 2
            assert found[0] is found[1] or Operands(*call[1:]).told is None


def test_the_default_data_type_is_part_of_a_call(mode: FakeTensorMode) -> None:
    layouts, found = Layouts(), []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        found.append(layouts.run(mode, ATEN.zeros.default, ([3],), {}).dtype)
    assert found == [torch.float64, torch.float32]


@pytest.mark.long
def test_a_traced_model_is_given_what_the_kernels_return(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Layouts.run
    compared = []

    def run(self: Layouts, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, *known: Any) -> Any:
        written = func._schema.is_mutable  # a second run would find other operands
        operands = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, FakeTensor)]
        wanted = None if written else described(func(*args, **kwargs), operands)
        found = original(self, mode, func, args, kwargs, *known)
        if not written:
            compared.append(func)
            assert described(found, operands) == wanted, func
        return found

    monkeypatch.setattr(Layouts, "run", run)
    model, inputs = build("complex_valued")
    ckptplan.profile(model, inputs, device="a100-40gb", menus=False)
    assert len(compared) > 100


@pytest.mark.long
def test_results_that_share_a_storage_do_so_in_each_trace() -> None:
    """PyTorch's own cache of fake kernels gives the two gradients of an LSTM's biases a storage each."""
    FakeTensorMode.cache_clear()
    torch.manual_seed(0)
    first, second = (nn.LSTM(width, 16, bidirectional=True, batch_first=True) for width in (16, 32))
    model = Lambda(lambda self, x: self.second(self.first(x)[0])[0].sum(), first=first, second=second)
    x = torch.randn(4, 8, 16)
    profiles = [ckptplan.profile(model, x, device="a100-40gb") for _ in range(2)]
    assert profiles[0] == profiles[1]


@pytest.mark.parametrize("activation", [nn.Identity, nn.Softplus])
@pytest.mark.long
def test_gradients_are_laid_out_as_real_kernels_do(activation: type[nn.Module]) -> None:
    """A convolution copies a gradient that isn't contiguous; normalized channels come from a transposed one."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x).transpose(1, 2)
        return torch.tanh(self.activation(self.norm(x)).transpose(1, 2).contiguous())

    def layer() -> nn.Module:
        return Lambda(
            forward, convolution=nn.Conv1d(32, 32, 3, padding=1), norm=nn.LayerNorm(32), activation=activation()
        )

    model, x = nn.Sequential(*times(4, layer)), torch.randn(4, 32, 256)
    plan = ckptplan.solve(model, inputs=x, budget="100%", time_limit_s=1)
    assert assert_kept(model, plan, x).measured_peak_bytes > 0.99 * plan.peak_bytes
