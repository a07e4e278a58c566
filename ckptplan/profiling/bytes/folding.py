"""Layers that repeat, and a model without most of them.

A run of equal layers of a container, with any period (a model may alternate two kinds), is shortened to four periods.
The second one stands for those that are left out. For example, of 24 equal blocks, blocks 0 to 3 are run, and block 1
stands for blocks 1 to 21. Of layers that are sharded units, five periods are run: backward frees a unit's buffers two
units later, so that the last but one has other neighbours, too.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ckptplan.distributed import parallel_of
from ckptplan.distributed.parallel import unit_settings

T = TypeVar("T")

_KEPT = 4
"""Periods that are run: the first and the last have other neighbours, the two between are compared."""
_KEPT_UNITS = 5
"""The same of sharded units, the last two of which have other neighbours."""
_LONGEST_PERIOD = 8
_POSITIONS = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_index", "idx", "index"}
"""Attributes with a layer's place, which differ between equal layers. The comparisons detect a use of the place."""
_PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.Size, torch.device)


class UnlikeLayersError(Exception):
    """The shortened model doesn't stand for the full one."""


@dataclass(frozen=True, slots=True)
class Run:
    """Layers of a container that repeat.

    Parameters
    ----------
    path : str
        The container's qualified name.
    first, count : int
        The layers are the container's members first to first + count - 1; count is a multiple of the period.
    period : int
        Number of members after which the pattern repeats.
    kept : int
        Number of periods that are run.
    """

    path: str
    first: int
    count: int
    period: int
    kept: int

    @property
    def periods(self) -> int:
        """Number of repetitions of the pattern."""
        return self.count // self.period

    @property
    def fewer(self) -> int:
        """Number of layers that the shortened model leaves out."""
        return self.count - self.kept * self.period

    @property
    def pattern(self) -> re.Pattern[str]:
        """The name of a member of the container, or of a part of one; the group is the member's index."""
        return re.compile((re.escape(self.path) + r"\." if self.path else "") + r"(\d+)(?=[.:#)]|$)")

    def renamed(self, name: str, r: int | None, q: int | None) -> str:
        """Return a name of the shortened model as the full one has it, in period `q`, which period `r` stands for."""
        head = f"{self.path}." if self.path else ""

        def moved(found: re.Match[str]) -> str:
            i = int(found[1])
            if i >= self.first + self.kept * self.period:
                i += self.fewer
            elif i >= self.first:
                recorded = (i - self.first) // self.period
                if r is not None and q is not None:
                    i += (q - r) * self.period
                elif recorded >= 2:
                    i += (self.periods - self.kept) * self.period
            return f"{head}{i}"

        return self.pattern.sub(moved, name, count=1) if head in name else name

    def shortened(self, name: str) -> str | None:
        """Return a name of the full model as the shortened one has it; None for that of a layer that is left out."""
        found = self.pattern.match(name)
        if found is None:
            return name
        i = int(found[1])
        if self.first <= i < self.first + self.count:
            q = (i - self.first) // self.period
            r = q if q < 2 else q - (self.periods - self.kept)
            if q >= 2 > r:
                return None
            i -= (q - r) * self.period
        elif i >= self.first:
            i -= self.fewer
        return f"{name[: found.start(1)]}{i}{name[found.end(1) :]}"


@dataclass(frozen=True, slots=True)
class Periods:
    """Where the periods of a run lie among the segments of the shortened model.

    Parameters
    ----------
    run : Run
    begins : tuple of int
        First segment of each period, and the first one after the last period.
    """

    run: Run
    begins: tuple[int, ...]

    @classmethod
    def of(cls, run: Run, stages: Sequence[str]) -> Periods | None:
        """Return the periods among `stages` of the shortened model; None unless equally long and in order."""
        members: list[int] = []
        segments: list[int] = []
        for j, name in enumerate(stages):
            found = run.pattern.match(name)
            if found and 0 <= (r := (int(found[1]) - run.first) // run.period) < run.kept:
                members.append(r)
                segments.append(2 * j + 1)
        if members != sorted(members) or set(members) != set(range(run.kept)):
            return None
        if segments != list(range(segments[0], segments[-1] + 1, 2)):
            return None
        begins = [segments[members.index(r)] for r in range(run.kept)]
        begins.append(segments[-1] + 2)  # the operations behind the last layer belong to its period
        return cls(run, tuple(begins)) if len({b - a for a, b in itertools.pairwise(begins)}) == 1 else None

    @property
    def length(self) -> int:
        """Number of segments of a period."""
        return self.begins[1] - self.begins[0]

    @property
    def more(self) -> int:
        """Number of segments that the full model has more."""
        return (self.run.periods - self.run.kept) * self.length

    def home(self, segment: int) -> int | None:
        """Return the period that a segment is in."""
        r = bisect.bisect_right(self.begins, segment) - 1
        return r if 0 <= r < self.run.kept else None

    @property
    def order(self) -> tuple[int, ...]:
        """Per period of the full model, the one that stands for it."""
        kept = self.run.kept
        return (0, *[1] * (self.run.periods - kept + 1), *range(2, kept))

    def repeated(
        self, short: Sequence[T], change: Callable[[T, int | None, int | None], T] = lambda item, r, q: item
    ) -> tuple[T, ...]:
        """Return the full model's list from the shortened one's with an item per stage.

        `change` gets an item with the period that it is of and the one that it stands for, None outside of them.
        """
        first, last, per = self.begins[0] // 2, self.begins[-1] // 2, self.length // 2
        out = [change(item, None, None) for item in short[:first]]
        for q, r in enumerate(self.order):
            out += [change(item, r, q) for item in short[first + r * per : first + (r + 1) * per]]
        return (*out, *(change(item, None, None) for item in short[last:]))

    def stages(self, short: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the full model's stages from those of the shortened one."""
        return self.repeated(short, self.run.renamed)


def find_runs(model: nn.Module) -> list[Run]:
    """Return the layers that can be left out: outermost containers first, none inside another."""
    owners = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    out: list[Run] = []
    if parallel_of(model).gathers_ahead:  # a layer may be gathered anywhere
        return out
    for path, container in model.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)) or any(path.startswith(f"{r.path}.") for r in out):
            continue
        members = list(container._modules.values())
        if None in members or any(owners[id(x)] > 1 for m in members for x in m.modules()):
            continue
        listed = _per_layer_settings(model, len(members))
        seen: dict[int, Any] = {}
        signatures = [(_signature(m, seen), tuple(values[i] for values in listed)) for i, m in enumerate(members)]
        units = any(unit_settings(x) for m in members for x in m.modules())
        run = _longest(path, signatures, _KEPT_UNITS if units else _KEPT)
        if run is not None:
            out.append(run)
    return out


def _longest(path: str, signatures: list[Any], kept: int) -> Run | None:
    """Return the run that leaves out most layers, all but `kept` periods; None if no run does."""
    best: tuple[int, Run] | None = None
    for period in range(1, _LONGEST_PERIOD + 1):
        first = 0
        while first < len(signatures):
            last = first + period
            while last < len(signatures) and signatures[last] == signatures[last - period]:
                last += 1
            count = (last - first) // period * period
            saved = count - kept * period
            if saved > 0 and (best is None or saved > best[0]):
                best = saved, Run(path, first, count, period, kept)
            first = max(last - period + 1, first + 1)
    return None if best is None else best[1]


def _per_layer_settings(model: nn.Module, layers: int) -> list[tuple[str, ...]]:
    """Return the lists with one entry per layer in the model's configurations; a forward may read its layer's entry."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    found = []
    for config in configs.values():
        for value in vars(config).values() if hasattr(config, "__dict__") else ():
            if isinstance(value, (list, tuple)) and len(value) == layers:
                found.append(tuple(map(repr, value)))
    return found


def _signature(module: nn.Module, seen: dict[int, Any]) -> Any:
    """Return a value that is equal for modules that do the same; `seen` has those of objects by identity."""
    plain = {}
    for name, value in vars(module).items():
        if name in _POSITIONS or name in ("_parameters", "_buffers", "_modules"):
            continue
        # Hooks are kept under numbers of their own.
        plain[name] = _settings(list(value.values()) if "_hooks" in name and isinstance(value, dict) else value, seen)
    tensors = [
        (name, None if t is None else (tuple(t.shape), t.stride(), t.dtype, t.requires_grad, t.device.type))
        for table in (module._parameters, module._buffers)
        for name, t in table.items()
    ]
    inner = [(name, None if m is None else _signature(m, seen)) for name, m in module._modules.items()]
    return type(module), sorted(plain.items(), key=lambda item: item[0]), tensors, inner, unit_settings(module)


def _settings(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, _PLAIN):
        return value if value == value else "nan"
    if isinstance(value, (list, tuple)):
        return [_settings(v, seen) for v in value]
    if isinstance(value, dict):
        return [(repr(k), _settings(v, seen)) for k, v in value.items()]
    if (engines := _of_engine(value)) is not None:
        return engines
    if _is_shared(value):
        return type(value), id(value)
    if isinstance(value, (torch.Tensor, nn.Module)) or not hasattr(value, "__dict__"):
        return type(value)
    if id(value) not in seen:
        seen[id(value)] = type(value)  # of an object that leads back to itself
        seen[id(value)] = type(value), _settings(vars(value), seen)
    return seen[id(value)]


def _of_engine(value: Any) -> str | None:
    """Return a name for an object or a hook of PyTorch's distributed engines, whose settings `unit_settings` gives."""
    kind = value if hasattr(value, "__qualname__") else type(value)
    in_engine = str(getattr(kind, "__module__", "")).startswith("torch.distributed.")  # a generator has none
    return kind.__qualname__ if in_engine else None


def _is_shared(value: Any) -> bool:
    """Return whether a value is compared by identity, as functions and classes are, and not by its type."""
    return callable(value) and not isinstance(value, nn.Module) and hasattr(value, "__name__")


@contextlib.contextmanager
def shortened(model: nn.Module, runs: list[Run]) -> Iterator[None]:
    """Shorten each run to its first periods while the context is active; the members behind it are renumbered."""
    modules = dict(model.named_modules())
    saved = [(modules[run.path], modules[run.path]._modules) for run in runs]
    try:
        for run, (container, members) in zip(runs, saved, strict=True):
            kept = [
                m
                for i, m in enumerate(members.values())
                if not run.first + run.kept * run.period <= i < run.first + run.count
            ]
            container._modules = {str(i): m for i, m in enumerate(kept)}
        yield
    finally:
        for container, members in saved:
            container._modules = members
