"""How large the code is, and how long its imports take; of several commits side by side.

    python experiments/size.py --commit 3892eb31 --out experiments/results

A line of code is one with a token on it: blank lines, comments and docstrings, those of attributes included, don't
count. Import times are medians of whole processes, the interpreter's own start with them (`pass`); processes of the
commits alternate, so that the machine's load meets all alike.
"""

from __future__ import annotations

import ast
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documents

ROOT = Path(__file__).parent.parent
FOLDERS = ("ckptplan", "tests", "experiments")
LONG_LINES = 500
PLAIN_NUMBERS = (-1, 0, 1, 2)
IMPORTS = ("pass", "import ckptplan", "import ckptplan.core.units", "import ckptplan.api")
HELP = "ckptplan --help"
LAYOUT = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)
PUBLIC = """
import ckptplan, inspect, json, re
def widths(call):
    parameters, accepted = inspect.signature(call).parameters, 0
    for name, parameter in parameters.items():
        unpacked = re.fullmatch(r"Unpack\\[(\\w+)\\]", str(parameter.annotation))
        keywords = inspect.unwrap(call).__globals__[unpacked[1]] if unpacked else None
        accepted += len(keywords.__optional_keys__ | keywords.__required_keys__) if keywords else 1
    return {"parameters": len(parameters), "accepted": accepted}
calls = {name: getattr(ckptplan, name) for name in ckptplan.__all__}
print(json.dumps({name: widths(call) for name, call in calls.items() if inspect.isfunction(call)}))
"""
"""Prints each public call's parameters, and how many it accepts with those of a TypedDict that `**options` unpack."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str) -> int:
    """Lines of `text` that are neither blank nor comment nor docstring alone."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def numbers(text: str) -> int:
    """Numeric literals in `text` other than -1, 0, 1 and 2."""
    found = 0
    stack: list[ast.AST] = [ast.parse(text)]
    while stack:
        node = stack.pop()
        negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        literal = node.operand if negative else node  # type: ignore[attr-defined]
        if isinstance(literal, ast.Constant) and type(literal.value) in (int, float, complex):
            found += (-literal.value if negative else literal.value) not in PLAIN_NUMBERS
        else:
            stack.extend(ast.iter_child_nodes(node))
    return found


def parameters(function: Function, *, method: bool) -> int:
    """Parameters in the function's signature, without the `self` or `cls` of a method."""
    given = function.args
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
    count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
    return count + (given.vararg is not None) + (given.kwarg is not None) - (method and not static)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and number of parameters of every function and method in `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, parameters(child, method=isinstance(node, ast.ClassDef))
        named = isinstance(child, Function | ast.ClassDef)
        yield from functions(child, f"{prefix}{child.name}." if named else prefix)  # type: ignore[attr-defined]


def folder_size(root: Path, folder: str) -> dict[str, Any]:
    """Counts over all Python files below `root / folder`."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / folder).rglob("*.py"))}
    code = {path: code_lines(text) for path, text in texts.items()}
    found = [(width, name) for text in texts.values() for name, width in functions(ast.parse(text))]
    width, widest = max(found)
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "code_lines": sum(code.values()),
        "functions": len(found),
        "widest_signature": {"name": widest, "parameters": width},
        f"files_over_{LONG_LINES}_lines": {
            path.relative_to(root).as_posix(): lines
            for path, text in texts.items()
            if (lines := len(text.splitlines())) > LONG_LINES
        },
    }


def process(root: Path, code: str, *arguments: str) -> tuple[float, str]:
    """Wall clock and output of `code` in a process of its own that imports from `root`."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    begin = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise SystemExit(f"python -c {code!r} fails in {root.name}:\n{ran.stderr}")
    return time.perf_counter() - begin, ran.stdout


def import_times(roots: dict[str, Path], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of a process for each import and for the help, by commit."""
    commands: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, root in roots.items():
        scripts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
        module, _, function = scripts["ckptplan"].partition(":")
        called = (f"from {module} import {function}; {function}()", "--help")
        commands[name] = {**{line: (line,) for line in IMPORTS}, HELP: called}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in roots}
    for i in range(rounds + 1):
        for line in (*IMPORTS, HELP):
            for name, root in roots.items():
                taken, _ = process(root, *commands[name][line])
                if i:  # the first one compiles the files
                    seconds[name].setdefault(line, []).append(taken)
    return {name: {line: statistics.median(took) for line, took in lines.items()} for name, lines in seconds.items()}


def size(root: Path) -> dict[str, Any]:
    """Everything counted in the checkout at `root`."""
    solving = sorted((root / "ckptplan" / "solving").rglob("*.py"))
    return {
        "folders": {folder: folder_size(root, folder) for folder in FOLDERS},
        "solving_numbers": sum(numbers(path.read_text(encoding="utf-8")) for path in solving),
        "public_parameters": json.loads(process(root, PUBLIC)[1]),
    }


def git(*arguments: str) -> bytes:
    """Output of git in this checkout."""
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if ran.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {ran.stderr.decode().strip()}")
    return ran.stdout


def rows(found: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """The figures of one commit as lines of the table."""
    long = f"files_over_{LONG_LINES}_lines"
    for folder, counts in found["folders"].items():
        yield f"{folder}: files", counts["files"]
        yield f"{folder}: lines", counts["lines"]
        yield f"{folder}: lines of code", counts["code_lines"]
        yield f"{folder}: functions", counts["functions"]
        widest = counts["widest_signature"]
        yield f"{folder}: most parameters", f"{widest['parameters']} {widest['name'].rpartition('.')[2]}"
        yield f"{folder}: files over {LONG_LINES} lines", len(counts[long])
    yield "ckptplan/solving: numbers but -1, 0, 1, 2", found["solving_numbers"]
    for name, widths in found["public_parameters"].items():
        yield f"{name}(): parameters, accepted", f"{widths['parameters']}, {widths['accepted']}"
    yield from ((line, f"{taken:.3f} s") for line, taken in found["process_s"].items())


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--commit", action="append", default=[], help="count this commit, too; may be given repeatedly")
    parser.add_argument("--rounds", type=int, default=7, help="processes timed for each import")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        roots = {}
        for commit in given.commit:
            roots[commit] = Path(scratch, commit.replace("/", "-"))
            with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit))) as archive:
                archive.extractall(roots[commit], filter="data")
        roots[f"here ({git('describe', '--always', '--dirty').decode().strip()})"] = ROOT
        times = import_times(roots, given.rounds)
        results = {name: {**size(root), "process_s": times[name]} for name, root in roots.items()}
    columns = {name: dict(rows(found)) for name, found in results.items()}
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    print(f"{'':<44}" + "".join(f"{name:>26}" for name in columns))
    for label in labels:
        print(f"{label:<44}" + "".join(f"{column.get(label, '-')!s:>26}" for column in columns.values()))
    documents.save(given.out, "size.json", {"rounds": given.rounds, "results": results})


if __name__ == "__main__":
    main()
