"""Other numbers for the search to go by, for the time of a test."""

from __future__ import annotations

import pytest

from ckptplan.solving import frontier, peak, planner
from ckptplan.solving.parameters import Parameters


def steer(monkeypatch: pytest.MonkeyPatch, **numbers: float) -> None:
    """Let all that plans go by `Parameters` with these numbers."""
    parameters = Parameters(**numbers)  # type: ignore[arg-type]
    for module in (frontier, peak, planner):
        monkeypatch.setattr(module, "DEFAULT", parameters)
