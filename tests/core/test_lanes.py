"""The links' time: the worked example of NOTE [Lanes], and that a lane takes as long from its end to its start."""

from __future__ import annotations

import random

import pytest

from ckptplan.core.lanes import Copy, lane

pytestmark = pytest.mark.planning


def test_the_worked_example() -> None:
    assert lane([Copy(1, 2, 3.0), Copy(2, 3, 2.0)], (2.0, 2.0, 2.0)) == (7.0, [1.0, 0.0])


def test_without_copies_a_lane_takes_what_compute_takes() -> None:
    assert lane([], (2.0, 3.0)) == (5.0, [])
    assert lane([], ()) == (0.0, [])


def test_a_copy_waits_for_the_one_in_front_of_it_and_nothing_waits_for_what_is_done() -> None:
    # The second copy is awaited first: with it, the first one is.
    assert lane([Copy(0, 3, 4.0), Copy(1, 2, 1.0)], (1.0, 1.0, 1.0)) == (6.0, [0.0, 3.0])
    assert lane([Copy(0, 1, 1.0)], (2.0, 1.0)) == (3.0, [0.0])
    assert lane([Copy(0, 0, 1.5)], (2.0,)) == (3.5, [1.5])


def test_a_lane_takes_as_long_from_its_end_to_its_start() -> None:
    rng = random.Random(0)
    waiting = 0
    for _ in range(100):
        n = rng.randint(1, 8)
        compute_s = [float(rng.randint(0, 5)) for _ in range(n)]
        joins = sorted(rng.randint(0, n) for _ in range(rng.randint(0, 6)))
        due = sorted(rng.randint(0, n) for _ in joins)
        copies = [Copy(a, max(a, b), float(rng.randint(1, 6))) for a, b in zip(joins, due, strict=True)]
        reversed_copies = [Copy(n - c.due, n - c.joins, c.seconds) for c in reversed(copies)]
        seconds, waits_s = lane(copies, compute_s)
        assert seconds == lane(reversed_copies, compute_s[::-1])[0]  # whole seconds add up exactly
        assert seconds == sum(compute_s) + sum(waits_s)
        waiting += seconds > sum(compute_s)
    assert waiting > 30
