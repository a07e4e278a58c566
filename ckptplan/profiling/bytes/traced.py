"""The chain of a step after tracing: exact bytes, no times yet.

`Profile` has the same stages with times; `profiler.py` makes it once they are measured or computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptplan.core.option import Option
from ckptplan.core.resident import Resident
from ckptplan.core.stage import Differentiated, InputTensor
from ckptplan.core.storage import Storage

if TYPE_CHECKING:
    from ckptplan.profiling.bytes.real_storages import Places


@dataclass(frozen=True, slots=True)
class TracedStage:
    """A stage, or the operations between two stages, without times; fields as in `ckptplan.core.stage.Stage`.

    Attributes
    ----------
    options : tuple of Option
        "keep" first; their bytes are final, `recompute_s` and `launch_s` are not set.
    has_backward : bool
        Whether backward runs. If not, it takes no time, nor does a recompute.
    """

    name: str
    kind: str
    options: tuple[Option, ...]
    linked: tuple[int, ...]
    inputs: tuple[InputTensor, ...] | None
    has_backward: bool = True

    @property
    def is_glue(self) -> bool:
        """Whether these are operations outside of any module's call."""
        return self.name.startswith("(")

    @property
    def keep(self) -> Option:
        """The option that holds everything."""
        return self.options[0]


@dataclass(frozen=True, slots=True)
class Traced:
    """Bytes of one step, found without running it on its device; other fields as in `Profile`.

    Attributes
    ----------
    written : tuple of str
        Qualified names of the parameters that forward writes to.
    places : dict
        Segment -> positions of its storages, as indices into `storages`.
    rerun_shares : dict
        Kind of a stage with a menu, and operations whose outputs a recompute finds saved -> share of the forward's time
        that the recompute runs again, from each operation's time by itself. Only where all of them could be timed.
    """

    stages: tuple[TracedStage, ...]
    storages: tuple[Storage, ...]
    base_forward_bytes: tuple[int, ...]
    base_backward_bytes: tuple[int, ...]
    update_peak_bytes: int
    resident_bytes: int
    notes: tuple[str, ...]
    outside: tuple[str, ...]
    uncalled: tuple[str, ...]
    differentiated: tuple[Differentiated, ...]
    foreign: tuple[str, ...]
    written: tuple[str, ...]
    places: dict[int, Places]
    rerun_shares: dict[tuple[str, tuple[int, ...]], float]
    residents: tuple[Resident, ...]
