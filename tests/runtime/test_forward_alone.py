"""What is there in forward alone, or in backward alone: stages run again as they ran first, and leave all as it is."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from by_hand import CPU, WAYS, run_again
from odd.harness import WIDTH
from odd.layers import DEPTH, layer_of, layers_of
from odd.surroundings import SineForTanh, SmallerTanh
from small_models import assert_same, gradients
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ckptplan.core.errors import PlanMismatchError, UnsupportedModelError
from ckptplan.runtime.guard.fused_steps import STEPS
from ckptplan.runtime.recompute.frames import Handed, hold
from ckptplan.state.flags import FLAGS, flags, set_flags

STAGES = [str(i) for i in range(DEPTH)]
Chain = nn.Sequential
Run = Callable[[Any, torch.Tensor], torch.Tensor]
Loop = Callable[[Chain], Any]


def chain(run: Run) -> Chain:
    kind = layer_of(lambda m, x: x + torch.tanh(run(m, x)), norm=lambda: nn.LayerNorm(WIDTH), handle=lambda: None)
    return nn.Sequential(*layers_of(kind))


def product(stage: Any, x: torch.Tensor) -> torch.Tensor:
    return stage.norm(stage.linear(x))


def loss_of(model: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    return model(x).square().sum()


def around_forward(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Loop:
    """Two steps, the forward alone in `context()`."""

    def loop(model: Chain) -> Any:
        found = []
        for _ in range(2):
            model.zero_grad()
            with context():
                loss = loss_of(model)
            loss.backward()
            found.append(gradients(model))
        return found

    return loop


def check(loop: Loop, plan: str, run: Run = product) -> None:
    """`loop` gives the same with and without the plan, under which stages ran again."""
    torch.manual_seed(0)
    plain = chain(run)
    model = copy.deepcopy(plain)
    wanted = loop(plain)
    with run_again(model, plan, STAGES) as controller:
        assert_same(loop(model), wanted)
        assert controller.counters.recomputed_stages >= DEPTH


# Flags


OTHER_VALUES = {
    "default dtype": torch.float64,
    "float32 matmul precision": "medium",
    "deterministic algorithms": (True, True),
    "number of threads": 1,
    "sdp_priority_order": [2, 1, 0, 3, 4],
    **{name: "ieee" for name in FLAGS if name.endswith("fp32_precision")},
}


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_is_put_and_put_back(name: str) -> None:
    before = flags()
    value = before[list(FLAGS).index(name)]
    other = OTHER_VALUES.get(name, not value if isinstance(value, bool) else value)
    get, put = FLAGS[name]
    try:
        put(other)
    except RuntimeError:
        pytest.skip("this machine can't")
    if get() == value:
        pytest.skip("has one value on this machine")
    in_forward = flags()
    assert in_forward != before
    set_flags(before)
    assert flags() == before
    set_flags(in_forward)
    assert flags() == in_forward
    set_flags(before)
    assert flags() == before


def test_flags_that_contradict_one_another() -> None:
    """PyTorch refuses to read the former interface where the new one was used; both are as they were all the same."""
    before = flags()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        mixed = flags()
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        set_flags(before)
        assert torch.get_float32_matmul_precision() == "highest"
        set_flags(mixed)
        assert flags() == mixed
    finally:
        set_flags(before)
    assert flags() == before


# Modes and context variables


@contextlib.contextmanager
def both() -> Iterator[None]:
    with SineForTanh(), SmallerTanh():
        yield


@pytest.mark.parametrize(
    ("plan", "mode", "where"),
    [
        ("recompute", both, "forward"), ("selective", SineForTanh, "step"), ("segment", SmallerTanh, "backward"),
        ("segment", both, "other in backward"),
    ],
)  # fmt: skip
def test_modes(plan: str, mode: Any, where: str) -> None:
    """A function mode around the whole step isn't active in backward either: `Tensor.backward` is such a function."""

    in_forward = contextlib.nullcontext if where == "backward" else mode
    in_backward = {"forward": contextlib.nullcontext, "backward": mode, "other in backward": SmallerTanh}

    def loop(model: Chain) -> Any:
        model.zero_grad()
        with in_forward():
            loss = loss_of(model)
            if where == "step":
                loss.backward()
        if where != "step":
            with in_backward[where]():
                torch.autograd.backward(loss)
        return gradients(model)

    check(loop, plan)
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0


def test_a_mode_is_put_back_without_being_entered_anew() -> None:
    model = chain(product)
    with run_again(model, "recompute", STAGES):
        with FlopCounterMode(display=False) as counter:
            loss = loss_of(model)
        forward = counter.get_total_flops()
        loss.backward()
        assert counter.get_total_flops() == 2 * forward


# Hooks and forwards of modules inside of a stage


def on_a_weight_once(stage: Any) -> None:
    if not stage.linear.weight._backward_hooks:
        stage.linear.weight.register_hook(lambda gradient: gradient * 0.5)


def on_a_weight_anew(stage: Any) -> None:
    if stage.handle is not None:
        stage.handle.remove()
    stage.handle = stage.linear.weight.register_hook(lambda gradient: gradient * 0.5)


def halve(p: torch.Tensor) -> None:
    p.grad *= 0.5  # type: ignore[operator]


def behind_accumulation(stage: Any) -> None:
    if stage.handle is None:
        stage.handle = stage.linear.weight.register_post_accumulate_grad_hook(halve)


def on_the_stage_itself(stage: Any) -> None:
    if stage.handle is None:
        stage.handle = stage.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.5,))


@pytest.mark.parametrize(
    ("plan", "register"),
    [
        ("recompute", on_a_weight_once), ("segment", on_a_weight_anew), ("selective", behind_accumulation),
        ("recompute", on_the_stage_itself),
    ],
)  # fmt: skip
def test_a_stage_that_registers_a_hook_on_its_gradients(plan: str, register: Callable[[Any], None]) -> None:
    def run(stage: Any, x: torch.Tensor) -> torch.Tensor:
        register(stage)
        return product(stage, x)

    def loop(model: Chain) -> Any:
        found = []
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(4, WIDTH, requires_grad=True)).square().sum().backward()
            found.append(gradients(model))
        return found

    check(loop, plan, run)


def test_a_class_with_another_forward_since() -> None:
    model = chain(product)
    with run_again(model, "recompute", STAGES):
        with mock.patch.object(nn.LayerNorm, "forward", lambda module, x: x * 2):
            loss = loss_of(model)
        with pytest.raises(PlanMismatchError, match=r"LayerNorm\.forward was replaced"):
            loss.backward()


# Parameters


def test_a_step_of_other_parameters() -> None:
    """A discriminator's, say."""
    other = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([other], fused=True)

    def loop(model: Chain) -> Any:
        loss = loss_of(model)
        other.sum().backward()
        optimizer.step()
        loss.backward()
        return gradients(model)

    check(loop, "recompute")


def test_steps_are_watched_while_a_plan_is_applied() -> None:
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    assert not hooks
    with STEPS.watched(), STEPS.watched():
        assert len(hooks) == 1
    assert not hooks


# Copies


# Hooks of the user's on what autograd saves


class Rounds:
    """Packs that go by the tensor: leaves and what needs no gradient stay, other values are rounded."""

    def pack(self, tensor: torch.Tensor) -> Any:
        stays = tensor.is_leaf or not tensor.requires_grad or isinstance(tensor, nn.Parameter)
        return tensor if stays else (tensor.bfloat16(), tensor.shape)

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else packed[0].float().view(packed[1])

    def __call__(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


@pytest.mark.parametrize("plan", WAYS)
def test_hooks_around_a_stage_decide_as_without_a_plan(plan: str) -> None:
    check(around_forward(Rounds()), plan, lambda stage, x: stage.linear(x) * stage.norm(x).exp())


def test_hooks_that_draw_random_numbers() -> None:
    model = chain(product)
    with run_again(model, "segment", STAGES):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * random.random(), lambda t: t):
            loss = loss_of(model)
        with pytest.raises(UnsupportedModelError, match=r"test_hooks_that_draw_random_numbers.*draw random numbers"):
            loss.backward()


def test_hooks_that_fail_in_backward_are_named() -> None:
    in_time = [True]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not in_time[0]:
            raise KeyError("closed")
        return tensor

    model = chain(product)
    with run_again(model, "segment", STAGES):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = loss_of(model)
        in_time[0] = False
        with pytest.raises(UnsupportedModelError, match=r"saved_tensors_hooks .*\.pack and .*lambda.* failed"):
            loss.backward()


def test_what_a_stage_runs_again_from_goes_where_pytorchs_hooks_send_it() -> None:
    with FakeTensorMode(), torch.autograd.graph.save_on_cpu():
        held = hold(torch.ones(3, device="cuda"), None)
        assert isinstance(held, Handed)
        assert held.packed[1].device == CPU
        assert held.tensor().device.type == "cuda"
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        x = torch.randn(3)
        assert torch.equal(hold(x, None).tensor(), x)
