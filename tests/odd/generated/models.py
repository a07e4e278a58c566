"""A random model: its plan, drawn from a seed, and the model itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from odd.generated.arguments import ARGUMENTS
from odd.generated.parts import BATCH, CORES, ENDS, LENGTH, PARTS, WIDTH, WORDS, Shared, main_of

CONTAINERS = ("list", "attributes", "dictionary", "pairs")
INPUTS = ("tensor", "tuple", "dictionary", "tokens", "input with gradient")


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A stage.

    Attributes
    ----------
    core, end : str
        In `CORES` and `ENDS`.
    parts : tuple of (str, bool)
        In `PARTS`, and whether a submodule has what they keep.
    arguments : tuple of (str, bool)
        In `ARGUMENTS`, and whether they are given by name.
    hooks : tuple of str
        In `HOOKS`.
    behind : str
        In `BEHIND`.
    """

    core: str
    end: str = "sum"
    parts: tuple[tuple[str, bool], ...] = ()
    arguments: tuple[tuple[str, bool], ...] = ()
    hooks: tuple[str, ...] = ()
    behind: str = "nothing"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model.

    Attributes
    ----------
    stages : tuple of StageSpec
    order : tuple of int
        Which stage each call is of.
    container, inputs : str
        In `CONTAINERS` and `INPUTS`.
    """

    stages: tuple[StageSpec, ...]
    order: tuple[int, ...]
    container: str = "list"
    inputs: str = "tensor"


# ---------------------------------------------------------------- hooks of stages


def _counting(stage: Any) -> None:
    calls = [0]

    def hook(module: nn.Module, given: Any, output: Any) -> None:
        calls[0] += 1

    stage.hook_calls = calls
    stage.register_forward_hook(hook)


def _pre_of_stage(stage: Any) -> None:
    def hook(module: nn.Module, given: Any, named: Any) -> Any:
        return (given[0].sin(), *given[1:]), named

    stage.register_forward_pre_hook(hook, with_kwargs=True)


def _once(stage: Any) -> None:
    def hook(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return output * 1.5

    handle = stage.core.register_forward_hook(hook)


def _backward(stage: Any) -> None:
    stage.gradient_sums = []

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        stage.gradient_sums.append([float(g.abs().sum()) for g in outputs if g is not None])
        return tuple(None if g is None else g * 0.5 for g in inputs)

    stage.core.register_full_backward_hook(hook)


def _of_parameter(stage: Any) -> None:
    for p in list(stage.parameters())[:1]:
        if p.requires_grad and not isinstance(p, nn.UninitializedParameter):
            p.register_hook(lambda gradient: gradient * 0.5)


HOOKS: dict[str, Callable[[Any], object]] = {
    "forward hook that counts": _counting,
    "forward hook that scales": lambda stage: stage.core.register_forward_hook(lambda m, given, output: output * 1.25),
    "forward pre-hook": lambda stage: stage.core.register_forward_pre_hook(
        lambda m, given: (given[0] * 0.75, *given[1:])
    ),
    "forward pre-hook of the stage": _pre_of_stage,
    "forward hook that removes itself": _once,
    "full backward hook": _backward,
    "full backward pre-hook of the stage": lambda stage: stage.register_full_backward_pre_hook(
        lambda m, gradients: tuple(None if g is None else g * 2 for g in gradients)
    ),
    "gradient hook of a parameter": _of_parameter,
}

# ---------------------------------------------------------------- behind stages

BEHIND: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "nothing": lambda model, x: x,
    "in place": lambda model, x: x.mul_(0.9),
    "in-place activation": lambda model, x: nn.functional.leaky_relu_(x, 0.2),
    "edited through .data": lambda model, x: _edited(x),
    "view": lambda model, x: x.reshape(len(x), -1).view_as(x),
    "halves": lambda model, x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
    "clone": lambda model, x: x.clone(),
    "glue with parameters": lambda model, x: torch.tanh(x * model.scale),
    "detached in part": lambda model, x: torch.cat([x[..., :8].detach(), x[..., 8:]], -1),
    "gradient scaled": lambda model, x: _with_hook(x),
}


def _edited(x: torch.Tensor) -> torch.Tensor:
    x.data.mul_(0.9)
    return x


def _with_hook(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


# ---------------------------------------------------------------- building


class _Holder(nn.Module):
    """A submodule that has what parts keep."""


class Stage(nn.Module):
    """A core, parts and arguments, put together."""

    def __init__(self, spec: StageSpec, shared: Shared) -> None:
        super().__init__()
        self.core = CORES[spec.core]()
        self.held = _Holder()
        self.spec = spec
        for name, is_held in spec.parts:
            PARTS[name].set_up(self.held if is_held else self, shared)
        for hook in spec.hooks:
            HOOKS[hook](self)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = self.core(x)
        for name, is_held in self.spec.parts:
            y = PARTS[name].change(self.held if is_held else self, y)
        given = iter(args)
        for i, (name, by_name) in enumerate(self.spec.arguments):
            value = kwargs[f"argument_{i}"] if by_name else next(given)
            y = ARGUMENTS[name][1](self, y, value)
        return ENDS[self.spec.end](x, y)


def _stage(spec: StageSpec, shared: Shared) -> Stage:
    """A stage, of a class of its own where one of its parts keeps something there."""
    of_class: dict[str, Any] = {}
    for name, is_held in spec.parts:
        make = PARTS[name].of_class
        if make is not None and not is_held:
            of_class.update(make())
    return type("OwnStage", (Stage,), of_class)(spec, shared) if of_class else Stage(spec, shared)


class Model(nn.Module):
    """Stages in the order of a spec."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        shared = Shared(random.Random(0))
        shared.model.append(self)
        self.spec = spec
        self.total = self.forwards = 0
        self.kept: dict[str, Any] = {}
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.common = nn.BatchNorm1d(WIDTH)
        self.words = nn.Embedding(WORDS, WIDTH) if spec.inputs == "tokens" else nn.Identity()
        stages = [_stage(stage, shared) for stage in spec.stages]
        if spec.container == "list":
            self.stages: Any = nn.ModuleList(stages)
        elif spec.container == "dictionary":
            self.stages = nn.ModuleDict({f"stage_{i}": stage for i, stage in enumerate(stages)})
        elif spec.container == "pairs":
            self.stages = nn.ModuleList(nn.ModuleList(stages[i : i + 2]) for i in range(0, len(stages), 2))
        else:
            for i, stage in enumerate(stages):
                setattr(self, f"stage_{i}", stage)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        self.forwards += 1
        self.of_forward: dict[str, Any] = {}
        x = self.words(x)
        if self.spec.inputs not in ("tokens", "input with gradient"):
            x = x * self.scale
        if mask is not None:
            x = x * mask
        x = self.first = x if scale == 1.0 else x * scale
        stages = self.stages_in_order()
        more: list[torch.Tensor] = []
        for number, index in enumerate(self.spec.order):
            stage = stages[index]
            args, kwargs = self._arguments(stage.spec, x, number)
            x, aux = main_of(stage.spec.end, stage(x, *args, **kwargs))
            if aux is not None:
                more.append(aux)
            x = BEHIND[stage.spec.behind](self, x)
        self.of_forward = {}
        self.first = torch.empty(0)
        if self.spec.inputs == "input with gradient":
            x = x * self.scale
        return x + sum(more) if more else x

    def stages_in_order(self) -> list[Stage]:
        """The stages as they were made."""
        return [module for module in self.modules() if isinstance(module, Stage)]

    def _arguments(self, spec: StageSpec, x: torch.Tensor, number: int) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for i, (name, by_name) in enumerate(spec.arguments):
            value = ARGUMENTS[name][0](self, x, number)
            if by_name:
                kwargs[f"argument_{i}"] = value
            else:
                args.append(value)
        return args, kwargs


def inputs_of(spec: ModelSpec) -> Any:
    """Inputs for a model."""
    if spec.inputs == "tokens":
        return torch.randint(0, WORDS, (BATCH, LENGTH))
    x = torch.randn(BATCH, LENGTH, WIDTH)
    if spec.inputs == "input with gradient":
        return x.requires_grad_()
    if spec.inputs == "tuple":
        return x, torch.ones(BATCH, LENGTH, 1)
    return {"x": x, "scale": 0.5} if spec.inputs == "dictionary" else x


# ---------------------------------------------------------------- drawing

_REFUSED = (
    "global counter", "scripted module", "value read", "layer left out at random", "tensors in a list, in place",
)  # fmt: skip
"""Parts that make a profile slow or end most plans: rare, so that others are tried."""

_IN_PLACE = ("in place", "in-place activation")
_SAVING = ("activation", "in-place activation", "dictionary")
"""Ends that save what they give, which mustn't be written to."""


def draw_model(rng: random.Random) -> ModelSpec:
    """A model of two to six calls of stages."""
    count = rng.choice([2, 2, 3, 3, 4, 5])
    kinds = [_draw_stage(rng) for _ in range(rng.randint(1, count))]
    stages = tuple(rng.choice(kinds) for _ in range(count))
    order = list(range(count))
    if rng.random() < 0.15:
        order.append(rng.choice(order))
    return ModelSpec(stages, tuple(order), rng.choice(CONTAINERS), rng.choice(INPUTS))


def _draw_stage(rng: random.Random) -> StageSpec:
    common = [name for name in PARTS if name not in _REFUSED]
    parts = rng.sample(common, rng.choice([0, 1, 1, 2, 3]))
    if rng.random() < 0.05:
        parts.append(rng.choice(_REFUSED))
    arguments = rng.sample(list(ARGUMENTS), rng.choice([0, 0, 1, 2]))
    end = rng.choice(list(ENDS))
    hooks = tuple(rng.sample(list(HOOKS), 1)) if rng.random() < 0.25 else ()
    behind = rng.choice(list(BEHIND)) if rng.random() < 0.3 else "nothing"
    if behind in _IN_PLACE and (end in _SAVING or "full backward pre-hook of the stage" in hooks):
        behind = "nothing"
    return StageSpec(
        core=rng.choice(list(CORES)),
        end=end,
        parts=tuple((name, rng.random() < 0.3 and PARTS[name].of_class is None) for name in parts),
        arguments=tuple((name, rng.random() < 0.5) for name in arguments),
        hooks=hooks,
        behind=behind,
    )
