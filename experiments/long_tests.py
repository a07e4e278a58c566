"""Do the tests marked `long` pass? Each takes seconds, and the suite leaves them out.

    python experiments/long_tests.py --out experiments/results

Failures are shown as pytest shows them; the table and the JSON file count by file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import documents

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Run pytest, which shows failures itself, and count."""
    given = documents.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "long", f"--junitxml={file}"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        suite = next(ElementTree.parse(file).iter("testsuite"))
    cases = defaultdict(list)
    for case in suite.iter("testcase"):
        cases[case.get("classname", "")].append(case)
    rows = [
        {
            "file": name, "tests": len(found), "seconds": round(sum(float(c.get("time", 0)) for c in found), 1),
            "skipped": sum(case.find("skipped") is not None for case in found),
            "failed": [c.get("name") for c in found if c.find("failure") is not None or c.find("error") is not None],
        }
        for name, found in sorted(cases.items())
    ]  # fmt: skip
    cells = [(row["file"], row["tests"], row["skipped"], row["seconds"], ", ".join(row["failed"])) for row in rows]
    ran = sum(row["tests"] - row["skipped"] for row in rows)
    checks = [(code == 0 and ran > 0, f"all of {ran} long tests pass, in {float(suite.get('time', 0)):.0f} s")]
    table = documents.table(("file", "tests", "skipped", "s of cores", "failed"), cells)
    documents.finish(rows, checks, table, given.out, "long_tests.json")


if __name__ == "__main__":
    main()
