"""Storages of a real forward compared with those of the trace, stage by stage.

A replay on fake tensors can be wrong about a storage in ways that no single operation shows: an autograd Function that
saves other tensors when its inputs are fake, a branch on real values, a view of memory from outside the step. So while
stages are timed, the inputs, outputs and saved tensors of each stage, and of the glue between stages, are recorded in
one forward.

NOTE [Real storages]
1. Traced and real storages are matched by their places: in the arguments, in the outputs, and in the order of saving
   (NOTE [Positions] in tensors/positions.py).
2. If the places agree, the larger size is taken. The stage that makes such a storage takes the difference in its
   forward, and once more when it is recomputed.
3. If they don't, for instance since more is saved than was traced, it isn't known what would be moved or made again.
   The stage is kept. It holds all its inputs, and the bytes by which its real saved tensors and outputs exceed the
   traced ones.

Example: in the trace, stage 1 made and saved storages 7 and 8 of 4 KiB each. If the real forward saves two of 4 KiB and
6 KiB, storage 8 gets 6 KiB, and stage 1 takes 2 KiB more in forward. If it saves three of 4 KiB, stage 1 is kept with
4 KiB more.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ckptplan.core.storage import Storage
from ckptplan.core.units import format_bytes
from ckptplan.distributed import parallel_of
from ckptplan.profiling.bytes.traced import Traced, TracedStage
from ckptplan.runtime.swap.packing import unowned
from ckptplan.runtime.swap.users_hooks import OwnHooks
from ckptplan.tensors.accelerator import is_accelerator
from ckptplan.tensors.positions import has_position
from ckptplan.tensors.storages import storages_of, tensors_in


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Storages of a stage's inputs and outputs and of its saved tensors, each in order.

    Attributes
    ----------
    given, returned, saved : tuple of int
        Of a trace, indices into the chain's storages, -1 for those that it doesn't have. Of a real forward, indices
        into `sizes`.
    sizes : tuple of int
        Of a real forward: bytes of its storages.
    stage : int
        Of a trace: the index of the stage in the chain, glue included.
    """

    given: tuple[int, ...]
    returned: tuple[int, ...]
    saved: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    stage: int = -1


class RealStorages:
    """Recorder of the places of storages in one real forward.

    Parameters
    ----------
    model : nn.Module
        Its own storages have no places.
    device : torch.device
        Storages on other devices have a place and count as 0 bytes.
    round_to : int
        The device's allocator gives blocks of multiples of this.

    Attributes
    ----------
    found : dict
        Segment -> its places.
    """

    def __init__(self, model: nn.Module, device: torch.device, round_to: int) -> None:
        self._own = {s._cdata for t in (*model.parameters(), *model.buffers()) for s in storages_of(t)}
        self._parallel = parallel_of(model)
        self._device, self._round_to = device, round_to
        self.found: dict[int, Places] = {}
        self._watched: _Watched | None = None

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Record the tensors that autograd saves within the block."""
        return OwnHooks(self._pack, lambda tensor: tensor)

    def begin(self, segment: int, given: Any = ()) -> None:
        """Note that a segment begins, with these arguments."""
        self._watched = _Watched(segment)
        self._watched.given = self._named(given)

    def end(self, returned: Any = ()) -> None:
        """Note that the segment ends; nothing is recorded until the next one begins."""
        watched, names = self._watched, self._named(returned)
        self._watched = None
        if watched is not None:
            sizes = tuple(self._bytes_of(storage) for _, storage in watched.storages.values())
            given, returned, saved = (tuple(dict.fromkeys(found)) for found in (watched.given, names, watched.saved))
            self.found[watched.segment] = Places(given, returned, saved, sizes)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._watched is not None:
            self._watched.saved += self._named(tensor)
        return unowned(tensor)

    def _named(self, tree: Any) -> list[int]:
        """Numbers of the storages of the tensors in `tree`."""
        if self._watched is None:
            return []
        known = self._watched.storages
        return [
            known.setdefault(t.untyped_storage()._cdata, (len(known), t.untyped_storage()))[0]
            for t in tensors_in(tree)
            if has_position(t, self._is_own)
        ]

    def _is_own(self, storage: torch.UntypedStorage) -> bool:
        if storage._cdata not in self._own:
            self._own.update(t.untyped_storage()._cdata for t in self._parallel.gathered())
        return storage._cdata in self._own

    def _bytes_of(self, storage: torch.UntypedStorage) -> int:
        if is_accelerator(self._device) and storage.device != self._device:
            return 0
        return -(-storage.nbytes() // self._round_to) * self._round_to


class _Watched:
    """A running segment; its storages are held, so that no address is used twice."""

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by address, with their numbers
        self.given: list[int] = []
        self.saved: list[int] = []


def with_real_sizes(chain: Traced, real: Mapping[int, Places]) -> Traced:
    """`chain` with the sizes of a real forward, and notes on the differences (NOTE [Real storages])."""
    larger: dict[int, int] = {}
    refused: dict[int, tuple[Places, int]] = {}
    notes: list[str] = []
    for segment in chain.places.keys() & real.keys():
        place, seen = chain.places[segment], real[segment]
        if not _agree(place, seen):
            refused[place.stage] = place, _missing(chain, place, seen)
            continue
        for name in ("given", "returned", "saved"):
            numbers = getattr(seen, name)
            if len(numbers) == len(getattr(place, name)):
                for s, nbytes in zip(getattr(place, name), (seen.sizes[n] for n in numbers), strict=True):
                    if s >= 0 and chain.storages[s].born >= 0 and 0 < chain.storages[s].nbytes < nbytes:
                        larger[s] = max(larger.get(s, 0), nbytes)
    more = [0] * len(chain.stages)
    for s, nbytes in larger.items():
        storage = chain.storages[s]
        more[storage.born] += nbytes - storage.nbytes
    stages = [_enlarged(stage, nbytes) for stage, nbytes in zip(chain.stages, more, strict=True)]
    notes += [
        f"{stage.name} makes storages that take {format_bytes(nbytes)} more in a real forward than in the trace: the "
        "real sizes are used"
        for stage, nbytes in zip(chain.stages, more, strict=True)
        if nbytes
    ]
    storages = [
        dataclasses.replace(storage, nbytes=larger.get(s, storage.nbytes)) for s, storage in enumerate(chain.storages)
    ]
    for k, (place, nbytes) in sorted(refused.items()):
        if nbytes:
            storages.append(Storage(f"{stages[k].name}/not traced", nbytes, k, k))
        stages[k] = _kept(stages[k], place, len(storages) - 1 if nbytes else None, nbytes)
        notes.append(
            f"{stages[k].name} saves other tensors in a real forward than in the trace, {format_bytes(nbytes)} more: "
            "it is kept"
        )
    return dataclasses.replace(chain, stages=tuple(stages), storages=tuple(storages), notes=(*chain.notes, *notes))


def _agree(place: Places, seen: Places) -> bool:
    """Whether as many storages are saved as were traced, and each is in the same places."""
    if len(place.saved) != len(seen.saved):
        return False
    pairs = {
        (s, n)
        for traced, real in ((place.given, seen.given), (place.returned, seen.returned), (place.saved, seen.saved))
        if len(traced) == len(real)
        for s, n in zip(traced, real, strict=True)
        if s >= 0
    }
    return len(pairs) == len({s for s, _ in pairs}) == len({n for _, n in pairs})


def _missing(chain: Traced, place: Places, seen: Places) -> int:
    """Bytes by which the real saved tensors and outputs, inputs left out, exceed the traced ones."""
    traced = {*place.returned, *place.saved} - {*place.given, -1}
    real = {*seen.returned, *seen.saved} - {*seen.given}
    return max(sum(seen.sizes[n] for n in real) - sum(chain.storages[s].nbytes for s in traced), 0)


def _enlarged(stage: TracedStage, nbytes: int) -> TracedStage:
    """`stage` making storages that are together larger by `nbytes` than was traced."""
    options = (
        dataclasses.replace(
            option,
            forward_bytes=option.forward_bytes + nbytes,
            backward_bytes=option.backward_bytes + (nbytes if option.runs_again else 0),
        )
        for option in stage.options
    )
    return dataclasses.replace(stage, options=tuple(options)) if nbytes else stage


def _kept(stage: TracedStage, place: Places, storage: int | None, nbytes: int) -> TracedStage:
    """`stage` with keep alone, which holds its inputs and `storage`, the bytes that weren't traced."""
    given = [s for s in place.given if s >= 0 and s not in stage.keep.saved and s not in stage.keep.pinned]
    keep = dataclasses.replace(
        stage.keep,
        pinned=(*stage.keep.pinned, *given, *([] if storage is None else [storage])),
        forward_bytes=stage.keep.forward_bytes + nbytes,
        backward_bytes=stage.keep.backward_bytes + nbytes,
    )
    return dataclasses.replace(stage, options=(keep,), linked=())
