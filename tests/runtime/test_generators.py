"""States of random generators: every draw is noticed, and every state is put back."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ckptplan.state import generators
from ckptplan.state.generators import Access, Generators, numpys, pythons

PYTHONS: dict[str, Callable[[random.Random], Any]] = {
    "random": lambda g: g.random(),
    "gauss": lambda g: g.gauss(0, 1),
    "integer": lambda g: g.getrandbits(7),
    "shuffled": lambda g: g.shuffle([1, 2, 3]),
    "seeded": lambda g: g.seed(5),
}
NUMPYS: dict[str, Callable[[np.random.RandomState], Any]] = {
    "random": lambda g: g.random_sample(),
    "normal": lambda g: g.standard_normal(),
    "integer": lambda g: g.randint(7),
    "permuted": lambda g: g.permutation(3),
    "seeded": lambda g: g.seed(5),
}


def in_memory_or_not(access: Callable[[Any], Access], generator: Any, in_memory: bool) -> Access:
    if in_memory:
        found = access(generator)
        assert isinstance(found.get()[0], bytes)
        return found
    return generators._access(generator)


@pytest.mark.parametrize(("what", "in_memory"), [*((what, True) for what in PYTHONS), ("gauss", False)])
def test_pythons(what: str, in_memory: bool) -> None:
    generator = random.Random(1)
    access = in_memory_or_not(pythons, generator, in_memory)
    for _ in range(650):  # past the words' renewal, with and without a normal number that waits
        before, state = generator.getstate(), access.get()
        assert access.same(access.get(), state)
        drawn = PYTHONS[what](generator)
        if what != "seeded":
            assert not access.same(access.get(), state)
            access.put(state)
            assert generator.getstate() == before
            assert PYTHONS[what](generator) == drawn


@pytest.mark.parametrize(("what", "in_memory"), [*((what, True) for what in NUMPYS), ("normal", False)])
def test_numpys(what: str, in_memory: bool) -> None:
    generator = np.random.RandomState(1)
    access = in_memory_or_not(numpys, generator, in_memory)
    for _ in range(700 if in_memory else 20):
        state = access.get()
        assert access.same(access.get(), state)
        drawn = NUMPYS[what](generator)
        if what != "seeded":
            assert not access.same(access.get(), state)
            access.put(state)
            assert access.same(access.get(), state)
            assert np.array_equal(NUMPYS[what](generator), drawn)


def test_a_normal_number_that_waits_moves_no_word() -> None:
    """The second of a pair comes from the first draw, and two states with equal words differ by it."""
    generator = np.random.RandomState(1)
    access = numpys(generator)
    generator.standard_normal()
    waiting, state = generator.get_state(), access.get()
    second = generator.standard_normal()
    assert not access.same(access.get(), state)
    without = access.get()
    generator.set_state(waiting)
    assert access.same(access.get(), state)
    assert not access.same(access.get(), without)
    access.put(state)
    assert generator.standard_normal() == second


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
