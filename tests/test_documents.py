"""README.md, CONTRIBUTING.md and docs/: code blocks run, and what the text names is there."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptplan

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[str]:
    return [code for language, code in FENCED.findall(path.read_text()) if language == "python"]


def prose(path: Path) -> str:
    return FENCED.sub("", path.read_text())


def code(path: Path) -> Iterator[str]:
    """Code spans of the prose, those that go on in the next line too, and lines of indented blocks."""
    text = prose(path)
    for span in re.findall(r"`([^`]+)`", text):
        yield " ".join(span.split())
    for line in text.splitlines():
        if line.startswith("    "):
            yield line.strip()


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MkDocs make it."""
    words = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
    return re.sub(r"[\s]+", "-", words)


def anchors(path: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)}


def test_nothing_installs_the_other_project_of_this_name() -> None:
    """On the package index `ckptplan` is another project: what is installed is the checkout or `ckptplan-torch`."""
    others = re.compile(r"\binstall\b[^&|\n]*[\s'\"]ckptplan(?![-.\w])|\bckptplan\[[a-z,]+\]['\"]")
    assert others.search("pip install -U 'ckptplan'")
    assert others.search('"ckptplan[test]"')
    folders = ("ckptplan", "docs", "examples", "experiments", "tests")
    paths = [*ROOT.glob("*.*"), *(path for name in folders for path in (ROOT / name).rglob("*.*"))]
    texts = [path for path in paths if path.suffix in {".py", ".md", ".toml", ".txt", ".html", ".js"}]
    assert len(texts) > 400
    found = {path: others.findall(path.read_text()) for path in texts if path != Path(__file__)}
    assert not {path: hits for path, hits in found.items() if hits}


def test_the_version_is_the_last_one_of_the_changelog() -> None:
    (version, day), *_ = re.findall(
        r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert version == ckptplan.__version__
    assert day


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(README.read_text().splitlines()) <= 120


@pytest.mark.usefixtures("short_search")
def test_the_block_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a program of its own; its budget makes a difference, and it prints what its comment says."""
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(README)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    out = capsys.readouterr().out
    assert re.match(r"fits \d+\.\d\d of 153\.60 MiB, step \+\d+\.\d%, ", out)
    assert "nothing to gain" not in out


RUN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tutorial": (("gradients bitwise equal", "loss "), ()),
    "own_loop": (("gradients bitwise equal", "1 new plan"), ("profile.json", "plan.json")),
    "budget": ((), ("plan.html",)),
    "fit": (("on NVIDIA L4", "fits with a plan"), ("estimate.json",)),
    "measure": (("12 training forwards",), ("trace.json",)),
    "frameworks": ((), ()),
}
"""By page whose blocks are one program: text of its output, and the files that it writes."""


@pytest.mark.usefixtures("short_search")
@pytest.mark.filterwarnings("ignore:input .* goes beyond the plan:RuntimeWarning")
@pytest.mark.parametrize("page", RUN)
@pytest.mark.long("tutorial", "fit")
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(ROOT / "docs" / f"{page}.md")):
        exec(compile(block, f"{page}.md, block {number}", "exec"), names)
    texts, files = RUN[page]
    out = capsys.readouterr().out
    assert [text for text in texts if text not in out] == []
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def code_blocks_are_python(page: Path) -> None:
    for block in blocks(page):
        ast.parse(block)


def links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", re.sub(r"`[^`]*`", "", prose(page)))
    for link in links:
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if page.parent.name == "docs":  # the site has nothing else
            assert target.resolve().parent == page.parent.resolve() or "images" in file, link
        assert not anchor or anchor in anchors(target), link


@functools.cache
def commands() -> dict[str, set[str]]:
    """By command of the command line: its options."""
    from typer.main import get_command

    from ckptplan.cli.app import app

    group = get_command(app)
    found = {"": {name for option in group.params for name in option.opts}}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        found[name] = {text for option in command.params for text in (*option.opts, *option.secondary_opts)}
        found[name] |= {"--help"}
    return found


def commands_and_their_options_exist(page: Path) -> None:
    known = commands()
    for text in code(page):
        for name, rest in re.findall(r"\bckptplan +([a-z]+)\b([^|&;]*)", text):
            assert name in known, text
            options = {word.partition("=")[0] for word in rest.split() if re.match(r"--?[a-z]", word)}
            assert options <= known[name], text


@pytest.mark.planning
def test_the_page_of_the_command_line_has_every_command() -> None:
    """One row each; the options in a row are the command's."""
    known = commands()
    rows = re.findall(r"^\| `ckptplan ([a-z]+)\b(.*)$", prose(ROOT / "docs" / "cli.md"), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(name for name in known if name)
    for name, row in rows:
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", row)) <= known[name], name


def scripts_and_their_options_exist(page: Path) -> None:
    """So no figure stands there without a command that prints it."""
    for text in code(page):
        for script, rest in re.findall(r"\bpython ((?:experiments|examples|docs)/\S+\.py)([^|&;]*)", text):
            assert (ROOT / script).is_file(), text
            source = (ROOT / script).read_text() + (ROOT / "experiments" / "documents.py").read_text()  # `--out`
            words = [word.partition("=")[0] for word in shlex.split(rest, comments=True)]
            assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == [], text
        for module, command in re.findall(r"\bpython -m (experiments\.\w+) ([a-z]+)", text):
            assert command in (ROOT / module.replace(".", "/") / "__main__.py").read_text(), text


def files_exist(page: Path) -> None:
    """Paths of the repository, or of the package without its name."""
    for text in code(page):
        for path in re.findall(r"^(?:[\w.-]+/)+(?:[\w-]+\.(?:py|json|md|toml|png))?$", text):
            if not path.startswith(("tmp/", "probe/", "profile/", "measure/", "plans/", "histories/", "traces/")):
                assert (ROOT / path).exists() or (ROOT / "ckptplan" / path).exists(), path


def cited_tests_exist(page: Path) -> None:
    """Tests are named from `tests/`; the page of guarantees names experiments by their script alone."""
    for text in code(page):
        for path, test in re.findall(r"^([\w/]+\.py)::(test_\w+)$", text):
            assert f"def {test}(" in (ROOT / "tests" / path).read_text(), text
        if page.name == "guarantees.md" and re.fullmatch(r"\w+\.py", text):
            assert (ROOT / "experiments" / text).exists(), text


@functools.cache
def notes() -> list[str]:
    """The names of all notes of the package."""
    pattern = re.compile(r"^NOTE \[([^]]+)\]", re.MULTILINE)
    return [note for path in (ROOT / "ckptplan").rglob("*.py") for note in pattern.findall(path.read_text())]


def notes_exist(page: Path) -> None:
    """A NOTE that is named is defined, once."""
    for note in re.findall(r"NOTE \[([^]]+)\]", " ".join(prose(page).split())):
        assert notes().count(note) == 1, note


def public_names_exist(page: Path) -> None:
    for text in [*code(page), *blocks(page)]:
        for name in re.findall(r"(?<![\w./-])ckptplan\.([A-Za-z_]+)(?![\w/])", text):
            is_schema = re.search(rf"ckptplan\.{name}/\d", text) is not None
            assert is_schema or name in ckptplan.__all__ or importlib.util.find_spec(f"ckptplan.{name}"), text


@pytest.mark.planning
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    for check in (
        code_blocks_are_python, links_lead_somewhere, commands_and_their_options_exist, scripts_and_their_options_exist,
        files_exist, cited_tests_exist, notes_exist, public_names_exist,
    ):  # fmt: skip
        check(page)


@pytest.mark.planning
def test_figures_are_of_the_commit_that_the_page_names() -> None:
    """Of results that record theirs: of a clean checkout, and named beside the command."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    results = [json.loads(path.read_text()) for path in (ROOT / "experiments" / "results").glob("*.json")]
    named = [result for result in results if isinstance(result, dict) and "environment" in result]
    found = [(result["command"], commit) for result in named if (commit := result["environment"].get("commit"))]
    assert found
    for command, commit in found:
        shown = re.escape(command.replace(" --out experiments/results", ""))
        assert re.search(rf"`{shown}`[^`\n]*`{commit[:7]}\w?`", page), (command, commit)


@pytest.mark.planning
def test_the_reference_has_every_public_name_once() -> None:
    """By the name of its package, or by that of its module where the package has a module of the same name."""
    text = (ROOT / "docs" / "reference.md").read_text()
    names = re.findall(r"^::: ckptplan\.(?:[\w.]+\.)?(\w+)$", text, re.MULTILINE)
    assert sorted(name for name in names if name in ckptplan.__all__) == sorted(ckptplan.__all__)


@pytest.mark.planning
def test_every_page_is_found_from_the_readme_and_in_the_menu() -> None:
    names = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert names == set(re.findall(r"\]\(docs/(\w+\.md)\)", README.read_text()))
    assert names <= set(re.findall(r"(\w+\.md)", (ROOT / "mkdocs.yml").read_text()))
