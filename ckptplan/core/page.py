"""The interface of a report, for the calls that return one without knowing how it is rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Page(Protocol):
    """A report that can be saved or shown in a notebook (implemented by `ckptplan.report.page.render.Report`)."""

    @property
    def html(self) -> str:
        """The page: one file that loads nothing, with its data inside."""

    @property
    def markdown(self) -> str:
        """The texts as Markdown, for a pull request."""

    def save(self, path: str | Path) -> None:
        """Write the report; the suffix says how: .html or .md."""
