"""Does every guarantee have a test that fails without its safeguard?

    python experiments/mutations.py --out experiments/results          # all of them, some minutes
    python experiments/mutations.py --items 8,12                        # some
    python experiments/mutations.py --digest --out experiments/results  # what the check finds without them
    python experiments/mutations.py --docs docs/guarantees.md           # write the page of promises

`safeguards.py` lists, for each requirement, the safeguard, its tests, and a change of the source that takes it out. In
a copy of the package each change is made in turn and the tests are run: at least one must fail. On the unchanged copy
all must pass.

With `--digest` the odd cases that a safeguard names are trained without it, under the whole package's plans (a
safeguard of profiling's: under those that it then makes). Where nothing is checked, each must end with wrong values,
which shows that nothing else protects it; with the checks as they are by default each must be a CheckError, in the
first step in which a value is wrong or before.
"""

from __future__ import annotations

import argparse
import collections
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


def odd_cells(what: str, cells: list[str], plans: Path, at: Path) -> Any:
    """What `odd_cells.py` of the copy at `at` prints: the outcomes of odd cases."""
    command = [sys.executable, str(at / "experiments" / "odd_cells.py"), str(plans), what, *cells]
    environment = {**os.environ, "PYTHONPATH": str(at), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=at, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1]) if what != "plan" else None


def found_alone(safeguard: Safeguard, package: Package, at: Path, plans: Path) -> dict[str, Any]:
    """What becomes of the odd cells of `safeguard` without it in the copy at `at`: unchecked, and checked."""
    definition = package.find(safeguard.where, safeguard.old)
    of_profiling = "profiling" in definition.path.relative_to(at).parts
    with definition.changed(safeguard.old, safeguard.new):
        found = odd_cells("off,sampled", safeguard.cells, at if of_profiling else plans, at)
    cells = {}
    for name, off, sampled in zip(safeguard.cells, found[::2], found[1::2], strict=True):
        wrong = off["kind"] == "DIFFERENT"
        by_check = sampled["kind"] == "error" and sampled["detail"].startswith("CheckError")
        cells[name] = {
            "unchecked": off["kind"],
            "wrong_in_step": off["step"],
            "checked": "CheckError" if by_check else sampled["kind"],
            "found_in_step": sampled["step"],
            "says": sampled["detail"][:200],
            "outcome": (
                "not wrong" if not wrong else "seen" if by_check and sampled["step"] <= off["step"] else "unseen"
            ),
        }
    outcomes = {cell["outcome"] for cell in cells.values()}
    return {
        "item": safeguard.item,
        "safeguard": safeguard.what,
        "outcome": outcomes.pop() if len(outcomes) == 1 else "not alike",
        "wanted": "unseen" if safeguard.unseen else "seen",
        "because": safeguard.unseen,
        "cells": cells,
    }


def digest(chosen: list[Safeguard], package: Package, at: Path, out: Path | None) -> bool:
    """Print what the check finds without each of `chosen`; whether all is as safeguards.py says."""
    plans = at / "plans"
    plans.mkdir()
    odd_cells("plan", sorted({cell for s in chosen for cell in s.cells}), plans, at)
    rows = []
    for s in chosen:
        row = found_alone(s, package, at, plans)
        rows.append(row)
        steps = sorted({cell["found_in_step"] for cell in row["cells"].values()})
        print(f"{s.item:>3}  {row['outcome']:<9} {len(row['cells']):>3} cells, steps {steps}  {s.what}", flush=True)
        for name, cell in row["cells"].items():
            if cell["outcome"] != row["wanted"]:
                print(f"       {name}: {cell}")
    seen = sum(row["outcome"] == "seen" for row in rows)
    reasons = collections.Counter(row["because"] for row in rows if row["because"])
    print(f"{seen} of {len(rows)} safeguards: the check alone finds what they prevent, in the first step that is wrong")
    for reason, count in reasons.items():
        print(f"{count} it doesn't: {reason}")
    if out is not None:
        path = out / "digest.json"
        known = json.loads(path.read_text(encoding="utf-8"))["safeguards"] if path.exists() else []
        kept = merged(known, rows)
        counts = {"safeguards": len(kept), "seen": sum(row["outcome"] == "seen" for row in kept)}
        documents.write({"counts": counts, "safeguards": kept}, path)
    return all(row["outcome"] == row["wanted"] for row in rows)


def merged(known: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`known` with `rows` in the place of those of the same safeguards, without those that are none any more."""
    latest = {(row["item"], row["safeguard"]): row for row in (*known, *rows)}
    return [latest[key] for s in SAFEGUARDS if (key := (s.item, s.what)) in latest]


def last_runs() -> dict[str, str]:
    """The date of each committed result: its own, or where it has none, of the last commit that changed it."""
    dates = {}
    for path in sorted([*RESULTS.glob("*.json"), *RESULTS.glob("*/*.json")]):
        document = json.loads(path.read_text(encoding="utf-8"))
        runs = [document, *document.get("runs", {}).values()] if isinstance(document, dict) else []
        known = max((run["date"] for run in runs if "date" in run), default="")
        command = ["git", "log", "-1", "--format=%cs", "--", str(path)]
        name = path.relative_to(RESULTS).as_posix()
        dates[name] = known or subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
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
        "and runs the tests named here. Where the last column says that the check alone finds what a safeguard",
        "prevents, `python experiments/mutations.py --digest` trains odd models without it, with `check` as it is by",
        "default, and meets a `CheckError` in the first step in which a value is wrong.",
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
        of_item = [s for s in SAFEGUARDS if s.item == number]
        checked = any(s.odd for s in of_item)
        lines.append("| safeguard | where | tests |" + " the check alone |" * checked)
        lines.append("|---|---|---|" + "---|" * checked)
        for s in of_item:
            tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in s.tests + s.gpu_tests)
            alone = f" {s.unseen or ('finds it' if s.odd else '')} |" * checked
            lines.append(f"| {s.what} | `{s.where}` | {tests} |{alone}")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run the changes that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", help="numbers of requirements, with commas between them")
    parser.add_argument("--digest", action="store_true", help="train odd cases without each, and run no tests")
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
    if given.digest:
        with tempfile.TemporaryDirectory() as scratch:
            at = copied(ROOT, Path(scratch))
            if not digest([s for s in chosen if s.odd], Package(at), at, given.out):
                raise SystemExit(1)
        return
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
        documents.write(merged(known, rows), path)
    if noticed < len(rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
