"""What is on the device before the step and may leave it within: weights, gradients and optimizer state, as storages.

NOTE [Offloaded weights]
1. A weight is the storage of one or several parameters or buffers. Its *users* are the stages whose forward reads it.
   All options of its users save it, so that it is needed by each user's forward, backward, and every run again; tied
   weights have several users (rule 4 of NOTE [Residency]). One that anything else reads (glue, a stage without a
   backward, one that is differentiated within forward) is none of these.
2. It exists before the step, and behind its first user's backward it is there again until the end of the step, also for
   the update. So it is part of `base_backward_bytes` in front of that user, and of no other base.
3. A frozen weight has a copy on the host that never changes (`Storage.on_host`), so it leaves without being copied out.
   A trained one is copied out in every step.
4. A gradient that exists when the step starts, as of an earlier micro-batch, is like a trained weight. Its user is the
   first stage that uses the parameter, in whose backward autograd adds to it.
5. The optimizer's state is needed by the update alone. So a stage is put in front of the others (`UPDATE`), whose
   forward does nothing and whose backward is the update: it saves the state, in parts. The state leaves from the
   beginning of forward on, is copied out in each step, and is back when the last backward has ended. In the first step
   of a training there is none yet, and the plan counts it all the same. Of a sharded parameter it is a rank's part.
6. Frozen weights may be away between steps as well, so that not all of them have to fit at once: from their first
   user's backward on, until they return for its forward in the next step. A storage of the chain says that by its
   birth: it is made in the step in front of `Resident.returns`, the stage at whose start it is allocated, as late as
   its copy is hidden behind the stages from there on, but not before the user of the weight that returned last. What
   the copies take longer, as of copies alone that wait for no release, is a part of the user's forward
   (`forward_wait_s`). Which weights these are is no decision of the search: a share of their bytes, spread evenly.
7. In an option that moves, these move with the rest; each option that moves nothing has another beside it that moves
   them alone. "recompute+swap" moves the inputs that can move, and these; "recompute+weights" leaves the inputs there.
8. Frozen layers in front of all that has a graph, as of an encoder, are glue: a stage needs a backward. Their weights
   are needed until the first module with a graph begins, and by no backward. They have no user among the stages, and
   are like state that the host has already: saved by the stage of the update, behind which they are there again.

Example: a chain of 4 frozen layers of 100 MiB with adapters. Before, each of the bases has all 400 MiB. As storages of
the chain, all leave behind their layer's forward but the last, which is needed at once: the turn has 100 MiB. In the
backward of layer 2 its own is back and that of layer 3 stays, in that of layer 0 all are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

from ckptplan.core.checks import check_fields, is_int, short_repr
from ckptplan.core.errors import InvalidInputError
from ckptplan.core.fsdp import is_sharding
from ckptplan.core.lanes import Copy, lane
from ckptplan.core.option import DISCARD, Option
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage

if TYPE_CHECKING:
    from ckptplan.core.profile import Profile

Kind = Literal["activations", "weights", "optimizer", "gradients"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_NONE: dict[Kind, str] = {
    "weights": (
        "offload= has no weights to move: of those that stages with a backward alone read, or layers in front of them, "
        "none is large enough, plain or quantized (no shard), and in memory that can be resized"
    ),
    "optimizer": (
        "offload= has no optimizer state to move: pass optimizer= to profile and solve; of its state, what is large "
        "enough and a plain or sharded tensor of a parameter moves"
    ),
    "gradients": (
        "offload= has no gradients to move: none exist when a step starts (pass accumulate=True if they do), or they "
        "are small or lie in buckets"
    ),
}
_OF_UNITS: tuple[Kind, ...] = ("weights", "gradients")
_STAYS_SHARDED = (
    "offload= leaves weights and gradients of sharded units to FSDP2, which gathers and frees them; their activations "
    "and their optimizer state can move"
)
ACTIVATIONS: tuple[Kind, ...] = ("activations",)
"""What moves if nothing else is said."""
GRADIENT_OF = "gradient of "
"""In front of a parameter's name: the name of its gradient."""
PARTS = 3
"""Of these many equal parts of the frozen weights none, one, ..., or all are away between steps."""
UPDATE = "optimizer update"
"""Name of the stage whose backward is the update (rule 5), which no module can have."""


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


def check_between(between: object) -> None:
    """Raise `InvalidInputError` unless it is a number of `PARTS`."""
    if not is_int(between) or not 0 <= between <= PARTS:
        raise InvalidInputError(
            f"between={short_repr(between)} must be a whole number, from 0 to {PARTS}: the parts of the frozen weights "
            "that are away between steps"
        )


@dataclass(frozen=True, slots=True)
class Resident:
    """Weights, a gradient or optimizer state that may be away within the step (NOTE [Offloaded weights]).

    Parameters
    ----------
    names : tuple of str
        Of weights, the parameters and buffers in it; of a quantized one, the tensors that it consists of or has in
        attributes ("layer.weight.scale"). Of a gradient, "gradient of " and the parameter. Of optimizer state,
        "parameter: key" of each tensor.
    nbytes : int
        Bytes of all its storages.
    users : tuple of int
        Indices of the stages whose forward reads it, in order and without glue. Of a gradient, the stage whose backward
        adds to it. Of optimizer state, and of a weight that is read only in front of all stages with a backward: none,
        or 0 where the chain begins with the stage "optimizer update".
    trained : bool
        Whether its values may change in each step, so that each step copies it out.
    overhead_s, launch_s : float
        Compute time and launching time of moving it.
    kind : "weights", "optimizer" or "gradients"
        What it is: parameters and buffers, optimizer state, or a gradient.
    sizes : tuple of int
        Of optimizer state and of a quantized weight, the bytes of each tensor's storage, 0 where it shares the storage
        of the tensor before; empty for others, which are one storage.
    returns : int or None
        Of a weight that is away between steps, the stage at the start of whose forward it is allocated again. None: it
        isn't away between steps.
    """

    names: tuple[str, ...]
    nbytes: int
    users: tuple[int, ...]
    trained: bool
    overhead_s: float = 0.0
    launch_s: float = 0.0
    kind: Kind = "weights"
    sizes: tuple[int, ...] = ()
    returns: int | None = None

    @property
    def storages(self) -> list[tuple[tuple[str, ...], int]]:
        """The names of the tensors on each of its storages, and its bytes."""
        starts = [n for n, nbytes in enumerate(self.sizes) if nbytes] or [0]
        ends = (*starts[1:], len(self.names))
        return [
            (self.names[a:b], self.sizes[a] if self.sizes else self.nbytes) for a, b in zip(starts, ends, strict=True)
        ]

    def behind(self, first: int) -> Resident:
        """Return it for a chain that lacks the first stages."""
        returns = None if self.returns is None else self.returns - first
        return replace(self, users=tuple(i - first for i in self.users if i >= first), returns=returns)

    def __post_init__(self) -> None:
        owner = f"resident {self.names[0]!r}" if self.names else "resident"
        check_fields(owner, self)
        in_order = list(self.users) == sorted(set(self.users)) and (self.users or self.kind != "gradients")
        if not self.names or not in_order or self.kind == "activations":
            raise InvalidInputError(
                f"{owner}: names={self.names}, users={self.users}, kind={self.kind!r}; give names, stages in order, "
                f"and a kind of {', '.join(map(repr, KINDS[1:]))}"
            )
        if self.returns is not None and not (is_int(self.returns) and 0 <= self.returns <= self.users[0]):
            raise InvalidInputError(f"{owner}: returns={self.returns} must be a stage up to the first of {self.users}")
        if self.sizes and (len(self.sizes) != len(self.names) or sum(self.sizes) != self.nbytes):
            raise InvalidInputError(
                f"{owner}: sizes={self.sizes} aren't those of {len(self.names)} tensors of {self.nbytes} bytes in all"
            )


def offloading(profile: Profile, offload: Sequence[Kind], between: int = 0) -> Profile:
    """Return the profile whose options move these kinds of storages; its residents become storages where they may.

    A profile that has other kinds already stays as it is where nothing is asked for (`ACTIVATIONS`).

    Parameters
    ----------
    offload : sequence of Kind
    between : int
        Parts of the frozen weights, of `PARTS`, that are away between steps as well.

    Raises
    ------
    InvalidInputError
        If it has others than those asked for.
    """
    kinds = tuple(offload)
    if kinds == ACTIVATIONS or (kinds, between) == (profile.offload, profile.between):
        return profile
    if profile.offload != ACTIVATIONS:
        raise InvalidInputError(
            f"the profile has offload={profile.offload} and between={profile.between} already, not {kinds} and "
            f"{between}; take the one that ckptplan.profile made"
        )
    found = {resident.kind for resident in profile.residents}
    own = _OF_UNITS if is_sharding(profile.fingerprint.parallel) else ()
    missing = [why for kind, why in _NONE.items() if kind in kinds and kind not in (*found, *own)]
    notes = (*profile.notes, *(missing if kinds != KINDS or not found else ()))
    if not set(own).isdisjoint(kinds):
        notes = (*notes, _STAYS_SHARDED)
    profile = replace(profile, offload=kinds, notes=notes, between=between)
    if any(not resident.users for resident in profile.moving):
        profile = _with_update(profile)
    if between and "weights" in kinds:
        profile = _returning_for_forward(profile)
    storages = list(profile.storages)
    forward, backward = list(profile.base_forward_bytes), list(profile.base_backward_bytes)
    used: dict[int, list[tuple[int, Resident]]] = {}
    for resident in profile.moving:
        for i in resident.users:
            used.setdefault(i, []).append((len(storages), resident))
        # What runs before the first module belongs to no stage that could wait for a copy.
        until = 1 if profile.stages[resident.users[0]].name == UPDATE and profile.stages[1].is_glue else -1
        born = -1 if resident.returns is None else resident.returns - 1
        until = max(born, until)
        storages.append(Storage(resident.names[0], resident.nbytes, born, until, on_host=not resident.trained))
        forward = [nbytes - resident.nbytes for nbytes in forward]
        there = range(resident.users[0])  # backward steps that have it and in which no stage holds it
        if resident.returns is not None:
            there = _until_a_backward(profile, resident.users[0])
        backward = [nbytes - resident.nbytes * (k not in there) for k, nbytes in enumerate(backward)]
    stages = []
    for i, stage in enumerate(profile.stages):
        options = [o for o in stage.options if "activations" in kinds or not o.moves]
        stages.append(replace(stage, options=tuple(_with_residents(options, used.get(i, [])))))
    return replace(
        profile,
        stages=tuple(stages),
        storages=tuple(storages),
        base_forward_bytes=tuple(forward),
        base_backward_bytes=tuple(backward),
    )


def _with_update(profile: Profile) -> Profile:
    """Return the profile with the stage whose backward is the update in front."""
    storages = tuple(
        replace(
            s,
            born=s.born + (s.born >= 0),
            program_until=s.program_until + (s.program_until >= 0),
            graph_until=None if s.graph_until is None else s.graph_until + (s.graph_until >= 0),
        )
        for s in profile.storages
    )
    held = sum(s.nbytes for s in profile.storages if s.to_end)
    state = sum(r.nbytes for r in profile.moving if not r.users)
    residents = tuple(replace(r, users=tuple(i + 1 for i in r.users) or (0,)) for r in profile.residents)
    update = Stage(UPDATE, UPDATE, (Option("keep", (), (), 0, 0),), 0.0, 0.0)
    return replace(
        profile,
        stages=(update, *profile.stages),
        storages=storages,
        base_forward_bytes=(profile.base_forward_bytes[0], *profile.base_forward_bytes),
        base_backward_bytes=(max(profile.update_peak_bytes - held, state), *profile.base_backward_bytes),
        residents=residents,
    )


def _until_a_backward(profile: Profile, first: int) -> range:
    """The backward steps below `first` up to one in which a module runs: there memory is freed that `first` needed."""
    k = first
    while k and (profile.stages[k - 1].is_glue or not profile.stages[k - 1].has_backward):
        k -= 1
    return range(k, first)


def _returning_for_forward(profile: Profile) -> Profile:
    """Return the profile with the share `between` of its frozen weights away between steps (rule 6)."""
    modules = [k for k, stage in enumerate(profile.stages) if not stage.is_glue and stage.name != UPDATE]
    able = [r for r in profile.moving if r.kind == "weights" and not r.trained and r.users[0] > modules[0]]
    able.sort(key=lambda resident: resident.users[0])
    passed = away = 0
    chosen: dict[int, list[Resident]] = {}
    for resident in able:
        passed += resident.nbytes
        if away + resident.nbytes / 2 <= passed * profile.between / PARTS:
            away += resident.nbytes
            chosen.setdefault(resident.users[0], []).append(resident)
    began = [0.0, *accumulate(stage.forward_s for stage in profile.stages)]
    copies: list[Copy] = []
    returns: dict[tuple[str, ...], int] = {}
    before = modules[0]
    for user, found in chosen.items():
        copies.append(Copy(before, user, sum(profile.link.in_s(resident.nbytes) for resident in found)))
        hidden = [k for k in modules if before <= k < user and began[user] - began[k] >= copies[-1].seconds]
        copies[-1] = copies[-1]._replace(joins=max(hidden, default=before))
        returns.update((resident.names, copies[-1].joins) for resident in found)
        before = user
    waits_s = [0.0] * len(profile.stages)
    _, waited = lane(copies, [stage.forward_s for stage in profile.stages])
    for copy, found, seconds in zip(copies, chosen.values(), waited, strict=True):
        waits_s[copy.due] += seconds + sum(resident.overhead_s for resident in found)
    stages = tuple(
        replace(stage, forward_s=stage.forward_s + wait_s, forward_wait_s=wait_s)
        for stage, wait_s in zip(profile.stages, waits_s, strict=True)
    )
    return replace(
        profile,
        stages=stages,
        residents=tuple(replace(r, returns=returns.get(r.names)) for r in profile.residents),
        update_peak_bytes=profile.update_peak_bytes - away,
        resident_bytes=profile.resident_bytes - away,
    )


def _with_residents(options: Sequence[Option], residents: Sequence[tuple[int, Resident]]) -> list[Option]:
    """Return a stage's options with its residents, and beside those that move nothing others that move these."""
    if not residents:
        return list(options)
    overhead_s, launch_s = sum(r.overhead_s for _, r in residents), sum(r.launch_s for _, r in residents)
    out: list[Option] = []
    moving: list[Option] = []
    named = {option.name for option in options}
    kinds = "+".join(kind for kind in KINDS if kind in {r.kind for _, r in residents})
    for option in options:
        whole = replace(option, saved=option.saved + tuple(s for s, _ in residents))
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
        name = kinds if option.name == "keep" else f"{option.name}+{kinds}"
        if option.name == "recompute" and "recompute+swap" not in named:
            name = "recompute+swap"  # the one that a segment may have
        if option.name != DISCARD:
            moving.append(replace(also, name=name))
    return [*out, *moving]
