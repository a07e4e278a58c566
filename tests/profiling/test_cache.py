"""Profiles from the cache: found for an equal step alone."""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import logging
import os
import random
import re
import sys
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn, ops
from transformers import BertConfig, BertModel
from transformers.models.bert import modeling_bert

import ckptplan
from ckptplan.core.request import Training
from ckptplan.profiling import cache, cache_key, profiler
from ckptplan.profiling.cache_key import key_of
from ckptplan.profiling.description import Description
from ckptplan.profiling.installed import NoKeyError
from ckptplan.profiling.target import find_target
from ckptplan.runtime.step import make_step

SCALE = 2.0
TABLE = {"add": 1.0}


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


def scaled_otherwise(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE * 1


class Settings:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __add__(self, more: float) -> float:
        return self.rate + more

    plus = functools.partialmethod(__add__, 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.settings = Settings(0.5)
        self.rate = 0.5

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.linear(x)) + TABLE["add"]

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inner = getattr(self, "inner")  # noqa: B009
        return x + Doubled.apply(inner(x)) * mask * (self.settings + 0.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x.tanh()


class Case:
    """A step that a test changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = Net().train()
        self.inputs: dict[str, Any] = {"x": torch.randn(4, 16), "mask": torch.ones(4, 16, dtype=torch.long)}
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters())
        self.options: dict[str, Any] = {}
        self.menus = True

    def key(self) -> str:
        training = Training.of(self.options, self.inputs)
        target = find_target(self.model)
        step = make_step(self.model, training).under(training.amp, "cpu")
        return key_of(step, self.optimizer, target, None, self.menus, ())


def of_factor(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: y.sum() * factor


def with_group(case: Case, **settings: Any) -> None:
    case.optimizer.param_groups[0].update(settings)


def in_forward(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x + self.linear(x) * mask


CHANGES: dict[str, Callable[[Case, pytest.MonkeyPatch], Any]] = {
    "attribute of a module": lambda case, patch: setattr(case.model.blocks[1], "rate", 0.25),
    "attribute of an object": lambda case, patch: setattr(case.model.blocks[1].settings, "rate", 0.25),
    "method of a class": lambda case, patch: patch.setattr(Block, "inner", in_forward),
    "operator of an object": lambda case, patch: patch.setattr(Settings, "__add__", lambda self, more: self.rate),
    "backward of a function": lambda case, patch: patch.setattr(
        Doubled, "backward", staticmethod(lambda ctx, gradient: gradient + gradient)
    ),
    "attribute of a class": lambda case, patch: patch.setattr(nn.Linear, "scale", 2, raising=False),
    "forward of one module": lambda case, patch: setattr(
        case.model.blocks[1], "forward", types.MethodType(in_forward, case.model.blocks[1])
    ),
    "function that forward calls": lambda case, patch: patch.setitem(globals(), "scaled", scaled_otherwise),
    "global number": lambda case, patch: patch.setitem(globals(), "SCALE", 3.0),
    "global table": lambda case, patch: patch.setitem(TABLE, "add", 2.0),
    "enclosed number": lambda case, patch: case.options.update(loss_fn=of_factor(3.0)),
    "setting of the optimizer": lambda case, patch: with_group(case, amsgrad=True),
    "kind of optimizer": lambda case, patch: setattr(case, "optimizer", torch.optim.SGD(case.model.parameters())),
    "autocast": lambda case, patch: case.options.update(amp="bfloat16"),
    "shape of an input": lambda case, patch: case.inputs.update(x=torch.randn(8, 16), mask=torch.ones(8, 16).long()),
    "type of an input": lambda case, patch: case.inputs.update(mask=torch.ones(4, 16, dtype=torch.int)),
    "values of a mask": lambda case, patch: case.inputs["mask"].__setitem__((0, 0), 0),
    "frozen parameter": lambda case, patch: case.model.blocks[0].linear.weight.requires_grad_(False),
    "gradients from before": lambda case, patch: case.options.update(accumulate=True),
    "training flag": lambda case, patch: case.model.eval(),
    "tied weights": lambda case, patch: setattr(
        case.model.blocks[0].linear, "weight", case.model.blocks[1].linear.weight
    ),
    "hook": lambda case, patch: case.model.blocks[0].register_forward_hook(lambda module, args, y: y * 2),
    "hook on a weight": lambda case, patch: case.model.blocks[0].linear.weight.register_hook(lambda g: g * 2),
    "menus": lambda case, patch: setattr(case, "menus", False),
    "threads": lambda case, patch: patch.setattr(torch, "get_num_threads", lambda: 77),
    "precision of products": lambda case, patch: patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium"),
    "attention kernels": lambda case, patch: patch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: "other"),
    "determinism": lambda case, patch: patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: "other"),
    "version of PyTorch": lambda case, patch: patch.setattr(torch, "__version__", "99.0"),
    "this package": lambda case, patch: patch.setattr(cache_key, "_own_files", lambda: "other"),
    "environment": lambda case, patch: patch.setenv("SOME_SWITCH", "1"),
    "method in PyTorch": lambda case, patch: patch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight),
    "function in PyTorch": lambda case, patch: patch.setattr(nn.functional, "gelu", lambda x: x * 2),
}


class Table(dict):  # type: ignore[type-arg]
    factor = 2.0

    def __missing__(self, key: str) -> float:
        return 1.0


class Kind(enum.Enum):
    FIRST = 1

    def of(self, x: float) -> float:
        return x


class Meta(type):
    rate = 1.0


class WithMeta(metaclass=Meta):
    __slots__ = ("__own",)
    counts: ClassVar[list[int]] = [1]

    def __init__(self, own: float) -> None:
        self.__own = own

    @property
    def own(self) -> float:
        return self.__own

    @own.setter
    def own(self, own: float) -> None:
        self.__own = own


class Text(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return "Text"


def classes_of_a_name() -> tuple[type, type]:
    def made(rate: float) -> type:
        return type("Made", (), {"rate": rate})

    return made(1.0), made(2.0)


def of_one_name(last: int) -> list[Any]:
    kinds = classes_of_a_name()
    return [kinds[0](), kinds[1](), kinds[last]()]


def importing(name: str) -> Callable[[Any], Any]:
    scope: dict[str, Any] = {}
    exec(f"def loss(y):\n    import {name} as m\n    return m.function(y)", {"__name__": __name__}, scope)
    found: Callable[[Any], Any] = scope["loss"]
    return found


def of_a_module(rate: float) -> types.ModuleType:
    module = types.ModuleType("module_of_a_test")
    exec(f"RATE = {rate}\ndef function(y):\n    return y.sum() * RATE", vars(module))
    return module


def imported(rate: float, patch: pytest.MonkeyPatch) -> Any:
    patch.setitem(sys.modules, "module_of_a_test", of_a_module(rate))
    return importing("module_of_a_test")


def calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like functools.wraps of an installed function."""
    return functools.wraps(nn.functional.linear)(function)


def with_attribute(rate: float) -> Callable[[Any], Any]:
    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.sum() * loss.rate  # type: ignore[attr-defined]

    loss.rate = rate  # type: ignore[attr-defined]
    return loss


def pattern(end: str) -> re.Pattern[str]:
    return re.compile("a" * 300 + end)


HELD: dict[str, tuple[Callable[[pytest.MonkeyPatch], Any], Callable[[pytest.MonkeyPatch], Any]]] = {
    "attribute of a dict": (lambda patch: Table(), lambda patch: with_rate(Table())),
    "class of a dict": (lambda patch: Table(), lambda patch: {}),
    "attribute of a dict's class": (
        lambda patch: Table(), lambda patch: patch.setattr(Table, "factor", 3.0) or Table()
    ),
    "method of a dict": (
        lambda patch: Table(), lambda patch: patch.setattr(Table, "__missing__", lambda self, key: 2.0) or Table()
    ),
    "default of a dict": (lambda patch: defaultdict(int), lambda patch: defaultdict(float)),
    "length of a deque": (lambda patch: deque([1], 2), lambda patch: deque([1], 3)),
    "method of an enum": (
        lambda patch: Kind.FIRST, lambda patch: patch.setattr(Kind, "of", lambda self, x: 2 * x) or Kind.FIRST
    ),
    "text with a repr": (lambda patch: Text("a"), lambda patch: Text("b")),
    "private slot": (lambda patch: WithMeta(1.0), lambda patch: WithMeta(2.0)),
    "state of a class": (
        lambda patch: WithMeta(1.0), lambda patch: patch.setattr(WithMeta, "counts", [2]) or WithMeta(1.0)
    ),
    "metaclass": (lambda patch: WithMeta(1.0), lambda patch: patch.setattr(Meta, "rate", 2.0) or WithMeta(1.0)),
    "setter": (
        lambda patch: WithMeta(1.0),
        lambda patch: patch.setattr(WithMeta, "own", WithMeta.own.setter(lambda self, own: None)) or WithMeta(1.0),
    ),
    "arguments of a method": (
        lambda patch: patch.setattr(Settings, "plus", functools.partialmethod(Settings.__add__, 1)) or Settings(1),
        lambda patch: patch.setattr(Settings, "plus", functools.partialmethod(Settings.__add__, 2)) or Settings(1),
    ),
    "classes of one name": (lambda patch: of_one_name(0), lambda patch: of_one_name(1)),
    "long pattern": (lambda patch: pattern("b"), lambda patch: pattern("c")),
    "attribute of a function": (lambda patch: with_attribute(1.0), lambda patch: with_attribute(2.0)),
    "argument of a partial": (lambda patch: functools.partial(scaled, 1), lambda patch: functools.partial(scaled, 2)),
    "import in a function": (lambda patch: imported(1.0, patch), lambda patch: imported(2.0, patch)),
    "module as an attribute": (
        lambda patch: (of_a_module(1.0), lambda m: m.function), lambda patch: (of_a_module(2.0), lambda m: m.function)
    ),
    "what an installed wrapper encloses": (
        lambda patch: wrapped(1.0), lambda patch: wrapped(2.0)
    ),
    "object of a built-in method": (lambda patch: {"a": 1}.get, lambda patch: {"a": 2}.get),
    "context variable": (lambda patch: ContextVar("A", default=1), lambda patch: ContextVar("A", default=2)),
    "what a reference is to": (lambda patch: weak(1.0), lambda patch: weak(2.0)),
    "values of a thread": (lambda patch: local(1.0), lambda patch: local(2.0)),
    "order of an array": (lambda patch: np.ones((2, 3)), lambda patch: np.ones((2, 3), order="F")),
    "method of PyTorch under its own name": (
        lambda patch: None, lambda patch: patch.setattr(nn.Linear, "forward", calling(lambda self, x: x * 2))
    ),
    "call of PyTorch's modules": (
        lambda patch: None, lambda patch: patch.setattr(nn.Module, "__call__", lambda self, *args: args[0])
    ),
    "object in place of a function": (
        lambda patch: None, lambda patch: patch.setattr(nn.functional, "gelu", Settings(1.0))
    ),
    "one function of PyTorch for another": (
        lambda patch: None, lambda patch: patch.setattr(nn.functional, "gelu", nn.functional.relu)
    ),
    "function deep in PyTorch": (
        lambda patch: None, lambda patch: patch.setattr(torch.utils.checkpoint, "checkpoint", of_factor(2.0))
    ),
    "built-in function": (
        lambda patch: of_max, lambda patch: patch.setattr("builtins.max", of_factor(2.0)) or of_max
    ),
}  # fmt: skip


def of_max(y: Any) -> Any:
    return max(y)


def with_rate(value: Any) -> Any:
    value.rate = 2.0
    return value


KEPT: list[Any] = []


def weak(rate: float) -> Any:
    KEPT.append(Settings(rate))
    return weakref.ref(KEPT[-1])


def local(rate: float) -> Any:
    return with_value(threading.local(), rate)


def with_value(value: Any, rate: float) -> Any:
    value.rate = rate
    return value


def wrapped(rate: float) -> Any:
    return torch.no_grad()(Scaling(rate).of)


class Scaling:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def of(self, x: float) -> float:
        return x * self.rate


@pytest.mark.parametrize("name", HELD)
def test_what_a_module_holds_is_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def described(make: Callable[[pytest.MonkeyPatch], Any]) -> str:
        text = Description()
        text.add(make(monkeypatch), nn.Linear(2, 2))
        text.add_installed(nn.functional)
        text.finish()
        return text.digest

    first, second = HELD[name]
    before = described(first)
    assert described(first) == before
    assert described(second) != before


def case() -> Case:
    made = Case()
    made.options["loss_fn"] = of_factor(2.0)
    return made


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_thing_gives_another_key(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, changed = case().key(), case()
    assert changed.key() == before
    CHANGES[change](changed, monkeypatch)
    assert changed.key() != before


def test_values_of_weights_and_inputs_leave_the_key() -> None:
    before, changed = case().key(), case()
    with torch.no_grad():
        for p in changed.model.parameters():
            p.mul_(2)
    changed.inputs["x"] = torch.randn(4, 16)
    assert changed.key() == before
    changed.model = copy.deepcopy(changed.model)
    changed.optimizer = torch.optim.AdamW(changed.model.parameters())
    assert changed.key() == before


def bert() -> Case:
    made = Case()
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    made.model = BertModel(config).train()
    made.inputs, made.optimizer = {"input_ids": torch.randint(50, (2, 8), generator=torch.Generator())}, None
    return made


def of_the_user(*args: Any, **kwargs: Any) -> Any:
    return args


@pytest.mark.parametrize(
    "change",
    [
        lambda model, patch: setattr(model.config, "hidden_dropout_prob", 0.2),
        lambda model, patch: patch.setattr(modeling_bert.BertLayer, "forward", of_the_user),
        lambda model, patch: patch.setattr(modeling_bert, "eager_attention_forward", of_the_user),
        lambda model, patch: modeling_bert.ALL_ATTENTION_FUNCTIONS.register("sdpa", of_the_user),
        lambda model, patch: patch.setattr(sys.modules["transformers"], "__version__", "0.0"),
    ],
    ids=["configuration", "method", "function", "registry", "version"],
)
def test_changes_of_a_librarys_model(
    change: Callable[[Any, pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, changed = bert().key(), bert()
    assert changed.key() == before
    registered = dict(modeling_bert.ALL_ATTENTION_FUNCTIONS._global_mapping)
    try:
        change(changed.model, monkeypatch)
        assert changed.key() != before
    finally:
        modeling_bert.ALL_ATTENTION_FUNCTIONS._global_mapping.clear()
        modeling_bert.ALL_ATTENTION_FUNCTIONS._global_mapping.update(registered)


class WithCounter:
    counter = itertools.count()


@functools.cache
def filled() -> float:
    return SCALE


FILLED = (filled(), filled)


def operators() -> Any:
    return ops.aten.sum


@pytest.mark.parametrize(
    "held",
    [
        iter([1]), itertools.count(), random.Random(1), torch.Generator(), {object()}, (i for i in range(3)),
        torch.ones(2).to_sparse(), memoryview(b"a"), np.frompyfunc(scaled, 1, 1), np.ones(2).view(np.matrix), FILLED,
        torch.ones(2, requires_grad=True) * 2, WithCounter(), torch.ops, ops, operators,
        lambda: eval("1"), lambda: globals(),
    ],
    ids=lambda held: type(held).__name__,
)  # fmt: skip
def test_steps_without_a_key(held: Any) -> None:
    changed = case()
    changed.model.held = held
    with pytest.raises(NoKeyError, match=r"it (has|names)"):
        changed.key()


def test_no_key_for_operators_of_any_code_and_under_modes() -> None:
    changed = case()
    changed.options["loss_fn"] = lambda y: torch.ops.aten.sum(y)
    with pytest.raises(NoKeyError, match=r"torch\.ops"):
        changed.key()
    plain = case()
    for mode in (torch.autograd.graph.save_on_cpu(), torch.device("meta")):
        with mode, pytest.raises(NoKeyError, match="a mode of PyTorch's, or a hook on saved tensors"):
            plain.key()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_no_key_with_an_implementation_of_an_operator_of_ones_own() -> None:
    plain = case()
    library = torch.library.Library("aten", "IMPL")
    library.impl("special_bessel_j0", lambda x: x, "CPU")
    try:
        with pytest.raises(NoKeyError, match="aten::special_bessel_j0"):
            plain.key()
    finally:
        library._destroy()
    assert plain.key()


# --- files ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    caplog.set_level(logging.INFO, "ckptplan")  # a failure shows why a step wasn't cached
    monkeypatch.setenv("CKPTPLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an item for each profile that is measured."""
    found: list[int] = []
    original = profiler._profile
    monkeypatch.setattr(profiler, "_profile", lambda *args: found.append(1) or original(*args))
    return found


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).train(), torch.randn(32, 64)


def test_a_plan_that_is_applied_to_another_model_has_no_part_in_the_key() -> None:
    model, x = small()
    optimizer = torch.optim.Adam(model.parameters())
    key = case().key()
    plan = ckptplan.solve(model, 1.0, inputs=x, cache=False)
    with ckptplan.apply(model, plan):
        model(x).mean().backward()
        optimizer.step()
        assert case().key() == key


def test_an_equal_step_is_measured_once(folder: Path, measured: list[int]) -> None:
    first = ckptplan.profile(*small())
    again = ckptplan.profile(*small())
    assert len(measured) == 1
    assert again.notes[0].startswith("from the cache, measured on 20")
    assert (again.stages, again.storages, again.link) == (first.stages, first.storages, first.link)
    model, x = small()
    plan = ckptplan.solve(model, 1.0, inputs=x)
    assert len(measured) == 1
    assert ckptplan.verify(model, plan, x, repeats=1).gradients_equal
    ckptplan.profile(*small(), cache=False)
    assert len(measured) == 2
    ckptplan.solve(model, 1.0, inputs=x, cache=False)
    assert len(measured) == 3
    model[0].bias.requires_grad_(False)
    ckptplan.profile(model, x)
    assert len(measured) == 4


class Reading(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if y.mean().item() > 1 else y


class Indexing(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y[y[:, 0] > 1]


class Skipping(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x) if random.random() < 0.5 else x
        return x


class ReadingInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 if gradient.sum().item() < 1e9 else gradient.sin()


def squares(bias: float = 0.0) -> list[nn.Module]:
    """Layers of random weights, whose output is about `bias`."""
    modules = nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)
    nn.init.constant_(modules[2].bias, bias)
    return list(modules)


@pytest.mark.parametrize("kind", [Reading, Indexing, Skipping])
def test_what_depends_on_values_or_chance_is_found_for_its_path(
    kind: type[nn.Sequential], folder: Path, measured: list[int]
) -> None:
    def profiled(bias: float, seed: int = 0) -> ckptplan.Profile:
        random.seed(seed)
        return ckptplan.profile(kind(*squares(bias)), torch.randn(32, 64))

    first = profiled(-9.0)
    drawn = random.getstate()
    again = profiled(-9.0)  # other weights, but the same path
    assert len(measured) == 1
    assert again.notes[0].startswith("from the cache")
    assert (again.stages, again.storages) == (first.stages, first.storages)
    assert random.getstate() == drawn
    other = profiled(9.0, seed=1)
    assert len(measured) == 2
    assert not other.notes[0].startswith("from the cache")
    assert profiled(9.0, seed=1).storages == other.storages
    assert profiled(-9.0).storages == first.storages
    assert len(measured) == 2


def test_what_reads_values_in_backward_is_not_stored(folder: Path, measured: list[int]) -> None:
    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(ReadingInBackward.apply(x * 1))

    for _ in range(2):
        ckptplan.profile(Model(*squares()), torch.randn(32, 64, requires_grad=True))
    assert len(measured) == 2
    assert not list(folder.glob("*.json"))


def test_the_path_of_a_step_leaves_nothing_behind(folder: Path) -> None:
    class Counting(Reading):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x)

    for _ in range(2):
        torch.manual_seed(0)
        model = Counting(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 64))
        x = torch.randn(32, 64)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        state = torch.get_rng_state()
        found = ckptplan.profile(model, x)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert not hasattr(model, "calls")
        assert all(p.grad is None for p in model.parameters())
    assert found.notes[0].startswith("from the cache")


def test_a_damaged_file_is_replaced(folder: Path, measured: list[int]) -> None:
    ckptplan.profile(*small())
    (path,) = folder.glob("*.json")
    path.write_text(path.read_text()[:100])
    ckptplan.profile(*small())
    assert len(measured) == 2
    assert ckptplan.profile(*small()).notes[0].startswith("from the cache")


def test_a_folder_that_cannot_be_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: list[int]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CKPTPLAN_CACHE", str(tmp_path / "file" / "inside"))
    for _ in range(2):
        ckptplan.profile(*small())
    assert len(measured) == 2


def test_the_profiles_unused_for_longest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = ckptplan.profile(*small(), cache=False)
    cache.put("a", profile)
    size = (folder / "a.json").stat().st_size
    monkeypatch.setattr(cache, "MOST_BYTES", 2 * size + size // 2)
    cache.put("b", profile)
    for age, name in enumerate("ba"):
        os.utime(folder / f"{name}.json", (1000 + age, 2000))
    assert cache.find("b") is not None  # used now
    cache.put("c", profile)
    assert sorted(path.name for path in folder.iterdir()) == ["b.json", "c.json"]


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CKPTPLAN_CACHE", "Off")
    assert cache.folder() is None
    assert cache.find("a") is None
    monkeypatch.delenv("CKPTPLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "ckptplan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "ckptplan"
