"""The numbers that the search goes by: few, all in one place, and checked."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from ckptplan.core.errors import InvalidInputError
from ckptplan.solving import parameters
from ckptplan.solving.parameters import DEFAULT, Parameters

MOST_NUMBERS = 36
NAMES = [field.name for field in dataclasses.fields(Parameters)]


def numbers_of(tree: ast.Module) -> list[str]:
    """Where a module gives a number a name: constants, defaults of fields and of arguments."""

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
                if isinstance(child, (ast.Assign, ast.AnnAssign)) and is_number(child.value):
                    targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                    found += [name for t in targets if (name := ast.unparse(t)).isupper() or config]
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_what_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}={value!r} must be a number, 0 or more"):
        dataclasses.replace(DEFAULT, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_share")])
def test_a_share_of_more_than_all_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}=1.5 is a share of the time: at most 1"):
        dataclasses.replace(DEFAULT, **{name: 1.5})  # type: ignore[arg-type]
