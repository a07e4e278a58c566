"""Reading and writing of JSON files, each one object whose `schema` names its format and version."""

from __future__ import annotations

import dataclasses
import gzip
import html
import json
import zlib
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin

from ckptplan.core.checks import types_of
from ckptplan.core.errors import InvalidInputError

_MADE_BY = {
    "ckptplan.profile": "ckptplan.profile",
    "ckptplan.plan": "ckptplan.solve",
    "ckptplan.device": "ckptplan calibrate",
    "ckptplan.frontier": "ckptplan frontier",
    "ckptplan.estimate": "ckptplan estimate",
}


class Saved:
    """Base of the dataclasses that are saved as JSON (docs/formats.md).

    Attributes
    ----------
    SCHEMA : str
        Name and version of the format.
    OLDER : tuple of str
        Those of older versions that can be read.
    """

    __slots__ = ()
    SCHEMA: ClassVar[str]
    OLDER: ClassVar[tuple[str, ...]] = ()

    def save(self, path: str | Path) -> None:
        """Write the fields as JSON (docs/formats.md)."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """Return the fields as JSON."""
        return json.dumps({"schema": self.SCHEMA, **dataclasses.asdict(self)}, indent=1)  # type: ignore[call-overload]

    def _repr_html_(self) -> str:
        """Return the text of `str` for a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by `save` or by hand; gzip may have packed it.

        Raises
        ------
        InvalidInputError
            If the file doesn't have this schema, a field is missing or unknown, or a value is impossible.
        """
        try:
            return cls._of(read_json(path, cls.SCHEMA, *cls.OLDER))
        except (AttributeError, TypeError, RecursionError) as error:
            raise InvalidInputError(
                f"{path} is not a complete {cls.__name__.lower()}: {error}; docs/formats.md lists the fields"
            ) from error

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` of this version returned."""
        return cls._of(json.loads(text))

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Self:
        del data["schema"]
        return decoded(cls, data)  # type: ignore[no-any-return]


def read_json(path: str | Path, *schemas: str) -> dict[str, Any]:
    """Return the object in the JSON file at `path`, whose schema must be one of `schemas`.

    Raises
    ------
    InvalidInputError
        If the file can't be read, isn't JSON, or has another schema.
    """
    try:
        raw = Path(path).read_bytes()
        data = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
    except OSError as error:
        raise InvalidInputError(f"{path} can't be read: {error}") from error
    except (ValueError, RecursionError, EOFError, zlib.error) as error:
        raise InvalidInputError(f"{path} can't be read as JSON: {error}; if it was cut off, make it again") from error
    found = data.get("schema") if isinstance(data, dict) else None
    if found not in schemas:
        same = [name for name in (schema.rpartition("/")[0] for schema in schemas) if f"{found}".startswith(f"{name}/")]
        remedy = (
            f"make it again with this version's {_MADE_BY[same[0]]}, or use the version of ckptplan that wrote it"
            if same
            else f"give a file that {' or '.join(dict.fromkeys(_MADE_BY[s.rpartition('/')[0]] for s in schemas))} made"
        )
        raise InvalidInputError(
            f"{path} has schema {found!r}; this version reads {' and '.join(map(repr, schemas))}: {remedy}"
        )
    return dict(data)


def decoded(kind: Any, value: Any) -> Any:
    """Return the value of a field annotated with `kind`, or the dataclass `kind`, from its form in JSON.

    Raises
    ------
    AttributeError, TypeError
        If it has another form, or a field is missing or unknown.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:  # with None
        return None if value is None else decoded(args[0], value)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is not a list")
        return tuple(decoded(args[0], item) for item in value)
    if dataclasses.is_dataclass(kind):
        types = types_of(kind)  # type: ignore[arg-type]
        value = dict(value.items())
        if hasattr(kind, "upgraded"):  # from the form of older versions
            value = kind.upgraded(value)
        fields = {name: decoded(types.get(name), item) for name, item in value.items()}
        return kind(**fields)  # type: ignore[operator]
    return value
