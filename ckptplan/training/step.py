"""One training step: its forward, loss and inputs, and the fingerprint that a profile is bound to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import getclosurevars
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ckptplan.core.arguments import LossFn
from ckptplan.core.errors import InvalidInputError, UnsupportedModelError
from ckptplan.core.profile import Fingerprint
from ckptplan.core.request import Training
from ckptplan.distributed import parallel_of
from ckptplan.distributed.engines import check_engine
from ckptplan.distributed.parallel import Parallel, class_of
from ckptplan.tensors import accelerator
from ckptplan.training.compiled import check_compiled, compiled_modules, compiled_otherwise, is_compiled_for_a_plan
from ckptplan.training.gradients import accumulates
from ckptplan.training.inputs import input_tensors


def default_loss(output: Any) -> torch.Tensor:
    """Return `output.loss` if there is one, otherwise the sum of the floating outputs' means.

    Raises
    ------
    InvalidInputError
        If the output holds no floating tensor.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    floating = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not floating:
        raise InvalidInputError(
            f"the model's output ({type(output).__name__}) has no loss and no floating tensor; "
            "pass loss_fn=, output -> scalar"
        )
    total = floating[0].mean()
    for tensor in floating[1:]:
        total = total + tensor.mean()
    return total


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Forward and loss of one step: `model(*args, **kwargs)` with a loss function, or one callable.

    Parameters
    ----------
    model : nn.Module
    args, kwargs : tuple, dict
        Inputs of the forward, leaves of its graph; empty when `fn` is set. Of a tensor that has a graph already, the
        step's is a leaf with the same memory.
    loss_fn : callable
        Maps the model's output to a scalar tensor.
    fn : callable, optional
        Runs every forward of the step and returns the loss; used instead of `args`, `kwargs` and `loss_fn`.
    autocast : (str, torch.dtype), optional
        Device type and data type of the autocast context in which forward and loss run.
    accumulates : bool
        Whether gradients exist when the step starts (NOTE [Gradients from before] in runtime/guard/gradients.py).
    parallel : Parallel, optional
        How `model` is trained on several ranks; default: as it is sharded now.
    found : str
        Where the inputs are from, if none were given, and their types and shapes.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: LossFn = default_loss
    fn: Callable[[], torch.Tensor] | None = None
    autocast: tuple[str, torch.dtype] | None = None
    accumulates: bool = False
    parallel: Parallel = None  # type: ignore[assignment]
    found: str = ""

    def __post_init__(self) -> None:
        if self.parallel is None:
            object.__setattr__(self, "parallel", parallel_of(self.model))
        if any(t.grad_fn is not None for t in self.tensors()):
            leaf = functools.cache(_leaf)  # an argument that is given twice stays one
            args, kwargs = pytree.tree_map_only(torch.Tensor, leaf, (self.args, self.kwargs))
            object.__setattr__(self, "args", args)
            object.__setattr__(self, "kwargs", kwargs)

    def forward(self) -> tuple[Any, torch.Tensor]:
        """Run forward and loss.

        Returns
        -------
        tuple
            The model's output (None if `fn` is set), which callers usually hold during backward, and the loss.

        Raises
        ------
        InvalidInputError
            If the loss isn't a floating tensor of one element, or has no graph to run backward through.
        """
        with self.autocasting():
            if self.fn is not None:
                output, loss = None, self.fn()
                source = "step()"
            else:
                output = self.parallel.returned(self.model(*self.args, **self.kwargs))
                loss = self.loss_fn(output)
                source = "loss_fn(output)" if self.loss_fn is not default_loss else "the model's loss"
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = repr(type(loss).__name__)
            if isinstance(loss, torch.Tensor):
                what = f"a tensor of shape {tuple(loss.shape)}"
            raise InvalidInputError(f"{source} gave {what}; it must be a floating tensor with one element")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise InvalidInputError(
                f"{source} does not depend on a parameter that needs gradients, so the step never runs backward; "
                "check for no_grad, detach or frozen parameters"
            )
        return output, loss

    def autocasting(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context in which forward and loss run."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.autocast[0], self.autocast[1])

    def under(self, amp: torch.dtype | str | None, kind: str) -> TrainingStep:
        """Return the step under autocast to `amp` on a kind of device, such as "cuda"; itself if `amp` is None."""
        if amp is None:
            return self
        return dataclasses.replace(self, autocast=(kind, getattr(torch, str(amp).removeprefix("torch."))))

    def without_loss(self) -> TrainingStep:
        """Return the step whose forward ends with the model's output; itself where a callable runs the forward."""
        nothing = torch.zeros((), requires_grad=True)
        return self if self.fn is not None else dataclasses.replace(self, loss_fn=lambda output: nothing)

    def tensors(self) -> list[torch.Tensor]:
        """Return the input tensors."""
        return [t for t in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, torch.Tensor)]

    @property
    def has_values(self) -> bool:
        """Whether the step can run for real: neither a tensor of the model nor an input lies on `meta`."""
        return not any(t.is_meta for t in (*self.model.parameters(), *self.model.buffers(), *self.tensors()))

    def reached(self) -> list[Any]:
        """Return the objects besides the model that running the step may change."""
        functions = [self.fn, self.loss_fn]
        enclosed = (getclosurevars(f).nonlocals.values() for f in functions if isinstance(f, FunctionType))
        return [self.args, self.kwargs, *(value for values in enclosed for value in values), *functions]

    def on_device(self, device: torch.device) -> None:
        """Raise `InvalidInputError` if an input is neither on a device of the model's kind nor on the host or `meta`.

        A model on CUDA may take host tensors: lengths, indices, or inputs that its forward moves by itself. If it
        doesn't, PyTorch raises the error.
        """
        for tensor in self.tensors():
            if tensor.device.type not in (device.type, "cpu", "meta"):
                raise InvalidInputError(f"an input lies on {tensor.device}, the model on {device}; move one of them")


@contextlib.contextmanager
def without_graph() -> Iterator[None]:
    """Let forwards within the block make no graph, and autocast not cache its casts of weights.

    In PyTorch 2.9 a later forward with a graph would use these cached casts, and the weights would get no gradients.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def make_step(model: nn.Module, training: Training) -> TrainingStep:
    """Return the step that `training` describes: a callable, or inputs as a tensor, a tuple or a dict.

    For a model in a wrapper that replicates it, it is the step of the model inside.

    Raises
    ------
    InvalidInputError
        If the inputs are none of these.
    UnsupportedModelError
        As `parallel_of`.
    """
    parallel = parallel_of(model, training.ddp)
    model = parallel.model
    starts_with_gradients = accumulates(model, training.accumulate) or parallel.gradients_in_buckets
    if training.step is not None:
        return TrainingStep(model, fn=training.step, accumulates=starts_with_gradients, parallel=parallel)
    inputs = training.inputs
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, torch.Tensor):
        args = (inputs,)
    elif isinstance(inputs, tuple):
        args = inputs
    elif isinstance(inputs, Mapping):
        kwargs = {str(key): value for key, value in inputs.items()}
    elif isinstance(inputs, list):
        raise InvalidInputError(
            f"inputs is a list of {len(inputs)}: several batches, which only estimate(inputs=[...]) takes; pass the "
            "largest batch, whose plan holds for smaller ones, too; positional inputs are a tuple"
        )
    else:
        raise InvalidInputError(
            f"inputs of type {type(inputs).__name__}; pass a tensor, a tuple (positional) or a dict (keywords)"
        )
    return TrainingStep(
        model, args, kwargs, training.loss_fn or default_loss, accumulates=starts_with_gradients, parallel=parallel
    )


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters.

    Raises
    ------
    InvalidInputError
        If `model` isn't a module, or has no parameters.
    UnsupportedModelError
        If the parameters are on several devices.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    parameters = list(model.parameters())
    if not parameters:
        raise InvalidInputError("the model has no parameters, so there is no training step to plan")
    devices = {p.device: name for name, p in reversed(list(model.named_parameters()))}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in reversed(devices.items()))
        raise UnsupportedModelError(
            f"parameters lie on several devices: {where}; planning covers one device at a time, so move them to one"
        )
    return parameters[0].device


_TURN_CHECKPOINTS_OFF = ("activation_checkpointing_disable", "gradient_checkpointing_disable")
"""Methods of models of the libraries, newest name first."""


def check_not_checkpointing(model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise `UnsupportedModelError` if one of a model's `modules`, given with their names, checkpoints by itself."""
    for name, module in modules:
        if getattr(module, "gradient_checkpointing", False) is True:
            method = next((name for name in _TURN_CHECKPOINTS_OFF if hasattr(model, name)), None)
            remedy = f"call model.{method}()" if method else "set its gradient_checkpointing to False"
            raise UnsupportedModelError(
                f"{_where(name)} already checkpoints; {remedy} and let the plan decide; a training framework's own "
                "option for it has to be off, too (activation_checkpointing, formerly gradient_checkpointing)"
            )


def _where(name: str) -> str:
    return f"module {name!r}" if name else "the model"


def check_supported(model: nn.Module, *, checkpoints: bool = False) -> None:
    """Check that a plan can be applied to `model`.

    Parameters
    ----------
    checkpoints : bool
        The model may checkpoint by itself: its step is looked at as it is, without a plan.

    Raises
    ------
    UnsupportedModelError
        If the model checkpoints by itself, is compiled as a whole, has a sparse buffer or a lazy parameter, or runs on
        several devices of one process or in DeepSpeed's engine.
    """
    check_engine(model)
    check_compiled(model)
    if not checkpoints:
        check_not_checkpointing(model, model.named_modules())
    for name, module in model.named_modules():
        where = _where(name)
        sparse = next((n for n, t in module._buffers.items() if t is not None and t.layout is not torch.strided), None)
        if sparse is not None:
            raise UnsupportedModelError(
                f"{where} has a sparse buffer, {sparse!r}, and tensors made from sparse ones can't be counted; make "
                "it dense, or register its indices and values for gather and index_add"
            )
        lazy = next((n for n, t in (*module._parameters.items(), *module._buffers.items()) if is_lazy(t)), None)
        if lazy is not None:
            raise UnsupportedModelError(
                f"{where}, a {type(module).__name__}, has no shape for {lazy!r} before its first forward; run one "
                "forward of the model, then profile it"
            )


def caching(model: nn.Module) -> list[Any]:
    """Return the configurations in `model` whose generation cache is on."""
    # The halves of an encoder-decoder, or the text half of a model for images, have configurations of their own.
    found = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    return [config for config in found.values() if getattr(config, "use_cache", None) is True]


@contextlib.contextmanager
def training_config(model: nn.Module) -> Iterator[None]:
    """Turn generation caches off inside: a stage that appends to a cache can't be run twice.

    Raises
    ------
    UnsupportedModelError
        If a configuration can't be written to.
    """
    found: list[Any] = []
    try:
        for config in caching(model):
            try:
                config.use_cache = False
            except AttributeError as error:
                raise UnsupportedModelError(
                    f"use_cache of the model's {type(config).__name__} is True and can't be set ({error}), and a plan "
                    "needs it off; make the model from a configuration with use_cache=False"
                ) from error
            found.append(config)
        yield
    finally:
        for config in found:
            config.use_cache = True


@contextlib.contextmanager
def every_layer(model: nn.Module) -> Iterator[None]:
    """Leave no layer out at random within the block: a plan for all layers holds for steps with fewer.

    Affected are modules and configurations that have the chance of it as an attribute with `layerdrop` or `layer_drop`
    in its name, as in transformers and torchaudio.
    """
    holders: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            if hasattr(holder, "__dict__"):
                holders[id(holder)] = holder
    found = [
        (holder, name, value)
        for holder in holders.values()
        for name, value in vars(holder).items()
        if "layerdrop" in name.replace("_", "") and isinstance(value, float)
    ]
    try:
        with contextlib.suppress(AttributeError):  # of a configuration that can't be written to
            for holder, name, _ in found:
                setattr(holder, name, 0.0)
        yield
    finally:
        with contextlib.suppress(AttributeError):
            for holder, name, value in found:
                setattr(holder, name, value)


@contextlib.contextmanager
def planned_config(model: nn.Module) -> Iterator[None]:
    """Configure the model as plans need it within the block: `training_config` and `every_layer`."""
    with training_config(model), every_layer(model):
        yield


def inputs_text(step: TrainingStep) -> str:
    """Return a step's input tensors as text."""
    return ", ".join(map(str, input_tensors(step.args, step.kwargs)))


def fingerprint(step: TrainingStep, device_name: str | None = None, *, compiles: Collection[str] = ()) -> Fingerprint:
    """Return the fingerprint that a profile of `step` is bound to; `device_name` names a device of another machine.

    `compiles` names modules that a plan compiles, as if they were compiled already.
    """
    model, kind = step.model, class_of(step.model)
    digest = hashlib.sha256()
    for name, p in model.named_parameters(remove_duplicate=False):
        digest.update(f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}\n".encode())
    count = sum(p.numel() for p in model.parameters())
    device = model_device(model)
    name = device_name or (accelerator.properties(device).name if accelerator.is_accelerator(device) else device.type)
    compiled = compiled_modules(model, compiles)
    ways: dict[str, list[str]] = {}
    for module_name, module in compiled.items():
        ways.setdefault(compiled_otherwise(module), []).append(module_name)
    told = ", ".join(f"{', '.join(names)} compiled{how}" for how, names in ways.items())
    return Fingerprint(
        model=f"{kind.__module__}.{kind.__qualname__}" + (f" with {told}" if told else ""),
        parameters=f"{count} in {digest.hexdigest()[:16]}",
        training=model.training,
        inputs=inputs_text(step) if step.fn is None else "step()",
        device=name,
        torch_version=torch.__version__.partition("+")[0],
        accumulates=step.accumulates,
        parallel=step.parallel.kind,
        autocast=present_autocast(device.type) if step.autocast is None else _type_name(step.autocast[1]),
        compiled=tuple(name for name, module in compiled.items() if is_compiled_for_a_plan(module)),
    )


def present_autocast(kind: str) -> str:
    """Return the type to which autocast casts now on a kind of device, as in `Fingerprint`; "off" if it is off."""
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return _type_name(torch.get_autocast_dtype(kind)) if on else "off"


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
