"""The version of this package, from which pyproject.toml has it, and its folder."""

from pathlib import Path

__version__ = "0.2.0"

PACKAGE_FOLDER = str(Path(__file__).absolute().parent.parent)
