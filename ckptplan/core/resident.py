"""What is on the device before the step and may leave it within: weights, as storages of the chain.

NOTE [Offloaded weights]
1. A weight is the storage of one or several parameters or buffers. Its *users* are the stages whose forward reads it.
   All options of its users save it, so that it is needed by each user's forward, backward, and every run again; tied
   weights have several users (rule 4 of NOTE [Residency]). One that anything else reads (glue, a stage without a
   backward, one that is differentiated within forward) is none of these.
2. It exists before the step, and behind its first user's backward it is there again until the end of the step, also for
   the update. So it is part of `base_backward_bytes` in front of that user, and of no other base.
3. A frozen weight has a copy on the host that never changes (`Storage.on_host`), so it leaves without being copied out.
   A trained one is copied out in every step.
4. In an option that moves, weights move with the rest; each option that moves nothing has another beside it that moves
   the weights alone. "recompute+swap" moves the inputs that can move, and the weights.

Example: a chain of 4 frozen layers of 100 MiB with adapters. Before, each of the bases has all 400 MiB. As storages of
the chain, all leave behind their layer's forward but the last, which is needed at once: the turn has 100 MiB. In the
backward of layer 2 its own is back and that of layer 3 stays, in that of layer 0 all are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from ckptplan.core.checks import check_fields
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.option import DISCARD, Option
from ckptplan.core.storage import Storage

if TYPE_CHECKING:
    from ckptplan.core.profile import Profile

Kind = Literal["activations", "weights"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_NONE = (
    "offload= has no weights to move: none that only stages with a backward read is large enough, plain (no shard or "
    "quantised subclass), and in memory that can be resized"
)
ACTIVATIONS: tuple[Kind, ...] = ("activations",)
"""What moves if nothing else is said."""


def checked_offload(offload: object) -> tuple[Kind, ...]:
    """Return the kinds of storages that may move, in the order of `KINDS`.

    Parameters
    ----------
    offload : str or iterable of str
        Any of `KINDS`, or "all".

    Raises
    ------
    InvalidInputError
    """
    given = (offload,) if isinstance(offload, str) else tuple(offload) if isinstance(offload, Iterable) else (offload,)
    unknown = [kind for kind in given if kind not in (*KINDS, "all")]
    if unknown or not given:
        wrong = f"unknown kind {unknown[0]!r}" if unknown else "nothing may move; leave 'swap' out of actions= instead"
        raise InvalidInputError(f"offload={offload!r}: {wrong}; give any of {', '.join(map(repr, KINDS))}, or 'all'")
    return tuple(kind for kind in KINDS if kind in given or "all" in given)


@dataclass(frozen=True, slots=True)
class Resident:
    """A storage that is on the device before the step and may be away within (NOTE [Offloaded weights]).

    Parameters
    ----------
    names : tuple of str
        Qualified names of the parameters and buffers that lie in it.
    nbytes : int
    users : tuple of int
        Stages whose forward reads it, in order.
    trained : bool
        Whether its values may change from step to step, so that it is copied out in each.
    overhead_s, launch_s : float
        Compute time and launching time that moving it takes, as of an option.
    """

    names: tuple[str, ...]
    nbytes: int
    users: tuple[int, ...]
    trained: bool
    overhead_s: float = 0.0
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        owner = f"resident {self.names[0]!r}" if self.names else "resident"
        check_fields(owner, self)
        if not self.names or not self.users or list(self.users) != sorted(set(self.users)):
            raise InvalidInputError(f"{owner}: names={self.names}, users={self.users}; want names, and stages in order")


def offloading(profile: Profile, offload: Sequence[Kind]) -> Profile:
    """Return the profile whose options move these kinds of storages; its residents become storages where they may.

    A profile that has other kinds already stays as it is where nothing is asked for (`ACTIVATIONS`).

    Raises
    ------
    InvalidInputError
        If it has others than those asked for.
    """
    kinds = tuple(offload)
    if kinds in (profile.offload, ACTIVATIONS):
        return profile
    if profile.offload != ACTIVATIONS:
        raise InvalidInputError(
            f"the profile is one with offload={profile.offload}, not {kinds}; take the one that ckptplan.profile made"
        )
    profile = replace(profile, offload=kinds)
    residents = profile.moving
    storages = list(profile.storages)
    forward, backward = list(profile.base_forward_bytes), list(profile.base_backward_bytes)
    used: dict[int, list[tuple[int, Resident]]] = {}
    for resident in residents:
        for i in resident.users:
            used.setdefault(i, []).append((len(storages), resident))
        storages.append(Storage(resident.names[0], resident.nbytes, -1, -1, on_host=not resident.trained))
        forward = [nbytes - resident.nbytes for nbytes in forward]
        first = resident.users[0]
        backward = [nbytes - resident.nbytes * (k >= first) for k, nbytes in enumerate(backward)]
    stages = []
    for i, stage in enumerate(profile.stages):
        options = [o for o in stage.options if "activations" in kinds or not o.moves]
        stages.append(replace(stage, options=tuple(_with_weights(options, used.get(i, [])))))
    return replace(
        profile,
        stages=tuple(stages),
        storages=tuple(storages),
        base_forward_bytes=tuple(forward),
        base_backward_bytes=tuple(backward),
        notes=profile.notes if residents or "weights" not in kinds else (*profile.notes, _NONE),
    )


def _with_weights(options: Sequence[Option], weights: Sequence[tuple[int, Resident]]) -> list[Option]:
    """Return a stage's options with its weights, and beside those that move nothing others that move the weights."""
    if not weights:
        return list(options)
    overhead_s, launch_s = sum(w.overhead_s for _, w in weights), sum(w.launch_s for _, w in weights)
    out: list[Option] = []
    moving: list[Option] = []
    named = {option.name for option in options}
    for option in options:
        whole = replace(option, saved=option.saved + tuple(s for s, _ in weights))
        own = tuple(range(len(option.saved), len(whole.saved)))
        also = replace(
            whole,
            moves=option.moves + own,
            overhead_s=option.overhead_s + overhead_s,
            launch_s=option.launch_s + launch_s,
        )
        if option.moves:
            out.append(also)
            continue
        out.append(whole)
        name = {"keep": "weights", "recompute": "recompute+swap"}.get(option.name, f"{option.name}+weights")
        if name not in named and option.name != DISCARD:
            moving.append(replace(also, name=name))
    return [*out, *moving]
