"""Limits on the training memory of a test's model: a marker, a fixture and a recorded baseline for pytest.

    @pytest.mark.max_training_memory("10 GiB", device="a100-40gb", optimizer="adamw")
    def test_memory():
        return build_model(), torch.zeros(8, 2048, dtype=torch.long)

The test returns a model and its inputs. A training step is estimated for the device (`ckptplan.estimate`):
without a GPU, and with the same result each time. A failure shows the tensors at the peak.

With `baseline="memory.json"` the bytes are compared with those recorded in that file, beside the test's; more than
`tolerance` above them is a failure. `pytest --record-training-memory` records them.

pytest loads this module in every run, so it imports nothing but pytest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.unittest import TestCaseFunction

_MARK = "max_training_memory"
_RECORD = "--record-training-memory"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records baselines."""
    parser.getgroup("ckptplan").addoption(
        _RECORD,
        action="store_true",
        help="record the training memory of tests marked max_training_memory(baseline=...) in their files",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; refuse to record from several processes, which would write over each other's figures."""
    if config.getoption(_RECORD) and (config.getoption("numprocesses", None) or config.getoption("tx", None)):
        raise pytest.UsageError(f"{_RECORD} writes files that all tests share; run it in one process (-n 0)")
    config.addinivalue_line(
        "markers",
        f"{_MARK}(limit, device, baseline, tolerance, **options): the test returns a model and its inputs; a training "
        "step of them must not need more memory than the limit, or than recorded (ckptplan.estimate has the options)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse the mark on a method of `unittest.TestCase`, whose result unittest drops."""
    for item in items:
        if item.get_closest_marker(_MARK) is not None and isinstance(item, TestCaseFunction):
            raise pytest.UsageError(
                f"{item.nodeid}: {_MARK} doesn't work on a method of unittest.TestCase; use a function, or a class "
                "without that base"
            )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test, and compare what its model needs with the limit."""
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    _check(pyfuncitem, pyfuncitem.obj(**arguments), *mark.args, **mark.kwargs)
    return True


def _check(
    item: pytest.Function,
    made: Any,
    limit: str | float | None = None,
    *,
    baseline: str | None = None,
    tolerance: float = 0.02,
    **options: Any,
) -> None:
    from ckptplan.core.budget import Budget
    from ckptplan.core.units import format_bytes

    if not (isinstance(made, tuple) and len(made) == 2):
        pytest.fail(
            f"a test marked {_MARK} returns a pair of a model and its inputs, this one gave {type(made).__name__}",
            pytrace=False,
        )
    if limit is None and baseline is None:
        pytest.fail(f"the mark {_MARK} needs a limit ('10 GiB') or a baseline ('memory.json')", pytrace=False)
    found = _estimated(*made, **options)
    needs = found.total_bytes
    if limit is not None:
        budget = Budget.of(None, limit) if isinstance(limit, str) else Budget.of(limit, None)
        if budget.nbytes is None:
            pytest.fail(f"{_MARK}: the limit {limit!r} isn't a number of bytes; give it as '10 GiB'", pytrace=False)
        if needs > budget.nbytes:
            _fail(found, f"training needs {format_bytes(needs)}, more than the limit of {format_bytes(budget.nbytes)}")
    if baseline is not None:
        _compare(item, found, Path(item.path).parent / baseline, tolerance)


def _compare(item: pytest.Function, found: Any, path: Path, tolerance: float) -> None:
    from ckptplan.core.units import format_bytes

    name = f"{Path(item.path).name}::{item.nodeid.partition('::')[2]}"
    try:
        recorded: dict[str, int] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not isinstance(recorded, dict) or not all(type(nbytes) is int for nbytes in recorded.values()):
            raise ValueError("it has to be a table of names and bytes")
    except ValueError as error:
        pytest.fail(f"{path} can't be read ({error}); delete it and record it anew: pytest {_RECORD}", pytrace=False)
    if item.config.getoption(_RECORD):
        recorded[name] = found.total_bytes
        text = json.dumps(dict(sorted(recorded.items())), indent=1)
        path.write_text(text + "\n", encoding="utf-8")
        return
    if name not in recorded:
        pytest.fail(f"{path.name} has no bytes of {name}; record them: pytest {_RECORD}", pytrace=False)
    if found.total_bytes > recorded[name] * (1 + tolerance):
        more = found.total_bytes / recorded[name] - 1
        _fail(
            found,
            f"training needs {format_bytes(found.total_bytes)}, {more:.1%} more than the recorded "
            f"{format_bytes(recorded[name])} (tolerance {tolerance:.1%}); if that is meant, record it: "
            f"pytest {_RECORD}",
        )


def _fail(found: Any, text: str) -> None:
    pytest.fail(f"{text}\n\n{found}", pytrace=False)


def _estimated(model: Any, inputs: Any, **options: Any) -> Any:
    from ckptplan.memory.estimate import estimate

    return estimate(model, inputs, **options)


@pytest.fixture
def training_memory() -> Callable[..., Any]:
    """A function of a model and its inputs that returns the `Estimate` of a training step."""
    return _estimated
