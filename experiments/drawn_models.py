"""Models drawn by a seed from all model classes of `transformers` and `diffusers`."""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections.abc import Sequence
from pathlib import Path

from torch import nn

BASES = {"transformers": "PreTrainedModel", "diffusers": "ModelMixin"}
"""Package -> the class of which its models are subclasses."""

DRAWS = Path(__file__).with_name("drawn.json")
"""The draws of the committed results, made before anything was run on them."""


def classes(packages: Sequence[str]) -> list[str]:
    """Qualified names of all concrete model classes that the packages export, sorted."""
    found: set[str] = set()
    for package in packages:
        module = importlib.import_module(package)
        base = getattr(module, BASES[package])
        for name in dir(module):
            try:
                kind = getattr(module, name)
            except Exception:  # it needs a library that is not here
                continue
            if inspect.isclass(kind) and issubclass(kind, base) and _is_concrete(kind):
                found.add(f"{kind.__module__}.{kind.__qualname__}")
    return sorted(found)


def _is_concrete(kind: type[nn.Module]) -> bool:
    abstract = kind.forward is nn.Module.forward or kind.__name__.endswith("PreTrainedModel")
    return not abstract and getattr(kind, "config_class", True) is not None


def draw(seed: int, count: int, packages: Sequence[str]) -> list[str]:
    """`count` of the classes, drawn by `seed`."""
    return random.Random(seed).sample(classes(packages), count)


def drawn(experiment: str) -> list[str]:
    """The committed draw of an experiment."""
    return list(json.loads(DRAWS.read_text())[experiment]["names"])
