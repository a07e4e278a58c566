"""Functions of higher layers that methods of plain data call; loaded then, as the package's public names are."""

from __future__ import annotations

import importlib
from typing import Any


def late(module: str, name: str) -> Any:
    """Return what `ckptplan.<module>` calls `name`."""
    return getattr(importlib.import_module(f"ckptplan.{module}"), name)
