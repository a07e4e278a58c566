"""The JSON files under `experiments/results/`: what was run, where, and what came out."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import ckptplan

os.environ["CKPTPLAN_CACHE"] = "off"  # what is measured is measured now


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
