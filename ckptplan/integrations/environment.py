"""Options of a callback from environment variables, for trainings whose code makes no callback."""

from __future__ import annotations

import json
import os
from typing import Any

from ckptplan.core.errors import InvalidInputError

BUDGET, OPTIONS = "CKPTPLAN_BUDGET", "CKPTPLAN_OPTIONS"
_EXAMPLE = '{"offload": "all", "time_limit_s": 30}'


def callback_options() -> dict[str, Any]:
    """Return the options of a callback that the environment names.

    `$CKPTPLAN_BUDGET` is `budget=`, such as "20GiB", "50%" or "auto". `$CKPTPLAN_OPTIONS` has more in JSON, such as
    `{"offload": "all"}`.

    Raises
    ------
    InvalidInputError
        If the options aren't a JSON object.
    """
    text = os.environ.get(OPTIONS, "").strip() or "{}"
    try:
        options = json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"${OPTIONS}={text!r} isn't JSON ({error}); give an object: {_EXAMPLE}") from error
    if not isinstance(options, dict):
        raise InvalidInputError(f"${OPTIONS}={text!r} isn't a JSON object; give one: {_EXAMPLE}")
    budget = os.environ.get(BUDGET, "").strip()
    return {**options, "budget": budget} if budget else options


def lightning_callbacks() -> list[Any]:
    """Return the callback that every Lightning `Trainer` gets if `$CKPTPLAN_BUDGET` is set; otherwise none.

    The entry point `lightning.pytorch.callbacks_factory` names this function.
    """
    if not os.environ.get(BUDGET, "").strip():
        return []
    from ckptplan.integrations.lightning import AskedFor  # only now: an error of its imports would end any training

    return [AskedFor(**callback_options())]
