"""The numbers that the search goes by: few, all in one place, and checked."""

from __future__ import annotations

import ast
import dataclasses
import math
import random
import re
from pathlib import Path

import pytest
from random_chains import rich_chain

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.option import ACTIONS
from ckptplan.core.request import Limits
from ckptplan.referee import validate
from ckptplan.solving import parameters, smallest_peak, solve_profile
from ckptplan.solving.cost import menus
from ckptplan.solving.enumerate import PlanSpace
from ckptplan.solving.frontier import everything_kept_bytes
from ckptplan.solving.parameters import DEFAULT, Parameters
from ckptplan.solving.peak import step_bound

MOST_NUMBERS = 36
NAMES = [field.name for field in dataclasses.fields(Parameters)]


def numbers_of(tree: ast.Module) -> list[str]:
    """Where a module gives a number a name: constants, settings of other solvers, defaults of fields and arguments."""

    def is_number(node: ast.AST | None) -> bool:
        # 0 and 1 are no limits: "none yet", "all of it". What is called or indexed has no number of its own.
        return (
            node is not None
            and not any(isinstance(part, (ast.Call, ast.Subscript)) for part in ast.walk(node))
            and any(
                isinstance(part, ast.Constant) and type(part.value) in (int, float) and part.value not in (0, 1)
                for part in ast.walk(node)
            )
        )

    def numbers(node: ast.AST | None) -> int:
        return sum(map(is_number, node.values)) if isinstance(node, ast.Dict) else is_number(node)

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            every = [*node.args.posonlyargs, *node.args.args]
            pairs = [*zip(reversed(every), reversed(node.args.defaults), strict=False)]
            pairs += [*zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
            found += [f"{node.name}({arg.arg}=)" for arg, value in pairs if is_number(value)]
        elif isinstance(node, (ast.Module, ast.ClassDef)):
            config = isinstance(node, ast.ClassDef) and node.name == "Parameters"
            for child in node.body:
                if isinstance(child, (ast.Assign, ast.AnnAssign)) and (count := numbers(child.value)):
                    targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                    names = [name for t in targets if (name := ast.unparse(t)).isupper() or config]
                    found += names * count
    return found


def test_there_are_few() -> None:
    folder = Path(parameters.__file__).parent
    found = {
        str(path.relative_to(folder)): numbers
        for path in sorted(folder.rglob("*.py"))
        if (numbers := numbers_of(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert set(NAMES) <= set(found["parameters.py"])
    assert sum(map(len, found.values())) <= MOST_NUMBERS, found


COUNTS = [field.name for field in dataclasses.fields(Parameters) if isinstance(field.default, int)]
LEAST = dict.fromkeys(COUNTS, 0) | {"least_width": 1, "width_factor": 2}
OTHERS = [name for name in NAMES if name not in COUNTS]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_count_and_no_amount_is_refused(name: str) -> None:
    count = name in COUNTS
    text = f"a whole number, {LEAST[name]} or more" if count else "a finite number above 0"
    for value in (-1, 2.5 if count else 0.0, math.nan, math.inf, True, "8", None):
        with pytest.raises(InvalidInputError, match=re.escape(f"{name}={value!r} must be {text}")):
            dataclasses.replace(DEFAULT, **{name: value})  # type: ignore[arg-type]
    if name.endswith("_share"):
        with pytest.raises(InvalidInputError, match=f"{name}=1.5 is a share: at most 1"):
            dataclasses.replace(DEFAULT, **{name: 1.5})


@pytest.mark.parametrize("number", [*LEAST.items(), *((name, 1e-9) for name in OTHERS)], ids=lambda n: n[0])
def test_with_any_number_a_search_ends_with_a_plan(number: tuple[str, float]) -> None:
    """Each at its least, on the way for longer chains; late or far from the optimum, but sound."""
    profile, limits = rich_chain(random.Random(6), 12), Limits(time_limit_s=0.1)
    budget = (everything_kept_bytes(profile) + step_bound(PlanSpace(profile, menus(profile, ACTIONS)))) // 2
    steered = dataclasses.replace(DEFAULT, **{"few_plans": 0, "many_plans": 0, number[0]: number[1]})  # type: ignore[arg-type]
    plan = solve_profile(profile, budget, limits, parameters=steered)
    assert validate(profile, plan, budget) == ()
    assert plan.lower_bound_s <= plan.step_s
    assert smallest_peak(profile, limits, parameters=steered).peak_bytes <= budget
