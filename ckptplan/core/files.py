"""Reading and writing of JSON files, each one object whose `schema` names its format and version."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptplan.core.errors import InvalidInputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MADE_BY = {
    "ckptplan.profile": "ckptplan.profile",
    "ckptplan.plan": "ckptplan.solve",
    "ckptplan.device": "ckptplan calibrate",
    "ckptplan.estimate": "ckptplan estimate",
}


def write_json(path: str | Path, schema: str, record: DataclassInstance) -> None:
    """Write the fields of `record` under the name of their schema."""
    text = json.dumps({"schema": schema, **dataclasses.asdict(record)}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_json(path: str | Path, *schemas: str) -> dict[str, Any]:
    """Return the object in the JSON file at `path`, whose schema must be one of `schemas`.

    Raises
    ------
    InvalidInputError
        If the file can't be read, isn't JSON, or has another schema.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"{path} can't be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} can't be read as JSON: {error}; if it was cut off, make it again") from error
    found = data.get("schema") if isinstance(data, dict) else None
    if found not in schemas:
        same = [name for name in (schema.rpartition("/")[0] for schema in schemas) if f"{found}".startswith(f"{name}/")]
        remedy = (
            f"make it again with this version's {_MADE_BY[same[0]]}, or use the version of ckptplan that wrote it"
            if same
            else f"give a file that {' or '.join(_MADE_BY[schema.rpartition('/')[0]] for schema in schemas)} made"
        )
        raise InvalidInputError(
            f"{path} has schema {found!r}; this version reads {' and '.join(map(repr, schemas))}: {remedy}"
        )
    return dict(data)


@contextlib.contextmanager
def reading(path: str | Path, kind: str) -> Iterator[None]:
    """Turn errors about fields of a file that is no complete `kind` into `InvalidInputError`."""
    try:
        yield
    except KeyError as error:
        raise InvalidInputError(
            f"{path} is not a complete {kind}: field {error} is missing; docs/formats.md lists the fields"
        ) from error
    except (AttributeError, TypeError, RecursionError) as error:
        raise InvalidInputError(
            f"{path} is not a complete {kind}: {error}; docs/formats.md lists the fields"
        ) from error


def as_tuple(items: object) -> tuple[Any, ...]:
    """Return the items of a JSON list.

    Raises
    ------
    TypeError
        If it is none.
    """
    if not isinstance(items, list):
        raise TypeError(f"{items!r} is not a list")
    return tuple(items)
