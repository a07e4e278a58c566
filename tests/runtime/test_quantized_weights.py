"""Quantized frozen weights that are away: several storages, in wrapping classes, attributes and buffers."""

from __future__ import annotations

import copy
import functools
import importlib.util
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_plans import plan_of
from small_models import assert_kept
from torch import nn
from torch.utils import _pytree as pytree

import ckptplan
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.resident import PARTS
from ckptplan.tensors.quantized import named_inside
from ckptplan.tensors.storages import is_away, plain_tensors

WIDTH, GROUP = 96, 8


def coded() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and a scale for each group of a row."""
    return torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8), torch.rand(WIDTH, WIDTH // GROUP) / 500


def whole(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (codes.to(scales.dtype).view(WIDTH, -1, GROUP) * scales[..., None]).view(WIDTH, WIDTH)


class Wrapped(torch.Tensor):
    """A wrapping class whose code reads the tensors inside below PyTorch's functions."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["codes"], inner["scales"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            return Wrapped(func(args[0].codes), func(args[0].scales))
        plain = pytree.tree_map_only(Wrapped, lambda t: whole(t.codes, t.scales), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class InWrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Wrapped(*coded()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class Scaled(nn.Parameter):
    """Codes whose scales are in an object."""

    def __new__(cls, codes: torch.Tensor, state: Any = None) -> Scaled:
        made = torch.Tensor._make_subclass(cls, codes, False)
        made.state = state
        return made

    def __deepcopy__(self, memo: Any) -> Scaled:
        return Scaled(copy.deepcopy(self.data), copy.deepcopy(self.state, memo))


class Product(torch.autograd.Function):
    """A product that keeps a view of the codes as an attribute, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, state: Any) -> torch.Tensor:
        ctx.codes, ctx.state = (codes.view(-1),), state
        return x @ whole(codes, state.scales).T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] @ whole(ctx.codes[0].view(WIDTH, WIDTH), ctx.state.scales), None, None


class InAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes, scales = coded()
        self.weight = Scaled(codes, types.SimpleNamespace(scales=scales))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight, self.weight.state)


class InModule(nn.Module):
    """The first forward takes the scales, and the codes as another tensor, from the parameter into an object."""

    def __init__(self) -> None:
        super().__init__()
        codes, scales = coded()
        self.weight = Scaled(codes, None)
        self.weight.codes, self.weight.scales = codes, scales
        self.state = types.SimpleNamespace(codes=None, scales=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.codes is not None:
            self.state.codes, self.state.scales = self.weight.codes, self.weight.scales
            self.weight.codes = self.weight.scales = None
        y = x @ whole(self.state.codes, self.state.scales).T
        self.weight.data = self.state.codes
        return y


class InBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes, scales = coded()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ whole(self.codes, self.scales).T


def bits_and_bytes(bits: int) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
    if bits == 4:
        return bnb.nn.Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    return bnb.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False).to("cpu")


def of_torchao() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install torchao")
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).requires_grad_(False)
    quantization.quantize_(made, quantization.Int8WeightOnlyConfig())
    return made[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "wrapper": InWrapper,
    "attributes": InAttributes,
    "module": InModule,
    "buffers": InBuffers,
    "bitsandbytes 4": functools.partial(bits_and_bytes, 4),
    "bitsandbytes 8": functools.partial(bits_and_bytes, 8),
    "torchao": of_torchao,
}
LARGE = {"bitsandbytes 4": 4_608, "bitsandbytes 8": 9_216, "torchao": 9_216}
"""Bytes of a layer that move; scales of less than a page stay."""


class Adapted(nn.Module):
    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(x) + self.up(self.dropout(self.down(x))))


def built(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages, about themselves
        return nn.Sequential(*(Adapted(LAYERS[kind]()) for _ in range(4))), torch.randn(24, WIDTH)


@functools.cache
def profiled(kind: str) -> Profile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ckptplan.profile(*built(kind), menus=False)


def moved(kind: str, option: str, between: int) -> Plan:
    measured = profiled(kind).offloading(("activations", "weights"), between)
    names = [next(n for n in (option, "weights", "keep") if stage.find(n)) for stage in measured.stages]
    return plan_of(measured, names)  # type: ignore[arg-type]


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = model(x).square().mean()
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def away(model: nn.Module) -> int:
    return sum(is_away(t) for _, t, _ in named_inside(model))


CASES = pytest.mark.parametrize(
    ("option", "between"), [("keep", PARTS), ("weights", 0), ("weights", 1), ("swap", PARTS), ("recompute+swap", PARTS)]
)


@pytest.mark.parametrize("kind", LAYERS)
@CASES
def test_steps_are_as_without_a_plan(kind: str, option: str, between: int) -> None:
    model, x = built(kind)
    torch.manual_seed(1)
    wanted = [each for _ in range(3) for each in step(model, x)]
    model, x = built(kind)
    plan = moved(kind, option, between)
    assert plan.decided.weights
    torch.manual_seed(1)
    with ckptplan.apply(model, plan, check="always") as handle:
        assert same([each for _ in range(3) for each in step(model, x)], wanted)
        assert not handle.stats().differences
        moves = [m.resident for m in plan.decided.weights]
        late = sum(r.nbytes for r in moves if r.returns == 0)  # which are there in the first step
        scales = 4 * 4 * WIDTH * WIDTH // GROUP if kind == "module" else 0  # which the first forward puts elsewhere
        assert handle.stats().swapped_in_bytes >= 3 * (sum(r.nbytes for r in moves) - scales) - late
    assert not away(model)


@pytest.mark.parametrize("kind", LAYERS)
def test_all_that_is_large_enough_moves(kind: str) -> None:
    weights = [r for r in profiled(kind).residents if ".own." in r.names[0]]
    assert sum(r.nbytes for r in weights) == 4 * LARGE.get(kind, WIDTH * WIDTH + 4 * WIDTH * WIDTH // GROUP)
    assert all(not r.trained and (not r.sizes or sum(r.sizes) == r.nbytes) for r in weights)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("option", "between"), [("weights", 0), ("weights", PARTS), ("recompute+swap", PARTS)])
def test_the_peak_is_that_of_the_plan(kind: str, option: str, between: int) -> None:
    plan = moved(kind, option, between)
    found = assert_kept(built(kind)[0], plan, built(kind)[1])
    # What a recomputed stage frees before its own peak counts as there.
    assert found.measured_peak_bytes > (0.88 if option == "recompute+swap" else 0.95) * plan.peak_bytes


def values(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors of a state_dict, plain."""
    return [plain.clone() for t in model.state_dict().values() for plain in plain_tensors(t)]


READS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": values,
    "deepcopy": lambda model: values(copy.deepcopy(model)),
    "evaluation": lambda model: _evaluated(model),
    "layer": lambda model: [layer.own(torch.ones(2, WIDTH)) for layer in model],  # type: ignore[attr-defined]
    "inside": lambda model: [t.float().sum() for _, t, _ in named_inside(model)],
    "values": lambda model: [plain * 2 for p in model.parameters() for plain in plain_tensors(p.detach())],
}


def _evaluated(model: nn.Module) -> list[torch.Tensor]:
    model.eval()
    with torch.no_grad():
        found = model(torch.ones(2, WIDTH))
    model.train()
    return [found]


@pytest.mark.filterwarnings("ignore:the peak may exceed")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("read", READS)
def test_who_reads_one_that_is_away_finds_it(kind: str, read: str) -> None:
    def run(plan: Plan | None) -> list[torch.Tensor]:
        model, x = built(kind)
        found = []
        handle = None if plan is None else ckptplan.apply(model, plan, check="always")
        for _ in range(2):
            loss = model(x).square().mean()
            assert handle is None or away(model)
            found += READS[read](model)
            loss.backward()
            assert handle is None or away(model) or read != "evaluation"
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            found += READS[read](model)
        if handle is not None:
            handle.remove()
        return [t.detach() for t in found]

    torch.manual_seed(2)
    wanted = run(None)
    torch.manual_seed(2)
    assert same(run(moved(kind, "weights", PARTS)), wanted)


@pytest.mark.parametrize("kind", LAYERS)
def test_inside_resident_all_are_there(kind: str) -> None:
    model, x = built(kind)
    with ckptplan.apply(model, moved(kind, "weights", PARTS)) as handle:
        step(model, x)
        assert away(model)
        with handle.resident():
            assert not away(model)
            step(model, x)
            assert not away(model)
        assert not handle.stats().differences


def test_profiling_leaves_the_attributes_of_parameters() -> None:
    model, x = built("module")
    before = [dict(vars(layer.own.weight)) for layer in model]  # type: ignore[attr-defined]
    ckptplan.profile(model, x, menus=False)
    after = [vars(layer.own.weight) for layer in model]  # type: ignore[attr-defined]
    assert all(a[name] is b[name] for a, b in zip(before, after, strict=True) for name in {*a, *b})


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: pip install peft")
def test_adapters_on_a_model_of_4_bits() -> None:
    """QLoRA, with the scales' scales."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
    from peft import LoraConfig, get_peft_model

    def made() -> nn.Module:
        torch.manual_seed(0)
        layers = {f"layer{k}": bits_and_bytes(4) for k in range(3)}
        base = nn.Sequential(*(m for layer in layers.values() for m in (layer, nn.Tanh())))
        base.is_loaded_in_4bit = True  # type: ignore[assignment]
        config = LoraConfig(r=4, target_modules=["0", "2", "4"], init_lora_weights=False, lora_dropout=0.1)
        return get_peft_model(base, config).train()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, model = made(), made()
        measured = ckptplan.profile(made(), (x := torch.randn(24, WIDTH)), menus=False)
    measured = measured.offloading(("activations", "weights"), PARTS)
    plan = plan_of(measured, ["weights" if stage.find("weights") else "keep" for stage in measured.stages])
    torch.manual_seed(1)
    wanted = [each for _ in range(3) for each in step(plain, x)]
    torch.manual_seed(1)
    with ckptplan.apply(model, plan, check="always") as handle:
        assert same([each for _ in range(3) for each in step(model, x)], wanted)
        assert handle.stats().swapped_in_bytes
