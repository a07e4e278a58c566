"""MkDocs hook: the README is the site's first page, and CONTRIBUTING.md one of its pages."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages that lie outside of docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_rewritten((ROOT / source).read_text(encoding="utf-8"))))
    return files


def _rewritten(text: str) -> str:
    """Links as the site has them: pages beside each other; folders and files that it doesn't have as plain text."""
    text = text.replace("](docs/", "](")
    for source, page in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return re.sub(r"\[([^]]+)\]\((?:examples/|LICENSE|CHANGELOG\.md)\)", r"\1", text)
