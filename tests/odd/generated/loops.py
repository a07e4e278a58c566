"""Random training loops: how gradients are made, what updates the parameters, and what happens in between."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from odd.generated.parts import BATCH, GLOBAL, VARIABLE, WIDTH
from odd.harness import STEPS, Extras, call, loss_of, update
from odd.surroundings import SineForTanh, SmallerTanh, larger_products, setting


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """A training loop.

    Attributes
    ----------
    main, optimizer, around : str
        In `MAINS`, `OPTIMIZERS` and `AROUND`.
    events : tuple of str
        In `EVENTS`.
    set_to_none : bool
        Of `zero_grad`.
    in_function : bool
        Whether a forward's output is gone before the next forward begins.
    """

    main: str = "plain"
    optimizer: str = "sgd"
    around: str = "nothing"
    events: tuple[str, ...] = ()
    set_to_none: bool = True
    in_function: bool = True


Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "one by one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False, amsgrad=True),
}

# ---------------------------------------------------------------- around forward


@contextlib.contextmanager
def _variable() -> Iterator[None]:
    token = VARIABLE.set(1.5)
    try:
        yield
    finally:
        VARIABLE.reset(token)


def _half(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    is_packed = tensor.dtype is torch.float32 and not tensor.is_leaf
    return (tensor.bfloat16() if is_packed else tensor), is_packed


def _whole(packed: tuple[torch.Tensor, bool]) -> torch.Tensor:
    tensor, is_packed = packed
    return tensor.float() if is_packed else tensor


AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16),
    "without onednn": functools.partial(torch.backends.mkldnn.flags, enabled=False),
    "matmul precision": functools.partial(setting, torch.set_float32_matmul_precision, "medium", "highest"),
    "attention kernel": functools.partial(sdpa_kernel, [SDPBackend.MATH]),
    "function mode": SineForTanh,
    "dispatch mode": SmallerTanh,
    "saved tensors in half": functools.partial(torch.autograd.graph.saved_tensors_hooks, _half, _whole),
    "saved tensors on the host": torch.autograd.graph.save_on_cpu,
    "context variable": _variable,
    "global module hook": larger_products,
    "anomaly detection": functools.partial(torch.autograd.set_detect_anomaly, True),
}

# ---------------------------------------------------------------- loops


class _Failed(Exception):
    """Raised on purpose in the middle of a step."""


class Training:
    """One training of a model, whose state mains and events share.

    Attributes
    ----------
    step : int
        From 0.
    seen : list
        What is yielded behind the step, besides losses.
    average : nn.Module or None
        A copy that follows the model.
    critic : nn.Module
        A small model of adversarial loops.
    """

    def __init__(self, spec: LoopSpec, model: nn.Module, inputs: Any, optimizer: torch.optim.Optimizer) -> None:
        self.spec, self.model, self.inputs, self.optimizer = spec, model, inputs, optimizer
        self.step = 0
        self.seen: list[Any] = []
        self.average: nn.Module | None = None
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.held: Any = None
        self._events = [EVENTS[name] for name in spec.events]

    def steps(self) -> Iterator[Extras]:
        """Train; yields what is to be compared."""
        GLOBAL["calls"] = 0  # not the model's: profiling may leave another
        with contextlib.ExitStack() as self.stack:
            self._at("begin")
            for self.step in range(STEPS):
                self.seen = []
                self._at("before")
                try:
                    losses = MAINS[self.spec.main](self)
                except _Failed:
                    losses = []
                self._at("behind")
                yield [*losses, *self.seen]

    def _at(self, point: str) -> None:
        for event in self._events:
            if point in event:
                event[point](self)

    def output(self, inputs: Any = None) -> torch.Tensor:
        """A forward, and what happens behind it."""
        with AROUND[self.spec.around]():
            y: torch.Tensor = call(self.model, self.inputs if inputs is None else inputs)
        if not self.spec.in_function:
            self.held = y
        self._at("between")
        return y.float()

    def loss(self) -> torch.Tensor:
        """A forward and its loss."""
        return loss_of(self.output())

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A forward and the losses of the first and the last part of its output."""
        y = self.output()
        return loss_of(y[:, :4]), loss_of(y[:, 4:])

    def gradients(self, inputs: Any = None) -> torch.Tensor:
        """A forward, its loss, which is returned, and backward."""
        loss = loss_of(self.output(inputs))
        loss.backward()
        return loss.detach()

    def parameters(self) -> list[nn.Parameter]:
        """Those that require gradients."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def zero(self) -> None:
        """Drop the gradients, or make them zero."""
        self.model.zero_grad(set_to_none=self.spec.set_to_none)

    def update(self) -> None:
        """Update the parameters."""
        self._at("gradients")
        self.optimizer.step()


Main = Callable[[Training], list[Any]]


def _updating(gradients: Main) -> Main:
    """A step that begins without gradients and ends with an update."""

    def main(t: Training) -> list[Any]:
        t.zero()
        losses = gradients(t)
        t.update()
        return losses

    return main


@_updating
def _two_losses(t: Training) -> list[Any]:
    first, second = t.halves()
    first.backward(retain_graph=True)
    second.backward()
    return [first.detach(), second.detach()]


def _step_between(t: Training) -> list[Any]:
    t.zero()
    first, second = t.halves()
    first.backward(retain_graph=True)
    t.update()
    second.backward()
    return [first.detach(), second.detach()]


def _adversarial(t: Training) -> list[Any]:
    made = t.output()
    of_critic = t.critic(made.detach()).square().mean() + (t.critic(torch.ones(BATCH, WIDTH)) - 1).square().mean()
    of_critic.backward()
    update(t.critic)
    t.critic.zero_grad()
    t.zero()
    of_model = (t.critic(made) - 1).square().mean()
    of_model.backward()
    t.critic.zero_grad()
    t.update()
    return [of_critic.detach(), of_model.detach()]


@_updating
def _as_critic(t: Training) -> list[Any]:
    real = t.gradients()
    made = pytree.tree_map(lambda x: x.detach() * 0.5 if _is_float(x) else x, t.inputs)
    other = (t.output(made) - 1).square().mean()
    other.backward()
    t.update()
    t.zero()
    return [real, other.detach(), t.gradients(made)]


def _in_backward(t: Training) -> list[Any]:
    if t.step == 0:
        for p in t.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def apply(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            t.stack.callback(p.register_post_accumulate_grad_hook(apply).remove)
    return [t.gradients()]


@_updating
def _two_forwards(t: Training) -> list[Any]:
    loss = t.loss() + 0.5 * t.loss()
    loss.backward()
    return [loss.detach()]


def _gradients_asked_for(t: Training) -> list[Any]:
    parameters = t.parameters()
    loss = t.loss()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    t.update()
    return [loss.detach()]


@_updating
def _some_parameters(t: Training) -> list[Any]:
    loss = t.loss()
    loss.backward(inputs=t.parameters()[1::2])
    return [loss.detach()]


@_updating
def _gradient_penalty(t: Training) -> list[Any]:
    loss = t.loss()
    gradients = torch.autograd.grad(loss, t.parameters(), create_graph=True, allow_unused=True)
    penalty = sum(g.square().sum() for g in gradients if g is not None)
    (loss + 0.01 * penalty).backward()
    return [loss.detach()]


def _closure(t: Training) -> list[Any]:
    def closure() -> torch.Tensor:
        t.zero()
        return t.gradients()

    optimizer = torch.optim.LBFGS(t.parameters(), lr=0.01, max_iter=2)
    return [optimizer.step(closure)]  # type: ignore[arg-type]


def _scaler(t: Training) -> list[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)  # type: ignore[attr-defined]
    t.zero()
    loss = t.loss()
    scaler.scale(loss).backward()
    scaler.unscale_(t.optimizer)
    scaler.step(t.optimizer)
    scaler.update()
    return [loss.detach()]


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


MAINS: dict[str, Main] = {
    "plain": _updating(lambda t: [t.gradients()]),
    "micro-batches": _updating(lambda t: [t.gradients() for _ in range(3)]),
    "two losses": _two_losses,
    "step between two losses": _step_between,
    "adversarial": _adversarial,
    "as a critic": _as_critic,
    "optimizer in backward": _in_backward,
    "two forwards": _two_forwards,
    "autograd.grad": _gradients_asked_for,
    "backward for some parameters": _some_parameters,
    "gradient penalty": _gradient_penalty,
    "closure": _closure,
    "gradient scaler": _scaler,
}

# ---------------------------------------------------------------- events


def _in_second(event: Callable[[Training], Any]) -> Callable[[Training], Any]:
    """What happens in the second step alone."""
    return lambda t: event(t) if t.step == 1 else None


Event = dict[str, Callable[[Training], Any]]
"""What happens at points: `begin` of the loop, `before` and `behind` each step, `between` a forward and what follows,
and with `gradients` before an update."""


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def _evaluate(t: Training) -> None:
    with _evaluating(t.model), torch.no_grad():
        t.seen.append(call(t.model, t.inputs).detach())


def _evaluate_in_inference_mode(t: Training) -> None:
    with _evaluating(t.model), torch.inference_mode():
        t.seen.append(call(t.model, t.inputs).sum().item())


def _forward_without_gradients(t: Training) -> None:
    with torch.no_grad():
        t.seen.append(call(t.model, t.inputs))


def _smaller(t: Training) -> None:
    if t.step == 0:
        t.full_inputs = t.inputs  # type: ignore[attr-defined]
    rows = BATCH - 3 if t.step == 1 else BATCH

    def cut(x: Any) -> Any:
        return x.detach()[:rows].requires_grad_(x.requires_grad) if rows < BATCH and isinstance(x, torch.Tensor) else x

    t.inputs = pytree.tree_map(cut, t.full_inputs)  # type: ignore[attr-defined]


def _start_average(t: Training) -> None:
    t.average = copy.deepcopy(t.model)


def _follow(t: Training) -> None:
    assert t.average is not None
    now = dict(t.model.named_parameters())
    with torch.no_grad():
        for name, p in t.average.named_parameters():
            p.lerp_(now[name], 0.1)
    with _evaluating(t.average), torch.no_grad():
        t.seen.append(call(t.average, t.inputs))


def _save_and_load(t: Training) -> None:
    file = io.BytesIO()
    torch.save(t.model.state_dict(), file)
    file.seek(0)
    t.model.load_state_dict(pickle.loads(pickle.dumps(torch.load(file))), strict=False)
    t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))


def _fail(*args: Any) -> None:
    raise _Failed


def _forward_that_fails(t: Training) -> None:
    """Another forward that fails in its last stage."""

    *_, last = t.model.stages_in_order()  # type: ignore[operator]
    handle = last.core.register_forward_hook(_fail)
    with contextlib.suppress(_Failed):
        call(t.model, t.inputs)
    handle.remove()


def _backward_that_fails(t: Training) -> None:
    """Another forward and a backward that fails in the middle."""

    parameters = t.parameters()
    handle = parameters[len(parameters) // 2].register_hook(_fail)
    with contextlib.suppress(_Failed):
        loss_of(call(t.model, t.inputs)).backward()
    handle.remove()


def _forward_that_is_dropped(t: Training) -> None:
    if t.step > 0:
        t.seen.append(call(t.model, t.inputs).detach())


def _set_frozen(t: Training, frozen: bool) -> None:
    for p in list(t.model.parameters())[::3]:
        p.requires_grad_(not frozen)


def _begin_hooks(t: Training) -> None:
    def hook(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 1.1

    t.hooks = [  # type: ignore[attr-defined]
        stage.core.register_forward_hook(hook)
        for stage in t.model.stages_in_order()  # type: ignore[operator]
    ]


def _end_hooks(t: Training) -> None:
    for hook in t.hooks:  # type: ignore[attr-defined]
        hook.remove()


def _record_gradients(t: Training) -> None:
    t.sums = []  # type: ignore[attr-defined]

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        t.sums.append([float(g.sum()) for g in outputs if g is not None])  # type: ignore[attr-defined]

    for stage in t.model.stages_in_order():  # type: ignore[operator]
        stage.core.register_full_backward_hook(hook)


def _train_a_copy(t: Training) -> None:
    other = copy.deepcopy(t.model)
    loss = loss_of(call(other, t.inputs))
    loss.backward()
    t.seen += [loss.detach(), [p.grad for p in other.parameters()]]


def _run_a_shallow_copy(t: Training) -> None:
    with torch.no_grad():
        t.seen.append(call(copy.copy(t.model), t.inputs))


def _shrink(t: Training) -> None:
    for p in t.model.parameters():
        p.data.mul_(0.99)


def _replace(t: Training) -> None:
    for p in t.model.parameters():
        p.data = p.data.clone()


def _slower(t: Training) -> None:
    for group in t.optimizer.param_groups:
        group["lr"] *= 0.5


def _noise(t: Training) -> None:
    for p in t.parameters():
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


EVENTS: dict[str, Event] = {
    "evaluation behind a step": {"behind": _evaluate},
    "inference mode behind a step": {"behind": _evaluate_in_inference_mode},
    "evaluation between forward and backward": {"between": _evaluate},
    "inference mode between forward and backward": {"between": _evaluate_in_inference_mode},
    "forward without gradients between forward and backward": {"between": _forward_without_gradients},
    "forward without gradients behind a step": {"behind": _forward_without_gradients},
    "smaller batch": {"before": _smaller},
    "clipping": {"gradients": lambda t: t.seen.append(nn.utils.clip_grad_norm_(t.parameters(), 0.5))},
    "noise on gradients": {"gradients": _noise},
    "moving average": {"begin": _start_average, "behind": _follow},
    "saved and loaded": {"behind": _save_and_load},
    "step given up before backward": {"between": _in_second(_fail)},
    "forward that fails": {"before": _in_second(_forward_that_fails)},
    "backward that fails": {"before": _in_second(_backward_that_fails)},
    "forward that is dropped": {"before": _forward_that_is_dropped},
    "frozen for a step": {"before": lambda t: _set_frozen(t, t.step == 1)},
    "frozen between forward and backward": {
        "between": lambda t: _set_frozen(t, True),
        "behind": lambda t: _set_frozen(t, False),
    },
    "thawed between forward and backward": {
        "before": lambda t: _set_frozen(t, True),
        "between": lambda t: _set_frozen(t, False),
    },
    "hooks around forward": {"before": _begin_hooks, "between": _end_hooks},
    "hooks around the step": {"before": _begin_hooks, "behind": _end_hooks},
    "backward hooks in the loop": {"begin": _record_gradients, "behind": lambda t: t.seen.append(list(t.sums))},  # type: ignore[attr-defined]
    "deep copy trained": {"behind": _train_a_copy},
    "shallow copy run": {"behind": _run_a_shallow_copy},
    "weights shrunk between steps": {"behind": _shrink},
    "weights shrunk between forward and backward": {"between": _shrink},
    "weights replaced between steps": {"behind": _replace},
    "weights replaced between forward and backward": {"between": _replace},
    "learning rate": {"behind": _slower},
    "gradients dropped between forward and backward": {"between": lambda t: t.zero()},
    "evaluation mode for a step": {"before": lambda t: t.model.train(t.step != 1)},
    "garbage collected": {"between": lambda t: gc.collect()},
}
COMPARABLE = {
    "evaluation behind a step", "inference mode behind a step", "forward without gradients behind a step",
    "smaller batch", "clipping", "step given up before backward", "forward that fails", "forward that is dropped",
    "frozen for a step", "weights shrunk between steps", "learning rate", "garbage collected",
}  # fmt: skip
"""Events beside which no step takes more memory than one without them."""


def draw_loop(rng: random.Random) -> LoopSpec:
    """A training loop."""
    main = rng.choice(["plain", "plain", *MAINS])
    optimizer = rng.choice(list(OPTIMIZERS))
    if main == "step between two losses":
        optimizer = rng.choice(["fused sgd", "fused adamw"])
    return LoopSpec(
        main,
        optimizer,
        around=rng.choice(list(AROUND)) if rng.random() < 0.3 else "nothing",
        events=tuple(rng.sample(list(EVENTS), rng.choice([0, 0, 1, 1, 2, 3]))),
        set_to_none=rng.random() < 0.7,
        in_function=rng.random() < 0.8,
    )
