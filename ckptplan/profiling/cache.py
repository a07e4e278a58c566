"""Profiles in the user's cache folder, under keys of all that they depend on (cache_key.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.profile import Profile

VARIABLE = "CKPTPLAN_CACHE"
"""Environment variable with the folder, or "off"."""
MOST_BYTES = 256 << 20
"""Limit on all files together; the profiles unused for longest are removed."""


def folder() -> Path | None:
    """Return the folder: `CKPTPLAN_CACHE`, or `ckptplan` in the user's cache folder; None if the variable is "off"."""
    named = os.environ.get(VARIABLE)
    if named:
        return None if named.lower() == "off" else Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckptplan"


def find(key: str, path_of: Callable[[], str] | None = None) -> Profile | None:
    """Return the profile under `key`, with a note that says when it was measured; None if there is none.

    Parameters
    ----------
    path_of : callable, optional
        Returns the path that the step takes; called if there are profiles for single paths under the key.
    """
    where = folder()
    if where is None:
        return None
    if path_of is not None and next(where.glob(f"{key}-*.json"), None) is not None:
        key = _name(key, path_of())
    path = where / f"{key}.json"
    try:
        measured = path.stat().st_mtime
        profile = Profile.load(path)
        os.utime(path, (time.time(), measured))  # the first is when it was used
    except (OSError, InvalidInputError):
        return None
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(measured))
    return dataclasses.replace(profile, notes=(f"from the cache, measured on {when}", *profile.notes))


def put(key: str, profile: Profile, path: str = "") -> None:
    """Store a profile, for one path of the step's if one is given; no effect where the folder can't be written to."""
    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=where) as beside:  # renamed, so that no process reads half a file
            profile.save(Path(beside) / "profile.json")
            os.replace(Path(beside) / "profile.json", where / f"{_name(key, path)}.json")
        _shrink(where)


def _name(key: str, path: str) -> str:
    return f"{key}-{path}" if path else key


def _shrink(where: Path) -> None:
    found = sorted(((path.stat(), path) for path in where.glob("*.json")), key=lambda item: item[0].st_atime)
    total = sum(stat.st_size for stat, _ in found)
    for stat, path in found:
        if total <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= stat.st_size
