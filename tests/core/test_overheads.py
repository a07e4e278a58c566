"""What a running plan takes of compute besides the stages' work, and the error of what is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_chains import with_options, with_stages

from ckptplan.core.device import known_devices
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.files import decoded
from ckptplan.core.option import Option
from ckptplan.core.overheads import Overheads
from ckptplan.core.plan import Decision, launch_s
from ckptplan.core.profile import Profile
from ckptplan.core.rules import sweeps_of
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage
from ckptplan.referee import simulate

pytestmark = pytest.mark.planning

SWAP = Option("swap", (0, 1, 2), (), 4, 9, moves=(0, 2))
SIZES = tuple(Storage(f"s{nbytes}", nbytes, 0, 0) for nbytes in (100, 200, 400))


def test_an_option_takes_seconds_for_what_it_saves_and_bytes_for_what_it_moves() -> None:
    overheads = Overheads(call_s=8.0, swap_s=1.0, storage_s=0.5, byte_s=0.01)
    assert overheads.swapping_s(SWAP) == 1.0 + 3 * 0.5
    assert overheads.copies_s(SWAP, SIZES) == pytest.approx(500 * 0.01)
    kept = replace(SWAP, name="keep", moves=())
    assert overheads.swapping_s(kept) == overheads.copies_s(kept, SIZES) == 0
    again = Option("recompute+swap", (0,), (), 4, 9, recompute_s=2.0, recomputes=True, moves=(0,), overhead_s=0.5)
    assert again.added_s == 2.5
    with pytest.raises(InvalidInputError, match=r"launch_s=0\.5 must be 0"):
        Option("keep", (0,), (), 4, 9, launch_s=0.5)


def test_each_run_in_a_sweep_takes_the_overhead_once_more() -> None:
    # Binary fractions, so that sums in any order are the same.
    plain = Profile.from_chain([1.0, 2.0, 4.0, 8.0], [2.0] * 4, [1] * 4, [3] * 4, input_bytes=1)
    stages = tuple(
        replace(stage, rerun_overhead_s=0.5**k, rerun_overhead_launch_s=0.25**k)
        for k, stage in enumerate(plain.stages, 1)
    )
    profile = replace(plain, stages=stages)
    assert [stage.rerun_s for stage in stages] == [1.5, 2.25, 4.125, 8.0625]
    assert [stage.rerun_launch_s for stage in stages] == [0.25, 0.0625, 0.015625, 0.00390625]
    # The outer sweep runs stages 0 to 2, the inner one 0 and 1; the last one of each is recomputed instead.
    segments = (Segment(0, 3, (Segment(0, 2),)),)
    choices = (Decision("recompute", option="recompute"),) * 4
    assert [sweep.seconds for sweep in sweeps_of(profile, segments)] == [1.5 + 2.25 + 4.125, 1.5 + 2.25]
    one, other = (simulate(p, choices, segments).makespan_s for p in (profile, plain))
    assert one - other == 2 * 0.5 + 2 * 0.25 + 0.125
    assert launch_s(profile, choices, segments) == 2 * 0.25 + 2 * 0.0625 + 0.015625
    alone = (Decision("recompute", option="recompute"),) * 4
    assert simulate(profile, alone).makespan_s == simulate(plain, alone).makespan_s
    assert launch_s(profile, alone) == 0


@pytest.mark.parametrize("inner", [(), (Segment(1, 2),)])
def test_what_moves_in_a_segment_takes_what_it_takes_outside(inner: tuple[Segment, ...]) -> None:
    plain = Profile.from_chain(
        [1.0] * 4, [2.0] * 4, [1] * 4, [3] * 4, input_bytes=1, out_bytes_per_s=1e9, in_bytes_per_s=1e9
    )
    more = {"recompute": (0.125, 0.5), "recompute+swap": (0.625, 2.5)}

    def dearer(o: Option) -> Option:
        return replace(o, overhead_s=more[o.name][0], launch_s=more[o.name][1]) if o.name in more else o

    profile = with_stages(plain, lambda stage: with_options(stage, dearer))
    still = (Decision("recompute"),) * 4
    moving = (*still[:1], Decision.moving("recompute", (0,), 2, 3, "recompute+swap"), *still[2:])
    segments = (Segment(1, 3, inner),)
    seconds = [[simulate(p, c, segments).events[-1].end_s for c in (still, moving)] for p in (plain, profile)]
    # Stage 0, and the last stage of each segment, are recomputed in their backward.
    assert seconds[1][0] - seconds[0][0] == pytest.approx((2 + len(inner)) * 0.125)
    assert seconds[1][1] - seconds[0][1] == pytest.approx((2 + len(inner)) * 0.125 + 0.5)
    assert launch_s(profile, moving, segments) - launch_s(profile, still, segments) == pytest.approx(2.0)


def test_only_stages_that_sweeps_run_have_their_overhead() -> None:
    glue = Stage("(glue)", "glue", (Option("keep", (), (), 0, 0),), 3.0, 1.0, forward_launch_s=2.0)
    assert glue.rerun_s == glue.rerun_launch_s == 0
    for field in ("rerun_overhead_s", "rerun_overhead_launch_s"):
        for stage in (glue, replace(glue, name="only kept")):
            with pytest.raises(InvalidInputError, match=f"{field}=0.5.*must be 0 without an option 'recompute'"):
                replace(stage, **{field: 0.5})


def test_devices_say_what_a_run_in_a_sweep_takes() -> None:
    assert decoded(Overheads, {"byte_s": 1e-12}) == Overheads(byte_s=1e-12, rerun_s=0.0)  # a file from before it
    for device in known_devices().values():
        measured = device.name.endswith("-measured")
        assert (device.overheads.rerun_s > 0) == measured
        assert ("measured" if measured else "rerun_s: 0") in device.sources["overheads"]


def test_a_profile_says_its_error() -> None:
    profile = Profile.from_chain([1.0], [2.0], [1], [1], input_bytes=1)
    assert profile.step_error == 0
    assert "±" not in str(profile)
    assert "± 1.2%" in str(replace(profile, step_error=0.012))
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(InvalidInputError, match="step_error"):
            replace(profile, step_error=wrong)
