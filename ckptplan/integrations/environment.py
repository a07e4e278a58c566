"""What a callback is asked for where no code makes it: by variables of the environment."""

from __future__ import annotations

import json
import os
from typing import Any

from ckptplan.core.errors import InvalidInputError

BUDGET, OPTIONS = "CKPTPLAN_BUDGET", "CKPTPLAN_OPTIONS"


def callback_options() -> dict[str, Any] | None:
    """Return the options of a callback; None where no budget is named.

    `$CKPTPLAN_BUDGET` is `budget=`, such as "20GiB", "50%" or "auto". `$CKPTPLAN_OPTIONS` has more in JSON, such as
    `{"offload": "all"}`.

    Raises
    ------
    InvalidInputError
        If the options aren't a JSON object.
    """
    budget = os.environ.get(BUDGET, "").strip()
    if not budget:
        return None
    text = os.environ.get(OPTIONS, "").strip() or "{}"
    try:
        options = json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"${OPTIONS}={text!r} isn't JSON ({error}); give an object: {_EXAMPLE}") from error
    if not isinstance(options, dict):
        raise InvalidInputError(f"${OPTIONS}={text!r} isn't a JSON object; give one: {_EXAMPLE}")
    return {"budget": budget, **options}


_EXAMPLE = '{"offload": "all", "time_limit_s": 30}'
