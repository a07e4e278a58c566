"""Puts PyTorch out of reach: from the import of this module on, `import torch` fails as if it weren't installed.

For tests that prove what works without it, and for `pytest -m planning`, which would lose ten seconds to importing it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _NoTorch(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


if "torch" in sys.modules:
    raise ImportError("torch is imported already; import no_torch first")
sys.meta_path.insert(0, _NoTorch())
