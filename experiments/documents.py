"""What the experiments share: arguments, processes, tables, and the JSON files under `experiments/results/`.

Importing it makes the helpers of `tests/` importable, and loads neither torch nor transformers, whose memory would
count in that of every process begun from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import ckptplan

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

Check = tuple[bool, str]
"""Whether a promise is kept, and what it is."""
LONGEST = 300
"""Characters of an error in a row: some of PyTorch's list all of its kernels."""


# --- arguments ---


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the script's docstring and takes `--out`."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, help="folder for the JSON file")
    return found


def among(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a type of argument: names out of `known`, separated by commas."""

    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; there are {', '.join(known)}")
        return found

    return names


def numbers(text: str) -> list[int]:
    """Type of argument: whole numbers, separated by commas."""
    return [int(part) for part in text.split(",") if part]


def reals(text: str) -> list[float]:
    """Type of argument: numbers, separated by commas."""
    return [float(part) for part in text.split(",") if part]


# --- processes ---


def brief(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST]


def in_a_process(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `call` in a process of its own, or a message of why there is none."""
    ((_, found),) = in_processes(functools.partial(_spread, call), [arguments])
    return found


def _spread(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return call(*arguments)


def in_processes(
    call: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    jobs: int = 1,
    time_limit_s: float = math.inf,
    method: str = "spawn",
) -> Iterator[tuple[Any, Any]]:
    """Each item with its result, or a message of why there is none, as they end.

    Each has a process of its own, `jobs` at a time; items are taken as they are needed. By `method="fork"` processes
    start with the modules that are loaded here.
    """
    context: Any = get_context(method)
    left, running = iter(items), dict[Any, tuple[Any, Any, float]]()
    while True:
        for item in itertools.islice(left, jobs - len(running)):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(there, call, item))
            process.start()
            there.close()
            running[here] = process, item, time.monotonic() + time_limit_s
        if not running:
            return
        ready = wait(running, timeout=1.0)
        for here in [c for c, (_, _, until) in running.items() if c in ready or time.monotonic() > until]:
            process, item, _ = running.pop(here)
            try:
                found = here.recv() if here in ready else f"no result after {time_limit_s:.0f} s"
            except EOFError:
                found = "the process died"
            process.kill()
            process.join()
            yield item, found


def _send(there: Any, call: Callable[[Any], Any], item: Any) -> None:
    there.send(call(item))


# --- what comes out ---


def command() -> str:
    """What was typed to get here."""
    return " ".join(["python", *sys.argv])


def commit() -> str:
    """The commit of the code that runs, with "-dirty" if it was changed since; empty outside of a repository."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("diff", "--name-only", "HEAD", "--", ":/ckptplan", ":/experiments/*.py")
        return git("rev-parse", "--short=8", "HEAD") + "-dirty" * bool(changed)
    except OSError:  # there is no git
        return ""


def environment(threads: int = 1) -> dict[str, Any]:
    """The commit and versions, the machine's size and how busy it is."""
    return {
        "commit": commit(), "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "ortools")},
        "ckptplan": ckptplan.__version__, "cpus": os.cpu_count(), "threads": threads,
        "load_average": os.getloadavg(),
    }  # fmt: skip


def write(document: dict[str, Any] | list[dict[str, Any]], path: Path) -> None:
    """Write `document`, with today's date if it has a place for it, making its folder where there is none."""
    if isinstance(document, dict):
        document = {"date": time.strftime("%Y-%m-%d"), **document}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def save(out: Path | None, name: str, document: Mapping[str, Any], *, threads: int = 1) -> None:
    """Write `document` with the command and the environment to the file `name` in `out`, if that is given."""
    if out is not None:
        write({"command": command(), "environment": environment(threads), **document}, out / name)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Table:
    """A table; None is a dash."""
    found = Table(*columns, title=title, box=None)
    for row in rows:
        found.add_row(*("–" if cell is None else escape(str(cell)) for cell in row))
    return found


def show(table: Any, width: int = 200) -> None:
    """Print a table, however narrow the terminal is."""
    Console(width=width, highlight=False).print(table)


def told(checks: Sequence[Check]) -> bool:
    """Print each promise; return whether all are kept."""
    for passed, text in checks:
        print(f"{'PASS' if passed else 'FAIL'}  {text}", flush=True)
    return all(passed for passed, _ in checks)


def finish(rows: Sequence[Any], checks: Sequence[Check], table: Any, out: Path | None, name: str, **more: Any) -> None:
    """Print table and promises, write them to the file `name` in `out`, and exit with 1 if a promise is broken."""
    show(table)
    kept = told(checks)
    found = [dataclasses.asdict(row) if dataclasses.is_dataclass(row) else row for row in rows]  # type: ignore[arg-type]
    save(out, name, {**more, "checks": [{"passed": ok, "what": text} for ok, text in checks], "rows": found})
    sys.exit(0 if kept else 1)
