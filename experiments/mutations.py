"""Does every guarantee have a test that fails without its safeguard?

    python experiments/mutations.py --out experiments/results          # all of them, some minutes
    python experiments/mutations.py --items 8,12                        # some
    python experiments/mutations.py --docs docs/guarantees.md           # write the page of promises

`safeguards.py` lists, for each requirement, the safeguard, its tests, and a change of the source that takes it out. In
a copy of the package each change is made in turn and the tests are run: at least one must fail. On the unchanged copy
all must pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import documents
from promises import AREAS, AT_SCALE, EXPERIMENTS, PROMISES
from safeguards import REQUIREMENTS, SAFEGUARDS, Safeguard
from source import AddressError, Package, copied

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
HANGS_S = 60
"""A test that hangs without its safeguard has failed, too."""
TIMEOUT_S = 900.0
"""So long may the tests of one safeguard take; more is no answer."""


def run_tests(tests: list[str], at: Path, timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
    """What became of `tests` in the copy at `at`: "passed", "failed" or "error", and pytest's last line."""
    options = ["-n0", "-x", "-q", "-p", "no:cacheprovider", "--timeout", str(HANGS_S)]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(at), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=at, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "error", f"no end within {timeout_s:.0f} s"
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    # 1: tests failed; a negative code: the process was ended by a signal, which such a change may well bring about.
    # Anything else says that the tests didn't run: no such test, or a change that isn't Python.
    if done.returncode == 0 and "passed" not in last:
        return "error", last
    return {0: "passed", 1: "failed"}.get(done.returncode, "failed" if done.returncode < 0 else "error"), last


def mutated(safeguard: Safeguard, package: Package, at: Path) -> tuple[str, str]:
    """The tests' outcome without `safeguard` in the copy at `at`, which is `package`."""
    try:
        definition = package.find(safeguard.where, safeguard.old)
    except AddressError as error:
        return "error", str(error)
    with definition.changed(safeguard.old, safeguard.new):
        return run_tests(list(safeguard.tests), at)


def last_runs() -> dict[str, str]:
    """The date of each committed result: its own, or where it has none, of the last commit that changed it."""
    dates = {}
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        runs = [document, *document.get("runs", {}).values()] if isinstance(document, dict) else []
        known = max((run["date"] for run in runs if "date" in run), default="")
        command = ["git", "log", "-1", "--format=%cs", "--", str(path)]
        dates[path.name] = known or subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return dates


def table(dates: Mapping[str, str]) -> str:
    """docs/guarantees.md, with the dates of the results by the names of their files."""
    lines = [
        "# Guarantees",
        "",
        "What may be relied on, and the tests that hold it. What is too slow for the tests is repeated at scale by",
        "experiments, listed first. The runtime's promises come last, with what makes each of them so: its tests fail",
        "without that.",
        "",
        "This page is written by `python experiments/mutations.py --docs docs/guarantees.md` from",
        "`experiments/promises.py` and `experiments/safeguards.py`, which also has, for each safeguard of the runtime,",
        "the change that takes it out. `python experiments/mutations.py` makes each change in a copy of the package",
        "and runs the tests named here.",
        "",
        "## Experiments",
        "",
        "Results are in `experiments/results/`. A date is that of the result, or where it has none, of the last commit",
        "that changed it.",
        "",
        "| experiment | question | command | last run |",
        "|---|---|---|---|",
    ]
    for experiment in EXPERIMENTS:
        last = "prints alone" if experiment.result is None else dates.get(experiment.result, "no result yet")
        lines.append(f"| {experiment.name} | {experiment.question} | `{experiment.command}` | {last} |")
    for area in AREAS:
        lines += ["", f"## {area}", "", "| promise | held by | at scale |", "|---|---|---|"]
        for promise in PROMISES:
            if promise.area == area:
                held = [f"`{test}`" for test in promise.tests]
                held += [f"import-linter: {contract}" for contract in promise.contracts]
                lines.append(f"| {promise.what} | {'<br>'.join(held)} | {', '.join(promise.experiments)} |")
    lines += ["", "## The runtime", "", "All are repeated by `mutations`.", ""]
    for number, requirement in REQUIREMENTS.items():
        lines += [f"### {number}. {requirement}", ""]
        if number in AT_SCALE:
            lines += [f"At scale: {', '.join(AT_SCALE[number])}.", ""]
        lines += ["| safeguard | where | tests |", "|---|---|---|"]
        for s in SAFEGUARDS:
            if s.item == number:
                tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in s.tests + s.gpu_tests)
                lines.append(f"| {s.what} | `{s.where}` | {tests} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run the changes that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", help="numbers of requirements, with commas between them")
    parser.add_argument("--tests-pass", action="store_true", help="the unchanged package was tested just before: don't")
    parser.add_argument("--out", type=Path, help="directory for mutations.json")
    parser.add_argument("--docs", type=Path, help="write the table there, and run nothing")
    given = parser.parse_args()
    if given.docs is not None:
        given.docs.write_text(table(last_runs()), encoding="utf-8")
        return
    wanted = None if given.items is None else {int(item) for item in given.items.split(",")}
    chosen = [s for s in SAFEGUARDS if wanted is None or s.item in wanted]
    if not chosen:
        raise SystemExit(f"--items {given.items}: no such requirement; there are 1 to {max(REQUIREMENTS)}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        at = copied(ROOT, Path(scratch))
        package = Package(at)
        if not given.tests_pass:
            outcome, last = run_tests(sorted({test for s in chosen for test in s.tests}), at, 4 * TIMEOUT_S)
            print(f"unchanged: {outcome} ({last})", flush=True)
            if outcome != "passed":
                raise SystemExit("the tests must pass before a safeguard is taken out")
        for s in chosen:
            begin = time.perf_counter()
            outcome, last = mutated(s, package, at)
            rows.append({"item": s.item, "safeguard": s.what, "tests": s.tests, "outcome": outcome, "last": last})
            print(f"{s.item:>3}  {outcome:<7} {time.perf_counter() - begin:5.1f} s  {s.what}", flush=True)
            if outcome != "failed":
                print(f"     {last}")
    noticed = sum(row["outcome"] == "failed" for row in rows)
    print(f"{noticed} of {len(rows)} safeguards are missed by a test when they are taken out")
    if given.out is not None:
        path = given.out / "mutations.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() and wanted is not None else []
        latest = {(row["item"], row["safeguard"]): row for row in (*known, *rows)}
        kept = [latest[key] for s in SAFEGUARDS if (key := (s.item, s.what)) in latest]
        documents.write(kept, path)
    if noticed < len(rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
