"""What a running plan takes of compute besides the stages' work, and the error of what is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.option import Option
from ckptplan.core.overheads import Overheads
from ckptplan.core.profile import Profile
from ckptplan.core.storage import Storage

pytestmark = pytest.mark.planning

SWAP = Option("swap", (0, 1, 2), (), 4, 9, moves=(0, 2))
SIZES = tuple(Storage(f"s{nbytes}", nbytes, 0, 0) for nbytes in (100, 200, 400))


def test_an_option_takes_seconds_for_what_it_saves_and_bytes_for_what_it_moves() -> None:
    overheads = Overheads(call_s=8.0, swap_s=1.0, storage_s=0.5, byte_s=0.01)
    assert overheads.swapping_s(SWAP) == 1.0 + 3 * 0.5
    assert overheads.copies_s(SWAP, SIZES) == pytest.approx(500 * 0.01)
    kept = replace(SWAP, name="keep", moves=())
    assert overheads.swapping_s(kept) == overheads.copies_s(kept, SIZES) == 0


def test_seconds_that_an_option_adds() -> None:
    again = Option("recompute+swap", (0,), (), 4, 9, recompute_s=2.0, recomputes=True, moves=(0,), overhead_s=0.5)
    assert again.added_s == 2.5
    with pytest.raises(InvalidInputError, match=r"overhead_s=0\.5 must be 0"):
        Option("keep", (0,), (), 4, 9, overhead_s=0.5)


def test_a_profile_says_its_error() -> None:
    profile = Profile.from_chain([1.0], [2.0], [1], [1], input_bytes=1)
    assert profile.step_error == 0
    assert "±" not in str(profile)
    assert "± 1.2%" in str(replace(profile, step_error=0.012))
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(InvalidInputError, match="step_error"):
            replace(profile, step_error=wrong)
