"""The JSON files under `experiments/results/`: what was run, where, and what came out."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import ckptplan


def command() -> str:
    """What was typed to get here."""
    return " ".join(["python", *sys.argv])


def environment(threads: int) -> dict[str, Any]:
    """The versions, the machine's size and how busy it is."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "ckptplan": ckptplan.__version__,
        "cpus": os.cpu_count(),
        "threads": threads,
        "load_average": os.getloadavg(),
    }


def write(document: dict[str, Any] | list[dict[str, Any]], path: Path) -> None:
    """Write `document`, with today's date if it has a place for it, making its folder where there is none."""
    if isinstance(document, dict):
        document = {"date": time.strftime("%Y-%m-%d"), **document}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def finish(
    rows: list[Any], results: list[tuple[bool, str]], table: Any, console: Any, out: Path | None, name: str
) -> None:
    """Print table and promises, write them to the file `name` in `out`, and exit with 1 if a promise is broken."""
    console.print(table)
    for passed, text in results:
        console.print(f"{'PASS' if passed else 'FAIL'}  {text}", soft_wrap=True, highlight=False)
    if out is not None:
        document = {
            "command": command(),
            "environment": environment(1),
            "checks": [{"passed": passed, "what": text} for passed, text in results],
            "rows": [asdict(row) for row in rows],
        }
        write(document, out / name)
    sys.exit(0 if all(passed for passed, _ in results) else 1)
