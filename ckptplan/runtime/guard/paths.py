"""Whether a stage saves more than planned on a path that it didn't take when it was profiled.

NOTE [Other paths]
The same sizes of arguments may lead a stage to other operations: it makes a mask where a batch has padding, or a kernel
is chosen by values (an LSTM saves twice as much where all of its packed sequences have one length). Swapped stages
look at what they save in each call (swap/session.py). For kept and recomputed ones that would take too long, so numbers
stand for paths: of a kept stage, how many nodes autograd makes in its forward; of a recomputed one, how many tensors
it saves. Where a number is new for a stage, the bytes are counted once: of a kept stage in the graph behind its output,
of a recomputed one when it has run again. More than it saved when it was profiled, and than on its first path under the
plan, is the difference "saved": on the first path, profiles count some memory elsewhere (what only real runs save).

A thawed parameter and another mode are differences of their own, and a stage with one of them is not counted. Nor is
one that saved nothing, whose graph the program drops behind it (NOTE [Dropped graphs] in runtime/controller.py).

Not seen are paths of one number, what is saved inside of other saved-tensor hooks, such as a checkpoint's in the stage,
and paths beyond a stage's first `_MOST`.

Example: a kept stage makes 12 nodes in the first steps, whose 3 MiB are those planned. With padding it makes 14, which
is counted once: 4 MiB, and the step warns. With 12 nodes again nothing is counted.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckptplan.core.units import format_bytes
from ckptplan.distributed.own import OwnNames, OwnStorages
from ckptplan.runtime.guard.differences import Differences
from ckptplan.tensors.private import next_sequence_number
from ckptplan.tensors.storages import tensors_in
from ckptplan.tensors.views import plain

if TYPE_CHECKING:
    from ckptplan.runtime.recompute.call import PlannedStage

_MOST = 16
_LEAST_BYTES = 512
"""Smaller surpluses don't count: kernels of attention save numbers (a seed) that a forward without memory lacks."""


def made_nodes() -> int:
    """Return the number of the next node that autograd makes in this thread."""
    return int(next_sequence_number())


class Paths:
    """The paths that the stages of a model have taken under a plan (NOTE [Other paths]).

    Parameters
    ----------
    kept_bytes : sequence of int
        Per stage, what it saved when it was profiled.

    Attributes
    ----------
    larger : set of int
        Stages whose arguments were larger than planned in their last call, which is a difference of its own.
    """

    def __init__(self, model: nn.Module, kept_bytes: Sequence[int], differences: Differences) -> None:
        self._model, self._kept_bytes, self._differences = model, [*kept_bytes], differences
        self._training = model.training
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._known: dict[int, dict[int, int]] = collections.defaultdict(dict)
        self.larger: set[int] = set()

    def kept(self, stage: PlannedStage, first: int, output: Any) -> None:
        """Look at the path of a kept stage, the first of whose nodes had the number `first`."""
        self.look(stage, made_nodes() - first, lambda: _saved_behind(output, first))

    def look(self, stage: PlannedStage, path: int, saved: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Note a path on which a stage saves more than planned.

        Parameters
        ----------
        path : int
            The number that stands for it.
        saved : callable
            Returns the tensors that the stage saves; called if the path is new.
        """
        index = stage.index
        if index in self.larger or not self._kept_bytes[index]:
            return
        known = self._known[index]
        nbytes = known.get(path)
        if nbytes is None:
            if len(known) >= _MOST:
                return
            if self._model.training != self._training or any(p.requires_grad for p in self._frozen):
                return
            nbytes = self._bytes(stage.module, saved())
            if not known:
                self._kept_bytes[index] = max(self._kept_bytes[index], nbytes)
            known[path] = nbytes
        if nbytes >= self._kept_bytes[index] + _LEAST_BYTES:
            planned = format_bytes(self._kept_bytes[index])
            self._differences.note(
                "saved",
                f"stage {stage.name!r} saves {format_bytes(nbytes)}, the plan expects {planned}: its forward took "
                "another path than the one profiled; solve again with such inputs",
            )

    def _bytes(self, stage: nn.Module, tensors: Iterable[torch.Tensor]) -> int:
        own = OwnStorages(OwnNames(self._model))
        own.enter(stage)
        wholes: dict[int, int] = {}
        parts: collections.Counter[int] = collections.Counter()
        for tensor in tensors:
            if plain(tensor) and not own(storage := tensor.untyped_storage()):
                wholes[storage._cdata] = storage.nbytes()
                parts[storage._cdata] += tensor.nbytes  # of a batch's storage, a part
        return sum(min(nbytes, parts[key]) for key, nbytes in wholes.items())


def nodes_behind(output: Any, first: int) -> Iterator[Any]:
    """Yield the nodes behind an output, back to the node number `first`."""
    found = {t.grad_fn for t in tensors_in(output)} - {None}
    left = [*found]
    while left:
        node: Any = left.pop()
        if node._sequence_nr() < first:
            continue
        yield node
        new = {after for after, _ in node.next_functions if after is not None} - found
        found |= new
        left += new


def _saved_behind(output: Any, first: int) -> Iterator[torch.Tensor]:
    """Yield the tensors that the nodes behind an output hold without hooks, back to the node number `first`."""
    for node in nodes_behind(output, first):
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                slots: Any = ()
                with contextlib.suppress(RuntimeError):  # freed by a backward inside of the stage
                    slots = getattr(node, name)
                for slot in slots if isinstance(slots, tuple) else (slots,):
                    # Older versions of PyTorch don't tell of hooks: nothing is counted there.
                    if getattr(slot, "unpack_hook", slot) is None and isinstance(slot.data, torch.Tensor):
                        yield slot.data
