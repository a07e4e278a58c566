from __future__ import annotations

import sys
from collections.abc import Callable


def calls_in(run: Callable[[], object]) -> int:
    """Calls and returns while `run` runs, those of built-in functions and steps of generators included.

    What a busy machine can't add to, in place of seconds.
    """
    count = 0

    def counting(*_: object) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(counting)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
