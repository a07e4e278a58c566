"""How large are the pages of plans, and how long does it take to make and to open them?

    python experiments/pages.py --out experiments/results

Chains of 12, 100 and 1000 equal stages, each of which saves ten storages with names and origins as long as a real
model's, and a plan for half of the way to everything kept, of keep, swap and recompute. Making a page is
`plan.report(profile)`, its prices and next choices included, and writing it; opening is from the browser's call,
headless Chromium, until all charts are drawn, the median of five.

Prints PASS or FAIL.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import documents
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.table import Table

import ckptplan
from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.profile import Profile
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage
from ckptplan.core.units import format_bytes, format_seconds

STAGES = (12, 100, 1000)
MOST_BYTES = 1 << 20
MOST_OPEN_S = 2.0
REPEATS = 5
SAVED = 10  # storages of a stage
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One page."""

    stages: int
    storages: int
    nbytes: int
    make_s: float
    open_s: float


def chain(count: int) -> Profile:
    """A chain of equal stages, whose swaps take longer than their compute."""
    storages, stages = [], []
    for k in range(count):
        own = tuple(range(SAVED * k, SAVED * (k + 1)))
        for s in range(SAVED):
            origin = f"aten.native_layer_norm in transformer.layers.{k}.mlp.act, modeling_gpt2.py:{100 + s}"
            storages.append(Storage(f"transformer.layers.{k}/{3 * s}", (s + 1) * MIB, k, k + (s == 0), origin=origin))
        keep = Option("keep", own, (), 30 * MIB, 60 * MIB)
        swap = Option("swap", own, (), 30 * MIB, 60 * MIB, moves=tuple(range(SAVED)), overhead_s=1e-4)
        before = () if k == 0 else (SAVED * (k - 1),)
        again = Option("recompute", before, (), 30 * MIB, 120 * MIB, recompute_s=0.01, recomputes=True)
        stages.append(Stage(f"transformer.layers.{k}", "layer", (keep, swap, again), 0.01, 0.02))
    base = tuple([64 * MIB] * count)
    return Profile(tuple(stages), tuple(storages), base, base, 96 * MIB, Link(1.5e9, 1.5e9), resident_bytes=64 * MIB)


def made(browser: Browser, count: int, folder: Path) -> Row:
    """Make and open the page of a chain."""
    profile = chain(count)
    plan = ckptplan.solve(profile, budget="50%", time_limit_s=20)
    begin = time.perf_counter()
    path = folder / f"{count}.html"
    plan.report(profile).save(path)
    make_s = time.perf_counter() - begin
    opened = []
    for _ in range(REPEATS):
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        begin = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn=yes]")
        opened.append(time.perf_counter() - begin)
        page.close()
    size = path.stat().st_size
    return Row(count, len(profile.storages), size, round(make_s, 3), round(statistics.median(opened), 3))


def checks(rows: Sequence[Row]) -> list[tuple[bool, str]]:
    largest, slowest = max(row.nbytes for row in rows), max(row.open_s for row in rows)
    return [
        (largest < MOST_BYTES, f"pages are below {format_bytes(MOST_BYTES)}: at most {format_bytes(largest)}"),
        (slowest < MOST_OPEN_S, f"they open in less than {MOST_OPEN_S:.0f} s: in at most {format_seconds(slowest)}"),
    ]


def table(rows: Sequence[Row]) -> Table:
    found = Table("stages", "storages", "page", "made in", "opened in")
    for row in rows:
        cells = (format_bytes(row.nbytes), format_seconds(row.make_s), format_seconds(row.open_s))
        found.add_row(str(row.stages), str(row.storages), *cells)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        rows = [made(browser, count, Path(folder)) for count in STAGES]
        browser.close()
    documents.finish(rows, checks(rows), table(rows), Console(), arguments.out, "pages.json")


if __name__ == "__main__":
    main()
