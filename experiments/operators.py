"""The small changes of the source that mutants.py draws from.

`sites(path)` lists every place of a file where one of the classic mutation operators applies: inside functions only,
and not in docstrings, f-strings, annotations, `raise` and `assert` statements, arguments of `warnings.warn`, what is
imported for type checkers, `__repr__`, `__str__` and `__format__`, or methods of protocols and abstract ones. A site
holds the edit and the syntax tree that the edit must give, so that precedence can't make another change of it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from source import Package, named

RELATIONAL: dict[type[ast.cmpop], tuple[tuple[str, type[ast.cmpop]], ...]] = {
    ast.Lt: (("boundary", ast.LtE), ("relation", ast.GtE)),
    ast.LtE: (("boundary", ast.Lt), ("relation", ast.Gt)),
    ast.Gt: (("boundary", ast.GtE), ("relation", ast.LtE)),
    ast.GtE: (("boundary", ast.Gt), ("relation", ast.Lt)),
    ast.Eq: (("relation", ast.NotEq),),
    ast.NotEq: (("relation", ast.Eq),),
    ast.Is: (("relation", ast.IsNot),),
    ast.IsNot: (("relation", ast.Is),),
    ast.In: (("relation", ast.NotIn),),
    ast.NotIn: (("relation", ast.In),),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.And: "and",
    ast.Or: "or",
}
DISPLAY = {"__repr__", "__str__", "__format__"}


@dataclass(frozen=True, slots=True)
class Site:
    """A place where an operator applies.

    Attributes
    ----------
    operator : str
        "relation", "boundary", "arithmetic", "constant", "condition", "logic", "statement" or "return".
    name : str
        Qualified name of the innermost function.
    statement : int
        Line where the innermost statement begins.
    edits : tuple of (int, int, bytes)
        Half-open ranges of bytes of the file, ascending, and what takes their place.
    node, replacement : ast.AST
        The node that changes, and what it becomes.
    """

    operator: str
    name: str
    statement: int
    edits: tuple[tuple[int, int, bytes], ...]
    node: ast.AST
    replacement: ast.AST


class Source:
    """A file, its syntax tree, and the sites of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path.read_bytes()
        self.tree = ast.parse(self.data)
        self._line_starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def sites(self) -> Iterator[Site]:
        """All sites, in the order of the file's functions."""
        skipped: set[str] = set()
        for name, node in named(self.tree):
            if any(name.startswith(other + ".") for other in skipped):
                continue
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                skipped.add(name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}
                if node.name not in DISPLAY and not decorators & {"abstractmethod", "overload"}:
                    for statement in node.body:
                        yield from self._visit(statement, name, statement.lineno)

    def changed(self, site: Site) -> bytes | None:
        """The file with `site` changed, or None where the edit gives another change than the one meant."""
        parts, at = [], 0
        for start, end, text in site.edits:
            parts += [self.data[at:start], text]
            at = end
        changed = b"".join([*parts, self.data[at:]])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                compile(changed, str(self.path), "exec")
        except (SyntaxError, Warning):
            return None
        return changed if ast.dump(ast.parse(changed)) == self._meant(site) else None

    def _meant(self, site: Site) -> str:
        for parent in ast.walk(self.tree):
            for field, value in ast.iter_fields(parent):
                if value is site.node:
                    setattr(parent, field, site.replacement)
                    try:
                        return ast.dump(self.tree)
                    finally:
                        setattr(parent, field, value)
                if isinstance(value, list) and any(item is site.node for item in value):
                    whole = [site.replacement if item is site.node else item for item in value]
                    setattr(parent, field, whole)
                    try:
                        return ast.dump(self.tree)
                    finally:
                        setattr(parent, field, value)
        raise LookupError("the site is of another tree")

    def _visit(self, node: ast.AST, name: str, statement: int) -> Iterator[Site]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return  # has a name, and thus its own turn
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            statement = node.lineno
        for operator, edits, replacement in self._changes(node):
            yield Site(operator, name, statement, edits, node, replacement)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns") or (field == "args" and _warns(node)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not (isinstance(node, ast.Compare) and _is_none(child)):
                    yield from self._visit(child, name, statement)

    def _changes(self, node: ast.AST) -> Iterator[tuple[str, tuple[tuple[int, int, bytes], ...], ast.AST]]:
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for k, op in enumerate(node.ops):
                for operator, other in RELATIONAL[type(op)]:
                    edits = self._symbol(operands[k], operands[k + 1], op, other)
                    ops = [*node.ops[:k], other(), *node.ops[k + 1 :]]
                    yield operator, edits, ast.Compare(node.left, ops, node.comparators)
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            if not any(isinstance(n, ast.JoinedStr) or _is_text(n) for n in (node.left, node.right)):
                other = ARITHMETIC[type(node.op)]
                edits = self._symbol(node.left, node.right, node.op, other)
                yield "arithmetic", edits, ast.BinOp(node.left, other(), node.right)
        elif isinstance(node, ast.BoolOp):
            other = ast.Or if isinstance(node.op, ast.And) else ast.And
            pairs = zip(node.values, node.values[1:], strict=False)
            edits = tuple(e for left, right in pairs for e in self._symbol(left, right, node.op, other))
            yield "logic", edits, ast.BoolOp(other(), node.values)
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield "condition", *self._negated(node.test, node)
        elif isinstance(node, ast.comprehension):
            for k, test in enumerate(node.ifs):
                edits, negated = self._not(test)
                ifs = [*node.ifs[:k], negated, *node.ifs[k + 1 :]]
                yield "condition", edits, ast.comprehension(node.target, node.iter, ifs, node.is_async)
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            if isinstance(node.value, ast.Compare | ast.BoolOp) or _is_not(node.value):
                edits, negated = self._not(node.value)
                yield "return", edits, ast.Return(negated)
            else:
                yield "return", ((*self._range(node.value), b"None"),), ast.Return(ast.Constant(None))
        elif isinstance(node, ast.AugAssign):
            yield "statement", ((*self._range(node), b"pass"),), ast.Pass()
            if type(node.op) in ARITHMETIC and not (_is_text(node.value) or isinstance(node.value, ast.JoinedStr)):
                other = ARITHMETIC[type(node.op)]
                edits = self._symbol(node.target, node.value, node.op, other)
                yield "arithmetic", edits, ast.AugAssign(node.target, other(), node.value)
        elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or (
            isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute) for t in node.targets)
        ):
            yield "statement", ((*self._range(node), b"pass"),), ast.Pass()

    def _constant(self, node: ast.Constant) -> Iterator[tuple[str, tuple[tuple[int, int, bytes], ...], ast.AST]]:
        value = node.value
        if value is None:
            changed: object = 0
        elif isinstance(value, bool):
            changed = not value
        elif isinstance(value, int):
            changed = value + 1
        else:
            return
        yield "constant", ((*self._range(node), repr(changed).encode()),), ast.Constant(changed)

    def _negated(
        self, test: ast.expr, node: ast.If | ast.While | ast.IfExp
    ) -> tuple[tuple[tuple[int, int, bytes], ...], ast.AST]:
        edits, negated = self._not(test)
        if isinstance(node, ast.IfExp):
            return edits, ast.IfExp(negated, node.body, node.orelse)
        return edits, type(node)(negated, node.body, node.orelse)

    def _not(self, test: ast.expr) -> tuple[tuple[tuple[int, int, bytes], ...], ast.expr]:
        start, end = self._range(test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return ((start, self._range(test.operand)[0], b""),), test.operand
        edits = (start, start, b"not ("), (end, end, b")")
        return edits, ast.UnaryOp(ast.Not(), test)

    def _symbol(
        self, left: ast.expr, right: ast.expr, op: ast.AST, other: type[ast.AST]
    ) -> tuple[tuple[int, int, bytes], ...]:
        """The edit of the one operator between two operands."""
        start, end = self._range(left)[1], self._range(right)[0]
        words = SYMBOLS[type(op)].split()
        pattern = rb"\s+".join(re.escape(word.encode()) for word in words)
        if words[0].isalpha():
            pattern = rb"\b" + pattern + rb"\b"
        found = re.search(pattern, self.data[start:end])
        if found is None:
            return ((start, end, b"?"),)  # no Python: `changed` refuses it
        return ((start + found.start(), start + found.end(), SYMBOLS[other].encode()),)

    def _range(self, node: ast.AST) -> tuple[int, int]:
        """Bytes of the file that `node` takes."""
        start = self._line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self._line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def texts(source: Source, site: Site, changed: bytes, package: Package) -> tuple[str, str] | None:
    """The whole lines that `site` changes, before and after, with as many lines around as make them unique."""
    first = source.data[: site.edits[0][0]].count(b"\n")  # from 0
    last = source.data[: site.edits[-1][1]].count(b"\n")
    old = source.data.decode().splitlines(keepends=True)
    new = changed.decode().splitlines(keepends=True)
    more = len(new) - len(old)
    candidates = [d for d in package.definitions[site.name] if d.path == source.path]
    definition = next(d for d in candidates if d.first_line <= first + 1 <= d.last_line)
    while True:
        text = "".join(old[first : last + 1])
        if sum(d.text.count(text) for d in package.definitions[site.name]) == 1:
            return text, "".join(new[first : last + 1 + more])
        if last + 1 < definition.last_line:
            last += 1
        elif first + 1 > definition.first_line:
            first -= 1
        else:
            return None


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _warns(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn")
