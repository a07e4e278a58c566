"""What profiling and verifying leave behind: nothing, whatever forward does, and on every way out."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from small_models import uniform
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as of_all
from torch.nn.utils import parametrizations, parametrize
from torch.optim import optimizer as of_optimizers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ckptplan
from ckptplan.core.plan import Plan

Mess = Callable[["Block", torch.Tensor], Any]

COLOUR: contextvars.ContextVar[str] = contextvars.ContextVar("colour")
SHADE: contextvars.ContextVar[str] = contextvars.ContextVar("shade", default="none")
CALLS = itertools.count()  # of forward; nothing that is put back


class Block(nn.Module):
    """A layer that does something odd in each forward."""

    def __init__(self, mess: Mess) -> None:
        super().__init__()
        self.mess = mess
        self.inner = nn.Linear(16, 16)
        self.weighted = parametrizations.weight_norm(nn.Linear(16, 16))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.weighted(self.inner(x))).relu()
        self.mess(self, x)
        return x


def messy(mess: Mess) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Block(mess), nn.Linear(16, 16)).train()


def inputs() -> torch.Tensor:
    return torch.ones(8, 16)


# ---------------------------------------------------------------- what forward does


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _no(*args: Any) -> None:
    return None


def _nothing(module: Block, x: torch.Tensor) -> None:
    pass


def _patched(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, self.weight, self.bias)


def _same_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


MESSES: dict[str, Mess] = {
    "default dtype": lambda m, x: torch.set_default_dtype(torch.float64),
    "default device": lambda m, x: torch.set_default_device("cpu"),
    "device entered": lambda m, x: torch.device("cpu").__enter__(),
    "matmul precision": lambda m, x: torch.set_float32_matmul_precision("medium"),
    "mkldnn": lambda m, x: torch._C._set_mkldnn_enabled(False),
    "deterministic": lambda m, x: torch.use_deterministic_algorithms(True, warn_only=True),
    "threads": lambda m, x: torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2),
    "anomaly": lambda m, x: torch.autograd.set_detect_anomaly(False, check_nan=False),
    "multithreading": lambda m, x: torch.autograd.set_multithreading_enabled(False),
    "warn always": lambda m, x: torch.set_warn_always(True),
    "autocast entered": lambda m, x: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "autocast set": lambda m, x: torch.set_autocast_enabled("cuda", True),
    "autocast cache": lambda m, x: torch.set_autocast_cache_enabled(False),
    "function mode": lambda m, x: _Functions().__enter__(),
    "operation mode": lambda m, x: _Operations().__enter__(),
    "saved hooks": lambda m, x: torch._C._autograd._push_saved_tensors_default_hooks(_same_tensor, _same_tensor),
    "saved hooks popped": lambda m, x: (
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        else None
    ),
    "cached weights": lambda m, x: setattr(parametrize, "_cache_enabled", parametrize._cache_enabled + 1),
    "warnings": lambda m, x: warnings.simplefilter("ignore"),
    "collection": lambda m, x: gc.disable(),
    "context variable": lambda m, x: (COLOUR.set("red"), SHADE.set("dark")),
    "numpy errors": lambda m, x: np.seterr(divide="ignore"),
    "hook": lambda m, x: m.inner.register_forward_hook(_no),
    "hooks of all kinds": lambda m, x: (
        m.inner.register_forward_pre_hook(_no, with_kwargs=False),
        m.inner.register_full_backward_hook(_no),
        m.inner.register_full_backward_pre_hook(_no),
        m.inner.register_state_dict_pre_hook(_no),
        m.inner.register_load_state_dict_post_hook(_no),
    ),
    "hook on itself": lambda m, x: m.register_forward_hook(_no),
    "hook taken off": lambda m, x: m.inner._forward_hooks.clear(),
    "hooks on all modules": lambda m, x: (
        of_all.register_module_forward_hook(_no),
        of_all.register_module_full_backward_hook(_no),
        of_all.register_module_buffer_registration_hook(_no),
    ),
    "hooks on optimizers": lambda m, x: of_optimizers.register_optimizer_step_pre_hook(_no),
    "hook on a parameter": lambda m, x: (
        m.weighted.bias.register_hook(_no),
        m.weighted.bias.register_post_accumulate_grad_hook(_no),
    ),
    "attribute of a parameter": lambda m, x: setattr(m.inner.weight, "calls", 1),
    "forward of an instance": lambda m, x: setattr(m.frozen, "forward", _patched.__get__(m.frozen)),
    "forward of a class": lambda m, x: setattr(nn.Linear, "forward", _patched),
    "frozen": lambda m, x: m.inner.requires_grad_(False),
    "thawed": lambda m, x: m.frozen.requires_grad_(True),
    "evaluation": lambda m, x: m.inner.eval(),
    "new names": lambda m, x: (
        m.register_buffer("late", x.detach().clone(), persistent=False),
        m.register_module("later", nn.Identity()),
        setattr(m, "last", x),
    ),
    "value": lambda m, x: m.seen.add_(1),
    "random": lambda m, x: (torch.rand(1), random.random(), np.random.rand()),  # noqa: NPY002
}  # fmt: skip
REFUSED = ("saved hooks", "saved hooks popped", "forward of a class")
"""These can't be profiled."""
TOGETHER = [name for name in MESSES if name not in (*REFUSED, "device entered")]
"""All but what PyTorch refuses beside another one."""


# ---------------------------------------------------------------- what is there before and afterwards


def _value(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return "fake"
    if isinstance(value, torch.Tensor):
        return value.detach().clone().tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def _table(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: id(item) for name, item in value.items()}
    return sorted(value) if isinstance(value, set) else _value(value)


def _saved_hooks() -> list[Any]:
    c = torch._C._autograd
    found = []
    while c._top_saved_tensors_default_hooks(True) is not None:
        found.append(c._top_saved_tensors_default_hooks(True))
        c._pop_saved_tensors_default_hooks()
    for pair in reversed(found):
        c._push_saved_tensors_default_hooks(*pair)
    return found


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


GETTERS: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype, torch.get_default_device, torch.get_float32_matmul_precision, torch.get_num_threads,
    torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled,
    torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_anomaly_enabled,
    torch.is_anomaly_check_nan_enabled, torch._C._is_multithreading_enabled, torch.is_warn_always_enabled,
    torch.is_autocast_cache_enabled, gc.isenabled, np.geterr,
)  # fmt: skip


def everything(model: nn.Module) -> dict[str, Any]:
    """All that forward could change, by name."""
    found: dict[str, Any] = {get.__name__: get() for get in GETTERS}
    found |= {
        "mkldnn": torch.backends.mkldnn.enabled,
        "autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), _nesting()) for kind in ("cpu", "cuda")
        ],
        "function modes": [id(torch._C._get_function_stack_at(i)) for i in range(torch._C._len_torch_function_stack())],
        "operation modes": [
            id(torch._C._get_dispatch_stack_at(i)) for i in range(torch._C._len_torch_dispatch_stack())
        ],
        "saved hooks": [tuple(map(id, pair)) for pair in _saved_hooks()],
        "cached weights": (parametrize._cache_enabled, {key: id(t) for key, t in parametrize._cache.items()}),
        "warnings": list(warnings.filters),
        "variables": dict(contextvars.copy_context()),
        "random": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),  # noqa: NPY002
        "forwards": (nn.Linear.__dict__["forward"], "forward" in vars(Block)),
    }
    for code in (of_all, of_optimizers):
        found.update((name, _table(value)) for name, value in vars(code).items() if name.startswith("_global_"))
    for where, module in model.named_modules():
        found.update((f"{where}.{name}", _table(value)) for name, value in vars(module).items())
    for where, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"tensor {where}"] = (
            _value(tensor), tensor.requires_grad, id(tensor.grad), tensor.grad is not None and _value(tensor.grad),
            dict(tensor._backward_hooks or {}), dict(tensor._post_accumulate_grad_hooks or {}), dict(vars(tensor)),
        )  # fmt: skip
    return found


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """A test that fails is to spoil no other."""
    with warnings.catch_warnings(action="ignore"), torch.enable_grad():
        yield


def unchanged(run: Callable[[nn.Module], Any], model: nn.Module) -> BaseException | None:
    """`run(model)` leaves all as it is; returns the error with which it ends, or that one's cause."""
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0) if p.requires_grad else None
    before = everything(model)
    caught: BaseException | None = None
    try:
        run(model)
    except BaseException as found:
        caught = found
    assert differing(before, everything(model)) == []
    return getattr(caught, "__cause__", None) or caught


# ---------------------------------------------------------------- tests


@functools.cache
def _plan() -> Plan:
    return uniform(messy(_nothing), inputs(), "recompute")


def _step(model: nn.Module) -> torch.Tensor:
    return model(inputs()).sum()  # type: ignore[no-any-return]


FUNCTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "profile": lambda model: ckptplan.profile(model, inputs(), accumulate=False, menus=False),
    "profile of a step": lambda model: ckptplan.profile(model, step=lambda: _step(model), accumulate=False),
    "profile for another device": lambda model: ckptplan.profile(
        model, inputs(), accumulate=False, device="a100-40gb", menus=False
    ),
    "solve": lambda model: ckptplan.solve(model, 1.0, inputs=inputs(), accumulate=False, menus=False),
    "estimate": lambda model: ckptplan.estimate(model, inputs(), optimizer="adamw"),
    "max_batch_size": lambda model: ckptplan.max_batch_size(
        model, lambda n: inputs().repeat(n, 1), 0.001, limit=2, accumulate=False
    ),
    "verify": lambda model: ckptplan.verify(model, _plan(), inputs(), accumulate=False, repeats=1),
    "trace": lambda model: ckptplan.trace(model, _plan(), inputs(), accumulate=False),
}


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """A program that has modes, hooks and caches of its own."""
    with (
        torch.device("cpu"),
        _Functions(),
        parametrize.cached(),
        torch.autograd.set_multithreading_enabled(True),
        torch.autograd.graph.saved_tensors_hooks(_same_tensor, _same_tensor),
    ):
        yield


@pytest.mark.parametrize("mess", MESSES)
def test_profile_leaves_nothing_behind(mess: str) -> None:
    error = unchanged(FUNCTIONS["profile"], messy(MESSES[mess]))
    assert (error is not None) == (mess in REFUSED), repr(error)


def _all(module: Block, x: torch.Tensor) -> None:
    for name in TOGETHER:
        MESSES[name](module, x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_whatever_runs_the_model_leaves_nothing_behind(name: str) -> None:
    with _busy():
        assert unchanged(FUNCTIONS[name], messy(_all)) is None


@pytest.mark.parametrize(("name", "refused"), list(zip(FUNCTIONS, itertools.cycle(REFUSED), strict=False)))
def test_nor_does_what_fails(name: str, refused: str) -> None:
    def both(module: Block, x: torch.Tensor) -> None:
        _all(module, x)
        MESSES[refused](module, x)

    unchanged(FUNCTIONS[name], messy(both))


class _Stop(Exception):
    """Forward fails."""


@pytest.mark.parametrize(
    ("name", "error"),
    [("profile", _Stop), ("verify", KeyboardInterrupt), ("estimate", KeyboardInterrupt), ("trace", KeyboardInterrupt)],
)
def test_nor_does_an_error_in_any_of_the_forwards(name: str, error: type[BaseException]) -> None:
    def failing(module: Block, x: torch.Tensor) -> None:
        _all(module, x)
        if next(CALLS) == last:
            raise error

    last, calls = 0, next(CALLS)
    FUNCTIONS[name](messy(failing))
    calls = next(CALLS) - calls
    assert calls > 2
    for share in (0.0, 0.7):  # of the calls, some of which are more or fewer each time
        last = next(CALLS) + 1 + int(share * calls)
        found = unchanged(FUNCTIONS[name], messy(failing))
        # Where the plain step runs out of memory it is left out.
        assert isinstance(found, error) or share > 0 or name == "verify", repr(found)


# ---------------------------------------------------------------- beyond the model's modules

SEEN: list[torch.Tensor] = []
FIRST: dict[str, torch.Tensor] = {}


@functools.lru_cache
def _ones(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def _note(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(x.detach())
    return FIRST.setdefault("first", torch.ones(16)) * x


class _Reading(nn.Linear):
    """Reads and writes what lies beside the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._noted(super().forward(x)) * _ones(16, x.dtype)

    def _noted(self, x: torch.Tensor) -> torch.Tensor:
        return _note(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_globals_caches_and_what_hooks_enclose_have_no_fake_tensors_afterwards(name: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), _Reading(16, 16), nn.Linear(16, 16))

    plan, model = uniform(build(), inputs(), "recompute"), build()
    kept: list[torch.Tensor] = []
    calls = 0

    def count(gradient: torch.Tensor) -> None:
        nonlocal calls
        calls += 1

    model[0].register_forward_hook(lambda module, args, output: kept.append(output.detach()))
    model[0].weight.register_hook(count)
    _ones.cache_clear()
    if name in ("verify", "trace"):
        getattr(ckptplan, name)(model, plan, inputs())
    else:
        FUNCTIONS[name](model)
    assert (SEEN, FIRST, kept, calls) == ([], {}, [], 0)
    assert not isinstance(_ones(16, torch.float32), FakeTensor)


@pytest.mark.parametrize("name", ["profile", "verify", "trace"])
def test_optimizers_that_step_in_backward_are_as_before(name: str) -> None:
    model = messy(_nothing)
    optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters() if p.requires_grad}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    _step(model).backward()
    before = [(p.detach().clone(), str(optimizer.state_dict())) for p, optimizer in optimizers.items()]
    FUNCTIONS[name](model)
    for (p, optimizer), (value, state) in zip(optimizers.items(), before, strict=True):
        assert torch.equal(p, value)
        assert str(optimizer.state_dict()) == state
