"""States of random generators: every draw is noticed, and every state is put back."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ckptplan.state import generators
from ckptplan.state.generators import Generators, numpys, pythons

DRAWS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "random": (lambda g: g.random(), lambda g: g.random_sample()),
    "normal": (lambda g: g.gauss(0, 1), lambda g: g.standard_normal()),
    "integer": (lambda g: g.getrandbits(7), lambda g: g.randint(7)),
    "shuffled": (lambda g: g.shuffle([1, 2, 3]), lambda g: g.permutation(3)),
    "seeded": (lambda g: g.seed(5), lambda g: g.seed(5)),
}
"""Of Python's generator and of numpy's."""


@pytest.mark.parametrize("kind", ["Python's", "numpy's"])
@pytest.mark.parametrize(("what", "in_memory"), [*((what, True) for what in DRAWS), ("normal", False)])
def test_every_draw_is_seen_and_taken_back(kind: str, what: str, in_memory: bool) -> None:
    is_numpys = kind == "numpy's"
    generator: Any = np.random.RandomState(1) if is_numpys else random.Random(1)
    draw = DRAWS[what][is_numpys]
    access = (numpys if is_numpys else pythons)(generator) if in_memory else generators._access(generator)
    assert not in_memory or isinstance(access.get()[0], bytes)
    for _ in range(700 if in_memory else 20):  # past the words' renewal, with and without a normal number that waits
        state = access.get()
        assert access.same(access.get(), state)
        drawn = draw(generator)
        if what != "seeded":
            assert not access.same(access.get(), state)
            access.put(state)
            assert access.same(access.get(), state)
            assert np.array_equal(draw(generator), drawn)  # type: ignore[arg-type]


@pytest.fixture
def numpys_own() -> Iterator[None]:
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    yield
    np.random.set_bit_generator(bits)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:get_state and legacy can only be used")
def test_numpys_own_may_be_given_other_bits(numpys_own: None) -> None:
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    held = Generators()
    drawn = np.random.rand()  # noqa: NPY002
    held.settle()
    back = held.put()
    assert np.random.rand() == drawn  # noqa: NPY002
    back()
    assert np.random.rand() != drawn  # noqa: NPY002


def test_of_those_not_drawn_from_nothing_is_kept() -> None:
    held = Generators([np.random.default_rng(1), random.Random(1)])
    held.settle()
    assert held._states == []


def test_where_states_lie_elsewhere_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "_memory", lambda address, count: types.SimpleNamespace(raw=bytes(count)))
    assert pythons(random.Random(1)).get() == random.Random(1).getstate()
    assert generators._gauss_offset() is None
    assert numpys(np.random.RandomState(1)).get()[0] == "MT19937"
