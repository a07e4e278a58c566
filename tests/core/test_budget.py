"""Budgets in words, the range in which a budget makes a difference, and plans of other profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ckptplan
from ckptplan.core.budget import AUTO_MARGIN, Budget
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError, PlanMismatchError
from ckptplan.core.measured import DeviceBytes
from ckptplan.core.plan import KEEP
from ckptplan.core.profile import Profile
from ckptplan.core.request import Limits
from ckptplan.core.units import GIB
from ckptplan.planning.job import Job
from ckptplan.referee import simulate

pytestmark = pytest.mark.planning


def chain(mib: int = 4) -> Profile:
    rates = {"out_bytes_per_s": 1e9, "in_bytes_per_s": 1e9}
    return Profile.from_chain([0.01] * 5, [0.02] * 5, [1 << 20] * 5, [mib << 20] * 5, input_bytes=1 << 20, **rates)


@pytest.mark.parametrize(
    ("budget_gb", "budget", "found"),
    [
        (12, None, Budget(12 * GIB)),
        (None, None, Budget()),
        (None, "12 GiB", Budget(12 * GIB)),
        (None, "1.5GB", Budget(1_500_000_000)),
        (None, " 800 mib ", Budget(800 << 20)),
        (None, "50%", Budget(share=0.5)),
        (None, "0 %", Budget(share=0.0)),
        (None, "auto", Budget(margin=AUTO_MARGIN)),
    ],
)
def test_budgets_in_words(budget_gb: float | None, budget: str | None, found: Budget) -> None:
    assert Budget.of(budget_gb, budget) == found


def test_a_budget_is_given_once_and_can_be_read() -> None:
    with pytest.raises(InvalidInputError, match=r"budget_gb=1 and budget='1 GiB' are both given"):
        ckptplan.solve(chain(), 1, budget="1 GiB")
    with pytest.raises(InvalidInputError, match=r"budget='50%' and max_overhead=0\.1 are both given"):
        ckptplan.solve(chain(), budget="50%", max_overhead=0.1)
    with pytest.raises(InvalidInputError, match="a profile doesn't record free memory"):
        ckptplan.solve(chain(), budget="auto")
    for budget in ("12", "12 G", "-1 GiB", "101%", "", "0 GiB", "1e9 B", 12):
        with pytest.raises(InvalidInputError, match=r"can't be read; give bytes as '12 GiB'"):
            Budget.of(None, budget)  # type: ignore[arg-type]


def test_a_share_of_the_way_from_the_smallest_peak_to_everything_kept() -> None:
    profile = chain()
    most = simulate(profile, (KEEP,) * 5).peak_bytes
    least = ckptplan.solve(profile, budget="0%")
    assert least.budget_bytes == least.peak_bytes < most
    assert ckptplan.solve(profile, budget="100%").budget_bytes == most
    half = ckptplan.solve(profile, budget="50%")
    assert half.budget_bytes == least.peak_bytes + (most - least.peak_bytes) // 2
    assert half.peak_bytes <= half.budget_bytes
    assert (half.least_peak_bytes, half.most_peak_bytes) == (least.peak_bytes, most)
    kept = str(ckptplan.solve(profile, 12))
    for text in (kept, str(half)):
        assert "the smallest peak found, to" in text
        assert ("this plan keeps everything: nothing to gain" in text) == (text is kept)
    assert repr(profile) == "<Profile: 5 stages, 10 storages, 150.0 ms a step>"
    assert len(repr(half)) < 120
    assert str(ckptplan.explain(profile, half))
    with pytest.raises(PlanMismatchError, match="made from another profile of this model"):
        ckptplan.explain(chain(5), half)


def test_a_share_of_a_way_that_is_found_once_alone() -> None:
    """A search that ends with its time doesn't find every peak that another one finds."""
    profile = chain()
    least = ckptplan.solve(profile, budget="0%").peak_bytes
    job = Job(profile, Limits(time_limit_s=1.0))
    assert job.needed_range_bytes((least - 1, 2 * least)) == (least - 1, 2 * least)
    replayed = replace(job, replayed=lambda plan: DeviceBytes(plan.peak_bytes, plan.peak_bytes, plan.peak_bytes + 7))
    assert replayed.needed_range_bytes((least - 1, 2 * least))[0] == least + 7


@pytest.mark.long
def test_a_share_is_solved_for_though_no_search_finds_the_smallest_peak_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(chain(), Limits(time_limit_s=1.0))
    least, most = job.range_bytes(1.0)
    monkeypatch.setattr(Job, "range_bytes", lambda self, time_limit_s: (least - 2, most))
    plan = job.solved_share(0.0)
    assert (plan.budget_bytes, plan.budget_share, plan.least_peak_bytes) == (least, 0.0, least - 2)
    assert job.solved_share(0.5, least).budget_bytes == least
    with pytest.raises(InfeasibleBudgetError):
        job.solved_share(0.0, least - 3)
    with pytest.raises(InfeasibleBudgetError):
        job.solved_share(0.0, least - 1)  # nor is it raised beyond
