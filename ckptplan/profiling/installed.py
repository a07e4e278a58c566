"""Code of installed packages, which counts by its version: whose it is, and what was put in its place."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import ckptplan

_FOLDERS = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")}
_FOLDERS |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
SITE = tuple(os.path.join(path, "") for path in (*sorted(_FOLDERS), str(Path(ckptplan.__file__).parent)))
"""Folders of installed packages, and of this one."""
_HEAP = 1 << 9
"""Flag of classes that a program makes as it runs, those of `class` statements among them."""

_WITHOUT_CODE = frozenset((str, int, bool, float, type(None), dict, list, tuple, set, types.ModuleType))


class NoKeyError(Exception):
    """A step can't be described; the message says why."""


class Installed:
    """Packages and files of installed code that were met; the same questions are answered once."""

    def __init__(self) -> None:
        self._packages: set[str] = set()
        self._files: set[str] = set()
        self._searched: set[str] = set()
        """Packages that `replaced` has searched."""
        self._of_module: dict[object, bool] = {}
        self._of_file: dict[str, bool] = {}
        self._of_kind: dict[type, bool] = {}
        self._foreign: dict[type, bool] = {}

    def has_module(self, name: object) -> bool:
        """Return whether a module is of the standard library, or lies in a folder of installed packages."""
        if name not in self._of_module:
            self._of_module[name] = isinstance(name, str) and name not in ("", "__main__") and self._finds(name)
        return self._of_module[name]

    def _finds(self, name: str) -> bool:
        file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
        if isinstance(file, str):
            return self.has_file(file)
        return name in sys.builtin_module_names or self.has_module(name.rpartition(".")[0])

    def has_function(self, function: types.FunctionType) -> bool:
        """Return whether a function's code is installed, whatever names `functools.wraps` gave it."""
        file = function.__code__.co_filename
        if not file.startswith("<"):
            return self.has_file(file)
        name = str(function.__globals__.get("__name__"))
        return name.startswith("namedtuple_") or self.has_module(name)

    def has_class(self, kind: type) -> bool:
        """Return whether a class is an installed module's; one that a function there made from others' parts is not."""
        if kind not in self._of_kind:
            self._of_kind[kind] = self.has_module(kind.__module__) and (
                not kind.__flags__ & _HEAP or found_as(kind.__module__, kind.__qualname__) is kind
            )
        return self._of_kind[kind]

    def note(self, module: object, file: str | None = None) -> None:
        """Note that code of an installed module counts."""
        self._packages.add(str(module).partition(".")[0])
        file = file or getattr(sys.modules.get(str(module)), "__file__", None)
        if file is not None:
            self._files.add(file)

    def versions(self) -> list[str]:
        """Return the packages that were noted with their versions, and the files with their times."""
        found = (
            (package, getattr(sys.modules.get(package), "__version__", None)) for package in sorted(self._packages)
        )
        texts = [f"{package} {_version(package, named)}" for package, named in found]
        return [*texts, *(f"{path} {_changed(path)}" for path in sorted(self._files))]

    def replaced(self) -> Iterator[tuple[str, Any]]:
        """Yield what others put into modules and classes of the packages that were noted since the last call."""
        new = self._packages - self._searched - {"ckptplan"}
        self._searched |= new
        for owner in sorted(name for name in list(sys.modules) if name.partition(".")[0] in new):
            if not self.has_module(owner):
                continue
            for name, value in self._others(vars(sys.modules[owner])):
                yield f"{owner}.{name}", value
            for kind in list(vars(sys.modules[owner]).values()):
                if type(kind) is type and kind.__module__ == owner:
                    for name, member in self._others(vars(kind)):
                        yield f"{owner}.{kind.__qualname__}.{name}", member

    def _others(self, variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        files = self._of_file
        for name, value in list(variables.items()):
            kind = type(value)
            if kind is types.FunctionType and files.get(value.__code__.co_filename):
                continue
            if kind not in _WITHOUT_CODE and self.lacks(value):
                yield name, value

    def lacks(self, value: Any) -> bool:
        """Return whether a function, a class, or another object's class isn't installed."""
        kind = type(value)
        if kind is types.FunctionType:
            return not self.has_function(value)
        if kind is staticmethod or kind is classmethod or kind is types.MethodType:
            return self.lacks(value.__func__)
        if kind is property:
            return any(map(self.lacks, (value.fget, value.fset, value.fdel)))
        if issubclass(kind, type):
            return not self.has_module(value.__module__)
        if kind not in self._foreign:
            written_in_c = not any(type(member) is types.FunctionType for member in vars(kind).values())
            named = not written_in_c or kind.__module__ in sys.modules  # extensions give names without packages
            self._foreign[kind] = named and not self.has_module(kind.__module__)
        return self._foreign[kind]

    def has_file(self, file: str) -> bool:
        """Return whether a file is in a folder of installed packages."""
        if file not in self._of_file:
            self._of_file[file] = file.startswith(SITE)
        return self._of_file[file]


def found_as(module: object, qualname: str) -> Any:
    """Return what a module has under a qualified name; None if there is nothing."""
    found = sys.modules.get(str(module))
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


@functools.cache
def _version(package: str, named: object) -> str:
    """The version that a package names, and a digest of the list of its files; of the standard library, Python's.

    Raises
    ------
    NoKeyError
        If it has none.
    """
    if package in sys.stdlib_module_names:
        return sys.version
    try:
        parts = [metadata.distribution(package)]
    except metadata.PackageNotFoundError:
        names = () if isinstance(named, str) else metadata.packages_distributions().get(package, ())
        parts = [metadata.distribution(name) for name in names]
    if not parts and not isinstance(named, str):
        raise NoKeyError(f"it has code of {package}, an installed package without a version")
    files = "".join(part.read_text("RECORD") or "" for part in parts)  # it has a digest of each file
    return f"{named} {[part.version for part in parts]} {hashlib.sha256(files.encode()).hexdigest()}"


def _changed(path: str) -> str:
    try:
        stat = os.stat(path)
    except OSError:
        return "not there"
    return f"{stat.st_size} {stat.st_mtime_ns}"
