"""The version of this package, as it is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return the version; that of a source tree that isn't installed is unknown."""
    try:
        return version("ckptplan")
    except PackageNotFoundError:
        return "0+unknown"
