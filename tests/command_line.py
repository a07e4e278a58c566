"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable

from click.testing import Result

Run = Callable[..., Result]


def assert_clean_error(result: Result, *texts: str) -> None:
    """One line on stderr, exit code 2, nothing on stdout, no traceback."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for text in texts:
        assert text in result.stderr


def output(result: Result) -> str:
    """What a command prints that ends well."""
    assert result.exit_code == 0, result.output
    return result.stdout
