"""A plugin for axolotl, which plans the memory of its trainings.

    plugins:
      - ckptplan.integrations.axolotl.CkptPlanPlugin
    ckptplan:
      budget: 20GiB

`ckptplan:` has the options of `ActivationPlanCallback`; without it the budget is what the device has free.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator
from transformers import Trainer, TrainerCallback

from ckptplan.integrations.transformers import ActivationPlanCallback


class CkptPlanArgs(BaseModel):
    """The plugin's key in axolotl's file, checked when the file is read.

    Attributes
    ----------
    ckptplan : dict, optional
        Options of `ActivationPlanCallback`.
    """

    ckptplan: dict[str, Any] | None = None

    @field_validator("ckptplan")
    @classmethod
    def _can_be_used(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        ActivationPlanCallback(**(options or {}))
        return options


class CkptPlanPlugin(BasePlugin):  # type: ignore[misc]  # axolotl has no types
    """Gives axolotl's trainer an `ActivationPlanCallback`."""

    def get_input_args(self) -> str:
        """Return where the model of the plugin's key is."""
        return f"{__name__}.{CkptPlanArgs.__name__}"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Trainer) -> list[TrainerCallback]:
        """Return the callback, made with the options of `cfg.ckptplan`."""
        return [ActivationPlanCallback(**(cfg.ckptplan or {}))]
