"""An activation checkpointing policy for torchtitan, which plans the memory of its trainings.

    activation_checkpoint=CkptPlanAC.Config(budget="60GiB", plan_file="plan.json", options={"optimizer": "adamw"})

The plan is made by the first training forward, of the sharded model, for its batch. The file is written then, and where
it exists already, its plan is applied and none is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from ckptplan.core.budget import Budget
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.plan import Plan
from ckptplan.core.units import format_bytes
from ckptplan.planning.applying import apply
from ckptplan.planning.first_forward import FirstForward
from ckptplan.planning.log import is_first_rank


class CkptPlanAC(ActivationCheckpointing):  # type: ignore[misc]  # torchtitan has no types
    """Plans a model, or applies the plan in a file, at its first training forward.

    Raises
    ------
    InvalidInputError
        If the file can't be read, or an option can't be used. That comes of `apply`; what planning raises, as
        `InfeasibleBudgetError`, and `PlanMismatchError` for a file of another model, of the first forward.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        """What to plan for.

        The fields of torchtitan's base class keep their defaults: random numbers are always put back.
        """

        plan_file: str = ""
        """Plan to apply; where there is no such file, the first rank writes the new plan there."""
        budget: str = ""
        """As in `ckptplan.solve`, such as "60GiB" or "50%"; by default what the device has free."""
        options: dict[str, Any] = field(default_factory=dict)
        """Further options of `ckptplan.apply`. The optimizer is known by its name alone: `{"optimizer": "adamw"}`."""

    def apply(self, model: nn.Module) -> None:
        """Have the first training forward of `model`, which may be on the meta device now, plan it."""
        config = self.config
        for known in fields(ActivationCheckpointing.Config):
            if getattr(config, known.name) != known.default:
                raise InvalidInputError(
                    f"{known.name}={getattr(config, known.name)!r} is for torchtitan's own checkpointing; leave it out"
                )
        file = Path(config.plan_file)
        if config.plan_file and file.exists():
            plan, wanted = Plan.load(file), Budget.of(None, config.budget or None).nbytes
            if wanted is not None and plan.counted_bytes > wanted:
                raise InvalidInputError(
                    f"the plan in {file} needs {format_bytes(plan.counted_bytes)}, and budget={config.budget!r}; "
                    "delete the file to plan anew"
                )
            FirstForward(model, lambda inputs: apply(model, plan, inputs=inputs, **config.options))
            return
        handle = apply(model, budget=config.budget or None, **config.options)
        if config.plan_file and is_first_rank():

            def save(*_: Any) -> None:
                if isinstance(handle, FirstForward) and handle.is_made:
                    hook.remove()
                    handle.plan.save(file)

            hook = model.register_forward_hook(save)
