"""Random odd models and loops, each made from a seed alone.

`draw` gives the description of one, `case` what `harness.Trial` trains. Stages are put together from cores, parts that
keep state, arguments and hooks (`models`, `parts`, `arguments`), loops from a way to make gradients, an optimizer, what
is around forward, and events (`loops`). All are legal: plain training runs, and gives the same each time.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from odd.generated.loops import COMPARABLE, OPTIMIZERS, LoopSpec, Training, draw_loop
from odd.generated.models import Model, ModelSpec, StageSpec, draw_model, inputs_of
from odd.harness import Case, Odd

__all__ = ["Spec", "case", "draw", "features", "smaller"]


@dataclass(frozen=True, slots=True)
class Spec:
    """A model and its training loop.

    Attributes
    ----------
    accumulates : bool
        Whether the profile is told where steps start with gradients.
    """

    model: ModelSpec
    loop: LoopSpec
    accumulates: bool = True


def draw(seed: int) -> Spec:
    """The model and the loop of a seed."""
    rng = random.Random(seed)
    model, loop = draw_model(rng), draw_loop(rng)
    return _legal(Spec(model, loop, rng.random() < 0.8))


_TWICE_DIFFERENTIABLE = ("linear", "mlp", "raw parameters", "layer norm", "convolution")
_FREEZING = frozenset({"frozen between forward and backward", "thawed between forward and backward"})
_ILLEGAL = (
    ({"weight norm by hooks", "pruning"}, {"moving average", "deep copy trained"}),  # weights that can't be copied
    ({"checkpoint inside", "autograd.grad", "gradient penalty"}, _FREEZING),  # an error of PyTorch's own
    ({"gradient scaler"}, {"gradients dropped between forward and backward"}),
)
"""Parts or ways to make gradients, and events, that plain training can't have together."""


def _legal(spec: Spec) -> Spec:
    """The spec without what plain training can't do."""
    model, loop = spec.model, spec.loop
    if loop.main == "gradient penalty":
        stages = tuple(
            StageSpec(stage.core if stage.core in _TWICE_DIFFERENTIABLE else "linear", stage.end)
            for stage in model.stages
        )
        model, loop = dataclasses.replace(model, stages=stages), dataclasses.replace(loop, around="nothing")
    own = {loop.main, *(name for stage in model.stages for name, _ in stage.parts)}
    illegal = {event for names, events in _ILLEGAL if names & own for event in events}
    loop = dataclasses.replace(loop, events=tuple(e for e in loop.events if e not in illegal))
    return dataclasses.replace(spec, model=model, loop=loop)


def features(spec: Spec) -> list[str]:
    """Names of all that a spec combines."""
    found = {f"inputs: {spec.model.inputs}", f"container: {spec.model.container}"}
    if len(spec.model.order) > len(spec.model.stages):
        found.add("model: stage called twice")
    for stage in spec.model.stages:
        found.add(f"core: {stage.core}")
        found.add(f"end: {stage.end}")
        found.update(f"part: {name}" for name, _ in stage.parts)
        found.update(f"argument: {name}" for name, _ in stage.arguments)
        found.update(f"hook: {name}" for name in stage.hooks)
        found.add(f"behind: {stage.behind}")
    loop = spec.loop
    found |= {f"loop: {loop.main}", f"optimizer: {loop.optimizer}", f"around: {loop.around}"}
    found.update(f"event: {name}" for name in loop.events)
    if not loop.set_to_none:
        found.add("loop: gradients kept")
    if not loop.in_function:
        found.add("loop: output held")
    return sorted(name for name in found if not name.endswith(": nothing"))


def case(seed: int, spec: Spec | None = None) -> Case:
    """The case of a seed, or of another spec with its random numbers."""
    spec = draw(seed) if spec is None else spec
    build = functools.partial(_build, spec)
    about = ", ".join(features(spec))
    return Case(f"seed {seed}", "random", about, build, measured=_comparable(spec), forced=False)


def _comparable(spec: Spec) -> bool:
    """Whether the loop's steps take what the profile's step takes, so that the budget must hold them."""
    loop = spec.loop
    return (
        loop.main in ("plain", "micro-batches")
        and loop.around == "nothing"
        and loop.in_function
        and COMPARABLE.issuperset(loop.events)
    )


def _build(spec: Spec) -> Odd:
    model = Model(spec.model)
    optimizer = OPTIMIZERS[spec.loop.optimizer](list(model.parameters()))
    starts_with_gradients = spec.loop.main == "micro-batches" or not spec.loop.set_to_none

    def loop(model: Any, inputs: Any) -> Iterator[list[Any]]:
        return Training(spec.loop, model, inputs, optimizer).steps()

    accumulate = True if starts_with_gradients and spec.accumulates else None
    return Odd(model, inputs_of(spec.model), loop, optimizer if _comparable(spec) else None, accumulate)


# ---------------------------------------------------------------- making a failure small


def smaller(spec: Any) -> Iterator[Any]:
    """Specs with one thing less, of which some may be illegal."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        for less in (*_less(value), field.default):
            if less not in (value, dataclasses.MISSING):
                yield dataclasses.replace(spec, **{field.name: less})


def _less(value: Any) -> Iterator[Any]:
    if isinstance(value, StageSpec):
        yield StageSpec("linear")
    if dataclasses.is_dataclass(value):
        yield from smaller(value)
    elif isinstance(value, tuple):
        for i, each in enumerate(value):
            yield (*value[:i], *value[i + 1 :])
            for less in _less(each) if dataclasses.is_dataclass(each) else ():
                yield (*value[:i], less, *value[i + 1 :])
