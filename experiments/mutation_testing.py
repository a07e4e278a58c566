"""What do the tests notice? mutmut changes one expression of a module at a time, and runs the tests that reach it.

    pip install -c constraints.txt -e ".[mutation]"
    nice python experiments/mutation_testing.py --out experiments/results
    nice python experiments/mutation_testing.py --modules core/rules.py,solving/cost.py --tests core,solving

The tests that need no PyTorch run in a copy of the checkout, on one core. Arguments of errors aren't changed. Mutants
that no test notices are listed with their change; some of them compute the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import documents

ROOT = Path(__file__).parent.parent
MODULES = "core/lanes.py,core/overheads.py,core/budget.py"
TESTS = "core/test_lanes.py,core/test_overheads.py,core/test_budget.py"
SETTINGS = """
[tool.mutmut]
source_paths = ["ckptplan"]
only_mutate = {modules}
do_not_mutate_patterns = ['raise \\w+']
also_copy = ["README.md", "docs", "examples", "experiments"]
pytest_add_cli_args = ["-n0", "-p", "no:cacheprovider", "-m", "planning"]
pytest_add_cli_args_test_selection = {tests}
use_git_change_detection = false
"""


def main() -> None:
    """Run mutmut and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", default=MODULES, help="files of the package that are changed")
    parser.add_argument("--tests", default=TESTS, help="folders or files of tests/ that judge")
    parser.add_argument("--out", type=Path, help="directory for mutation_testing.json")
    given = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch) / "checkout"
        shutil.copytree(ROOT, at, ignore=shutil.ignore_patterns(".*", "__pycache__", "results", "*.egg-info"))
        changed = [f"ckptplan/{module}" for module in given.modules.split(",")]
        judges = [f"tests/{test}" for test in given.tests.split(",")]
        with (at / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write(SETTINGS.format(modules=json.dumps(changed), tests=json.dumps(judges)))

        def mutmut(*words: str) -> str:
            command = [sys.executable, "-m", "mutmut", *words]
            return subprocess.run(command, cwd=at, stdout=subprocess.PIPE, text=True, check=True).stdout

        mutmut("run", "--max-children", "1")
        rows = [line.strip().split(": ") for line in mutmut("results", "--all", "true").splitlines()]
        survivors = {name: mutmut("show", name) for name, end in rows if end in ("survived", "no tests")}
    total = Counter(name.rpartition(".")[0] for name, _ in rows)
    noticed = Counter(name.rpartition(".")[0] for name, _ in rows if name not in survivors)
    for module, count in total.items():
        print(f"{module:<30} {noticed[module]:>4} of {count} noticed")
    if given.out is not None:
        found = {
            "command": documents.command(),
            "environment": documents.environment(1),
            "seconds": round(time.perf_counter() - begin),
            "ends": Counter(end for _, end in rows),
            "modules": {module: {"mutants": count, "noticed": noticed[module]} for module, count in total.items()},
            "survivors": survivors,
        }
        documents.write(found, given.out / "mutation_testing.json")


if __name__ == "__main__":
    main()
