"""Private names of PyTorch are in one place, and a version of it without one is refused."""

from __future__ import annotations

import ast
import collections
import importlib.util
import operator
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptplan
from ckptplan.core.errors import CkptPlanError
from ckptplan.tensors import private

_PACKAGE = Path(ckptplan.__file__).parent
_OF_SOME_BUILDS = ("cuda", "cudnn", "sdp_priority", "nvtx")
_LOADED_LATER = (
    "torch._dynamo", "torch._functorch.config", "torch._functorch.partitioners", "torch._guards", "torch._inductor",
    "torch.distributed.", "torch.testing.",
)  # fmt: skip
"""Modules that are imported inside functions; the tests of these functions fail without them."""


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *parts[::-1]]) if isinstance(node, ast.Name) else ""


def _aliases(code: ast.AST) -> dict[str, str]:
    """Variables that stand for a name of PyTorch's, such as `_c = torch._C`."""
    found = {}
    for node in ast.walk(code):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value and _dotted(node.value).startswith("torch."):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found[_dotted(target)] = _dotted(node.value)
    return found


def _names(code: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """Dotted names of PyTorch's in code, of imports and of attributes."""
    for node in ast.iter_child_nodes(code):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Attribute) and (name := _dotted(node).partition(".__")[0]):
            top, _, rest = name.partition(".")
            yield f"{aliases.get(top, top)}.{rest}"
        else:
            yield from _names(node, aliases)


def _is_private(name: str) -> bool:
    top, *rest = name.split(".")
    return (
        top == "torch"
        and rest[:1] != ["ops"]
        and any(part.startswith("_") for part in rest)
        and rest != ["_C"]
        and rest != ["_C", "_autograd"]
        and rest[:2] != ["utils", "_pytree"]  # as good as public
        and not any(part in name for part in _OF_SOME_BUILDS)
        and not name.startswith(_LOADED_LATER)
    )


@pytest.fixture(scope="module")
def used() -> dict[str, set[str]]:
    """The private names that are used outside of `private`, with the files."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path != Path(private.__file__):
            code = ast.parse(path.read_text())
            for name in filter(_is_private, _names(code, _aliases(code))):
                found[name.removeprefix("torch.")].add(str(path.relative_to(_PACKAGE)))
    return found


def test_the_names_of_one_file_are_listed(used: dict[str, set[str]]) -> None:
    assert sorted(used) == sorted(private.OF_ONE_FILE)


def test_the_names_of_several_files_come_from_one(used: dict[str, set[str]]) -> None:
    assert {name: files for name, files in used.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    "name", ["_C._current_autograd_node", "_C._storage_Use_Count", "utils._mode_utils.no_dispatch"]
)
def test_a_version_without_a_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, _, last = name.rpartition(".")
    monkeypatch.delattr(operator.attrgetter(where)(torch), last)
    spec = importlib.util.spec_from_file_location("again", private.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(CkptPlanError, match=rf"{last}.*2\.9 to 2\.15"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
