"""A folder of results: one JSON file each, written when it exists, found again by the next run. No torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OURS = "ckptplan"
ROOT = Path(__file__).resolve().parent.parent.parent


class OutOfTime(Exception):
    """The command's time is up."""


class Skipped(Exception):
    """There is nothing to measure here; the message says why."""


def slug(name: str) -> str:
    """A rival's or a budget's name as a part of a file's."""
    return name.replace("/", "-")


class Results:
    """`<folder>/<part>/<part>/<name>.json`, each a dictionary with a "status".

    "ok"; "skipped" (a reason); "oom" and "failed" (an error); "running": begun, and cut off if no process works on it.

    Parameters
    ----------
    folder : Path
    again : bool
        Run what failed or ran out of memory once more.
    deadline : float
        Seconds of `time.time()` after which nothing is begun.
    """

    def __init__(self, folder: Path, *, again: bool = False, deadline: float = math.inf) -> None:
        self.folder, self.again, self.deadline = folder, again, deadline

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def file(self, part: str, name: str) -> Path:
        """A file beside the results of `part`, in a folder that is there."""
        path = self.folder / part / "files" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def read(self, key: str) -> dict[str, Any] | None:
        path = self.path(key)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def ok(self, key: str) -> dict[str, Any] | None:
        """The result, if there is one that succeeded."""
        found = self.read(key)
        return found if found is not None and found["status"] == "ok" else None

    def done(self, key: str) -> bool:
        """Whether a run that goes on where another stopped would skip it."""
        found = self.read(key)
        if found is None or found["status"] == "running":
            return False
        return not (self.again and found["status"] in ("failed", "oom"))

    def under(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names and results in a folder, by name."""
        for path in sorted((self.folder / prefix).glob("*.json")):
            yield path.stem, json.loads(path.read_text(encoding="utf-8"))

    def close_running(self, error: str | None) -> None:
        """What was begun and isn't finished failed with `error`; None: its time was up, and it is begun anew."""
        for path in self.folder.rglob("*.json"):
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("status") != "running":
                continue
            if error is None:
                path.unlink()
            else:
                self.write(
                    str(path.relative_to(self.folder).with_suffix("")), {**data, "status": "failed", "error": error}
                )

    def write(self, key: str, data: dict[str, Any]) -> None:
        """Replace the file as a whole."""
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(data, file, indent=1, default=str)
            file.write("\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)

    def run(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Measure, unless the result is there; a failure is a result. Returns it if it succeeded."""
        if self.done(key):
            return self.ok(key)
        if time.time() > self.deadline:
            raise OutOfTime
        # Should the process die in it, it is known what it died in.
        self.write(key, {"status": "running", "error": "begun and not finished"})
        began = time.perf_counter()
        try:
            result = {"status": "ok", **measure()}
        except Skipped as reason:
            result = {"status": "skipped", "error": str(reason)}
        except Exception as error:  # whatever stops it, the others go on
            status = "oom" if type(error).__name__ == "OutOfMemoryError" else "failed"
            tail = "".join(traceback.format_exception(error)[-6:])
            result = {"status": status, "error": f"{type(error).__name__}: {error}"[:2000], "traceback": tail[-4000:]}
        self.write(key, {**result, "seconds": time.perf_counter() - began, "sources": sources()})
        if result.get("error", "").startswith("AcceleratorError"):  # the device is lost to this process
            raise SystemExit(f"{key}: {result['error']}")
        return self.ok(key)


_sources: list[str] = []


def sources() -> str:
    """A digest of the package and of these scripts, so that results of different code can be told apart."""
    if not _sources:
        digest = hashlib.sha256()
        paths = [*(ROOT / "ckptplan").rglob("*.py"), *(ROOT / "experiments" / "gpu").glob("*.py")]
        for path in sorted([*paths, ROOT / "experiments" / "rivals.py"]):
            digest.update(path.read_bytes())
        _sources.append(digest.hexdigest()[:12])
    return _sources[0]
