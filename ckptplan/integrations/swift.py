"""A callback for ms-swift, by the name `ckptplan`.

    CKPTPLAN_BUDGET=20GiB swift sft ... --external_plugins FILE --callbacks ckptplan

FILE is this one: `python -c "import importlib.util as u; print(u.find_spec('ckptplan.integrations.swift').origin)"`.
Budget and options are the environment's (`environment.py`); without them the budget is what the device has free.
"""

from __future__ import annotations

from typing import Any

from swift.callbacks import TrainerCallback, callbacks_map

from ckptplan.integrations.environment import callback_options
from ckptplan.integrations.transformers import ActivationPlanCallback


class CkptPlanCallback(ActivationPlanCallback, TrainerCallback):  # type: ignore[misc]  # ms-swift has no types
    """An `ActivationPlanCallback` as ms-swift makes its callbacks.

    Parameters
    ----------
    args : TrainingArguments
    trainer : Trainer
        The one that calls it.
    """

    def __init__(self, args: Any, trainer: Any) -> None:
        TrainerCallback.__init__(self, args, trainer)
        ActivationPlanCallback.__init__(self, **callback_options())


callbacks_map["ckptplan"] = CkptPlanCallback
