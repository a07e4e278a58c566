"""The rules of residency: which storage is on the device in which step, and who holds it there.

Every planner, bound and baseline takes them from here, so a rule is changed in this file alone. Two parts of the
project work them out from the text below with code of their own, to check it: the referee, which prices what
`tests/brute_force.py` tries, and `baselines/_rotor_dp.py`.

NOTE [Residency]
1. Storage `s` is *made* in forward step `s.born` (-1: before the step). From the next forward step on it is resident
   while the program holds it (`k <= s.program_until`), or a stage before `k` holds it, or the caller keeps it
   (`s.to_end`). What a stage holds was there until then: from its birth on, whatever the program did with it.
2. A stage holds, until its backward, what its option saves and pins, less what is away. In a segment `a..b` it doesn't
   hold those of its `linked` storages that a stage of `a..b` made: the sweep makes them again. Of a graph that the
   program drops in forward (of a detached output, or one that nothing uses) a stage holds what it saved only as long as
   the graph is there, in forward steps `k <= s.graph_until`: no backward reads it, it never moves, and no sweep saves
   it again.
3. In backward step `k` a storage is resident while a stage `i <= k` holds it, or the caller keeps it.
4. A stage `o` may move what its option `moves`, unless it `stays`. Such a storage has no other holder than stages
   before `o` whose options move it too, and it is away after forward step `release` and until backward step `prefetch`,
   but for the program, which holds it as long as rule 1 says: resident in forward steps `k <= release` and
   `k <= program_until`, and in backward steps `k <= prefetch`, with `o <= release` and `last <= prefetch`, where `last`
   is the last stage of the outermost segment around `o`, or `o` outside of any. Both
   points are met where a module begins or ends, so neither lies in glue after the last module, and prefetch neither in
   glue nor in a stage whose graph is dropped.
   What has the same two points may be one transfer: every byte of it counts until the last is copied out, which
   `release` waits for, and all of it is allocated at once at `prefetch`, before the first byte is copied in. All that a
   stage moves goes to one tier, host or disk; which one changes times alone, never the device's bytes.
   What the tier has already (`on_host`) isn't copied out: a transfer of such storages alone leaves at `release` itself.
5. Bytes of a step = base(step) + resident storages at its start + what the stage's option adds on top at the worst
   moment, what it makes included.
6. A segment `a..b` begins and ends with a module stage. It runs forward with its stages' recompute options. Just
   before backward `b`, its *sweep* runs the module stages of `a..b-1` again, in order; glue isn't run again. In the
   sweep, each stage of an inner segment saves nothing and from its run on holds what rule 2 gives it for the inner
   segment; each other stage saves what keep does and holds that, and what it held before, until its backward. `b`
   itself then holds all that its recompute option does, and is recomputed in its backward step. An inner segment's
   sweep follows in the same way just before its own last stage's backward. What a sweep makes is a copy of its own,
   beside any original still resident; it is also resident until the last stage of the sweep that is `linked` to it
   has run.
7. Bytes of a sweep's run of stage `k` = base of backward step `b` + what is resident in it (rules 3 and 6) + the
   forward bytes of keep, or of recompute in an inner segment. They count as bytes of backward step `b`.

Worked example. Two stages of one chain; stage 0 reads x and makes a (saved for its own backward) and y (its output),
stage 1 reads y and makes z, which the caller keeps:

    storage  nbytes  born  program_until  to_end     held by "keep" of     by "recompute" of
    x           10    -1        0         no         stage 0               stage 0
    a           40     0        0         no         stage 0               -
    y           20     0        1         no         stages 0, 1           stage 1 (linked)
    z            5     1        1         yes        -                     -

Both kept: x is there in forward steps 0, 1 and in backward step 0; a in forward step 1 and backward 0; y in forward
step 1 and backward 1, 0; z in both backward steps. So backward 1 starts with 10 + 40 + 20 + 5 bytes, and backward 0
does, too, since stage 0 holds y as well. Stage 0 may move x and a (rule 4): stage 1 comes later, and neither of them
is held by it. It may not move y, which stage 1 holds as well.
In a segment 0..1, stage 0 holds x alone and stage 1 nothing (rule 2: y was made in the segment). Backward 1 starts
with 10 + 5 bytes; its sweep runs stage 0 again (rule 6), and copies of a and y are there from then on.

If stage 1 gets `y.detach()`, and the program lets go of y's graph in stage 1, x and a have `graph_until` 1: they are
there at the start of forward step 1, of 10 + 40 + 20 bytes, and of no later one, and stage 0 has no backward. If it
"discards", which saves x alone, forward step 1 starts with 10 + 20 bytes, and nothing runs again. Backward 1 starts
with 20 + 5 bytes, y for stage 1 and z, whatever is decided for stage 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckptplan.core.option import Option
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage

_NONE = range(0)


def program_steps(storage: Storage, n: int) -> range:
    """Forward steps of `n` at whose start the program or the caller holds it (rule 1)."""
    return range(storage.born + 1, n if storage.to_end else min(storage.program_until + 1, n))


def held_stop(storage: Storage, n: int) -> int:
    """The forward step of `n` from which on no stage holds it: `n`, unless its graph is dropped before (rule 2)."""
    return n if storage.graph_until is None else min(storage.graph_until + 1, n)


def forward_stop(program_stop: int, held_stop: int | None, mover: int | None) -> int:
    """The forward step from which on it is no longer resident, if what moves is away as soon as it can be.

    It is resident from the step behind the one that makes it (rules 1 and 4). Between the program's last use and the
    first hold nothing keeps it, but a stage that holds it uses it.

    Parameters
    ----------
    program_stop : int
        Where `program_steps` ends.
    held_stop : int or None
        Where stages cease to hold it; None: none does.
    mover : int or None
        The stage that moves it.
    """
    if mover is not None:
        return max(mover + 1, program_stop)
    return program_stop if held_stop is None else max(held_stop, program_stop)


def backward_stop(n: int, needed: int | None) -> int:
    """The backward step of `n` from which on what a stage holds isn't resident: none, unless it moves (rules 3 and 4).

    Parameters
    ----------
    needed : int or None
        The backward step by whose start it must be back, where it moves.
    """
    return n if needed is None else needed + 1


def counts(storage: Storage) -> bool:
    """Whether its bytes depend on any decision: those that the caller keeps are there in any case."""
    return storage.nbytes > 0 and not storage.to_end


def awaits_backward(storage: Storage) -> bool:
    """Whether stages that hold it do until their backward (rule 2)."""
    return storage.graph_until is None


def passing(profile: Profile, i: int, option: Option) -> list[tuple[range, int]]:
    """Forward steps in which stage `i` alone has what it saved in graphs that are dropped in forward, and its bytes."""
    n = len(profile.stages)
    found: dict[range, int] = {}
    for s in option.held:
        storage = profile.storages[s]
        steps = range(max(i + 1, program_steps(storage, n).stop), held_stop(storage, n))
        if counts(storage) and not awaits_backward(storage) and steps:
            found[steps] = found.get(steps, 0) + storage.nbytes
    return list(found.items())


def can_move(storage: Storage) -> bool:
    """Whether any stage might move it (rule 4)."""
    return counts(storage) and not storage.stays and awaits_backward(storage)


def movers(storage: Storage, n: int) -> range:
    """The stages of `n` that may move it if no other stage forbids it (rule 4)."""
    return range(max(storage.born, 0), n - 1) if can_move(storage) else _NONE


def moves_any(profile: Profile, i: int, option: Option) -> bool:
    """Whether `option` of stage `i` moves anything that isn't bound to stay."""
    n = len(profile.stages)
    return any(i in movers(profile.storages[s], n) for s in option.moved)


def there_until(storage: Storage, mover: int, n: int) -> int:
    """The last forward step of `n` in which it is there however early it leaves (rule 4)."""
    return min(max(storage.program_until, mover), n - 1)


def latest_first(storage: Storage) -> int:
    """The latest first stage of a segment in which it is made, if it ends behind the stage that makes it (rule 2)."""
    return storage.born


def held(profile: Profile, i: int, option: Option, segment: Segment | None) -> tuple[int, ...]:
    """Storages that stage `i` holds under `option`, by itself or in `segment` (rule 2)."""
    if segment is None:
        return option.held
    stage = profile.stages[i]
    if stage.is_glue:
        return option.held
    linked = set(stage.linked)
    return tuple(s for s in option.held if s not in linked or segment.first > latest_first(profile.storages[s]))


def around(segments: Sequence[Segment], n: int) -> list[Segment | None]:
    """Per stage of `n`, the segment of `segments` that contains it."""
    out: list[Segment | None] = [None] * n
    for segment in segments:
        out[segment.first : segment.last + 1] = [segment] * (segment.last + 1 - segment.first)
    return out


def moved_by(
    storages: Sequence[Storage], moves: Sequence[Sequence[int]], holds: Sequence[Sequence[int]]
) -> dict[int, int]:
    """Storage -> the stage that moves it: the last that holds it, if all that hold it would move it (rule 4).

    Parameters
    ----------
    storages : sequence of Storage
        Those of the chain, which the indices in `moves` and `holds` point into.
    moves, holds : sequence of sequence of int
        Per stage, the storages that it would move, and those that it holds.
    """
    last: dict[int, int] = {}
    fixed: set[int] = set()
    for i, (moved, held_here) in enumerate(zip(moves, holds, strict=True)):
        last.update(dict.fromkeys(held_here, i))
        fixed.update(set(held_here).difference(moved))
    return {s: i for s, i in last.items() if s not in fixed and i in movers(storages[s], len(holds))}


def enforceable_points(stages: Sequence[Stage]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per step, the last release and the last prefetch point at or before it that the runtime can meet.

    Release points are met where a module ends or the next one begins; prefetch points where a module's backward does.
    """
    n = len(stages)
    modules = [k for k, stage in enumerate(stages) if not stage.is_glue] or list(range(n))
    meets = [k for k in modules if stages[k].has_backward] or modules
    prefetch, last = [], meets[0]
    for k in range(n):
        last = k if k in meets else last
        prefetch.append(last)
    return (*range(modules[-1]), *[modules[-1]] * (n - modules[-1])), tuple(prefetch)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One sweep, its inner segments' sweeps left out (NOTE [Residency], rules 6 and 7).

    Attributes
    ----------
    last : int
        The stage before whose backward it runs.
    runs : tuple of int
        Stages it runs.
    seconds, launch_s : float
        Of compute, and of launching.
    run_bytes : tuple of int
        Bytes of copies and of its own, of each run.
    held_from : tuple of (int, int)
        Stage and bytes of the copies that are resident from this stage's backward on, up to the sweep's last stage.
    last_run : tuple of (int, Option)
        The option of what is no part of an inner segment, for its last run before backward.
    """

    last: int
    runs: tuple[int, ...]
    seconds: float
    launch_s: float
    run_bytes: tuple[int, ...]
    held_from: tuple[tuple[int, int], ...]
    last_run: tuple[tuple[int, Option], ...]

    @property
    def most_bytes(self) -> int:
        """The most of `run_bytes`."""
        return max(self.run_bytes, default=0)


def sweep_of(profile: Profile, segment: Segment, ran: Sequence[Option] | None = None) -> Sweep:
    """The sweep of `segment`; which bytes are there around it doesn't matter to it. O(its stages + what they hold).

    Parameters
    ----------
    ran : sequence of Option, optional
        Per stage of the chain, how it ran forward; "recompute" where left out.
    """
    stages, storages = profile.stages, profile.storages
    begin, last = segment.first, segment.last
    inner: dict[int, Segment] = {k: item for item in segment.inner for k in range(item.first, item.last + 1)}
    runs = [k for k in range(begin, last) if not stages[k].is_glue]
    makers = set(runs)
    begins: dict[int, int] = {}  # copy -> the run after which it is there
    in_transit_to: dict[int, int] = {}
    held_by: dict[int, int] = {}  # copy -> the lowest stage that holds it
    last_run: list[tuple[int, Option]] = []
    run_own: list[tuple[int, int]] = []
    for k in (*runs, last):
        stage = stages[k]
        again = stage.option("recompute")
        before = held(profile, k, again if ran is None else ran[k], segment)
        if k == last:
            last_run.append((k, again))
            after = again.held
        elif k not in inner:
            last_run.append((k, stage.keep))
            after = stage.keep.held
            run_own.append((k, stage.keep.forward_bytes))
        else:
            after = held(profile, k, again, inner[k])
            run_own.append((k, again.forward_bytes))
        for s in stage.linked:
            if storages[s].born in makers:
                in_transit_to[s] = k
                begins.setdefault(s, storages[s].born)
        for s in set(filter(lambda s: awaits_backward(storages[s]), after)).difference(before):
            held_by.setdefault(s, k)
            begins.setdefault(s, storages[s].born if storages[s].born in makers else k)
    # Differences per run: a copy is there from the run after the one that begins it.
    changes = [0] * (last - begin + 3)
    held_from: dict[int, int] = {}
    for s, first in begins.items():
        nbytes = storages[s].nbytes
        until = last + 1
        if s in held_by:
            held_from[held_by[s]] = held_from.get(held_by[s], 0) + nbytes
            gap_from, gap_to = max(in_transit_to.get(s, -1), first) + 1, held_by[s] + 1
            if gap_from < gap_to:  # in between it isn't there
                changes[gap_from - begin] -= nbytes
                changes[gap_to - begin] += nbytes
        else:
            until = in_transit_to[s] + 1
        if first + 1 < until:
            changes[first + 1 - begin] += nbytes
            changes[until - begin] -= nbytes
    copies = list(accumulate(changes))
    return Sweep(
        last,
        tuple(runs),
        sum(stages[k].rerun_s for k in runs),
        sum(stages[k].rerun_launch_s for k in runs),
        tuple(copies[k - begin] + own for k, own in run_own),
        tuple(sorted((k, nbytes) for k, nbytes in held_from.items() if nbytes)),
        tuple(last_run),
    )


def last_runs(options: Sequence[Option], sweeps: Sequence[Sweep]) -> list[Option]:
    """Per stage, the option of its last run before its backward: its own, or that of the last sweep that runs it."""
    found = list(options)
    for sweep in sweeps:
        for k, option in sweep.last_run:
            found[k] = option
    return found


def moving_s(profile: Profile, options: Sequence[Option], last_run: Sequence[Option]) -> list[tuple[float, float]]:
    """Per stage, what its moves take of compute and of launching beside the times of its last run (`last_runs`).

    That run's option has them, but for a stage in a segment, whose last run is "keep" or "recompute".
    """
    return [
        (0.0, 0.0) if last is option else stage.moving_s(option)
        for stage, option, last in zip(profile.stages, options, last_run, strict=True)
    ]


def launch_s(
    profile: Profile,
    last_run: Sequence[Option],
    sweeps: Sequence[Sweep],
    moving: Sequence[tuple[float, float]],
) -> float:
    """Time in which the host launches a step: each forward and backward, what options add, and each run of a sweep.

    Parameters
    ----------
    last_run : sequence of Option
        Those of `last_runs`.
    sweeps : sequence of Sweep
        Those of `sweeps_of`.
    moving : sequence of (float, float)
        Those of `moving_s`.
    """
    again_s = {sweep.last: sweep.launch_s for sweep in sweeps}
    total_s = 0.0
    for k, (stage, option) in enumerate(zip(profile.stages, last_run, strict=True)):
        own_s = stage.forward_launch_s + stage.backward_launch_s + option.launch_s
        total_s += own_s + again_s.get(k, 0.0) + moving[k][1]
    return total_s


def sweeps_of(profile: Profile, segments: Sequence[Segment], ran: Sequence[Option] | None = None) -> list[Sweep]:
    """The sweeps of these segments and all inner ones, outer before inner."""
    found: list[Sweep] = []
    for segment in segments:
        found += [sweep_of(profile, segment, ran), *sweeps_of(profile, segment.inner, ran)]
    return found
