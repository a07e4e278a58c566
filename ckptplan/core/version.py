"""The version of this package, from which pyproject.toml has it."""

__version__ = "0.2.0"
