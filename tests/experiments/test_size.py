"""The counter of lines, numbers and parameters in experiments/size.py."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import size

pytestmark = pytest.mark.planning

TEXT = '''"""A module,
of two lines."""

# A comment.
LIMIT = 3  # counts

"""Docstring of the attribute."""
MESSAGE = """text

that is data"""


class A:
    """One line."""

    scale: float = -1.0

    def go(self, x, *rest, y=2, **more):
        """Some lines.

        More.
        """
        return (
            x
            + 0.5  # counts

            - 7j
        )

    @staticmethod
    def stay(a, /, b): return -2

    async def wait(self): return True
'''


def test_what_is_counted() -> None:
    # LIMIT; MESSAGE with its blank line; class; scale; go's def; five of the return; @staticmethod; stay; wait.
    assert size.code_lines(TEXT) == 1 + 3 + 1 + 1 + 1 + 5 + 2 + 1
    assert size.numbers(TEXT) == 4  # 3, 0.5, 7j, -2
    assert size.numbers("x = [-1, 0, 1, 2, 1.0, True]") == 0  # plain ones and truth values
    assert dict(size.functions(ast.parse(TEXT))) == {"A.go": 4, "A.stay": 2, "A.wait": 0}
    assert dict(size.functions(ast.parse("def f(self):\n def g(a): pass"))) == {"f": 1, "f.g": 1}
