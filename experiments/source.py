"""Find a definition of the package by its qualified name, in whichever file it lies.

`Package(root).find("PinnedStore.copy_out")` returns the class, function, method, nested function or assignment of that
name (without `<locals>`). Where several files define the name, the text that is looked for tells them apart. So a list
of changes of the source, as in safeguards.py and mutants.json, stays valid when the code moves to another file.
"""

from __future__ import annotations

import ast
import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class AddressError(LookupError):
    """No definition, or more than one, has the name and the text."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A definition in a file, whole lines from its first decorator to its last statement.

    Attributes
    ----------
    name : str
        Qualified name.
    path : Path
        The file.
    first_line, last_line : int
        From 1, both included.
    text : str
        These lines.
    """

    name: str
    path: Path
    first_line: int
    last_line: int
    text: str

    def replaced(self, old: str, new: str) -> str:
        """The text of the file with `new` for `old`, which must occur once in the definition."""
        if (count := self.text.count(old)) != 1:
            raise AddressError(f"{self.name} in {self.path} has this text {count} times, not once: {old!r}")
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        before, after = lines[: self.first_line - 1], lines[self.last_line :]
        return "".join([*before, self.text.replace(old, new), *after])

    @contextlib.contextmanager
    def changed(self, old: str, new: str) -> Iterator[None]:
        """Inside, the file has `new` for `old`, which must occur once in the definition."""
        text = self.path.read_text(encoding="utf-8")
        try:
            self.path.write_text(self.replaced(old, new), encoding="utf-8")
            yield
        finally:
            self.path.write_text(text, encoding="utf-8")

    def lines_of(self, text: str) -> tuple[int, int]:
        """The first and last line in the file of `text`, which must occur once in the definition."""
        if (count := self.text.count(text)) != 1:
            raise AddressError(f"{self.name} in {self.path} has this text {count} times, not once: {text!r}")
        first = self.first_line + self.text[: self.text.index(text)].count("\n")
        return first, first + text.rstrip("\n").count("\n")


def named(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Each class, function and assigned name of a module or class, with its qualified name, outermost first."""
    yield from _named(tree, "", assignments=True)


def _named(node: ast.AST, prefix: str, assignments: bool) -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from _named(child, f"{prefix}{child.name}.", isinstance(child, ast.ClassDef))
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            if assignments:
                yield from ((prefix + target.id, child) for target in targets if isinstance(target, ast.Name))
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):  # definitions under if, try, with, ...
            yield from _named(child, prefix, assignments)


class Package:
    """The definitions of a package, parsed once.

    Parameters
    ----------
    root : Path
        The checkout that holds the package.
    name : str
        The package's folder in it.
    """

    def __init__(self, root: Path, name: str = "ckptplan") -> None:
        self.definitions: dict[str, list[Definition]] = {}
        for path in sorted((root / name).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines(keepends=True)
            for qualified, node in named(ast.parse(text)):
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
                last = node.end_lineno or node.lineno
                found = Definition(qualified, path, first, last, "".join(lines[first - 1 : last]))
                self.definitions.setdefault(qualified, []).append(found)

    def find(self, name: str, text: str | None = None) -> Definition:
        """The one definition called `name`, or of several the one that holds `text`.

        Raises
        ------
        AddressError
            There is none, or more than one; or `text` isn't exactly once in it.
        """
        candidates = self.definitions.get(name, [])
        if not candidates:
            last = name.rpartition(".")[2]
            near = sorted(other for other in self.definitions if other.rpartition(".")[2] == last)[:10]
            raise AddressError(f"the package defines no {name}" + (f"; there is {', '.join(near)}" if near else ""))
        holding = [c for c in candidates if text is None or text in c.text]
        if len(holding) != 1:
            which = "have this text" if text is not None else "have this name"
            places = ", ".join(f"{c.path}:{c.first_line}" for c in holding or candidates)
            raise AddressError(f"{name}: {len(holding)} definitions {which}, not one ({places})")
        if text is not None:
            holding[0].lines_of(text)
        return holding[0]


def copied(checkout: Path, into: Path) -> Path:
    """Copy what the tests of `checkout` need to the folder `into`, and return that."""
    for name in ("ckptplan", "tests", "experiments"):
        shutil.copytree(checkout / name, into / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(checkout / name, into / name)
    shutil.copytree(checkout / "docs", into / "docs")
    return into
