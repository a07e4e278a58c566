"""Reports: the texts of a report and its data, rendered as HTML or Markdown."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from ckptplan.core.errors import InvalidInputError
from ckptplan.core.files import Saved
from ckptplan.core.version import __version__

_ASSETS = files("ckptplan.report.page") / "assets"
_LIBRARY_VERSION = "1.6.32"
SUFFIXES = (".html", ".md")
"""Suffixes of the files that a report can be written to."""


def check_suffix(path: Path) -> str:
    """Return the suffix of a report's file in small letters.

    Raises
    ------
    InvalidInputError
        If it isn't one of `SUFFIXES`.
    """
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise InvalidInputError(f"a report can't be written to {path}: its name must end in {' or '.join(SUFFIXES)}")
    return kind


@dataclass(frozen=True)
class Part:
    """A section of a report that is only text.

    Attributes
    ----------
    heading : str
    lines : str
        Preformatted text.
    table : sequence of sequence of str
        Rows, the first one of headers; empty: none.
    """

    heading: str
    lines: str = ""
    table: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class View:
    """The texts of a report, common to all kinds."""

    title: str
    fits: bool
    answer: str
    verdict: str
    facts: Sequence[tuple[str, str]]
    commands: Sequence[str]
    parts: Sequence[Part]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Attached:
    """A file inside of the page, which a button saves."""

    name: str
    label: str
    content: Saved


@dataclass(frozen=True, eq=False)
class Report:
    """A report that can be saved or shown in a notebook.

    Attributes
    ----------
    template : str
        Name of the HTML template among the assets.
    view : View
        Its texts; what else the template shows is in `shown`.
    data : mapping
        What the charts draw, as plain JSON.
    attached : sequence of Attached
    """

    template: str
    view: View
    data: dict[str, Any]
    attached: Sequence[Attached] = ()
    shown: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def html(self) -> str:
        """The page: one file that loads nothing, with its data inside."""
        return _environment().get_template(self.template).render(
            view=self.view, title=f"{self.view.title}: {self.view.answer}", heading=self.view.title,
            data=_packed(json.dumps(self.data, separators=(",", ":"), allow_nan=False)), scripts=_scripts(),
            files=[
                {"id": f"file-{k}", "name": file.name, "label": file.label, "text": _packed(file.content.to_json())}
                for k, file in enumerate(self.attached)
            ],
            version=__version__, css=_asset("page.css"), library_css=_asset("uPlot.min.css"),
            library_version=_LIBRARY_VERSION, **self.shown,
        )  # fmt: skip

    def _repr_html_(self) -> str:
        page = html.escape(self.html)
        allowed = "allow-scripts allow-downloads"
        return f'<iframe srcdoc="{page}" sandbox="{allowed}" style="width:100%;height:46rem;border:0"></iframe>'

    @cached_property
    def markdown(self) -> str:
        """The texts as Markdown, for a pull request."""
        view = self.view
        lines = [f"## {_escaped(view.title)}", "", f"**{_escaped(view.answer)}** {_escaped(view.verdict)}", ""]
        lines += [f"> {_escaped(note)}" for note in view.notes]
        for part in view.parts:
            lines += ["", f"### {_escaped(part.heading)}", ""]
            if part.table:
                head, *rows = part.table
                lines += [_row(head), _row(["---", *["---:"] * (len(head) - 1)]), *map(_row, rows)]
            if part.lines:
                lines += ["```text", part.lines.replace("```", "'''"), "```"]
        lines += ["", "### Reproduce", ""]
        lines += [f"- {_escaped(name)}: {_escaped(value)}" for name, value in view.facts]
        if view.commands:
            lines += ["", "```text", *(command.replace("```", "'''") for command in view.commands), "```"]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the report; the suffix says how: .html or .md.

        Raises
        ------
        InvalidInputError
            If the suffix is another, or the file can't be written.
        """
        path = Path(path)
        kind = check_suffix(path)
        try:
            path.write_text(self.markdown if kind == ".md" else self.html, encoding="utf-8")
        except OSError as error:
            raise InvalidInputError(f"the report can't be written to {path}: {error}") from error


def _packed(text: str) -> str:
    """Return `text` compressed and in base 64, none of whose characters has a meaning in HTML."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _scripts() -> list[dict[str, str]]:
    """Return the page's scripts, first the library with its licence, and their hashes: its policy allows no others."""
    texts = (f"/*\n{_asset('uPlot.LICENSE')}\n*/\n{_asset('uPlot.iife.min.js')}", _asset("page.js"))
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return [{"text": text, "hash": f"sha256-{found}"} for text, found in zip(texts, hashes, strict=True)]


def _environment() -> jinja2.Environment:
    """Return the environment of the templates. It escapes everything except assets and packed data."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FunctionLoader(_asset)
    )
    return environment


def _escaped(text: str) -> str:
    """Return `text` in one line, with the characters escaped that have a meaning in Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", " ".join(text.split()))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell if set(cell) <= set('-:') else _escaped(cell) for cell in cells)} |"
