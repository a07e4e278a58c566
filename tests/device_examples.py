"""Device descriptions that tests work with."""

from __future__ import annotations

import re
from pathlib import Path

from ckptplan.core.device import Device

ROOT = Path(__file__).parent.parent
FORMATS = ROOT / "docs" / "formats.md"

SIMPLE = Device(
    name="simple",
    description="round numbers",
    memory_bytes=1 << 30,
    context_bytes=0,
    bytes_per_s=1e9,
    flops_per_s={"float32": 1e10, "tf32": 8e10, "float16": 1e11, "float64": 1e9},
    out_bytes_per_s=1e8,
    in_bytes_per_s=1e8,
    launch_s=1e-6,
    compute_capability=(8, 0),
)


def example() -> str:
    found = re.search(r"<!-- example: device -->\n```json\n(.*?)```", FORMATS.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]
