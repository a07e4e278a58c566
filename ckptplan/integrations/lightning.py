"""A callback that plans the memory of a Lightning `Trainer`.

    L.Trainer(callbacks=[ActivationPlanner(budget_gb=20)])

NOTE [In Lightning's loop]
The first event with a batch is `on_train_batch_start`. There the step is profiled and planned: `training_step` with
that batch under the trainer's precision, whose logging and progress are off meanwhile. A later batch that is larger
than any before is planned for in the same way.

With manual optimization, `training_step` runs backward itself, maybe several times. While it is profiled, its backwards
record their losses and its optimizers do nothing; the losses' sum is the step's loss, so that all graphs count at once.

Example: the training step of a GAN runs backward for the generator, steps, and runs backward for the discriminator. The
plan is made for one step with the forwards of both and holds for each.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer

from ckptplan.core.errors import PlanMismatchError, UnsupportedModelError
from ckptplan.core.plan import Plan
from ckptplan.integrations.training import PlannedBatch, PlanningCallback, say, unchanged
from ckptplan.runtime.guard.shapes import input_tensors
from ckptplan.runtime.handle import Handle

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
"""Strategies with which a plan can be applied; the buckets of the second one aren't in its bytes."""


class ActivationPlanner(PlanningCallback, pl.Callback):
    """Plans the activation memory of the training step on the first batch, and trains with the plan.

    Gradients are those of training without it, bit for bit. The module is as before when training ends, by whatever
    way. The plan is in the trainer's checkpoints, and a resumed training applies it without planning again.

    Parameters
    ----------
    budget_gb, budget, swap_dir
        As in `ckptplan.solve`; with neither budget, what the device has free.
    check : "sampled", "always" or "off"
        As in `ckptplan.apply`.
    **options
        What a plan may use, as in `ckptplan.solve` (`ckptplan.core.request.Limits`).

    Raises
    ------
    InvalidInputError
        If an option can't be used. In training, the errors of `solve` and `apply`, and `UnsupportedModelError` for
        strategies that plans can't go with.
    """

    def __init__(self, budget_gb: float | None = None, **options: Any) -> None:
        super().__init__(budget_gb, **options)
        self._batch: PlannedBatch | None = None
        self._applied: Handle | None = None
        self._inputs = ""
        self._saved: dict[str, Any] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Plan for the first batch, and for one that is larger than those before."""
        if self._applied is not None and self._batch is not None:
            if self._batch.holds_for(batch):
                return
            self._applied.remove()
        self._inputs = f"{trainer.precision}: {', '.join(map(str, input_tensors((batch,), {})))}"
        with unchanged(batch):
            self._applied = self._begin(trainer, pl_module, batch, batch_idx)
        self._batch = PlannedBatch(batch)

    def _begin(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> Handle:
        _check_strategy(trainer)
        saved, self._saved = self._saved, {}
        if saved and saved["budget"] == self._budget() and saved["inputs"] == self._inputs:
            with contextlib.suppress(PlanMismatchError):  # another model: it is planned for
                return self._planning.begin(module, Plan.from_json(saved["plan"]))

        def step() -> torch.Tensor:
            with _planning(trainer, module) as losses, trainer.precision_plugin.train_step_context():
                output = module.training_step(*_arguments(module, batch, batch_idx))
            if losses:
                return torch.stack([loss.float() for loss in losses]).sum()
            return output["loss"] if isinstance(output, dict) else output  # type: ignore[return-value]

        optimizers = [getattr(o, "optimizer", o) for o in trainer.optimizers]
        optimizer = optimizers[0] if len(optimizers) == 1 else _Together(optimizers) if optimizers else None
        # Lightning's own loop, and most manual ones, drop the gradients of a step after the next one's forward.
        return self._planning.begin(module, step=step, optimizer=optimizer, accumulate=True)

    def _budget(self) -> list[Any]:
        return [self._planning.budget_gb, self._planning.budget]

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, the budget and the batch that it was made for."""
        if self.plan is None:
            return {}
        return {"plan": self.plan.to_json(), "budget": self._budget(), "inputs": self._inputs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the plan of a checkpoint, which is applied if budget, batch and model are the same."""
        self._saved = state_dict

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the module."""
        self._end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the module."""
        self._end()

    def _end(self) -> None:
        applied, self._applied = self._applied, None
        if applied is not None:
            applied.remove()


class _Together(torch.optim.Optimizer):
    """Several optimizers that step one after the other; their groups and states are shared with them."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})
        self.param_groups = [group for o in optimizers for group in o.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for optimizer in self.optimizers:
            optimizer.step()


@contextlib.contextmanager
def _planning(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[list[torch.Tensor]]:
    """Inside, `training_step` logs nothing and updates nothing; yields the losses whose backwards it would run."""
    losses: list[torch.Tensor] = []

    def note(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss)

    nothing = mock.Mock(return_value=None)
    with contextlib.ExitStack() as stack:
        for name in ("log", "log_dict", "clip_gradients"):
            stack.enter_context(mock.patch.object(type(module), name, nothing))
        stack.enter_context(mock.patch.object(type(module), "manual_backward", lambda self, *a, **k: note(*a, **k)))
        stack.enter_context(mock.patch.object(LightningOptimizer, "step", _runs_closure))
        for optimizer in trainer.optimizers:
            stack.enter_context(mock.patch.object(optimizer, "step", functools.partial(_runs_closure, optimizer)))
        for config in trainer.lr_scheduler_configs:
            stack.enter_context(mock.patch.object(config.scheduler, "step", nothing))
        yield losses


def _runs_closure(optimizer: Any, closure: Any = None, **kwargs: Any) -> Any:
    return None if closure is None else closure()


def _arguments(module: pl.LightningModule, batch: Any, batch_idx: int) -> list[Any]:
    """Return what a module's `training_step` takes: not all take the batch's number."""
    given = [batch, batch_idx]
    names = [p for p in inspect.signature(module.training_step).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return given if any(p.kind is p.VAR_POSITIONAL for p in names) else given[: len(names)]


def _check_strategy(trainer: pl.Trainer) -> None:
    """Raise `UnsupportedModelError` for a strategy that plans can't go with."""
    name = type(trainer.strategy).__name__
    if name not in _STRATEGIES:
        raise UnsupportedModelError(
            f"plans don't know the bytes of Lightning's {name}; use strategy='auto' on one device, or 'ddp'"
        )
    if name == "DDPStrategy":
        say("ckptplan: the buckets in which DDP reduces gradients aren't in the plan; leave room in the budget")
