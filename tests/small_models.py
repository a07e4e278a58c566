"""Toy architectures whose saved tensors are large enough to be swapped, one per way real models are unlike a chain.

Each builder returns the model (in training mode) and its inputs, as `profile` takes them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from made_plans import plan_of as plan_of
from made_plans import plan_with as plan_with
from made_plans import scheduled as scheduled
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckptplan.core.option import Action
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.profiling.profiler import profile
from ckptplan.runtime.handle import Handle
from ckptplan.runtime.patching import PatchedForward, installed
from ckptplan.runtime.recompute.selective import NumberedOps
from ckptplan.runtime.swap.record import Whereabouts
from ckptplan.runtime.verify import Verification, verify
from ckptplan.state.restore import restored
from ckptplan.training.step import default_loss

Built = tuple[nn.Module, Any]


def mlp() -> Built:
    layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(32, 64)


def conv_norm() -> Built:
    """Batch statistics, and ReLUs that write over the normalised values."""
    blocks = [
        nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        for i in range(4)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 12 * 12, 10)), torch.randn(4, 3, 12, 12)


class Made(nn.Module):
    """What it is made with, and a function of it and its arguments."""

    def __init__(self, run: Callable[..., Any], **made: Any) -> None:
        super().__init__()
        self.run = run
        for name, value in made.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.drop(torch.softmax(q @ k.transpose(-1, -2) / 4, -1))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, width))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Residual blocks with dropout, run by a loop."""

    def __init__(self, depth: int = 4, width: int = 32, vocabulary: int = 50, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Attention(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def transformer() -> Built:
    return Transformer(), torch.randint(0, 50, (4, 32))


def tied() -> Built:
    return Transformer(depth=3, tied=True), torch.randint(0, 50, (4, 32))


class UNet(nn.Module):
    """Skips that stay alive across the stages in between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)])
        self.middle = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.SiLU())
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 4, 3, padding=1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.down[0](x))
        second = torch.tanh(self.down[1](first))
        x = self.up[0](self.middle(second) + second)
        return self.up[1](torch.cat([x, first], 1))


def unet() -> Built:
    return UNet(), torch.randn(2, 3, 16, 16)


def _block_of_trees(
    m: Any, pair: tuple[torch.Tensor, dict[str, torch.Tensor]], *, scale: torch.Tensor, flag: bool = True
) -> Any:
    x, more = pair
    y = torch.tanh(m.a(x)) * scale
    return y, {"z": torch.sigmoid(m.b(more["z"])) * y, "count": more.get("count", 0) + 1 if flag else 0}


def _of_trees(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = torch.sigmoid(m.scale(x))
    pair: Any = (x, {"z": x})
    for layer in m.layers:
        pair = layer(pair, scale=scale)
    assert pair[1].pop("count") == len(m.layers)
    return {"y": pair[0], **pair[1]}


def nested() -> Built:
    """Blocks that take and return tuples and dicts, with a keyword tensor that needs gradients itself."""
    layers = (Made(_block_of_trees, a=nn.Linear(64, 64), b=nn.Linear(64, 64)) for _ in range(4))
    return Made(_of_trees, layers=nn.ModuleList(layers), scale=nn.Linear(64, 64)), torch.randn(32, 64)


def _sharing(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + m.blocks[0](x)
    return m.head(m.blocks[1](x))  # type: ignore[no-any-return]


def shared() -> Built:
    """One block called three times, between others."""
    blocks = (nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.Dropout(0.1)) for _ in range(2))
    return Made(_sharing, blocks=nn.ModuleList(blocks), head=nn.Linear(64, 8)), torch.randn(32, 64)


def _in_double(m: Any, x: torch.Tensor) -> torch.Tensor:
    """In double precision: the single-precision kernel's workspace has no fake twin, so its size can't be planned."""
    return m.norm(x + m.lstm(x.double())[0].float())  # type: ignore[no-any-return]


def recurrent() -> Built:
    made = (Made(_in_double, lstm=nn.LSTM(32, 32, batch_first=True).double(), norm=nn.LayerNorm(32)) for _ in range(3))
    return nn.Sequential(*made), torch.randn(24, 4, 32)


def _views(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Saves a slice, an expanded, a transposed tensor, and one storage twice."""
    both = torch.tanh(m.linear(x))
    left, right = both[:, :64], both[:, 64:]
    gate = torch.sigmoid(right.sum(1, keepdim=True)).expand(-1, 64)
    mixed = (left.t() * right.t()).t() * gate
    return x + mixed * torch.exp(left) * left


def views() -> Built:
    return nn.Sequential(*(Made(_views, linear=nn.Linear(64, 128)) for _ in range(4))), torch.randn(32, 64)


class Routed(nn.Module):
    """Counts its load in one buffer in place, in another by replacing it, and uses a third that it updates first."""

    load: torch.Tensor
    seen: torch.Tensor
    direction: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("load", torch.zeros(64, dtype=torch.long))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("direction", nn.functional.normalize(torch.randn(64), dim=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.load.add_(nn.functional.one_hot(y.argmax(1), 64).sum(0))
            self.seen = self.seen + len(x)
            # One power iteration, as spectral normalisation does: the output depends on the value before.
            self.direction.copy_(nn.functional.normalize(self.linear.weight @ self.direction, dim=0))
        return x + torch.tanh(y / (self.linear.weight.t() @ self.direction.clone()).norm())


def routed() -> Built:
    return nn.Sequential(*(Routed() for _ in range(4))), torch.randn(32, 64)


def _low_rank(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(m.base(x) + m.b(m.a(x)))


def low_rank() -> Built:
    made = (
        Made(
            _low_rank, base=nn.Linear(64, 64).requires_grad_(False), a=nn.Linear(64, 4, bias=False),
            b=nn.Linear(4, 64, bias=False),
        )
        for _ in range(4)
    )  # fmt: skip
    return nn.Sequential(nn.Linear(64, 64).requires_grad_(False), *made), torch.randn(32, 64)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.twice = 2 * x  # seen by no hook
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x + ctx.twice / 2)


def _squared(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(_Square.apply(m.linear(x)))


def custom_function() -> Built:
    return nn.Sequential(*(Made(_squared, linear=nn.Linear(64, 64)) for _ in range(4))), torch.randn(32, 64)


def _complex(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Saves a tensor and its lazy conjugate, which share their memory and differ in a flag."""
    z = torch.fft.rfft(x) * m.filter
    power = z * z.conj() * z
    turned = z.conj() * z.conj().imag  # the imaginary part of a conjugate is lazily negated
    return x + torch.tanh(torch.fft.irfft(power + turned, n=x.shape[-1]) / 100)


def complex_valued() -> Built:
    made = (Made(_complex, filter=nn.Parameter(torch.randn(33, dtype=torch.cfloat))) for _ in range(4))
    return nn.Sequential(*made), torch.randn(32, 64)


BUILDERS: Mapping[str, Callable[[], Built]] = {
    f.__name__: f
    for f in (
        mlp, conv_norm, transformer, tied, unet, nested, shared, recurrent, views, routed, low_rank, custom_function,
        complex_valued,
    )
}  # fmt: skip


def build(name: str, seed: int = 0) -> Built:
    """The model and its inputs, the same at every call."""
    torch.manual_seed(seed)
    model, inputs = BUILDERS[name]()
    return model.train(), inputs


@functools.cache
def measured(name: str) -> Profile:
    """The profile of `build(name)`, made once for all tests and for all processes that run them.

    Its times count as exact, so that no plan is given up for one that is slower by less than their error.
    """
    path = Path(os.environ["CKPTPLAN_TEST_PROFILES"], f"{name}.json")
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            replace(profile(*build(name)), step_error=0.0).save(path)
        return Profile.load(path)


def uniform(model: nn.Module, inputs: Any, action: Action) -> Plan:
    """Every stage with the same action."""
    chain = profile(model, inputs, menus=False)
    return plan_of(chain, [action] * len(chain.stages))


def decided(chain: Profile, what: str, op: int = 0) -> Plan:
    """Every stage with the same option, or one after the other ("mixed", or "mixed 1", which begins with the second).

    Or all as one "segment", or "selective": the output of operation `op` is saved.
    """
    stages = chain.stages
    if what.startswith("mixed"):
        first = int(what.removeprefix("mixed") or 0)
        return plan_of(chain, [("swap", "recompute", "keep")[(first + i) % 3] for i in range(len(stages))])  # type: ignore[misc]
    if what == "segment":
        able = [i for i, stage in enumerate(stages) if not stage.is_glue and stage.recompute]
        options = [stage.find("recompute") or stage.keep for stage in stages]
        return scheduled(chain, options, (Segment(able[0], able[-1]),))
    plan = plan_of(chain, ["recompute" if what == "selective" else what] * len(stages))  # type: ignore[list-item]
    if what == "selective":
        return saving(plan, dict.fromkeys(plan.stages, (op,)), range(len(stages)))
    return plan


@functools.cache
def planned(name: str, what: str) -> Plan:
    """For `build(name)`, as `decided` has it."""
    return decided(measured(name), what)


def plan_for(model: nn.Module, inputs: Any, what: str, op: int = 0) -> Plan:
    """For a model, as `decided` has it."""
    return decided(profile(model, inputs, menus=False), what, op)


def call(model: nn.Module, inputs: Any) -> torch.Tensor:
    """A forward's loss."""
    return default_loss(model(**inputs) if isinstance(inputs, dict) else model(inputs))


def step(model: nn.Module, inputs: Any, loss_of: Callable[[nn.Module, Any], torch.Tensor] = call) -> list[Any]:
    """Loss and gradients of a step that begins without gradients."""
    model.zero_grad()
    loss = loss_of(model, inputs)
    loss.backward()
    return [loss.detach(), gradients(model)]


def train(
    model: nn.Module, inputs: Any, steps: int = 3, context: Callable[[], Any] = contextlib.nullcontext
) -> list[Any]:
    """Loss, gradients and buffers of each step, parameters updated in between; then the generator's next numbers."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    out: list[Any] = []
    for _ in range(steps):
        optimizer.zero_grad()
        with context():
            loss = call(model, inputs)
        loss.backward()
        out.append([loss.detach(), gradients(model), {n: b.clone() for n, b in model.named_buffers()}])
        optimizer.step()
    return [*out, [torch.rand(3)]]


def state_of(model: nn.Module) -> tuple[Any, ...]:
    """What planning leaves alone, to be compared: identities, values, modes and hooks, and the random states."""

    def value(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else (id(tensor), tensor.detach().numpy().tobytes())

    return (
        {name: (value(p), value(p.grad), p.requires_grad) for name, p in model.named_parameters()},
        {name: value(b) for name, b in model.named_buffers()},
        {name: (m.training, sorted(m.__dict__), len(m._forward_hooks)) for name, m in model.named_modules()},
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        np.random.get_state()[1].tobytes(),  # type: ignore[union-attr]  # noqa: NPY002
    )


def assert_kept(model: nn.Module, plan: Plan, inputs: Any = None, loss_fn: Any = None, **how: Any) -> Verification:
    """A step under a plan has the plain gradients, saves and runs what was planned, and keeps to the plan's peak."""
    found = verify(model, plan, inputs, loss_fn, repeats=1, **how)
    what = [choice.option for choice in plan.choices], plan.segments
    assert found.gradients_equal, (what, found.differing)
    assert found.other_paths == 0, what
    assert found.stats.runs == found.stats.planned_runs, what
    assert found.measured_peak_bytes <= plan.peak_bytes <= plan.budget_bytes, what
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Any, wanted: Any) -> None:
    """Bit for bit, through lists and dicts."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b)
    else:
        assert found == wanted


PRODUCTS = ("addmm", "mm", "bmm", "convolution")


def products(
    model: nn.Module, inputs: Any, stages: Iterable[str], sought: Sequence[str] = PRODUCTS
) -> dict[str, tuple[int, ...]]:
    """Per stage, as plans name its calls, the numbers of the operations whose outputs a selective plan may save.

    Parameters
    ----------
    inputs : tensor, tuple or dict
        As `profile` takes them.
    sought : sequence of str
        Names of operations, by default those of matrix products.
    """
    found: dict[str, tuple[int, ...]] = {}
    calls: Counter[str] = Counter()

    def runner(name: str) -> Callable[..., Any]:
        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            numbers: list[int] = []

            def note(number: int, func: Any, given: Any, more: Any) -> Any:
                if str(func).split(".")[1] in sought:
                    numbers.append(number)
                return func(*given, **more)

            calls[name] += 1
            with NumberedOps(note):
                result = original(*args, **kwargs)
            found[name if calls[name] == 1 else f"{name}#{calls[name]}"] = tuple(numbers)
            return result

        return run

    modules = dict(model.named_modules())
    names = {stage.partition("#")[0] for stage in stages} & modules.keys()
    with restored(model), installed([PatchedForward(modules[name], runner(name)) for name in names]):
        if isinstance(inputs, dict):
            model(**inputs)
        else:
            model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return found


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def saving(plan: Plan, numbers: Mapping[str, tuple[int, ...]], stages: Collection[int]) -> Plan:
    """The plan, where those of these stages that recompute save the outputs of the numbered operations."""
    choices = tuple(
        Decision("recompute", ops=numbers[name])
        if i in stages and choice.action == "recompute" and numbers.get(name)
        else choice
        for i, (name, choice) in enumerate(zip(plan.stages, plan.choices, strict=True))
    )
    return replace(plan, choices=choices)


def states_of_swapped(handle: Handle) -> set[Whereabouts]:
    """The states of what the present pass has sent away and that is still alive."""
    session = handle._applied.controller._session
    assert session is not None
    return {record.state for refs in session._leaving.values() for ref in refs if (record := ref()) is not None}
