"""An activation checkpointing policy for torchtitan, which plans the memory of its trainings.

    activation_checkpoint=CkptPlanAC.Config(budget="60GiB", optimizer="adamw")

The plan is made by the first training forward, of the sharded model, for its batch. In one process, `plan_file` keeps
it for later runs of the same request.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from ckptplan.core.errors import InvalidInputError
from ckptplan.integrations.training import PlanningCallback
from ckptplan.planning.enlarging import inside_forward
from ckptplan.planning.first_forward import FirstForward
from ckptplan.runtime.handle import Handle
from ckptplan.tensors.storages import tensors_in


class CkptPlanAC(ActivationCheckpointing):  # type: ignore[misc]  # torchtitan has no types
    """Plans a model at its first training forward.

    Raises
    ------
    InvalidInputError
        If the file can't be read, or an option can't be used: raised by `apply`. Errors of planning, such as
        `InfeasibleBudgetError`, are raised by the first forward.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        """Settings of the plan.

        The fields of torchtitan's base class keep their defaults: random numbers are always put back.
        """

        budget: str = ""
        """As in `ckptplan.solve`, such as "60GiB" or "50%"; by default what the device has free."""
        plan_file: str = ""
        """As in `ckptplan.solve`, in one process: the file's plan is taken if it was made for the same request."""
        optimizer: str = ""
        """Name of the optimizer, whose state the plan counts, such as "adamw"."""
        accumulate: bool = False
        """Whether several batches add to the gradients before an update."""
        options: dict[str, Any] = field(default_factory=dict)
        """Further options, as of the callbacks: `{"offload": "optimizer", "time_limit_s": 30}`."""

    def apply(self, model: nn.Module) -> None:
        """Have the first training forward of `model`, which may be on the meta device now, plan it."""
        config = self.config
        for known in fields(ActivationCheckpointing.Config):
            if getattr(config, known.name) != known.default:
                raise InvalidInputError(
                    f"{known.name}={getattr(config, known.name)!r} is for torchtitan's own checkpointing; leave it out"
                )
        options = {"budget": config.budget or None, "plan_file": config.plan_file or None, **config.options}
        callback = PlanningCallback(**options)

        def planned(inputs: Any) -> Handle:
            training: dict[str, Any] = {"optimizer": config.optimizer or None, "accumulate": config.accumulate}
            of = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(inputs)]
            with inside_forward(model, None) as amp:
                return callback.begin(
                    model, inputs=inputs, amp=amp, of=f"{of}, accumulate={config.accumulate}", **training
                )

        FirstForward(model, planned)
