"""What a training of one rank showed with a plan and without one, and what it has to show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptplan.core.plan import Plan
from ckptplan.runtime.observe.stats import Stats
from ckptplan.runtime.verify import Verification


def outcome(
    plan: Plan,
    found: tuple[list[Any], int],
    plain: tuple[list[Any], int],
    *,
    stats: Stats,
    verified: Verification,
    unchanged: bool,
) -> dict[str, Any]:
    """Return the results of a rank, which another process checks; `found` and `plain`: losses and state, peak."""
    return {
        "equal": all(map(torch.equal, found[0], plain[0])), "unchanged": unchanged,
        "peak": found[1], "plain": plain[1], "predicted": plan.peak_bytes, "budget": plan.budget_bytes,
        "acts": stats.recomputed_stages + stats.swapped_out_bytes, "verified": verified.measured.requested_bytes,
        "gradients_equal": verified.gradients_equal,
    }  # fmt: skip


def check(found: dict[str, Any]) -> None:
    """Check the same bits, within the budget, as predicted."""
    assert found["equal"]
    assert found["unchanged"]
    assert found["acts"]
    assert found["peak"] <= found["budget"] < found["plain"]
    assert found["peak"] == pytest.approx(found["predicted"], rel=0.03)
    assert found["gradients_equal"]
