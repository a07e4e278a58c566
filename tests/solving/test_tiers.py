"""Three tiers: what goes to the disk and how long that takes; and swaps that gain nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Run
from exactly import LONG_S, NO_RECOMPUTE, Limits, check, solve_profile
from random_chains import random_chain, with_disk

import ckptplan
from ckptplan.core.errors import InfeasibleBudgetError, InvalidInputError
from ckptplan.core.link import STAGING_BYTES, Link
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.schedule import StepNeed, evaluate
from ckptplan.core.units import GIB, format_swapped
from ckptplan.planning.job import staged
from ckptplan.referee import simulate, validate
from ckptplan.solving import smallest_peak
from ckptplan.solving.frontier import frontier_profile, smallest_within
from ckptplan.solving.incumbent import AT_THE_HOSTS_RATE

pytestmark = pytest.mark.planning


def tight_chain() -> Profile:
    """Six stages that save 10 bytes each, no room for them, links as fast as a stage's forward, a disk half as fast."""
    return Profile.from_chain(
        [1.0] * 6, [1.0] * 6, [2] * 6, [10] * 6, input_bytes=2, out_bytes_per_s=10.0, in_bytes_per_s=10.0,
        disk_out_bytes_per_s=5.0, disk_in_bytes_per_s=4.0,
    )  # fmt: skip


def test_violations_of_tiers() -> None:
    profile = tight_chain()
    host, disk = 10, 1000
    budget = smallest_peak(profile, Limits(actions=NO_RECOMPUTE, host_bytes=host, disk_bytes=disk)).peak_bytes
    plan = solve_profile(profile, budget, Limits(actions=NO_RECOMPUTE, host_bytes=host, disk_bytes=disk))
    assert 0 < plan.host_bytes <= host
    assert plan.disk_bytes > 0

    def kinds(profile: Profile, plan: Plan, host: int | None, disk: int | None) -> list[str]:
        return [v.kind for v in validate(profile, plan, budget, host_bytes=host, disk_bytes=disk)]

    assert kinds(profile, plan, host, disk) == []
    assert kinds(profile, plan, None, plan.disk_bytes) == []
    assert kinds(profile, plan, plan.host_bytes - 1, disk) == ["host budget"]
    assert kinds(profile, plan, host, plan.disk_bytes - 1) == ["disk budget"]
    assert kinds(profile, plan, host, None) == kinds(profile, plan, host, 0) == ["disk budget"]
    assert kinds(profile, replace(plan, disk_bytes=plan.disk_bytes + 1), host, disk) == ["prediction"]
    gone = kinds(replace(profile, disk=None), plan, host, disk)
    assert gone
    assert set(gone) == {"tier"}
    with pytest.raises(InvalidInputError, match="the profile has no disk tier"):
        simulate(replace(profile, disk=None), plan)
    at_host = replace(plan, choices=tuple(replace(c, tier="host") for c in plan.choices))
    assert set(kinds(profile, at_host, host, disk)) == {"host budget", "prediction"}


def test_a_disk_makes_smaller_peaks_possible() -> None:
    profile = tight_chain()
    limits = {"actions": NO_RECOMPUTE, "host_bytes": 10}
    alone = smallest_peak(profile, Limits(**limits)).peak_bytes
    both = smallest_peak(profile, Limits(disk_bytes=1000, **limits)).peak_bytes
    assert both < alone
    with pytest.raises(InfeasibleBudgetError):
        solve_profile(profile, alone - 1, Limits(**limits))
    assert solve_profile(profile, alone - 1, Limits(disk_bytes=1000, **limits)).disk_bytes > 0
    whole = Limits(disk_bytes=1000, time_limit_s=LONG_S, **limits)
    plans = frontier_profile(profile, points=3, limits=whole)
    for plan in (*plans, smallest_within(profile, plans[0].overhead, whole)):
        check(profile, plan, plan.budget_bytes, 10, 1000)
    assert plans[0].peak_bytes == plan.peak_bytes == both
    assert plans[0].disk_bytes > 0
    assert "to host or disk" in plan.space


# ---- Swaps that gain nothing (checklist 24)


def leaner_choices(profile: Profile, plan: Plan) -> list[tuple[str, str]]:
    """Stages that swap and could keep, or do the same and move less, as fast and within the budget; by the referee."""
    names = [choice.option for choice in plan.choices]
    on_disk = [i for i, choice in enumerate(plan.choices) if choice.tier == "disk"]
    inside = {i for s in plan.segments for i in range(s.first, s.last + 1)}
    found = []
    for i, (stage, choice) in enumerate(zip(profile.stages, plan.choices, strict=True)):
        now = stage.option(choice.option)
        if not now.moves:
            continue
        for other in stage.options:
            plain = other.name == "keep" and i not in inside
            same = (other.recomputes, other.ops) == (now.recomputes, now.ops) and set(other.moved) < set(now.moved)
            allowed = i not in inside or other.name in ("recompute", "recompute+swap")
            if not (plain or (same and allowed)):
                continue
            options = [s.option(other.name if k == i else names[k]) for k, s in enumerate(profile.stages)]
            scheduled = evaluate(profile, options, plan.budget_bytes, plan.segments)
            if isinstance(scheduled, StepNeed):
                continue
            timeline = simulate(profile, scheduled.decisions(on_disk), plan.segments)
            assert timeline.peak_bytes <= plan.budget_bytes
            if timeline.host_bytes <= plan.host_bytes and timeline.makespan_s <= plan.step_s * (1 + 1e-12):
                found.append((stage.name, other.name))
    return found


@pytest.mark.usefixtures("short_search")
def test_no_swap_gains_nothing() -> None:
    """Chains of all kinds, however little time there was: no swap can be a keep, or a smaller one, and as fast."""
    swaps = 0
    for seed in range(12):
        rng = random.Random(seed)
        cut = seed % 3 > 0  # what is found then is up to the machine
        profile = with_disk(rng, random_chain(seed, 4 + seed % 9 if cut else 3 + seed % 4))
        host, disk = (None, None) if seed % 2 else (20, 1000)
        least = smallest_peak(profile, Limits(host_bytes=host, disk_bytes=disk, time_limit_s=0.2 if cut else LONG_S))
        budget = least.peak_bytes + rng.randint(0, 40)
        limit_s = 0.02 if cut else LONG_S
        plan = solve_profile(profile, budget, Limits(host_bytes=host, disk_bytes=disk, time_limit_s=limit_s))
        check(profile, plan, budget, host, disk)
        assert leaner_choices(profile, plan) == [], seed
        if not cut:
            swaps += sum(bool(choice.moves) for choice in plan.choices)
    assert swaps


# ---- The interface


def test_a_disk_no_faster_than_the_link() -> None:
    link = Link(10.0, 10.0, 0.1)
    for disk in (Link(11.0, 5.0, 0.1), Link(5.0, 11.0, 0.1), Link(5.0, 5.0, 0.0)):
        with pytest.raises(InvalidInputError, match="faster than"):
            replace(tight_chain(), link=link, disk=disk)
        assert replace(tight_chain(), link=link, disk=disk.behind(link)).disk == disk.behind(link)
    for one in ({"disk_out_bytes_per_s": 1.0}, {"disk_in_bytes_per_s": 1.0}):
        with pytest.raises(InvalidInputError, match="needs both"):
            Profile.from_chain([1.0], [1.0], [1], [1], input_bytes=0, **one)


def test_limits_that_cannot_be_used() -> None:
    profile = tight_chain()
    without = replace(profile, disk=None)
    for solve in (
        lambda: ckptplan.solve(without, 1.0, host_gb=1.0, disk_gb=1.0),
        lambda: ckptplan.frontier(without, host_gb=1.0, disk_gb=1.0),
        lambda: solve_profile(without, 1000, Limits(host_bytes=10, disk_bytes=10)),
        lambda: smallest_peak(without, Limits(host_bytes=10, disk_bytes=10)),
    ):
        with pytest.raises(InvalidInputError, match=r"no disk tier.*swap_dir=.*host_gb=.*disk=Link"):
            solve()
    with pytest.raises(InvalidInputError, match="without host_gb"):
        ckptplan.solve(profile, 1.0, disk_gb=1.0)
    with pytest.raises(InvalidInputError, match="disk_gb"):
        ckptplan.solve(profile, 1.0, host_gb=1.0, disk_gb=-1.0)
    with pytest.raises(InvalidInputError, match="disk_bytes=-1 must be"):
        solve_profile(profile, 1000, Limits(host_bytes=1, disk_bytes=-1))


def test_staging_buffers_count_against_the_host() -> None:
    assert staged(Limits(host_bytes=STAGING_BYTES + 70, disk_bytes=1)).host_bytes == 70
    with pytest.raises(InvalidInputError, match="raise host_gb"):
        staged(Limits(host_bytes=STAGING_BYTES - 1, disk_bytes=1))
    small = tight_chain()
    scaled = tuple(replace(s, nbytes=s.nbytes << 20) for s in small.storages)
    profile = replace(small, storages=scaled, fingerprint=replace(small.fingerprint, device="NVIDIA H100"))
    host_gb = (STAGING_BYTES + (10 << 20)) / GIB
    budget = smallest_peak(profile, Limits(actions=NO_RECOMPUTE)).peak_bytes / GIB
    plan = ckptplan.solve(profile, budget, actions=NO_RECOMPUTE, host_gb=host_gb, disk_gb=1.0)
    assert 0 < plan.host_bytes <= 10 << 20
    assert plan.disk_bytes > 0
    on_cpu = replace(profile, fingerprint=small.fingerprint)
    more = ckptplan.solve(on_cpu, budget, actions=NO_RECOMPUTE, host_gb=host_gb, disk_gb=1.0)
    assert more.disk_bytes == 0


def test_the_command_line_says_what_goes_to_the_disk(tmp_path: Path, run: Run) -> None:
    small = tight_chain()
    profile = replace(small, storages=tuple(replace(s, nbytes=s.nbytes << 20) for s in small.storages))
    profile_file, plan_file = tmp_path / "profile.json", tmp_path / "plan.json"
    profile.save(profile_file)
    budget = smallest_peak(profile, Limits(actions=NO_RECOMPUTE)).peak_bytes / GIB
    limits = ("--host-gb", (10 << 20) / GIB, "--disk-gb", 1, "--actions", "keep,swap")
    done = run("solve", profile_file, "--budget-gb", budget, *limits, "-o", plan_file)
    assert done.exit_code == 0, done.output
    plan = Plan.load(plan_file)
    assert plan.notes == (AT_THE_HOSTS_RATE,)
    told = format_swapped(plan.host_bytes, plan.disk_bytes)
    assert told.endswith("to disk")
    for text in (AT_THE_HOSTS_RATE, "to the disk", "swap to disk"):
        assert text in done.output
    for command, text in (("simulate", told), ("explain", "the disk's copies count at the rate of the host's link")):
        assert text in run(command, profile_file, plan_file).output
    assert "to disk" in run("frontier", profile_file, "--points", 2, "--time-limit", 2, *limits).output
