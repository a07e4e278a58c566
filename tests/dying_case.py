"""A case of experiments/gpu whose process is killed in the middle."""

from __future__ import annotations

import os
import signal
from typing import Any


def run(case: Any, options: Any) -> None:
    def die() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    options.results.run("first", lambda: {})
    options.results.run("second", die)
    options.results.run("third", lambda: {})
