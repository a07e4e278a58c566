"""The page of a plan, in a browser: it draws what the referee says, and answers to mouse and keyboard."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Run, output
from made_plans import plan_of, scheduled
from random_chains import random_chain, random_options, random_segments, with_residents

import ckptplan
from ckptplan.baselines import BASELINES
from ckptplan.core.errors import InvalidInputError, PlanMismatchError
from ckptplan.core.estimate import Estimate, Phase, Tensors
from ckptplan.core.frontier import Frontier
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.trace import DrawnStep, Span, Trace
from ckptplan.core.units import format_bytes
from ckptplan.report.page.planned import plan_report
from ckptplan.report.page.render import Report
from ckptplan.report.page.waterline import CATEGORIES, waterline
from ckptplan.reporting import RIVALS

pytestmark = pytest.mark.planning

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a report; at the end, nothing was asked of a network, and nothing complained."""
    told: list[str] = []
    context = browser.new_context(viewport={"width": 1000, "height": 800})
    page = context.new_page()
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda request: told.append(request.url))

    def opens(report: Report) -> Any:
        file = tmp_path / "report.html"
        report.save(file)
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-drawn=yes]", timeout=20_000)
        told.remove(file.as_uri())
        return page

    yield opens
    context.close()
    assert told == []


def chain(n: int = 12) -> Profile:
    link = {"out_bytes_per_s": 3e8, "in_bytes_per_s": 3e8}
    return Profile.from_chain([0.01] * n, [0.02] * n, [1 << 20] * n, [8 << 20] * n, input_bytes=1 << 20, **link)


def solved(profile: Profile) -> Plan:
    return ckptplan.solve(profile, budget="40%", time_limit_s=1)


def at_random(seed: int) -> tuple[Profile, Plan]:
    """A random chain, and a plan with swaps and with segments that are recomputed together; some move weights."""
    rng = random.Random(seed)
    profile = random_chain(seed, rng.randint(1, 10))
    profile = with_residents(rng, profile) if seed % 4 == 3 else profile
    segments = random_segments(rng, profile, share=rng.random())
    return profile, scheduled(profile, random_options(rng, profile, segments), segments, rng.random())


def with_all() -> tuple[Profile, Plan]:
    """The first of these that swaps and has a segment that makes something again."""
    for seed in range(1000):
        profile, plan = at_random(seed)
        if plan.segments and plan.host_bytes and any(stay.again for stay in ckptplan.simulate(profile, plan).stays):
            return profile, plan
    raise AssertionError


def drawn(page: Any, name: str) -> list[list[float | None]]:
    return page.evaluate(f"report.charts.{name}.data.map((column) => [...column])")  # type: ignore[no-any-return]


def test_categories_add_up_to_the_peaks() -> None:
    seen = [0] * len(CATEGORIES)
    for seed in range(60):
        profile, plan = at_random(seed)
        timeline = ckptplan.simulate(profile, plan)
        found = waterline(profile, plan, timeline).stacked
        assert found.sum(axis=0).tolist() == [step.peak_bytes for step in timeline.steps]
        assert (found >= 0).all()
        seen = [a + b for a, b in zip(seen, found.sum(axis=1).tolist(), strict=True)]
    assert all(seen)


def test_the_page_draws_what_the_referee_says(opened: Any) -> None:
    profile, plan = with_all()
    page = opened(plan.report(profile))
    timeline = ckptplan.simulate(profile, plan)
    x, *columns = drawn(page, "waterline")
    assert x[:-1] == pytest.approx([step.start_s for step in timeline.steps], abs=1e-8)
    peaks = [step.peak_bytes for step in timeline.steps]
    assert columns[0] == [*peaks, peaks[-1]]  # the topmost; each hides those below but for what it adds
    assert columns[-1] == [plan.budget_bytes] * len(x)
    labels = page.evaluate("report.charts.waterline.series.slice(1).map((s) => s.label)")
    stacked = waterline(profile, plan, timeline).stacked
    for k, label in enumerate(labels[:-1]):
        below = columns[k + 1] if k + 2 < len(labels) else [0] * len(x)
        added = [a - b for a, b in zip(columns[k], below, strict=True)][:-1]
        assert added == stacked[CATEGORIES.index(label)].tolist(), label
    # And on the canvas: the top of the highest step is at its bytes.
    highest = peaks.index(max(peaks))
    pixel = """(k) => { const u = report.charts.waterline, at = (x, y) => u.ctx.getImageData(x, y - 3, 1, 7).data;
        const middle = (u.data[0][k] + u.data[0][k + 1]) / 2, x = u.valToPos(middle, "x", true);
        const found = [...at(x, u.valToPos(u.data[1][k], "y", true))]; return [found.slice(0, 4), found.slice(-4)]; }"""
    over, under = page.evaluate(pixel, highest)
    assert over != under
    assert under[3] == 255
    lanes = drawn(page, "lanes")
    for column in lanes[1:]:
        assert any(value is not None for value in column)


@pytest.mark.usefixtures("short_search")
def test_hover_click_and_zoom(opened: Any) -> None:
    profile = chain()
    plan = solved(profile)
    page = opened(plan.report(profile))
    timeline = ckptplan.simulate(profile, plan)
    over = page.locator("#waterline .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    for k in (3, len(timeline.steps) - 5):
        step, then = timeline.steps[k], timeline.steps[k + 1]
        share = (step.start_s + 0.8 * (then.start_s - step.start_s)) / (1.02 * timeline.makespan_s)
        over.hover(position={"x": share * box["width"], "y": 50})
        text = page.locator("#moment").inner_text()
        assert text.startswith(f"{step.phase} of {step.stage}: {step.peak_bytes / 2**20:.2f} MiB of ")
        over.click(position={"x": share * box["width"], "y": 50})
        assert page.locator("#why strong").inner_text() == step.stage
        assert page.locator("#strip [aria-selected=true]").get_attribute("title").startswith(f"{step.stage}: ")
    swapping = next(i for i, choice in enumerate(plan.choices) if choice.action == "swap")
    page.locator("#strip button").nth(swapping).click()
    text = page.locator("#why").inner_text()
    assert "to the host: gone after the forward of" in text
    assert "With more memory: " in text
    page.keyboard.press("ArrowRight")
    assert page.locator("#strip [aria-selected=true]").get_attribute("title").startswith(f"s{swapping + 1}: ")
    ranges = "['waterline', 'lanes'].map((name) => { const x = report.charts[name].scales.x; return [x.min, x.max]; })"
    whole = page.evaluate(ranges)
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()
    zoomed = page.evaluate(ranges)
    assert zoomed[0] == zoomed[1]
    end = 1.02 * timeline.makespan_s
    assert zoomed[0] == pytest.approx([0.25 * end, 0.5 * end], abs=0.01 * end)
    page.locator("#waterline").focus()
    page.keyboard.press("0")
    assert page.evaluate(ranges) == whole
    before = page.locator("#why strong").inner_text()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    chosen = page.locator("#why strong").inner_text()
    assert f" of {chosen}: " in page.locator("#moment strong").inner_text()
    assert chosen != before


def test_a_bound_is_shown_for_the_budgets_that_it_holds_for(run: Run, tmp_path: Path) -> None:
    profile = chain(6)
    plan = solved(profile)
    profile.save(tmp_path / "profile.json")
    plan.save(tmp_path / "plan.json")
    for factor, known in ((2.0, False), (1.0, True)):
        budget = plan.budget_bytes * factor / 2**30
        report = ("report", tmp_path / "profile.json", tmp_path / "plan.json", "-o", tmp_path / "report.md")
        assert run(*report, "--budget-gb", repr(budget)).exit_code == 0
        text = (tmp_path / "report.md").read_text()
        assert ("how near to the best isn't known" in text) != known
        assert f"--budget-gb {budget!r}" in text


def test_plans_for_other_budgets_are_of_the_same_model() -> None:
    profile, other = chain(6), chain(5)
    plan = solved(profile)
    with pytest.raises(PlanMismatchError, match="solve again for this model"):
        plan.report(profile, frontier=[solved(other)])
    trace = Trace(DrawnStep((Span("compute", "forward", "layer", 0.0, 0.05),), (), 0.05), None, ())
    with pytest.raises(PlanMismatchError, match="the trace is of another model"):
        plan.report(profile, trace=trace)


@pytest.mark.usefixtures("short_search")
def test_what_a_report_says_of_budgets_and_while_it_is_made() -> None:
    profile, seen = chain(4), []
    plan = solved(profile)
    plan.report(profile, time_limit_s=1, on_progress=lambda text: seen.append(str(text)))
    assert any(text.startswith("budget ") for text in seen)
    assert any("another rule: uniform" in text for text in seen)
    assert "explaining the plan" in seen
    # Tensors are drawn below the budget that is left for them; the verdict counts what is reserved.
    more = replace(plan, reserved_bytes=plan.peak_bytes + (4 << 20), budget_bytes=plan.peak_bytes + (5 << 20))
    data = plan_report(profile, more).data
    assert data["budget"] == plan.peak_bytes + (1 << 20)
    assert data["budget_name"] != "budget"
    view = plan_report(profile, replace(plan, budget_bytes=plan.peak_bytes // 2)).view
    assert view.answer.startswith("Doesn't fit: ")
    assert not view.fits
    assert "proven" not in view.verdict


def test_a_malformed_estimate_is_an_error(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "estimate.json"
    for changed in ({"capacity_bytes": "80 GB"}, {"peak_bytes": math.nan}, {"phases": [1]}):
        estimated().save(path)
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
        result = run("report", path, "-o", tmp_path / "estimate.html")
        assert result.exit_code == 2, result.output
        assert "error:" in result.stderr
        assert not (tmp_path / "estimate.html").exists()


@pytest.mark.usefixtures("short_search")
def test_the_frontier_has_a_slider(opened: Any) -> None:
    profile = chain(6)
    plan = solved(profile)
    plans = ckptplan.frontier(profile, points=3, time_limit_s=1)
    page = opened(plan.report(profile, frontier=plans))
    # Legends have values without a pointer: at the plan that the budget allows, at the peak, and where it last was.
    found = values(page, "frontier")
    chosen = max((p for p in plans if p.counted_bytes <= plan.budget_bytes), key=lambda p: p.counted_bytes)
    assert found["peak"] == format_bytes(chosen.peak_bytes)
    assert found["chosen"] == found["best plan found"] == f"{100 * chosen.overhead:.1f} %"
    timeline = ckptplan.simulate(profile, plan)
    stacked = waterline(profile, plan, timeline).stacked
    steps = [step.peak_bytes for step in timeline.steps]
    for step in (steps.index(max(steps)), 0):
        wanted = {
            name: format_bytes(int(row[step])) for name, row in zip(CATEGORIES, stacked, strict=True) if row.any()
        }
        assert values(page, "waterline").items() >= wanted.items()
        page.locator("#waterline .u-over").hover(position={"x": 5, "y": 50})
        page.mouse.move(0, 0)
        page.evaluate(DRAWN)
    peaks, ours, *_ = drawn(page, "frontier")
    at = dict(zip(peaks, ours, strict=True))
    for found in plans:
        assert at[found.peak_bytes] == pytest.approx(100 * found.overhead, abs=1e-6)
    labels = page.evaluate("report.charts.frontier.series.slice(1).map((s) => s.label)")
    assert {"greedy (PoocH)", "checkpoint every block"} <= set(labels)
    for name, planner in RIVALS.items():
        points = drawn(page, "frontier")[1 + labels.index(name)]
        for peak, slower in zip(peaks, points, strict=True):
            if slower is not None:
                made = BASELINES[planner](profile, peak)
                assert slower == pytest.approx(100 * made.overhead, abs=1e-6)
                assert slower >= at[peak] - 1e-6
    for k in (0, len(plans) - 1):
        page.locator("#point").fill(str(k))
        told = page.locator("#told").inner_text()
        assert told.startswith(f"{plans[k].peak_bytes / 2**20:.2f} MiB: ")
        assert ("one MiB more saves" in told) == (k == 0)
        chosen = drawn(page, "frontier")[-1]
        assert [peak for peak, value in zip(peaks, chosen, strict=True) if value is not None] == [plans[k].peak_bytes]


DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Waits until charts are resized and drawn, for which a page needs no more than two frames."""


def values(page: Any, chart: str) -> dict[str, str]:
    """What a legend says."""
    rows = page.locator(f"#{chart} .u-legend .u-series")
    texts = [rows.nth(k).locator(part).inner_text() for k in range(rows.count()) for part in (".u-label", ".u-value")]
    return dict(zip(texts[::2], texts[1::2], strict=True))


@pytest.mark.usefixtures("short_search")
def test_a_measured_step_is_drawn_over_the_predicted_one(opened: Any, tmp_path: Path) -> None:
    profile = chain(4)
    spans = (Span("compute", "forward", "s0", 0.0, 0.05), Span("out", "out", "", 0.01, 0.02, 512))
    step = DrawnStep(spans, ((0.0, 5 << 20), (0.031, 9 << 20)), 0.05)
    Trace(step, None, ("slow", "here")).save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert (loaded.measured.memory, loaded.notes, loaded.predicted) == (step.memory, ("slow", "here"), None)
    assert loaded.measured.spans == spans
    page = opened(solved(profile).report(profile, trace=loaded))
    x, *columns = drawn(page, "waterline")
    measured = {at: value for at, value in zip(x, columns[-1], strict=True) if value is not None}
    assert measured == {0.0: 5 << 20, 0.031: 9 << 20}
    assert page.evaluate("report.charts.waterline.series.at(-1).label") == "measured"


@pytest.mark.usefixtures("short_search")
def test_a_strangers_profile_runs_nothing(opened: Any, tmp_path: Path) -> None:
    profile = chain(5)
    stages = tuple(replace(stage, name=f"{HOSTILE}{i}") for i, stage in enumerate(profile.stages))
    storages = tuple(replace(storage, name=HOSTILE, origin=HOSTILE) for storage in profile.storages)
    made_on = replace(profile.fingerprint, model=HOSTILE, inputs=HOSTILE, device=HOSTILE)
    profile = replace(profile, stages=stages, storages=storages, notes=(HOSTILE,), fingerprint=made_on)
    plan = solved(profile)
    report = plan.report(profile, commands=[HOSTILE], verification=HOSTILE)
    page = opened(report)
    page.locator("#strip button").nth(1).click()
    page.locator("#waterline .u-over").hover()
    assert page.evaluate("window.hacked") is None
    assert page.locator("#why strong").inner_text() == f"{HOSTILE}1"
    assert HOSTILE in page.locator("#moment").inner_text()
    assert page.locator("img").count() == 0
    assert page.locator("script:not([type])").count() == 2
    shown = re.sub(r"```text\n.*?```", "", report.markdown, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)<", shown)
    assert report.markdown.count("```") % 2 == 0


@pytest.mark.usefixtures("short_search")
def test_files_in_the_page_are_the_plan_and_the_profile(opened: Any) -> None:
    profile = chain(3)
    plan = solved(profile)
    page = opened(plan.report(profile))
    for kind, made in ((Plan, plan), (Profile, profile)):
        with page.expect_download() as saved:
            page.get_by_role("button", name=f"Save the {kind.__name__.lower()}").click()
        assert kind.load(saved.value.path()) == made  # type: ignore[attr-defined]


def estimated(name: str = "") -> Estimate:
    phases = (
        Phase("forward", 100, 700, 900, 1000, {"weights": 100, "saved activations": 800}),
        Phase(f"backward{name}", 700, 100, 1200, 1300, {"weights": 100, "gradients": 400, "saved activations": 700}),
    )
    alive = (Tensors(700, 2, "saved activations", f"h{name}", "", f"h{name}", "model.py:3", "aten.mm", (7, 5), "f4"),)
    return Estimate(
        f"a device{name}", phases, 1200, f"backward{name}", f"h{name}", 1300, 50, 1 << 40, {"weights": 100},
        {f"h{name}": 800}, alive, (f"a note{name}",),
    )  # fmt: skip


def test_the_page_of_an_estimate(opened: Any, run: Run, tmp_path: Path) -> None:
    estimate = estimated()
    page = opened(estimate.report())
    _, *columns = drawn(page, "phases")
    assert columns[0] == [phase.reserved_bytes + estimate.context_bytes for phase in estimate.phases]
    assert values(page, "phases").items() >= {"phase": "backward", "weights": "100 B", "gradients": "400 B"}.items()
    labels = page.evaluate("report.charts.phases.series.slice(1).map((s) => s.label)")
    assert columns[labels.index("weights")] == [100, 100]
    assert columns[labels.index("the device has")] == [1 << 40, 1 << 40]
    text = page.locator("body").inner_text()
    for told in ("700 B", "f4[7, 5]", "model.py:3 in h", "NVIDIA A100 40GB", "fits, "):
        assert told in text
    assert "does NOT fit" in replace(estimate, capacity_bytes=1000).report().markdown
    page = opened(estimated(HOSTILE).report())
    page.locator("#phases .u-over").hover()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    estimate.save(tmp_path / "estimate.json")
    output(run("report", tmp_path / "estimate.json", "-o", tmp_path / "estimate.md"))
    assert "**Needs 1.32 KiB on a device of 1.00 TiB: fits.**" in (tmp_path / "estimate.md").read_text()
    done = run("report", tmp_path / "estimate.json", "--budget-gb", 1, "--time-limit", 2)
    assert done.exit_code == 2
    assert "leave out the arguments for plans: --budget-gb, --time-limit" in " ".join(done.stderr.split())


def test_what_notebooks_show(browser: Any) -> None:
    profile = chain(3)
    stages = tuple(replace(stage, name=f"{HOSTILE}{i}") for i, stage in enumerate(profile.stages))
    profile = replace(profile, stages=stages, notes=(HOSTILE,))
    plan = plan_of(profile, ["keep", "swap", "recompute"])
    report = plan_report(profile, plan)
    shown = [found._repr_html_() for found in (profile, plan, Frontier((plan, plan)), estimated(HOSTILE), report)]
    assert max(map(len, shown[:-1])) < 10_000
    page = browser.new_page()
    page.set_content(f"<body>{''.join(shown)}</body>")
    page.frame_locator("iframe").locator("html[data-drawn=yes]").wait_for(state="attached")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    text = page.locator("body").inner_text()
    told = ("profile of 3 stages", "fits ", "over everything kept", "needs ", "1.00 TiB: fits", "recompute")
    assert [each for each in told if each not in text] == []
    page.close()


@pytest.mark.usefixtures("short_search")
@pytest.mark.long
def test_of_the_command_line(run: Run, tmp_path: Path) -> None:
    profile = chain(6)
    profile.save(tmp_path / "profile.json")
    solved(profile).save(tmp_path / "plan.json")
    files = (tmp_path / "profile.json", tmp_path / "plan.json")
    Frontier((Plan.load(files[1]),)).save(tmp_path / "frontier.json")
    page, text = tmp_path / "plan.html", tmp_path / "plan.md"
    output(run("report", *files, "--frontier", tmp_path / "frontier.json", "-o", page))
    assert 'id="frontier"' in page.read_text()
    assert run("report", *files, "-o", text).exit_code == 0
    assert text.read_text().startswith("## A chain of 6 stages")
    (tmp_path / "broken.json").write_text(json.dumps({"traceEvents": [{"pid": 1}]}))
    for arguments, message in (
        ((*files, "-o", page, "--format", "md"), "--format md doesn't match the file name"),
        ((*files, "-o", tmp_path / "plan.pdf"), "its name must end in .html or .md"),
        ((files[1], files[0]), "has schema 'ckptplan.plan/4'"),
        ((files[0],), "profile.json has no plan; give it too"),
        ((*files, "--frontier", files[1]), "give a file that ckptplan frontier made"),
        ((*files, "--trace", tmp_path / "broken.json"), "is not a trace that `ckptplan trace` wrote"),
        ((*files, "--trace", tmp_path / "none.json"), "can't be read"),
    ):
        done = run("report", *arguments)
        assert done.exit_code == 2
        assert message in " ".join(done.stderr.split())
    with pytest.raises(InvalidInputError, match="can't be written"):
        solved(profile).report(profile).save(tmp_path / "nowhere" / "plan.html")


def test_a_thousand_stages_fit_in_a_megabyte(opened: Any) -> None:
    profile = chain(1000)
    report = plan_report(profile, plan_of(profile, ["keep", "swap", "recompute", "keep"] * 250))
    assert len(report.html) < 1 << 20
    page = opened(report)
    assert page.locator("#strip button").count() == 1000
