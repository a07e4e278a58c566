"""A callback that plans the memory of a `transformers.Trainer`, and of TRL's trainers, which build on it.

    Trainer(model, args, train_dataset=data, callbacks=[ActivationPlanCallback(budget_gb=20)])

NOTE [In a Trainer's loop]
A callback gets neither the batch nor the loss, so this one replaces methods of the Trainer, on the instance, from
`on_train_begin` to the end of training:

1. `compute_loss`. Its first call in training has the true batch, labels and precision, so there the step is profiled
   and planned, before it runs. The call of the model is recorded, and the loss is what `compute_loss` makes of the
   model's output: label smoothing and functions of the user's count. A `compute_loss` that calls the model several
   times is planned as one step (`step=`).
2. `_run_epoch`, `_evaluate`, `_finalize_training` and the handler's `call_event`: an error that leaves them, a
   `KeyboardInterrupt` too, undoes everything, for which callbacks have no event. `compute_loss` is replaced, and the
   model's checkpointing is off, from the first `_run_epoch` on.

Batches that are larger than any before are planned for before they run. If nothing but the model's inputs is needed,
the plan then holds for a quarter more (`apply(on_larger="replan")`).

Example, with dynamic padding: batches of 4 x 100, 4 x 80 and 4 x 130 tokens come in turn. The first is planned for, the
second runs under the same plan, and before the third another plan is made, which holds up to 4 x 163 tokens.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from ckptplan.core.errors import CkptPlanError, InvalidInputError, UnsupportedModelError
from ckptplan.distributed import parallel_of
from ckptplan.integrations.training import PlannedBatch, PlanningCallback, unchanged
from ckptplan.planning.log import say
from ckptplan.planning.plan_file import name_of
from ckptplan.runtime.handle import Handle
from ckptplan.runtime.patching import PatchedForward, installed
from ckptplan.state.restore import restored

_GUARDED = ("_run_epoch", "_evaluate", "_finalize_training")
"""Methods of a Trainer that are guarded on the instance (NOTE [In a Trainer's loop])."""


class ActivationPlanCallback(PlanningCallback, TrainerCallback):
    """Plans the activation memory of the training step on the first batch, and trains with the plan.

    Gradients are those of training without it, bit for bit. The model and the Trainer are as before when training
    ends, by whatever way. The Trainer's own activation checkpointing is off while the plan is applied.

    Parameters
    ----------
    budget_gb, budget, swap_dir, plan_file
        As in `ckptplan.solve`; with neither budget, what the device has free. The file's plan is applied if it was made
        for such a batch, with these settings of Trainer, optimizer and model; their code isn't compared.
    check : "sampled", "always" or "off"
        As in `ckptplan.apply`.
    **options
        What a plan may use, as in `ckptplan.solve` (`ckptplan.core.request.Limits`).

    Raises
    ------
    InvalidInputError
        If an option can't be used. In training, the errors of `solve` and `apply`, and `UnsupportedModelError` for
        settings of the Trainer that plans don't support; the message names the setting.
    """

    _run: _TrainerLoop | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare for the first batch; also where a loop begins again after it ran out of memory."""
        self.end()
        trainer = _trainer_above()
        _check_settings(trainer)
        self._run = _TrainerLoop(trainer, self)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn if the first step is over and nothing was planned."""
        if self._run is not None:
            self._run.check_planned()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore model and Trainer."""
        self.end()

    def end(self) -> None:
        """Restore model and Trainer; calling it again does nothing."""
        run, self._run = self._run, None
        if run is not None:
            run.close()


class _SecondForward(Exception):
    """Raised if a `compute_loss` calls the model more often than when it was recorded."""


@dataclass
class _Batch:
    """The present batch: the arguments with which the Trainer calls `compute_loss`."""

    model: Any = None
    inputs: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def loss(self, code: Callable[..., Any]) -> torch.Tensor:
        """Return its loss by `code`."""
        found = code(self.model, copy.copy(self.inputs), *self.args, **self.kwargs)
        loss: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return loss


class _TrainerLoop:
    """One run of a Trainer's loop."""

    def __init__(self, trainer: Trainer, callback: ActivationPlanCallback) -> None:
        self.trainer, self.callback = trainer, callback
        self.handle: Handle | None = None
        self._batch = _Batch()
        self._planned_batch: PlannedBatch | None = None
        self._undo = contextlib.ExitStack()
        self._begun = self._warned = False
        self.compute_loss: Callable[..., Any] = trainer.compute_loss
        self._patch(trainer, "_run_epoch", functools.partial(self._epoch, trainer._run_epoch))
        for name in _GUARDED:
            self._patch(trainer, name, functools.partial(self._guarded, getattr(trainer, name)))
        handler = trainer.callback_handler
        self._patch(handler, "call_event", functools.partial(self._guarded, handler.call_event))

    def _patch(self, of: Any, name: str, by: Callable[..., Any]) -> None:
        self._undo.enter_context(mock.patch.object(of, name, by))

    def check_planned(self) -> None:
        """Warn, once, if a step was trained and no call of `compute_loss` was seen."""
        if self.handle is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self.trainer).__name__} has trained a step without calling compute_loss, so nothing is "
                "planned: steps take as much memory as without the callback; call self.compute_loss in training_step",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Undo everything."""
        if self.handle is not None:
            self.handle.remove()
        self._undo.close()

    def _guarded(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException:
            self.callback.end()
            raise

    def _epoch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._begun:
            self._begun = True
            self.compute_loss = self.trainer.compute_loss
            self._patch(self.trainer, "compute_loss", self._compute_loss)
            self._undo.enter_context(_checkpointing_off(_model_of(self.trainer)))
        return original(*args, **kwargs)

    def _compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training and torch.is_grad_enabled():
            vars(self._batch).update(model=model, inputs=copy.copy(inputs), args=args, kwargs=kwargs)
            planned = self._planned_batch
            beyond = planned is not None and self.callback.tries_again and not planned.holds_for(dict(inputs))
            if self.handle is None or beyond:
                former = None if self.handle is None else self.handle.plan
                with unchanged(dict(inputs)):
                    try:
                        self._plan()
                    except CkptPlanError as error:
                        self.handle = self.callback.follow(_model_of(self.trainer), former, error)
        return self.compute_loss(model, inputs, *args, **kwargs)

    def _plan(self) -> None:
        """Plan for the present batch, and apply the plan."""
        trainer, model = self.trainer, _model_of(self.trainer)
        again = self.handle is not None
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        accumulate = trainer.args.gradient_accumulation_steps > 1
        batch = PlannedBatch(dict(self._batch.inputs), model)
        of = [*map(str, batch.tensors), accumulate, trainer.accelerator.mixed_precision]
        of += [name_of(type(trainer)), name_of(self.compute_loss), name_of(trainer.compute_loss_func)]
        of.append(trainer.args.label_smoothing_factor)
        more: dict[str, Any] = {"optimizer": optimizer, "accumulate": accumulate, "again": again, "of": repr(of)}
        more["ddp"] = parallel_of(self._batch.model).ddp
        code, present = self.compute_loss, self._batch

        def loss_fn(output: Any) -> torch.Tensor:
            given = iter([output])

            def give(*_: Any) -> Any:
                for output in given:
                    return output
                raise _SecondForward

            # The forward of a wrapper is replaced, too: it would copy the output once more.
            with installed([PatchedForward(m, give) for m in dict.fromkeys((model, present.model))]):
                return present.loss(code)

        def step() -> torch.Tensor:
            return present.loss(code)

        forwards = self._forwards(model, step, code)
        if len(forwards) == 1:
            own = _loss_of_model if self._is_the_models() else loss_fn
            try:
                self.handle = self.callback.begin(model, inputs=forwards[0], loss_fn=own, **more)
                return
            except CkptPlanError as error:  # a second call that runs only with a graph
                if _SecondForward.__name__ not in str(error):  # of this rank or another
                    raise
        self.handle = self.callback.begin(model, step=step, **more)
        self._planned_batch = batch

    def _is_the_models(self) -> bool:
        """Return whether the Trainer's loss is the one in the model's output."""
        plain = getattr(self.compute_loss, "__func__", None) is Trainer.compute_loss
        return plain and self.trainer.label_smoother is None and self.trainer.compute_loss_func is None

    def _forwards(
        self, model: nn.Module, step: Callable[[], torch.Tensor], code: Callable[..., Any]
    ) -> list[dict[str, Any]]:
        """Return the arguments, by name, of each call of the model that the present batch's loss makes."""
        found: list[dict[str, Any]] = []

        def record(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            names = inspect.signature(model.forward).parameters
            found.append({**dict(zip(names, args, strict=False)), **kwargs})
            return original(*args, **kwargs)

        patch = PatchedForward(model, record)
        # An error that isn't due to the missing graph comes again when the step is profiled.
        with restored(model, [self.trainer, code]), contextlib.suppress(Exception), installed([patch]), torch.no_grad():
            step()
        return found


def _model_of(trainer: Trainer) -> nn.Module:
    """Return a Trainer's model, without the wrapper in which it trains."""
    model = trainer.model
    assert isinstance(model, nn.Module)
    return model


def _loss_of_model(output: Any) -> torch.Tensor:
    return output["loss"] if isinstance(output, dict) else output[0]  # type: ignore[no-any-return]


def _trainer_above() -> Trainer:
    """Return the Trainer whose method has called the callback: it isn't among a callback's arguments."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(found := frame.f_locals["self"], Trainer):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise InvalidInputError(
        "no transformers.Trainer has called ActivationPlanCallback; pass it in the callbacks= of a Trainer"
    )


def _check_settings(trainer: Trainer) -> None:
    """Raise `UnsupportedModelError` for settings of a Trainer that plans don't support."""
    args = trainer.args
    kind = trainer.accelerator.distributed_type
    engine = str(getattr(kind, "value", kind))
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if engine == "FSDP":
        engine += str(getattr(plugin, "fsdp_version", 1))
    refused = {
        "torch_compile=True compiles the whole model, into which no plan can reach; leave it out and have the "
        "callback compile the layers (compile=True)": getattr(args, "torch_compile", False),
        "activation_offloading=True moves activations by itself; leave it out, a plan swaps what pays": getattr(
            args, "activation_offloading", False
        ),
        f"the model is in DataParallel on {args.n_gpu} devices; run torchrun, or make one device alone visible "
        "(CUDA_VISIBLE_DEVICES=0)": args.n_gpu > 1,
        f"training is distributed by {engine}, whose bytes plans don't know; train on one device, under DDP or under "
        "FSDP2 (fsdp_version: 2)": engine not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP2"),
        "the plugin of FSDP checkpoints by itself; set its activation_checkpointing to false, since the plan "
        "decides": bool(getattr(plugin, "activation_checkpointing", False)),
    }
    for why, applies in refused.items():
        if applies:
            raise UnsupportedModelError(why)
    missing = [name for name in _GUARDED if not hasattr(trainer, name)]
    if missing:
        raise UnsupportedModelError(
            f"this version of transformers has no Trainer.{missing[0]}, which the callback needs; use 5.23 or later"
        )


@contextlib.contextmanager
def _checkpointing_off(model: nn.Module) -> Iterator[None]:
    """Turn a model's own checkpointing off within the block, since the plan decides."""
    found = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    if found:
        say(f"ckptplan: the checkpointing of {len(found)} modules is off in training, since the plan decides")
    for module in found:
        setattr(module, "gradient_checkpointing", False)  # noqa: B010 (an attribute of only some modules)
    try:
        yield
    finally:
        for module in found:
            setattr(module, "gradient_checkpointing", True)  # noqa: B010
