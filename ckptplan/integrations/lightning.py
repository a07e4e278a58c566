"""A callback that plans the memory of a Lightning `Trainer`.

    L.Trainer(callbacks=[ActivationPlanner(budget_gb=20)])

NOTE [In Lightning's loop]
Every batch of training goes through the strategy's `training_step`, which is replaced on the instance: after all hooks
that see the batch, before the precision's context, with the arguments that the module will get. At its first call the
step is profiled and planned: the module's `training_step` under the trainer's precision, whose logging and progress are
off meanwhile. A later batch that is larger than any before is planned for in the same way.

A step without a loss (`training_step` returned None), or with one that doesn't depend on the model, has nothing to
plan. It runs without one, and the next is planned.

With manual optimization, `training_step` runs backward itself, maybe several times. While it is profiled, its backwards
record their losses and its optimizers do nothing; the losses' sum is the step's loss, so that all graphs count at once.

Example: the training step of a GAN runs backward for the generator, steps, and runs backward for the discriminator. The
plan is made for one step with the forwards of both and holds for each.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer

from ckptplan.core.errors import CkptPlanError, PlanMismatchError, UnsupportedModelError
from ckptplan.core.plan import Plan
from ckptplan.distributed import is_distributed, parallel_of
from ckptplan.integrations.training import PlannedBatch, PlanningCallback, Together, unchanged
from ckptplan.planning.log import say
from ckptplan.planning.plan_file import optimizer_text, plain_text, settings_of
from ckptplan.profiling.workload.discover import NothingSavedError
from ckptplan.runtime.handle import Handle
from ckptplan.tensors.storages import tensors_in

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
"""Strategies with which a plan can be applied."""


class ActivationPlanner(PlanningCallback, pl.Callback):
    """Plans the activation memory of the training step on the first batch, and trains with the plan.

    Gradients are those of training without it, bit for bit. The module is as before when training ends, by whatever
    way. The plan is in the trainer's checkpoints, and a resumed training applies it without planning again.

    Parameters
    ----------
    budget_gb, budget, swap_dir, plan_file
        As in `ckptplan.solve`; with neither budget, what the device has free. The file's plan is applied if it was made
        for such a batch, with these settings of trainer, optimizers and module; their code isn't compared.
    check : "sampled", "always" or "off"
        As in `ckptplan.apply`.
    **options
        What a plan may use, as in `ckptplan.solve` (`ckptplan.core.request.Limits`).

    Raises
    ------
    InvalidInputError
        If an option can't be used. In training, the errors of `solve` and `apply`, and `UnsupportedModelError` for
        strategies that plans don't support.
    """

    def __init__(self, budget_gb: float | None = None, **options: Any) -> None:
        super().__init__(budget_gb, **options)
        self._batch: PlannedBatch | None = None
        self._applied: Handle | None = None
        self._asked = ""
        self._saved: dict[str, Any] = {}
        self._made: list[tuple[PlannedBatch, Plan, str]] = []
        self._undo = contextlib.ExitStack()
        self._warned = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare for the first batch."""
        self._end()
        _check(trainer, pl_module)
        original = trainer.strategy.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            batch = self._batch
            if batch is None or (self.tries_again and not batch.holds_for((args, kwargs))):
                self._plan(trainer, pl_module, args, kwargs)
            return original(*args, **kwargs)

        self._undo.enter_context(mock.patch.object(trainer.strategy, "training_step", training_step))

    def _plan(
        self, trainer: pl.Trainer, module: pl.LightningModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Apply a plan for a step with these arguments: an earlier one that holds for them, or a new one."""
        former = None if self._applied is None else self._applied.plan
        before = self._batch, self._asked
        self._remove()
        for batch, plan, asked in self._made:
            if batch.holds_for((args, kwargs)):
                self._applied = self.begin(module, plan, again=True)
                self._batch, self._asked = batch, asked
                return
        batch = PlannedBatch((args, kwargs), module)
        asked = self._request(trainer, module, batch)
        with unchanged((args, kwargs)):
            try:
                self._applied = self._begin(trainer, module, args, kwargs, asked)
            except CkptPlanError as error:
                if not isinstance(error, NothingSavedError) and not isinstance(error.__cause__, _NoLossError):
                    self._applied = self.follow(module, former, error)
                    self._batch, self._asked = before
                    return
                if not self._warned:
                    self._warned = True
                    say("ckptplan: training_step has no loss that depends on the model; the next batch is planned for")
                return
        self._batch, self._asked = batch, asked
        self._made.append((batch, self._applied.plan, asked))

    def _begin(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        asked: str,
    ) -> Handle:
        optimizers = [getattr(o, "optimizer", o) for o in trainer.optimizers]
        optimizer = optimizers[0] if len(optimizers) == 1 else Together(optimizers) if optimizers else None
        saved, self._saved = self._saved, {}
        # A checkpoint has the batch of one rank; the others would plan and wait for it. A plan file takes precedence.
        if saved and saved["asked"] == asked and not is_distributed() and self._plan_file is None:
            plan = Plan.from_json(saved["plan"])
            with contextlib.suppress(PlanMismatchError):  # another model: it is planned for
                if self.fits(plan, module, optimizer):
                    return self.begin(module, plan)

        precision = trainer.precision_plugin
        parallel, again = parallel_of(trainer.strategy.model or module), bool(self._made)

        def step() -> torch.Tensor:
            with _planning(trainer, module) as losses, precision.train_step_context():
                output = parallel.returned(module.training_step(*args, **kwargs))  # in training the wrapper's forward
            if losses:
                return torch.stack([loss.float() for loss in losses]).sum()
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                raise _NoLossError
            if isinstance(output, Mapping):  # the loop holds the other values during backward
                held = [t.detach() for k, v in output.items() if k != "loss" for t in tensors_in(v)]
                vars(loss)["held"] = held
            return loss

        # Lightning's own loop, and most manual ones, drop the gradients of a step after the next one's forward.
        return self.begin(
            module, again=again, of=asked, step=step, optimizer=optimizer, accumulate=True, ddp=parallel.ddp
        )

    def _request(self, trainer: pl.Trainer, module: pl.LightningModule, batch: PlannedBatch) -> str:
        """Return what a plan is made for, without the model's modules, as text for a checkpoint."""
        optimizers = [optimizer_text(getattr(o, "optimizer", o)) for o in trainer.optimizers]
        inputs = [str(tensor) for tensor in batch.tensors]
        settings = f"{plain_text(module.hparams)}; {settings_of(module)}"
        return f"{self.in_text()}; {trainer.precision}; {optimizers}; {inputs}; {settings}"

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and what it was made for."""
        return {} if self.plan is None else {"plan": self.plan.to_json(), "asked": self._asked}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the plan of a checkpoint, which is applied if options, optimizers, batch and model are the same."""
        self._saved = state_dict

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the module."""
        self._end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the module."""
        self._end()

    def _end(self) -> None:
        self._undo.close()
        self._made.clear()
        self._remove()

    def _remove(self) -> None:
        applied, self._applied, self._batch = self._applied, None, None
        if applied is not None:
            applied.remove()


class AskedFor(ActivationPlanner):
    """Planner that is added without the script; it does nothing if the script gave the trainer a planner of its own."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare for the first batch."""
        if not any(isinstance(other, ActivationPlanner) and other is not self for other in trainer.callbacks):  # type: ignore[attr-defined]
            super().on_train_start(trainer, pl_module)


class _NoLossError(Exception):
    """Raised where a step that is planned has no loss."""


@contextlib.contextmanager
def _planning(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[list[torch.Tensor]]:
    """Keep `training_step` from logging and updating within the block; yield the losses whose backwards it runs."""
    losses: list[torch.Tensor] = []

    def note(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss)

    def note_all(tensors: Any, *args: Any, **kwargs: Any) -> None:
        losses.extend([tensors] if isinstance(tensors, torch.Tensor) else tensors)

    nothing = mock.Mock(return_value=None)
    with contextlib.ExitStack() as stack:
        for name in ("log", "log_dict", "clip_gradients"):
            stack.enter_context(mock.patch.object(type(module), name, nothing))
        stack.enter_context(mock.patch.object(type(module), "logger", mock.MagicMock()))
        if not module.automatic_optimization:
            stack.enter_context(mock.patch.object(torch.autograd, "backward", note_all))
        stack.enter_context(mock.patch.object(type(module), "manual_backward", lambda self, *a, **k: note(*a, **k)))
        stack.enter_context(mock.patch.object(LightningOptimizer, "step", _runs_closure))
        for optimizer in trainer.optimizers:
            stack.enter_context(mock.patch.object(optimizer, "step", functools.partial(_runs_closure, optimizer)))
        for config in trainer.lr_scheduler_configs:
            stack.enter_context(mock.patch.object(config.scheduler, "step", nothing))
        yield losses


def _runs_closure(optimizer: Any, closure: Any = None, **kwargs: Any) -> Any:
    return None if closure is None else closure()


def _check(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise `UnsupportedModelError` for a `training_step` or a strategy that can't be planned."""
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UnsupportedModelError(
            "training_step takes the iterator of batches (dataloader_iter), of which planning would take some; "
            "let it take a batch: training_step(self, batch)"
        )
    name = type(trainer.strategy).__name__
    if name not in _STRATEGIES:
        raise UnsupportedModelError(
            f"plans don't know the bytes of Lightning's {name}; use strategy='auto' on one device, 'ddp', "
            "or ModelParallelStrategy with fully_shard"
        )
