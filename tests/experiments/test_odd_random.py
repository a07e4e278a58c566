"""Random odd models and loops: what a seed makes, and a few of them under every decision.

`experiments/odd_random.py` tries a thousand.
"""

from __future__ import annotations

import pytest
from odd.generated import case, draw, features, smaller
from odd.generated.arguments import ARGUMENTS
from odd.generated.loops import AROUND, EVENTS, MAINS, OPTIMIZERS
from odd.generated.models import BEHIND, HOOKS
from odd.generated.parts import CORES, ENDS, PARTS
from odd.harness import DECISIONS, MIXED, Trial

TRIED = (2, 3, 6)


@pytest.fixture(scope="module")
def trials() -> dict[int, Trial]:
    return {seed: Trial(case(seed)) for seed in TRIED}


@pytest.mark.parametrize("decision", [*DECISIONS, MIXED])
@pytest.mark.parametrize("seed", TRIED)
def test_no_promise_is_broken(trials: dict[int, Trial], seed: int, decision: str) -> None:
    found = trials[seed].outcome(decision)
    assert not found.broken, f"{found.kind}: {found.detail}"


def test_a_seed_always_makes_the_same() -> None:
    assert draw(11) == draw(11)
    assert len({draw(seed) for seed in range(100)}) == 100


def test_a_thousand_seeds_have_everything() -> None:
    kinds = {
        "core": CORES, "end": ENDS, "part": PARTS, "argument": ARGUMENTS, "hook": HOOKS, "behind": BEHIND,
        "loop": MAINS, "optimizer": OPTIMIZERS, "around": AROUND, "event": EVENTS,
    }  # fmt: skip
    wanted = {f"{kind}: {name}" for kind, names in kinds.items() for name in names if name != "nothing"}
    assert wanted <= {name for seed in range(1000) for name in features(draw(seed))}


def test_smaller_ones_have_less() -> None:
    whole = set(features(draw(11)))
    assert any(set(features(less)) < whole for less in smaller(draw(11)))
    assert draw(11) not in smaller(draw(11))
