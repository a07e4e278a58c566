"""What do the tests notice? 120 small changes of the source, drawn at random, each tried against the tests that run it.

    python experiments/mutants.py --draw 1 --count 120                             # write mutants.json anew
    python experiments/mutants.py --measure /tmp/covered                           # which test runs which line; an hour
    python experiments/mutants.py --measured /tmp/covered --label before --out experiments/results
    python experiments/mutants.py --measured /tmp/covered --only 3,17-20           # some, and write nothing
    python experiments/mutants.py --measured /tmp/other --tests-from ../other      # package, tests of another

The draw takes equally many mutants of each area. Within an area an operator is drawn uniformly of those that still have
a site, then a site of that operator uniformly, at most one in a statement (operators.py says what is never a site). The
mutants are frozen in mutants.json, by qualified name and text (source.py), so that the same ones can be made when the
code has moved.

A mutant is made in a copy of the package. The tests that run its lines follow, those that take least time first, until
one fails or `--limit` seconds of tests (as measured before) have passed. A failure counts only if the test, alone,
fails with the mutant and passes without. A test that was not passed when it was measured is left out, and so is
tests/experiments/test_guarantees.py, which compares the source with the lists. Each run is a fork of a process that has
imported torch and what else the tests need, but not the package.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from operators import Site, Source, texts
from source import AddressError, Package, copied

ROOT = Path(__file__).parent.parent
FROZEN = Path(__file__).with_name("mutants.json")
AREAS = {
    "solving": "ckptplan/solving",
    "referee": "ckptplan/referee",
    "core": "ckptplan/core",
    "profiling": "ckptplan/profiling",
    "memory": "ckptplan/memory",
    "cli": "ckptplan/cli",
}
NOT_A_TEST_OF_BEHAVIOUR = "tests/experiments/test_guarantees.py"
LIMIT_S = 300.0
HANGS_S = 60.0
"""A test that takes longer, and four times as long as the longest of the run, has failed."""
MEMORY_BYTES = 8 << 30
"""Private memory of one run: a mutant that allocates in an endless loop must not take the machine's."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of the source: `old`, once in the definition `name`, becomes `new`."""

    area: str
    operator: str
    name: str
    old: str
    new: str


def frozen() -> list[Mutant]:
    """The mutants of mutants.json."""
    return [Mutant(**row) for row in json.loads(FROZEN.read_text(encoding="utf-8"))["mutants"]]


# Drawing


def draw(seed: int, count: int) -> dict[str, Any]:
    """`count` mutants of the package as it is here."""
    package = Package(ROOT)
    each, rest = divmod(count, len(AREAS))
    mutants: list[Mutant] = []
    sites: dict[str, int] = {}
    for k, (area, where) in enumerate(AREAS.items()):
        path = ROOT / where
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        found = [(source, site) for source in map(Source, files) for site in source.sites()]
        sites[area] = len(found)
        rng = random.Random(f"{seed} {area}")
        mutants += [
            Mutant(area, site.operator, site.name, old, new)
            for site, old, new in _drawn(found, each + (k < rest), rng, package)
        ]
    return {"seed": seed, "count": count, "sites": sites, "mutants": [asdict(mutant) for mutant in mutants]}


def _drawn(
    found: list[tuple[Source, Site]], count: int, rng: random.Random, package: Package
) -> list[tuple[Site, str, str]]:
    left: dict[str, list[tuple[Source, Site]]] = defaultdict(list)
    for source, site in found:
        left[site.operator].append((source, site))
    taken: set[tuple[Path, int]] = set()
    chosen = []
    while len(chosen) < count:
        operator = rng.choice(sorted(left))
        source, site = left[operator].pop(rng.randrange(len(left[operator])))
        if not left[operator]:
            del left[operator]
        if (source.path, site.statement) in taken or (changed := source.changed(site)) is None:
            continue
        if (lines := texts(source, site, changed, package)) is not None:
            taken.add((source.path, site.statement))
            chosen.append((site, *lines))
    return chosen


# What runs which line


def measure(checkout: Path, into: Path) -> None:
    """Run the suite of `checkout` under branch coverage with a context per test; two files in `into`."""
    into.mkdir(parents=True, exist_ok=True)
    for name in ("coverage", "durations.jsonl"):
        (into / name).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        at = copied(checkout, Path(scratch))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(at), str(ROOT / "experiments")]),
            "COVERAGE_FILE": str(into / "coverage"),
            "DURATIONS": str(into / "durations.jsonl"),
        }
        options = ["--cov=ckptplan", "--cov-branch", "--cov-context=test", "--cov-report=", "--timeout=900"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "durations", "-p", "no:cacheprovider", *options]
        subprocess.run(command, cwd=at, env=environment, check=False)


class Suite:
    """The tests that may be run, how long each takes, and which run a line.

    Parameters
    ----------
    durations, coverage : Path
        As `measure` writes them.
    """

    def __init__(self, durations: Path, coverage: Path) -> None:
        import coverage as coverage_py

        seconds: dict[str, dict[str, float]] = defaultdict(dict)
        passed: dict[str, dict[str, bool]] = defaultdict(dict)
        for line in durations.read_text(encoding="utf-8").splitlines():
            test, when, outcome, duration = json.loads(line)
            seconds[test][when] = duration
            passed[test][when] = outcome == "passed"
        self.seconds = {
            test: sum(phases.values())
            for test, phases in seconds.items()
            if len(phases) == 3 and all(passed[test].values()) and not test.startswith(NOT_A_TEST_OF_BEHAVIOUR)
        }
        self._data = coverage_py.CoverageData(str(coverage))
        self._data.read()
        self._contexts: dict[str, dict[int, list[str]]] = {}

    def tests_of(self, file: str, first: int, last: int, *, cached: bool = False) -> list[str]:
        """The tests that run lines `first` to `last` of `file` (as in "ckptplan/api.py"), shortest first.

        A line that runs only while tests are collected is run by every test. What the set-up of a test runs may be a
        fixture of its whole file: then the file's other tests follow behind. Where the lines are those of a function
        whose results are `cached`, so do all tests that run something of `file`, since each of them may be the first
        that needs the function. A line that runs only in processes that tests start is run by none.
        """
        contexts = self._of(file)
        direct: set[str] = set()
        files: set[str] = set()
        imported = False
        for line in range(first, last + 1):
            for context in contexts.get(line, ()):
                test, _, phase = context.rpartition("|")
                imported |= not context
                if context:
                    direct.add(test)
                    if phase == "setup":
                        files.add(test.partition("::")[0])
        more: set[str] = set()
        if imported and not direct:
            more |= set(self.seconds)
        if cached and direct:
            more |= {context.rpartition("|")[0] for found in contexts.values() for context in found}
        more |= {test for test in self.seconds if test.partition("::")[0] in files}
        return [*self._shortest_first(direct), *self._shortest_first(more - direct)]

    def _shortest_first(self, tests: set[str]) -> list[str]:
        return sorted((test for test in tests if test in self.seconds), key=lambda test: (self.seconds[test], test))

    def _of(self, file: str) -> dict[int, list[str]]:
        if file not in self._contexts:
            matching = [name for name in self._data.measured_files() if name.endswith("/" + file)]
            if len(matching) > 1:
                raise SystemExit(f"the coverage is of several checkouts: {', '.join(sorted(matching))}")
            self._contexts[file] = self._data.contexts_by_lineno(matching[0]) if matching else {}
        return self._contexts[file]


@dataclass(frozen=True, slots=True)
class Task:
    """A mutant and the tests that may notice it.

    Attributes
    ----------
    number : int
        From 1, in mutants.json.
    mutant : Mutant
        The change.
    file, text : str
        The file in the checkout, and what it becomes.
    tests : tuple of str
        In the order in which they are run.
    covering : int
        How many tests run the lines, whether or not the limit of time lets them.
    seconds : tuple of float
        How long each of `tests` took when it was measured.
    """

    number: int
    mutant: Mutant
    file: str
    text: str
    tests: tuple[str, ...]
    covering: int
    seconds: tuple[float, ...]


def task_of(number: int, mutant: Mutant, package: Package, checkout: Path, suite: Suite, limit_s: float) -> Task:
    """The tests of `mutant`: as many of those that run its lines as take `limit_s` together."""
    definition = package.find(mutant.name, mutant.old)
    file = definition.path.relative_to(checkout).as_posix()
    first, last = _statement_lines(definition.path, *_changed_lines(mutant, definition.lines_of(mutant.old)[0]))
    cached = any(
        line.lstrip().startswith(("@functools.cache", "@functools.lru")) for line in definition.text.split("\n")
    )
    covering = suite.tests_of(file, first, last, cached=cached)
    tests, total = [], 0.0
    for test in covering:
        total += suite.seconds[test]
        if tests and total > limit_s:
            break
        tests.append(test)
    return Task(
        number,
        mutant,
        file,
        definition.replaced(mutant.old, mutant.new),
        tuple(tests),
        len(covering),
        tuple(suite.seconds[test] for test in tests),
    )


def _changed_lines(mutant: Mutant, first: int) -> tuple[int, int]:
    """The lines of the file that differ, where `mutant.old` begins at line `first`."""
    old, new = mutant.old.splitlines(), mutant.new.splitlines()
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    end = 0
    while end < min(len(old), len(new)) - same and old[-1 - end] == new[-1 - end]:
        end += 1
    return first + same, max(first + same, first + len(old) - 1 - end)


@functools.cache
def _statements(path: Path) -> list[tuple[int, int]]:
    """The first and last line of each simple statement and of each header of a compound one."""
    found = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            found.append((node.lineno, last))
    return found


def _statement_lines(path: Path, first: int, last: int) -> tuple[int, int]:
    """`first` to `last` widened to the innermost statement: coverage knows a statement by some of its lines."""
    around = [lines for lines in _statements(path) if lines[0] <= first and last <= lines[1]]
    return min(around, key=lambda lines: lines[1] - lines[0], default=(first, last))


# Running


class Reporter:
    """A pytest plugin that writes what happens to a file as it happens."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def _write(self, *row: Any) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def pytest_collection_finish(self, session: Any) -> None:
        self._write("collected", [item.nodeid for item in session.items])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write("broken", report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("started", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._write(report.outcome, report.nodeid, report.when, report.duration)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run of pytest came to.

    Attributes
    ----------
    outcome : str
        "passed", "failed" (a test), "collection" (the tests can't be imported or found), "crash" (of the process) or
        "hang" (no end in time).
    test : str or None
        The test that failed, or under way at a crash or a hang.
    tests : int
        How many were begun.
    collected : tuple of str
        Found, in the order in which they run.
    """

    outcome: str
    test: str | None
    tests: int
    collected: tuple[str, ...] = ()


def preload(checkout: Path) -> None:
    """Import what the tests and the package import from outside, so that forks needn't."""
    own = {
        "ckptplan",
        "__future__",
        *(path.stem for folder in ("tests", "experiments") for path in (checkout / folder).glob("*.py")),
    }
    statements = {"import pytest", "import ortools.sat.python.cp_model", "import matplotlib.pyplot"}
    for folder in ("tests", "ckptplan"):
        for path in sorted((checkout / folder).rglob("*.py")):
            for node in ast.parse(path.read_bytes()).body:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module or ""]
                if names and not any(name.partition(".")[0] in own for name in names):
                    statements.add(ast.unparse(node))
    for statement in sorted(statements):
        with contextlib.suppress(Exception):
            exec(statement, {})
    if any(name.partition(".")[0] == "ckptplan" for name in sys.modules):
        raise SystemExit("the package was imported before the fork; it would hide the mutants")


def run_pytest(at: Path, tests: tuple[str, ...], deadline_s: float, *options: str) -> Run:
    """Run `tests` in the copy at `at`, in a fork of this process."""
    with tempfile.TemporaryDirectory() as scratch:
        report, output = Path(scratch, "report.jsonl"), Path(scratch, "output")
        child = os.fork()
        if child == 0:
            _run_in_child(at, tests, report, output, options)
        code = _wait(child, deadline_s)
        rows = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    collected = next((tuple(row[1]) for row in rows if row[0] == "collected"), ())
    begun = [row[1] for row in rows if row[0] == "started"]
    failed = next((row[1] for row in rows if row[0] == "failed"), None)
    last = begun[-1] if begun else None
    if failed is not None:
        return Run("failed", failed, len(begun), collected)
    if code is None:
        return Run("hang", last, len(begun), collected)
    if code < 0 or code not in (0, 1, 2, 4, 5):
        return Run("crash", last, len(begun), collected)
    return Run("passed" if code == 0 else "collection", last, len(begun), collected)


def _run_in_child(at: Path, tests: tuple[str, ...], report: Path, output: Path, options: tuple[str, ...]) -> None:
    """Never returns."""
    code = 3
    try:
        os.setsid()
        log = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        for name, module in list(sys.modules.items()):
            if name != "__main__" and Path(getattr(module, "__file__", None) or "/").is_relative_to(ROOT):
                del sys.modules[name]
        sys.path[:] = [
            str(at),
            *(p for p in sys.path if p and not (Path(p) / "ckptplan").exists() and Path(p) != ROOT / "experiments"),
        ]
        sys.argv = ["pytest"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # for tests that start processes which import it
        os.environ["PYTHONPATH"] = str(at)
        os.chdir(at)
        importlib.invalidate_caches()
        import pytest

        imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # plugins, before the fork
        fixed = ["-q", "-n0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-W", imported, *options]
        code = int(pytest.main([*fixed, *tests], plugins=[Reporter(report)]))
    except BaseException as error:  # whatever ends the run must not go on as the parent
        print(repr(error), flush=True)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _wait(child: int, deadline_s: float) -> int | None:
    """The exit code of `child`, negative for a signal; None if it had to be killed."""
    end = time.monotonic() + deadline_s
    ended = None
    while ended is None and time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            ended = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with all that its tests have started
    if ended is None:
        os.waitpid(child, 0)
    return ended


class Worker:
    """Makes mutants in a copy of its own, one at a time."""

    def __init__(self, checkout: Path, scratch: Path) -> None:
        self.plain = _compiled_copy(checkout, scratch / f"plain-{os.getpid()}")
        self.mutated = _compiled_copy(checkout, scratch / f"mutated-{os.getpid()}")
        self._passes_alone: dict[str, bool] = {}

    def try_out(self, task: Task) -> dict[str, Any]:
        """The row of the results for one mutant."""
        begin = time.monotonic()
        path = self.mutated / task.file
        text = path.read_text(encoding="utf-8")
        unreliable: list[str] = []
        path.write_text(task.text, encoding="utf-8")
        try:
            while True:
                left = [(test, s) for test, s in zip(task.tests, task.seconds, strict=True) if test not in unreliable]
                run = self._run(self.mutated, left)
                if run.outcome == "passed" or not left:
                    break
                if run.test is None:
                    wrong = self._missing([test for test, _ in left])
                else:
                    wrong = [] if self._is_noticed_by(run, dict(left)[run.test]) else [run.test]
                if not wrong:
                    break
                unreliable += wrong
        finally:
            path.write_text(text, encoding="utf-8")
        row: dict[str, Any] = {"outcome": "survived" if run.outcome == "passed" or not left else "noticed"}
        if row["outcome"] == "noticed":
            row |= {"by": run.test, "how": run.outcome}
        row |= {"tests": run.tests, "covering": task.covering, "limit_reached": len(task.tests) < task.covering}
        if unreliable:
            row["unreliable"] = unreliable
        return row | {"seconds": round(time.monotonic() - begin, 1)}

    def _run(self, at: Path, tests: list[tuple[str, float]]) -> Run:
        if not tests:
            return Run("passed", None, 0)
        hangs_s = max(HANGS_S, 4 * max(seconds for _, seconds in tests))
        deadline_s = 2 * hangs_s + 4 * sum(seconds for _, seconds in tests)
        return run_pytest(at, tuple(test for test, _ in tests), deadline_s, "-x", f"--timeout={hangs_s:.0f}")

    def _missing(self, tests: list[str]) -> list[str]:
        """Those of `tests` that aren't there without the mutant either."""
        collected = run_pytest(self.plain, tuple(tests), 10 * HANGS_S, "--collect-only").collected
        if collected or len(tests) == 1:
            return [test for test in tests if test not in collected]
        return [test for test in tests if self._missing([test])]  # a single unknown name stops the whole collection

    def _is_noticed_by(self, run: Run, seconds: float) -> bool:
        """Whether the test that stopped `run` fails alone with the mutant, and passes alone without."""
        test = run.test
        assert test is not None
        if test not in self._passes_alone:
            self._passes_alone[test] = self._run(self.plain, [(test, seconds)]).outcome == "passed"
        if not self._passes_alone[test]:
            return False
        return run.outcome == "hang" or self._run(self.mutated, [(test, seconds)]).outcome != "passed"


def _compiled_copy(checkout: Path, into: Path) -> Path:
    """A copy whose bytecode is used only where it is of the source as it is, to the letter."""
    into.mkdir(parents=True)
    copied(checkout, into)
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "ckptplan", "tests"]
    subprocess.run(command, cwd=into, check=True)
    return into


_worker: Worker | None = None


def _begin_worker(checkout: Path, scratch: Path) -> None:
    global _worker
    _worker = Worker(checkout, scratch)


def _try_out(task: Task) -> dict[str, Any]:
    assert _worker is not None
    return _worker.try_out(task)


# Results


def numbers(text: str | None, mutants: list[Mutant]) -> list[int]:
    """The mutants of `--only`: numbers, ranges of them, and areas, with commas in between."""
    if text is None:
        return list(range(1, len(mutants) + 1))
    found: list[int] = []
    for part in text.split(","):
        if part in AREAS:
            found += [k for k, mutant in enumerate(mutants, 1) if mutant.area == part]
        else:
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    if not all(1 <= k <= len(mutants) for k in found):
        raise SystemExit(f"--only {text}: there are mutants 1 to {len(mutants)}")
    return sorted(set(found))


def line(task: Task, row: dict[str, Any]) -> str:
    """One mutant's outcome."""
    mutant = task.mutant
    by = f"  by {row['by']} ({row['how']})" if row["outcome"] == "noticed" else ""
    tests = f"{row['tests']:>5} of {row['covering']:>5} tests"
    what = f"{mutant.area} {mutant.operator} {mutant.name}"
    return f"{task.number:>4}  {row['outcome']:<8} {row['seconds']:6.1f} s {tests}  {what}{by}"


def table(rows: list[dict[str, Any]], labels: list[str]) -> str:
    """How many mutants of each area are noticed, of those that were tried."""
    lines = [f"{'area':<10} {'mutants':>7}" + "".join(f" {label:>12}" for label in labels)]
    for area in [*AREAS, "all"]:
        of = [row for row in rows if area in (row["area"], "all")]
        counts = [f"{sum(noticed(row, label) for row in of)} of {sum(label in row for row in of)}" for label in labels]
        lines.append(f"{area:<10} {len(of):>7}" + "".join(f" {count:>12}" for count in counts))
    return "\n".join(lines)


def record(results: dict[int, dict[str, Any]], label: str, about: dict[str, Any], path: Path) -> dict[str, Any]:
    """Put `results` into the column `label` of the file and leave the rest of it."""
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    before = {(row["name"], row["old"], row["new"]): row for row in known.get("mutants", [])}
    rows = []
    for number, mutant in enumerate(frozen(), 1):
        row = before.get((mutant.name, mutant.old, mutant.new), {"number": number, **asdict(mutant)})
        row["number"] = number
        if number in results:
            row[label] = results[number]
        rows.append(row)
    runs = {**known.get("runs", {}), label: about}
    document = {"runs": runs, "mutants": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def run(given: argparse.Namespace) -> None:
    """Try the mutants that were asked for."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a pool of threads doesn't survive a fork
    checkout = given.tests_from.resolve()
    mutants = frozen()
    chosen = numbers(given.only, mutants)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        measured = given.measured or scratch
        durations, coverage = given.durations or measured / "durations.jsonl", given.coverage or measured / "coverage"
        if given.measured is None and (given.durations is None or given.coverage is None):
            measure(checkout, measured)
        suite = Suite(durations, coverage)
        package = Package(checkout)
        tasks, results = [], {}
        for k in chosen:
            try:
                tasks.append(task_of(k, mutants[k - 1], package, checkout, suite, given.limit))
            except AddressError as error:
                results[k] = {"outcome": "no such code", "why": str(error).replace(str(checkout) + "/", "")}
                print(f"{k:>4}  {error}", flush=True)
        preload(checkout)
        about = {
            "limit_s": given.limit,
            "tests_measured": len(suite.seconds),
            "python": sys.version.split()[0],
            "torch": str(sys.modules["torch"].__version__),
            "date": time.strftime("%Y-%m-%d"),
        }
        # The longest first, so that no worker is left with one of them at the end.
        tasks.sort(key=lambda task: -sum(task.seconds))
        context = get_context("fork")
        with ProcessPoolExecutor(given.workers, context, _begin_worker, (checkout, scratch / "copies")) as pool:
            under_way = {pool.submit(_try_out, task): task for task in tasks}
            for future in as_completed(under_way):
                task, row = under_way[future], future.result()
                results[task.number] = row
                print(line(task, row), flush=True)
                if given.out is not None:
                    record(results, given.label, about, given.out / "mutants.json")
    rows = [{"area": mutants[k - 1].area, given.label: row} for k, row in results.items()]
    labels = [given.label]
    if given.out is not None:
        rows = record(results, given.label, about, given.out / "mutants.json")["mutants"]
        labels = [label for label in ("before", "after") if any(label in row for row in rows)]
    print(table(rows, labels))
    lost = [row["number"] for row in rows if noticed(row, "before") and "after" in row and not noticed(row, "after")]
    if lost:
        raise SystemExit(f"noticed before and not after: {', '.join(map(str, lost))}")


def noticed(row: dict[str, Any], label: str) -> bool:
    return row.get(label, {}).get("outcome") == "noticed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, metavar="SEED", help="write mutants.json and run nothing")
    parser.add_argument("--count", type=int, default=120, help="how many to draw")
    parser.add_argument(
        "--measure", type=Path, metavar="DIR", help="run the suite under coverage, keep what it says in DIR"
    )
    parser.add_argument("--measured", type=Path, metavar="DIR", help="use that; without it the suite is run first")
    parser.add_argument(
        "--coverage", type=Path, metavar="FILE", help="a data file of coverage.py with a context per test"
    )
    parser.add_argument("--durations", type=Path, metavar="FILE", help="what durations.py writes")
    parser.add_argument(
        "--tests-from", type=Path, default=ROOT, metavar="CHECKOUT", help="package and tests of another one"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of tests, for each mutant")
    parser.add_argument("--only", help="numbers, ranges and areas, with commas in between")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--label", choices=("before", "after"), default="after", help="the column of the results")
    parser.add_argument("--out", type=Path, help="directory for mutants.json")
    given = parser.parse_args()
    if given.draw is not None:
        FROZEN.write_text(json.dumps(draw(given.draw, given.count), indent=1) + "\n", encoding="utf-8")
    elif given.measure is not None:
        measure(given.tests_from.resolve(), given.measure.resolve())
    else:
        run(given)


if __name__ == "__main__":
    main()
