"""Sums of variables, rows of them, and the program that they make.

Programs have some hundred thousand coefficients. With the solver's own classes they take three times as long to build.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Sum:
    """A linear expression.

    Attributes
    ----------
    terms : dict
        Number of each variable -> its coefficient.
    constant : float
    """

    __slots__ = ("constant", "terms")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, terms: dict[int, float], constant: float = 0.0) -> None:
        self.terms, self.constant = terms, constant

    def __add__(self, other: Sum | float) -> Sum:
        return total((self, other))

    __radd__ = __add__

    def __neg__(self) -> Sum:
        return self * -1.0

    def __sub__(self, other: Sum | float) -> Sum:
        return total((self, -other))

    def __rsub__(self, other: float) -> Sum:
        return total((other, -self))

    def __mul__(self, factor: float) -> Sum:
        return Sum({number: factor * a for number, a in self.terms.items()}, factor * self.constant)

    __rmul__ = __mul__

    def __le__(self, other: Sum | float) -> Row:
        return Row.of(self - other, -math.inf)

    def __ge__(self, other: Sum | float) -> Row:
        return Row.of(other - self, -math.inf)

    def __eq__(self, other: Sum | float) -> Row:  # type: ignore[override]
        return Row.of(self - other, 0.0)


class Variable(Sum):
    """A variable, from 0 on."""

    __slots__ = ("id", "upper_bound")

    def __init__(self, number: int, upper_bound: float) -> None:
        super().__init__({number: 1.0})
        self.id, self.upper_bound = number, upper_bound


class Row(NamedTuple):
    """`lower` <= sum of terms <= `upper`."""

    terms: dict[int, float]
    lower: float
    upper: float

    @classmethod
    def of(cls, found: Sum, lower: float) -> Row:
        """`lower` <= found <= 0."""
        return cls(found.terms, lower - found.constant, -found.constant)


def total(terms: Iterable[Sum | float]) -> Sum:
    """The sum of terms."""
    found: dict[int, float] = {}
    constant = 0.0
    for term in terms:
        if isinstance(term, Sum):
            constant += term.constant
            for number, a in term.terms.items():
                found[number] = found.get(number, 0.0) + a
        else:
            constant += term
    return Sum(found, constant)


@dataclass(slots=True)
class Program:
    """Minimise `cost` within `rows`.

    Attributes
    ----------
    variables : list of Variable
    whole : list of bool
        Whether each is a whole number.
    """

    variables: list[Variable] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    cost: Sum = field(default_factory=lambda: Sum({}))

    def add(self, upper: float, *, whole: bool = False) -> Variable:
        """A new variable."""
        self.variables.append(Variable(len(self.variables), upper))
        self.whole.append(whole)
        return self.variables[-1]

    def model(self) -> Any:
        """The program as the solver's model, in which variables have the same numbers."""
        from ortools.math_opt import model_pb2
        from ortools.math_opt.python import mathopt

        n, m = len(self.variables), len(self.rows)
        proto: Any = model_pb2.ModelProto()
        found = proto.variables
        found.ids.extend(range(n))
        found.lower_bounds.extend([0.0] * n)
        found.upper_bounds.extend([var.upper_bound for var in self.variables])
        found.integers.extend(self.whole)
        proto.objective.offset = self.cost.constant
        costs = sorted((number, a) for number, a in self.cost.terms.items() if a)
        proto.objective.linear_coefficients.ids.extend([number for number, _ in costs])
        proto.objective.linear_coefficients.values.extend([a for _, a in costs])
        proto.linear_constraints.ids.extend(range(m))
        proto.linear_constraints.lower_bounds.extend([row.lower for row in self.rows])
        proto.linear_constraints.upper_bounds.extend([row.upper for row in self.rows])
        matrix = proto.linear_constraint_matrix
        for at, row in enumerate(self.rows):
            terms = sorted((number, a) for number, a in row.terms.items() if a)
            matrix.row_ids.extend([at] * len(terms))
            matrix.column_ids.extend([number for number, _ in terms])
            matrix.coefficients.extend([a for _, a in terms])
        return mathopt.Model.from_model_proto(proto)
