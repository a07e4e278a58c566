"""The modules of a model."""

from __future__ import annotations

from torch import nn


def below(module: nn.Module) -> list[nn.Module]:
    """Return `module` and all its submodules, each once, as `module.modules()` does, in a fraction of the time."""
    found = [module]
    known = {id(module)}
    for m in found:
        for child in m._modules.values():
            if child is not None and id(child) not in known:
                known.add(id(child))
                found.append(child)
    return found
