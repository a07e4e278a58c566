"""Bytes of a step, read off replays on fake tensors, which allocate nothing.

Each replay runs the step under a plan (replays.py):

- *program*: autograd saves nothing, so the storages that live on are those that the program's own variables hold. It
  runs all layers, and notes where each storage is made;
- *keep*: gives the storages that each stage, and the glue between stages, saves, and the bytes no decision changes;
- *recompute*: gives what recomputing adds, and, beside keep, the bytes that no hook sees;
- one for each variant of compiled stages (NOTE [Variants] in training/variants.py): gives the storages that they save;
- further ones until each option that moves nothing was run: they give its temporaries, and what it holds without any
  hook seeing it. Stages that are alike run different options in one replay;
- two in which as much moves as can, one of saved storages and one of what recomputing holds. If moving adds nothing
  there, the options that move less need no replay.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from ckptplan.core import rules
from ckptplan.core.device import Device
from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.option import DISCARD, Action, HowAgain, Option
from ckptplan.core.plan import KEEP, Decision, Decisions
from ckptplan.core.progress import counted
from ckptplan.core.request import Report, ignore_progress
from ckptplan.core.resident import GRADIENT_OF, Resident
from ckptplan.core.rules import moved_by, there_until
from ckptplan.core.schedule import resident_changes
from ckptplan.core.stage import Differentiated
from ckptplan.core.storage import Storage
from ckptplan.profiling.bytes.menus import SavedOps, choose, front, list_ops, numbered
from ckptplan.profiling.bytes.real_storages import Places
from ckptplan.profiling.bytes.replays import Replay, replay, segment_name
from ckptplan.profiling.bytes.traced import Traced, TracedStage
from ckptplan.profiling.bytes.tracker import (
    SegmentTrace,
    Sid,
    stage_segment,
    workspaces_of,
)
from ckptplan.profiling.bytes.unfolding import Folding
from ckptplan.profiling.target import Target
from ckptplan.profiling.times.timing import Times
from ckptplan.profiling.workload.discover import FoundStages
from ckptplan.tensors.private import is_traceable_wrapper_subclass
from ckptplan.tensors.quantized import named_inside
from ckptplan.training.gradients import starting_gradients
from ckptplan.training.step import TrainingStep, default_loss

DRAWS = "forward draws random numbers from Python's or numpy's generators"
"""Beginning of a note."""
_MENU_BYTES = 1 << 16
"""Least bytes of its own that a stage must hold to get options inside it: less can't pay for their bookkeeping."""
_MENU_SHARE = 0.01
"""Least share of all stages' own bytes that the stages of a kind must hold together, for the same reason."""


@dataclass(frozen=True, slots=True)
class BytesBeside:
    """Bytes of a step that its replays don't count.

    Attributes
    ----------
    resident : int
        Those on the device before the step: parameters, buffers, gradients, optimizer state, inputs.
    update : int or None
        Those that the optimizer's update adds to the ones live after backward; None without an optimizer.
    not_measured : sequence of str
        Operations of the update whose temporaries couldn't be measured.
    """

    resident: int
    update: int | None = None
    not_measured: Sequence[str] = ()


class Replayed(Protocol):
    """Replays one step with decisions for its stages."""

    def __call__(self, choices: tuple[Decision, ...], *, saves: bool) -> Replay:
        """Return the replay; the first one has to be one that saves nothing."""


def trace_chain(
    step: TrainingStep,
    found: FoundStages,
    target: Target,
    *,
    beside: BytesBeside,
    menus: bool = False,
    devices: Sequence[Device] | None = None,
    folding: Folding | None = None,
    report: Report = ignore_progress,
) -> tuple[Traced, list[Times]]:
    """Trace `step`: exact bytes, and times on devices that aren't in this machine.

    Parameters
    ----------
    found : FoundStages
        Its stages.
    beside : BytesBeside
    menus : bool
        Add options inside the stages, for which their operations are timed one by one on the device.
    devices : sequence of Device, optional
        Devices to compute times for; by default the target's own, if that isn't in this machine.
    folding : Folding, optional
        The layers that are run; by default all.
    report : callable
        Called with the number of each replay.

    Returns
    -------
    Traced
    list of Times
        One for each of `devices`.
    """
    if devices is None:
        devices = () if target.spec is None else (target.spec,)

    def replay_all(choices: tuple[Decision, ...], *, saves: bool) -> Replay:
        return replay(step, Decisions(found.stages, choices), target, saves=saves, accumulating=step.accumulates)

    replayed = replay_all if folding is None else folding.replay
    while True:
        tracing = _Tracing(step, found, target, beside, None if menus else {}, replayed, report)
        traced = tracing.trace(devices, folding)
        if not tracing.learned:
            return traced


@dataclass(frozen=True, slots=True)
class _Held(HowAgain):
    """Storages that an option of a stage holds; fields as in `ckptplan.core.option.Option`, without bytes and times."""

    saved: tuple[int, ...]
    pinned: tuple[int, ...]
    recomputes: bool = False
    moves: tuple[int, ...] = ()
    ops: tuple[int, ...] = ()
    ratio: float = 0.0

    @property
    def all(self) -> tuple[int, ...]:
        """Storages held until backward, moved ones included."""
        return self.saved + self.pinned

    @property
    def moved(self) -> tuple[int, ...]:
        """Storages it would move."""
        return tuple(self.saved[p] for p in self.moves)

    @property
    def moves_all(self) -> bool:
        """It would move all storages that it saves."""
        return bool(self.moves) and len(self.moves) == len(self.saved)


_NUMBERS_OF = re.compile(r"\b\d+\b")
"""Numbers of layers in the names of parameters: a trace of some of equal layers stands for all."""
_ALWAYS, _MOVING = 3, 2
"""Replays before the menus are known, and those in which most is moved."""
_UNSEEN = "unseen under"
"""In the name of a storage that stands for what a replay of an option held and no hook saw."""

_Menu = dict[str, _Held]
"""Name of an option -> the storages that it holds; "keep" first."""


class _ReplayedRun(NamedTuple):
    """A replay, and per stage of the chain the name of the option that it ran under."""

    names: tuple[str, ...]
    seen: Replay


@dataclass(frozen=True, slots=True)
class _StartBytes:
    """Bytes at the start of each step of the chain, in each direction."""

    forward: list[int]
    backward: list[int]


class _Tracing:
    """The replays of one step, and the chain read off them.

    Parameters
    ----------
    choices : mapping, optional
        The attribute's; by default they are chosen.

    Attributes
    ----------
    learned : bool
        The device showed larger storages than the replays had, so the step has to be traced again with these.
    not_measured : set of str
        Operations whose temporaries couldn't be measured.
    segments : list of int
        Those that are stages or run any operation; the chain's stage `k` is segment `segments[k]`.
    choices : dict
        Kind of stage -> the choices of operations to save that its menu offers.
    rerun_shares : dict
        As in `Traced`.
    menus : list of dict
        Per stage of the chain, its options by name.
    ended : set of int
        Segments whose graphs forward drops, so that no backward runs for them.
    lasting : dict
        Storage that several hold, some of them in a graph that forward drops -> the last stage of the chain at whose
        start that graph is there. Plans count it until then, whatever is decided.
    first_holders : dict
        Storage -> the first stage of the chain with an option that holds it.
    """

    def __init__(
        self,
        step: TrainingStep,
        found: FoundStages,
        target: Target,
        beside: BytesBeside,
        choices: Mapping[str, list[SavedOps]] | None,
        replayed: Replayed,
        report: Report,
    ) -> None:
        self.step, self.found, self.target = step, found, target
        self.names = names = found.stages
        self.replayed, self.report = replayed, report
        self.replays, self.all_replays = 0, _ALWAYS
        self.update_bytes = beside.update
        self.notes: list[str] = []
        self.learned = False
        self.not_measured = set(beside.not_measured)
        self.kinds: dict[int, str] = {}
        # A recomputing stage keeps the state of the CPU's generator in memory that replays don't count.
        self.state_bytes = 0 if target.is_cuda else torch.get_rng_state().numel()
        self.program = self._run((KEEP,) * len(names), saves=False)
        self.kept = self._run((KEEP,) * len(names))
        self.once = self._not_repeatable()  # not recomputed as wholes: some outputs have to be saved
        self._note_modifying()
        if step.fn is None and step.loss_fn is default_loss and not self.kept.has_loss:
            self.notes.append(
                "the loss is the sum of the means of the output's tensors, since the output has no loss; pass loss_fn= "
                "as your loop has it, whose bytes may differ"
            )
        if self.kept.draws:
            self.notes.append(
                f"{DRAWS}: where they decide which operations run, as where layers are left out, the memory figures "
                "hold for steps that take the same path"
            )
        self.ended = {g for g, whole in self.kept.unread.items() if whole}
        fixed = self.kept.modifies.keys() | self.once.keys()
        self.recomputed = self._run(
            tuple(KEEP if stage_segment(j) in fixed else Decision("recompute") for j in range(len(names)))
        )
        count = max((len(self._ratios(g)) for g in range(1, 2 * len(names), 2)), default=0)
        self.all_replays += count
        self.variants = [self._run(self._at_ratios(n)) for n in range(count)]
        self.resident_bytes = beside.resident + self.kept.left_bytes
        self.segments = [
            g
            for g in range(2 * len(names) + 1)
            if g % 2 or self.kept.forward[g].ops or (g in self.kept.backward and self.kept.backward[g].ops)
        ]
        self.rerun_shares: dict[tuple[str, tuple[int, ...]], float] = {}
        self.choices = self._choose() if choices is None else choices
        self.lasting: dict[Sid, int] = {}
        self.storages, self.index = self._storages()
        self.menus = [self._menu(g) for g in self.segments]
        self.first_holders = self._first_holders()

    def _ratios(self, g: int) -> tuple[float, ...]:
        """The ratios of the variants of a stage."""
        answers = self.target.answers
        if answers is None or not answers.ratios or g in self.ended or g in self.kept.differentiated:
            return ()
        return answers.ratios.get(segment_name(self.names, g).partition("#")[0], ()) if self.kept.saved.get(g) else ()

    def _at_ratios(self, n: int) -> tuple[Decision, ...]:
        """Decisions under which each stage runs its variant number `n`, if it has one."""
        ratios = (self._ratios(stage_segment(j))[n : n + 1] for j in range(len(self.names)))
        return tuple(Decision("recompute", ratio=found[0]) if found else KEEP for found in ratios)

    def _run(self, choices: tuple[Decision, ...], *, saves: bool = True) -> Replay:
        self.replays += 1
        self.report(counted("tracing", self.replays, max(self.replays, self.all_replays), "replays"))
        found = self.replayed(choices, saves=saves)
        if len(found.forward) != 2 * len(self.names) + 1:
            raise UnsupportedModelError(
                f"forward ran {len(found.forward) // 2} of the stages {', '.join(self.names)}: it takes another path "
                "each time it runs on the same inputs; have it decide by PyTorch's, Python's or numpy's random "
                "generators, which profiling restores between runs, or take what changes it (a counter, the time, "
                "other sources of randomness) out of it"
            )
        return found

    def _not_repeatable(self) -> dict[int, tuple[str, ...]]:
        """Stages with operations that may give other bits when run again (repeatable.py), and which; adds notes."""
        found: dict[int, tuple[str, ...]] = {}
        for g in range(1, 2 * len(self.names), 2):
            keys = [op.key for op in self.kept.forward[g].ops if not op.repeatable]
            if keys:
                found[g] = tuple(dict.fromkeys(str(key[0]) for key in keys if isinstance(key, tuple)))
        for funcs in dict.fromkeys(found.values()):
            stages = ", ".join(segment_name(self.names, g) for g, those in found.items() if those == funcs)
            self.notes.append(
                f"not recomputed as wholes: {stages}: {', '.join(funcs)} may give other bits when run again; "
                "torch.use_deterministic_algorithms(True) makes PyTorch's own operations repeatable"
            )
        return found

    def _note_modifying(self) -> None:
        """Add a note for each reason for which stages can't run a second time."""
        for why in dict.fromkeys(self.kept.modifies.values()):
            those = [g for g, its in sorted(self.kept.modifies.items()) if its == why]
            stages = ", ".join(segment_name(self.names, g) for g in those)
            so = "kept" if self.kept.differentiated.keys() >= set(those) else "kept or swapped alone"
            self.notes.append(f"{so}: {stages}: {why}")

    def _choose(self) -> dict[str, list[SavedOps]]:
        """Kind of stage -> the choices of operations to save that its menu offers."""
        kinds: dict[str, list[int]] = {}
        for g in self.segments:
            if (
                g % 2
                and self.kept.saved.get(g)
                and g not in self.kept.modifies
                and g not in self.ended
                and not self._gathers_inside(g)
            ):
                kinds.setdefault(self._kind(g), []).append(g)
        own = {g: sum(self.kept.sizes[s] for s in self._own(g)) for segments in kinds.values() for g in segments}
        worth = {
            kind: segments
            for kind, segments in kinds.items()
            if max(own[g] for g in segments) >= _MENU_BYTES
            # A stage that depends on values may run other operations in the next step, or another number of them.
            and not any(op.from_real_run for g in segments for op in self.kept.forward[g].ops)
            and sum(own[g] for g in segments) >= _MENU_SHARE * sum(own.values())
        }
        runs = {kind: [numbered(self.kept.forward[g].ops) for g in segments] for kind, segments in worth.items()}
        seconds = self.target.times(op.key for run in runs.values() for op in run[0])
        written = {s for trace in self.kept.forward.values() for op in trace.ops for s in op.written}
        written.update(s for ends in self.kept.ends.values() for s in ends)  # a recompute would hold them for longer
        held = {s for inputs in self.kept.inputs.values() for s in inputs}
        held.update(s for g, saved in self.kept.saved.items() if g % 2 == 0 for s in saved)
        out = {}
        for kind, segments in worth.items():
            rerun = max(len(numbered(self.kept.forward[g].ops[: self.kept.rerun[g]])) for g in segments)
            ops = list_ops(runs[kind], rerun, written, held.__contains__, seconds)
            total_s = sum(op.seconds for op in ops)
            out[kind] = choose(front(ops), total_s, min(own[g] for g in segments))
            keys = [op.key for op in runs[kind][0]]
            if all(key in seconds for key in keys) and (all_s := sum(seconds[key] for key in keys)):
                self.rerun_shares[kind, ()] = total_s / all_s
                self.rerun_shares.update(((kind, c.ops), (total_s - c.saved_s) / all_s) for c in out[kind])
        return out

    def _gathers_inside(self, g: int) -> bool:
        """Whether parts of a stage gather in forward and not in a recompute, whose operations have other numbers."""
        stage = self.step.model.get_submodule(segment_name(self.names, g).partition("#")[0])
        return self.step.parallel.gathers_inside(stage)

    def _own(self, g: int) -> list[Sid]:
        """Storages that a stage makes and holds when kept, and that are gone when it is recomputed."""
        others = {s for h, inputs in self.kept.inputs.items() if h != g for s in inputs}
        return [s for s in self.kept.saved.get(g, {}) if s[1] == g and s[0] == "forward" and s not in others]

    def _outputs(self, g: int, choice: SavedOps) -> dict[Sid, tuple[int, bool]]:
        """Storages that the operations of `choice` make, in order: bytes, and whether they have positions."""
        ops = numbered(self.kept.forward[g].ops)
        return {s: made for number in choice.ops for s, made in ops[number].made.items()}

    def _storages(self) -> tuple[list[Storage], dict[Sid, int]]:
        """The chain's storages, and the index of each by its name in the replays."""
        at = self._at
        last_seen = {sid: k for k, g in enumerate(self.segments) for sid in self.program.forward[g].present}
        wanted: dict[Sid, int] = {}
        for sids in (*self.kept.saved.values(), *self.kept.inputs.values(), sorted(self.kept.output)):
            for sid in sids:
                if sid[0] != "backward":
                    wanted.setdefault(sid, self.kept.sizes[sid])
        for seen in self.variants:
            for sid in (sid for sids in seen.saved.values() for sid in sids if sid[0] != "backward"):
                wanted.setdefault(sid, seen.sizes[sid])
        for g in self.segments:
            for choice in self.choices.get(self._kind(g), ()) if g % 2 else ():
                wanted |= {s: nbytes for s, (nbytes, _) in self._outputs(g, choice).items() if nbytes}
        graphs = self._graphs()
        storages: list[Storage] = []
        for sid, nbytes in wanted.items():
            if sid[0] == "outside":
                storages.append(Storage(f"input {sid[2]}", nbytes, -1, -1, to_end=True))
                continue
            born = at(sid[1])
            until = max(last_seen.get(sid, born), born)
            name = f"{segment_name(self.names, sid[1])}/{sid[2]}"
            stays = nbytes < self.target.least_moved_bytes or sid in self.kept.in_objects
            noted = self.program.origins.get(sid)
            origin = noted.text if noted else ""
            to_end = sid in self.kept.output or sid in self.program.held
            graph_until, alone = graphs.get(sid, (None, False))
            if graph_until is None or to_end:
                storages.append(Storage(name, nbytes, born, until, to_end, stays, origin=origin))
            elif not alone:
                self.lasting[sid] = until = max(until, graph_until)
                storages.append(Storage(name, nbytes, born, until, to_end, stays, origin=origin))
            else:
                storages.append(Storage(name, nbytes, born, until, False, stays, graph_until, origin=origin))
        return storages, {sid: s for s, sid in enumerate(wanted)}

    def _at(self, segment: int) -> int:
        """The stage of the chain that a segment is, or that is in front of it; -1: none is."""
        return bisect.bisect_right(self.segments, segment) - 1

    def _graphs(self) -> dict[Sid, tuple[int, bool]]:
        """Storages saved in graphs that forward drops -> the last stage at whose start one is there, and if alone.

        Alone: nothing but this graph holds the storage for backward, under any option.
        """
        at, kept = self._at, self.kept
        found: dict[Sid, tuple[int, bool]] = {}
        chosen = {g: [s for c in self.choices.get(self._kind(g), ()) for s in self._outputs(g, c)] for g in kept.inputs}
        holders: dict[Sid, set[int]] = {}
        for table in (kept.saved, kept.inputs, chosen):
            for g, sids in table.items():
                for sid in sids:
                    holders.setdefault(sid, set()).add(g)
        for g, ends in kept.ends.items():
            held = {sid: at(end[1]) for sid, end in ends.items()}
            if g in self.ended:
                held |= dict.fromkeys(kept.inputs.get(g, ()), max(held.values()))
            for sid, last in held.items():
                alone = holders[sid] == {g} and (g in self.ended or sid not in kept.inputs.get(g, ()))
                alone &= sid not in ends or at(ends[sid][1]) in (at(g), last)  # until then under each option, or never
                found[sid] = max(last, found.get(sid, (last,))[0]), alone
        return found

    def _kind(self, g: int) -> str:
        """Return a key that is equal for segments with the same operations and reasons not to run again."""
        if g not in self.kinds:
            digest = hashlib.sha256()
            for op in self.kept.forward[g].ops:
                digest.update(repr(op.key).encode())
            digest.update(self.kept.modifies.get(g, "").encode())
            digest.update(b"unread" if g in self.kept.unread else b"")
            self.kinds[g] = f"{'stage' if g % 2 else 'glue'} {digest.hexdigest()[:12]}"
        return self.kinds[g]

    def _first_holders(self) -> dict[Sid, int]:
        """Storage -> the first stage of the chain with an option that holds it, but for those that the caller keeps.

        What the program holds when forward ends may go within backward, unless a stage holds it.
        """
        names = list(self.index)
        first: dict[Sid, int] = {}
        for k, menu in enumerate(self.menus):
            for s in {s for option in menu.values() for s in option.all if names[s] not in self.kept.output}:
                if rules.awaits_backward(self.storages[s]):  # others are gone in each plan
                    first.setdefault(names[s], k)
        return first

    # --- menus: the storages that each option holds ---

    def _menu(self, g: int) -> _Menu:
        """The options of a segment, and what each holds as far as hooks show it."""
        is_stage = g % 2 == 1
        keep = self._held((s, can and is_stage) for s, can in self.kept.saved.get(g, {}).items())
        if g in self.ended:  # what others hold too counts in any case
            ends = self.kept.ends.get(g, {})  # none, if it saves nothing but parameters: keep holds least then
            until = {self.index[sid]: self._at(end[1]) for sid, end in ends.items() if sid in self.index}
            own = tuple(s for s in keep.all if self.storages[s].graph_until == until[s])
            given = self._held(self.kept.inputs.get(g, {}).items()).all
            given = tuple(s for s in given if not rules.awaits_backward(self.storages[s]))
            can_run_again = is_stage and bool(ends) and g not in self.kept.modifies and g not in self.once
            return {"keep": _Held((), own)} | ({DISCARD: _Held((), given, recomputes=True)} if can_run_again else {})
        menu = {"keep": keep}
        if is_stage and keep.all and g not in self.kept.differentiated:
            menu |= self._all_moved(keep, "swap")
            if self._kind(g) in self.choices:
                menu |= self._half_moved(keep, "swap-1")
            menu |= self._compiled(g)
            if g not in self.kept.modifies:
                again = dataclasses.replace(self._held(self.kept.inputs[g].items()), recomputes=True)
                if g not in self.once:
                    menu |= {"recompute": again} | self._all_moved(again, "recompute+swap")
                menu |= self._selective(g, again)
        return menu

    def _held(self, storages: Iterable[tuple[Sid, bool]]) -> _Held:
        """An option that holds `storages`, given with whether each could be moved; those not in the chain left out."""
        can_move = {self.index[s]: can for s, can in storages if s in self.index}
        return _Held(tuple(s for s, can in can_move.items() if can), tuple(s for s, can in can_move.items() if not can))

    def _selective(self, g: int, again: _Held) -> _Menu:
        """Options that save some operations' outputs on the device; for the most of them also all away, and half."""
        menu: _Menu = {}
        choices = self.choices.get(self._kind(g), [])
        for n, choice in enumerate(choices, 1):
            made = self._held((s, can) for s, (_, can) in self._outputs(g, choice).items())
            saved = (*made.saved, *(s for s in again.saved if s not in made.all))
            menu[f"selective-{n}"] = plain = _Held(saved, (*made.pinned, *again.pinned), True, ops=choice.ops)
        if choices:
            menu |= self._all_moved(plain, f"selective-{len(choices)}+swap")
            menu |= self._half_moved(plain, f"selective-{len(choices) + 1}+swap")
        return menu

    def _compiled(self, g: int) -> _Menu:
        """The variants of a compiled stage, and each with all that it saves away."""
        menu: _Menu = {}
        for n, ratio in enumerate(self._ratios(g), 1):
            saved = self._held(self.variants[n - 1].saved.get(g, {}).items())
            plain = dataclasses.replace(saved, recomputes=True, ratio=ratio)
            menu |= {f"compiled-{n}": plain} | self._all_moved(plain, f"compiled-{n}+swap")
        return menu

    def _half_moved(self, option: _Held, name: str) -> _Menu:
        """`option` with the largest storages of its stage's own making moved, up to half of their bytes.

        Empty if that moves all of them or none. Example: of 4, 3 and 2 MiB it moves the first.
        """
        shared = {self.index[s] for inputs in self.kept.inputs.values() for s in inputs if s in self.index}
        sizes = {
            p: self.storages[s].nbytes
            for p, s in enumerate(option.saved)
            if s not in shared and not self.storages[s].to_end and not self.storages[s].stays
        }
        moves: list[int] = []
        left = sum(sizes.values()) // 2
        for p in sorted(sizes, key=lambda p: (-sizes[p], p)):
            if sizes[p] <= left or not moves:
                moves.append(p)
                left -= sizes[p]
        if len(moves) in (0, len(sizes)):
            return {}
        return {name: dataclasses.replace(option, moves=tuple(sorted(moves)))}

    def _all_moved(self, option: _Held, name: str) -> _Menu:
        """`option` with everything moved; empty if nothing may move."""
        if all(self.storages[s].to_end or self.storages[s].stays for s in option.saved):
            return {}
        return {name: dataclasses.replace(option, moves=tuple(range(len(option.saved))))}

    def _named(self, name: str) -> tuple[str, ...]:
        """Per stage of the chain, `name` if it has that option, otherwise "keep"; "discard" stands for "recompute"."""
        again = DISCARD if name == "recompute" else name
        return tuple(name if name in menu else again if again in menu else "keep" for menu in self.menus)

    def _held_under(self, names: Sequence[str]) -> list[_Held]:
        """Per stage of the chain, its option of the name given for it."""
        return [menu[name] for menu, name in zip(self.menus, names, strict=True)]

    def _moved(self, options: Sequence[_Held]) -> dict[int, int]:
        """Storage -> the stage of the chain that moves it, but for what the program holds beyond that stage.

        The program frees it amid a later step, which then adds less than where it stays: what is measured for
        that step would depend on the stage before.
        """
        moved = moved_by(self.storages, [option.moved for option in options], [option.all for option in options])
        n = len(options)
        return {s: k for s, k in moved.items() if there_until(self.storages[s], k, n) == k}

    def _decisions(self, names: Sequence[str]) -> tuple[Decision, ...]:
        """Decisions for the module stages; what moves is away in every step but its stage's own."""
        options = self._held_under(names)
        moved = self._moved(options)
        decisions: list[Decision] = []
        for k, option in enumerate(options):
            if self.segments[k] % 2:
                moves = tuple(p for p in option.moves if moved.get(option.saved[p]) == k)
                action: Action = "recompute" if option.recomputes else "swap" if option.moves else "keep"
                point = len(decisions)  # the controller counts module stages alone
                decision = Decision.moving(action, moves, point, point, names[k], ops=option.ops, ratio=option.ratio)
                decisions.append(decision)
        return tuple(decisions)

    # --- bytes ---

    def trace(self, devices: Sequence[Device], folding: Folding | None) -> tuple[Traced, list[Times]]:
        """The chain, and times on `devices`."""
        bases = self._bases()
        targets = [dataclasses.replace(self.target, spec=device) for device in devices]
        few = None if folding is None else self._of_few(targets, folding, bases)
        options, times = few or self._of_all(targets, bases, self._alike(bases) if folding is None else ())
        stages = []
        for k, (g, menu) in enumerate(zip(self.segments, self.menus, strict=True)):
            linked = {self.index[s] for s in self.kept.linked.get(g, ()) if s in self.index}
            stages.append(
                TracedStage(
                    name=segment_name(self.names, g),
                    kind=self._kind(g),
                    options=tuple(options[k][name] for name in menu),
                    linked=tuple(sorted(linked.intersection(menu["recompute"].all))) if "recompute" in menu else (),
                    inputs=self.kept.arguments.get(g),
                    has_backward=g not in self.kept.unread,
                )
            )
        if self.not_measured:
            self.notes.append(f"temporaries not measured for: {', '.join(sorted(self.not_measured))}")
        residents = self._residents()
        traced = Traced(
            stages=tuple(stages),
            storages=tuple(self.storages),
            base_forward_bytes=tuple(bases.forward),
            base_backward_bytes=tuple(bases.backward),
            update_peak_bytes=self.resident_bytes + self.kept.end_bytes + self._update_bytes(residents),
            resident_bytes=self.resident_bytes,
            notes=tuple(self.notes),
            outside=self.found.outside,
            uncalled=self.found.uncalled,
            foreign=self.found.foreign,
            differentiated=tuple(
                Differentiated(segment_name(self.names, g), sum(not c for _, c in tasks), sum(c for _, c in tasks))
                for g, tasks in sorted(self.kept.differentiated.items())
                if g % 2
            ),
            written=tuple(self.kept.written),
            places=self._places(),
            rerun_shares=self.rerun_shares,
            residents=residents,
        )
        return traced, times

    def _update_bytes(self, residents: Sequence[Resident]) -> int:
        """Bytes of the update beside those that are live after backward.

        What may return for the update returns while autograd still holds the loss's gradient.
        """
        returns = self.update_bytes is not None or any(not resident.users for resident in residents)
        at_end = sum(self.kept.sizes[sid] for sid in self.kept.results.get("loss", ())) if returns else 0
        return max(self.update_bytes or 0, at_end)

    def _residents(self) -> tuple[Resident, ...]:
        """The parameters, buffers and gradients that may be away within the step (NOTE [Offloaded weights])."""
        users = self._readers()
        fixed = {
            k for k, g in enumerate(self.segments) if g % 2 == 0 or g in self.ended or g in self.kept.differentiated
        }
        written = {_NUMBERS_OF.sub("#", name) for name in (*self.kept.written, *self.kept.written_buffers)}
        graph = self.kept.backward.get(0)
        front = [0] if self.segments[0] == 0 and (graph is None or not graph.ops) else None
        found = []
        for weight in self._weights():
            parts = [part for part in weight if part[0][1].untyped_storage().nbytes() >= self._least_bytes]
            names = tuple(name for part in parts for name, _ in part)
            nbytes = sum(part[0][1].untyped_storage().nbytes() for part in parts)
            used = sorted(set().union(*(users.get(name, ()) for name in names)))
            is_written = not written.isdisjoint(_NUMBERS_OF.sub("#", name) for name in names)
            if is_written or not (used == front or (used and fixed.isdisjoint(used))):
                continue
            trained = any(t.requires_grad for part in parts for _, t in part)
            sizes = tuple(t.untyped_storage().nbytes() * (not n) for part in parts for n, (_, t) in enumerate(part))
            readers = () if used == front else tuple(used)
            found.append(Resident(names, nbytes, readers, trained, sizes=sizes if len(parts) > 1 else ()))
        if self.step.accumulates and not self.step.parallel.kind:
            found += self._gradients(users, fixed)
        return tuple(found)

    @property
    def _least_bytes(self) -> int:
        return max(self.target.least_moved_bytes, 1)

    def _weights(self) -> Iterable[list[list[tuple[str, torch.Tensor]]]]:
        """The parameters and buffers, by their storages; of a quantized one, these are several.

        Storages that several quantized parameters share (a table of codes) are left out.
        """
        by_storage: dict[int, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        sharded = self.step.parallel.named_shards()
        # DistributedDataParallel sends buffers where each forward begins.
        for name, t, whole in named_inside(self.step.model, buffers=not self.step.parallel.kind):
            is_plain = name not in sharded and t.layout is torch.strided
            if is_plain and (t is whole or not whole.requires_grad):
                by_storage.setdefault(t.untyped_storage()._cdata, []).append((name, t, whole))
        weights: dict[int, list[list[tuple[str, torch.Tensor]]]] = {}
        for part in by_storage.values():
            if all(t is whole for _, t, whole in part) or len({id(whole) for *_, whole in part}) == 1:
                weights.setdefault(id(part[0][2]), []).append([(name, t) for name, t, _ in part])
        return weights.values()

    def _gradients(self, users: Mapping[str, Set[int]], fixed: Set[int]) -> Iterator[Resident]:
        """The gradients that exist when the step starts and that stages' backwards add to."""
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, p in self.step.model.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        sizes = starting_gradients(self.step.model)
        for p, same in names.items():
            used = set[int]().union(*(users.get(name, ()) for name in same))
            nbytes = sizes.get(same[0], 0)
            plain = p.layout is torch.strided and not is_traceable_wrapper_subclass(p)
            if plain and used and fixed.isdisjoint(used) and nbytes >= self._least_bytes:
                yield Resident((GRADIENT_OF + same[0],), nbytes, (min(used),), trained=True, kind="gradients")

    def _readers(self) -> dict[str, set[int]]:
        """Parameter or buffer -> the stages whose forward reads it; a compiled one is taken to read all its own."""
        users: dict[str, set[int]] = {}
        for k, g in enumerate(self.segments):
            names = {name for op in self.program.forward[g].ops for name, *_ in op.reads if isinstance(name, str)}
            if g % 2 and self.program.forward[g].is_compiled:
                stage = segment_name(self.names, g).partition("#")[0]
                inside = named_inside(self.step.model.get_submodule(stage))
                names.update(f"{stage}.{name}" for name, *_ in inside)
            for name in names:
                users.setdefault(name, set()).add(k)
        return users

    def _of_all(
        self, targets: Sequence[Target], bases: _StartBytes, alike: Sequence[Sequence[int]]
    ) -> tuple[list[dict[str, Option]], list[Times]]:
        """Per stage of the chain, its options by name; and times on `targets`.

        Parameters
        ----------
        alike : sequence of sequence of int
            The stages that share replays.
        """
        runs = self._runs(bases, alike)
        options = self._options(runs, bases, alike)
        while options is None:
            runs += self._runs_left(runs, bases)
            options = self._options(runs, bases, alike)
        return options, [self._times(runs, target) for target in targets]

    def _of_few(
        self, targets: Sequence[Target], folding: Folding, bases: _StartBytes
    ) -> tuple[list[dict[str, Option]], list[Times]] | None:
        """Return what `_of_all` does, from a trace of the few layers that are run.

        None if they hold what no hook sees, since that adds up over layers.
        """
        found, beside = FoundStages(folding.stages, ()), BytesBeside(self.resident_bytes)
        few = _Tracing(self.step, found, self.target, beside, self.choices, folding.replay_few, self.report)
        few_bases = few._bases()
        runs = few._runs(few_bases, alike := few._alike(few_bases))
        options = few._options(runs, few_bases, alike)
        place = {g: k for k, g in enumerate(few.segments)}
        twins = [(place[a], place[b]) for a, b in folding.twins if a in place and b in place]
        sources = [place.get(2 * folding.positions[g // 2] + g % 2) for g in self.segments]
        if (
            options is None
            or not all(self._is_local(run, bases) for run in self._runs_of_all())
            or not all(few._is_local(run, few_bases, twins) for run in runs)
            or any(
                k is None or _shape(menu) != _shape(few.menus[k]) for k, menu in zip(sources, self.menus, strict=True)
            )
        ):
            return None
        self.learned |= few.learned
        self.not_measured |= few.not_measured
        out = [_as_in(menu, options[k]) for k, menu in zip(sources, self.menus, strict=True) if k is not None]
        return out, [few._times(runs, target).unfolded(folding.positions) for target in targets]

    def _is_local(self, run: _ReplayedRun, bases: _StartBytes, twins: Iterable[tuple[int, int]] = ()) -> bool:
        """Whether each step of `run` begins with the bytes of the storages that are known alone.

        Where storages move, what is away then is less by as much in both of `twins`, so that nothing adds up.
        """
        beyond = self._beyond(run, bases)
        if any(option.moves for option in self._held_under(run.names)):
            return all(table[a] == table[b] for table in (beyond.forward, beyond.backward) for a, b in twins)
        return not any(beyond.forward + beyond.backward)

    def _runs_of_all(self) -> list[_ReplayedRun]:
        """The replays from which the menus are made."""
        return [_ReplayedRun(self._named("keep"), self.kept), _ReplayedRun(self._named("recompute"), self.recomputed)]

    def _runs(self, bases: _StartBytes, alike: Sequence[Sequence[int]]) -> list[_ReplayedRun]:
        """The replays that are always needed: all options that move nothing, and those that move most.

        Stages that are alike share the former: each is run by one of them, unless a replay holds what no hook sees. An
        option that moves part of what another one moves has no replay of its own (`_options`).
        """
        still = [[name for name, held in menu.items() if held.ops and not held.moves] for menu in self.menus]
        shares = {k: (i, len(group)) for group in alike for i, k in enumerate(group)}
        parts = [names[i::n] for k, names in enumerate(still) for i, n in [shares.get(k, (0, 1))]]
        together = list(itertools.zip_longest(*parts, fillvalue="keep"))
        most = tuple(
            next((name for name, option in reversed(menu.items()) if option.recomputes and option.moves_all), "keep")
            for menu in self.menus
        )
        moving = [each for each in (self._named("swap"), most) if set(each) != {"keep"}]
        self.all_replays = self.replays + len(together) + len(moving)
        runs = [_ReplayedRun(each, self._run(self._decisions(each))) for each in together]
        if alike and not all(self._is_local(run, bases) for run in runs):
            return self._runs(bases, ())
        runs += [_ReplayedRun(self._named(f"compiled-{n}"), seen) for n, seen in enumerate(self.variants, 1)]
        for run in runs:
            self._pin_unseen(run, bases)
        return [*self._runs_of_all(), *runs, *(self._under(each, bases) for each in moving)]

    def _alike(self, bases: _StartBytes) -> Sequence[Sequence[int]]:
        """Groups of stages that run the same operations with as many bytes and hold alike storages.

        There are none where keep or recompute hold what no hook sees.
        """
        if not all(self._is_local(run, bases) for run in self._runs_of_all()):
            return ()

        def storages(held: Iterable[int], k: int) -> tuple[Any, ...]:
            found = [self.storages[s] for s in held]
            own = (
                s.born == k and (s.program_until > k, None if s.graph_until is None else s.graph_until - k)
                for s in found
            )
            return *own, *((s.nbytes, s.to_end, s.stays) for s in found)

        groups: dict[Any, list[int]] = {}
        for k, (g, menu) in enumerate(zip(self.segments, self.menus, strict=True)):
            like = [
                (name, o.recomputes, o.moves, o.way, storages(o.saved, k), storages(o.pinned, k))
                for name, o in menu.items()
            ]
            ran = [
                (self._rise(table, k), *(op.key for op in table[g].ops))
                for seen in (self.kept, self.recomputed)
                for table in (seen.forward, seen.backward)
                if g in table
            ]
            groups.setdefault((self._kind(g), *like, *ran), []).append(k)
        return [group for group in groups.values() if len(group) > 1]

    def _runs_left(self, runs: Sequence[_ReplayedRun], bases: _StartBytes) -> list[_ReplayedRun]:
        """A replay for each name of an option that has none in `runs`."""
        seen = {(k, name) for run in runs for k, name in enumerate(run.names)}
        left = dict.fromkeys(name for k, menu in enumerate(self.menus) for name in menu if (k, name) not in seen)
        self.all_replays = self.replays + len(left)
        return [self._under(self._named(name), bases) for name in left]

    def _under(self, names: tuple[str, ...], bases: _StartBytes) -> _ReplayedRun:
        """A replay of the options of these names, with what it held unseen pinned to them."""
        run = _ReplayedRun(names, self._run(self._decisions(names)))
        self._pin_unseen(run, bases)
        return run

    def _unexplained(self, run: _ReplayedRun) -> _StartBytes:
        """Bytes at the start of each forward and backward step of `run` beyond the storages that are resident then.

        What is on the device before the step isn't in it.
        """
        options, seen = self._held_under(run.names), run.seen
        change_forward, change_backward = resident_changes(
            self.storages, [option.all for option in options], self._moved(options), range(len(options))
        )
        # Saved numbers are in no replay's bytes; a stage's count from its forward to its backward.
        numbers = list(accumulate(self.kept.forward[g].wrapped_bytes for g in self.segments))

        def beyond(table: Mapping[int, SegmentTrace], change: Iterable[int]) -> list[int]:
            known = zip(self.segments, numbers, accumulate(change), strict=False)
            return [table[g].start_bytes - resident + number for g, number, resident in known]

        forward, backward = beyond(seen.forward, change_forward), beyond(seen.backward, change_backward)
        held = {s for option in options for s in option.all}
        for sid, last in self.lasting.items():  # counted where this replay doesn't have it
            storage = self.storages[self.index[sid]]
            for k in range(storage.born + 1, len(forward) if self.index[sid] in held else last + 1):
                if sid not in seen.forward[self.segments[k]].present:
                    forward[k] += storage.nbytes
        return _StartBytes(forward, backward)

    def _beyond(self, run: _ReplayedRun, bases: _StartBytes) -> _StartBytes:
        """Bytes at the start of each step of `run` beyond `bases` and all that is known to be resident then."""
        unexplained, states = self._unexplained(run), self._states_before(self._held_under(run.names))

        def beyond(found: list[int], state: list[int], base: list[int]) -> list[int]:
            return [self.resident_bytes + f + s - b for f, s, b in zip(found, state, base, strict=True)]

        return _StartBytes(
            beyond(unexplained.forward, states.forward, bases.forward),
            beyond(unexplained.backward, states.backward, bases.backward),
        )

    def _bases(self) -> _StartBytes:
        """Bytes at the start of each forward and backward step that no decision changes.

        Pins to the stages what they hold beyond what hooks show. Autograd nodes may hold tensors that no hook sees
        (attributes of a custom Function, for one): such bytes show as a base that is larger under keep than under
        recompute, and are pinned to the stage where the difference begins.
        """
        kept_run, again_run = self._runs_of_all()
        kept, again = self._unexplained(kept_run).forward, self._unexplained(again_run).forward
        base_forward = []
        hidden_kept = hidden_again = 0
        kept_ends: Counter[int] = Counter()  # of the hidden bytes, those in graphs that are dropped, by their last step
        again_ends: Counter[int] = Counter()
        for k in range(len(self.segments)):
            base = self.resident_bytes + min(kept[k] - hidden_kept, again[k] - hidden_again)
            base_forward.append(max(base, 0))  # less than 0 where more is saved from outside than is known of
            if k + 1 == len(self.segments):
                break
            hidden_kept -= kept_ends[k]
            hidden_again -= again_ends[k]
            difference = (kept[k + 1] - hidden_kept) - (again[k + 1] - hidden_again)
            if difference > 0:
                until = self._pin(k, difference, "unseen", self._option_names(k, recomputing=False))
                hidden_kept += difference
                kept_ends[until] += difference
            elif difference < 0 and self._option_names(k, recomputing=True):
                until = self._pin(k, -difference, "unseen", self._option_names(k, recomputing=True))
                hidden_again -= difference
                again_ends[until] -= difference
            else:  # what is unseen of a graph that is dropped, of a stage that isn't: it counts as if it were there
                hidden_kept += difference
        for k in range(len(self.menus)):
            if self._state(k) and self._option_names(k, recomputing=True):
                self._pin(k, self._state(k), "random state", self._option_names(k, recomputing=True))
        kept, again = self._unexplained(kept_run).backward, self._unexplained(again_run).backward
        states = self._states_before(self._held_under(again_run.names)).backward
        base_backward = [
            max(self.resident_bytes + max(kept_bytes, again_bytes + state_bytes), 0)
            for kept_bytes, again_bytes, state_bytes in zip(kept, again, states, strict=True)
        ]
        return _StartBytes(base_forward, base_backward)

    def _option_names(self, k: int, *, recomputing: bool) -> list[str]:
        """The options of stage `k` that run it again, or those of its own code that don't."""
        return [name for name, option in self.menus[k].items() if option.runs_again == recomputing and not option.ratio]

    def _pin(self, k: int, nbytes: int, label: str, options: Iterable[str]) -> int:
        """Add a storage of stage `k` that these options of it hold and can't move; return the last step that has it."""
        until = self._graph_until(k)
        stage = segment_name(self.names, self.segments[k])
        self.storages.append(Storage(f"{stage}/{label}", nbytes, k, k, graph_until=until))
        pinned = len(self.storages) - 1
        for name in options:
            option = self.menus[k][name]
            self.menus[k][name] = dataclasses.replace(option, pinned=(*option.pinned, pinned))
        return len(self.segments) if until is None else until

    def _graph_until(self, k: int) -> int | None:
        """The last step at whose start the graph of stage `k` is there, if forward drops it."""
        g = self.segments[k]
        ends = self.kept.ends.get(g, {}).values()
        return self._at(max(end[1] for end in ends)) if g in self.ended and ends else None

    def _state(self, k: int) -> int:
        """Bytes of the random states that stage `k` keeps for another run, its own generators' included."""
        return self.state_bytes and self.state_bytes + self.kept.generator_bytes.get(self.segments[k], 0)

    def _states(self, options: Sequence[_Held]) -> list[int]:
        """Per stage, bytes of the random states that its option holds; no replay counts them."""
        return [self._state(k) if option.runs_again else 0 for k, option in enumerate(options)]

    def _states_before(self, options: Sequence[_Held]) -> _StartBytes:
        """Bytes of the random states that are held at the start of each forward and each backward step."""
        n = len(options)
        forward, backward = [0] * n, [0] * n
        for i, nbytes in enumerate(self._states(options)):
            until = self._graph_until(i) if nbytes else None
            for k in range(i + 1, n if until is None else until + 1):
                forward[k] += nbytes
            for k in range(i, n) if until is None else ():
                backward[k] += nbytes
        return _StartBytes(forward, backward)

    def _collected_bytes(self, g: int) -> int:
        """Bytes that a stage makes in each run and others keep besides its output (features, by a hook)."""
        trace, after = self.program.forward[g], self.program.forward[g + 1].present
        returned = self.program.returned.get(g, {})
        return sum(nbytes for op in trace.ops for s, (nbytes, _) in op.made.items() if s in after and s not in returned)

    def _pin_unseen(self, run: _ReplayedRun, bases: _StartBytes) -> None:
        """Pin to the options of `run` what it held beyond the storages that are known."""
        hidden = 0
        for k, (beyond, name) in enumerate(zip(self._beyond(run, bases).forward[1:], run.names, strict=False)):
            difference = beyond - hidden
            if difference > 0 and name != "keep":
                self._pin(k, difference, f"{_UNSEEN} {name}", [name])
                hidden += difference

    def _workspaces(self, replays: Iterable[Replay]) -> dict[Hashable, int]:
        """Operation key -> most bytes that it allocates at once; adds to `not_measured`, and sets `learned`."""
        extra, failed, learned = workspaces_of(
            self.target, [trace for r in replays for table in (r.forward, r.backward) for trace in table.values()]
        )
        self.learned |= learned
        self.not_measured.update(failed)
        return extra

    def _options(
        self, runs: Sequence[_ReplayedRun], bases: _StartBytes, alike: Sequence[Sequence[int]]
    ) -> list[dict[str, Option]] | None:
        """Per stage of the chain, its options by name, with the bytes that they add in the replays.

        An option that no replay ran has the bytes that it has in a stage that is alike. This is right if the options
        that all of these ran have equal bytes. One that moves part of what another one moves has the bytes of the one
        that moves nothing and is otherwise the same. This is right if leaving and returning take no memory and nothing
        else holds what moves: then the options that move most have such bytes too, and no replay held anything unseen.
        If that doesn't hold, the result is None.
        """
        extra = self._workspaces(run.seen for run in runs)
        out: list[dict[str, Option]] = [{} for _ in self.segments]
        for run in runs:
            for options, option in zip(out, self._measured(run, extra, bases), strict=True):
                options.setdefault(option.name, option)  # "keep" from the run in which all stages keep
        if all(menu.keys() == options.keys() for menu, options in zip(self.menus, out, strict=True)):
            return out
        if any(_UNSEEN in storage.name for storage in self.storages):
            return None
        if not all(_share(group, out, self.menus) for group in alike):
            return None
        for menu, options in zip(self.menus, out, strict=True):
            for name, held in menu.items():
                if held.moves:
                    stays = next(other for other in menu if menu[other] == dataclasses.replace(held, moves=()))
                    expected = dataclasses.replace(options[stays], name=name, moves=held.moves)
                    if options.setdefault(name, expected) != expected:
                        return None
        return out

    def _measured(self, run: _ReplayedRun, extra: Mapping[Hashable, int], bases: _StartBytes) -> Iterator[Option]:
        """Per stage of the chain, the option that `run` ran under, with the bytes that it adds."""
        options, seen = self._held_under(run.names), run.seen
        states, beyond = self._states(options), self._beyond(run, bases)
        moved = self._moved(options)
        for k, (g, option) in enumerate(zip(self.segments, options, strict=True)):
            # Fewer bytes at the start than known storages have are no saving of this stage's, but for those that it
            # moved itself in this run, which may return only after the start.
            returning = sum(self.storages[s].nbytes for s in option.moved if moved.get(s) == k)
            forward = max(beyond.forward[k], -returning) + self._rise(seen.forward, k, extra)
            backward = max(beyond.backward[k], -returning) + self._rise(seen.backward, k, extra)
            again = 0
            if "recompute" in self.menus[k]:  # in a segment's sweep it runs again, whether it saves there or not
                again = self._collected_bytes(g)
                if not option.runs_again:  # with copies of buffers and of the random state
                    again += self._state(k) + self.recomputed.copied_bytes.get(g, 0)
                again += self.kept.forward[g].wrapped_bytes
            yield Option(
                run.names[k],
                option.saved,
                option.pinned,
                max(forward, 0) + states[k] + again,
                max(backward, 0) + (0 if g in self.ended else 2 * states[k]),
                recomputes=option.recomputes,
                moves=option.moves,
                ops=option.ops,
                ratio=option.ratio,
            )

    def _rise(
        self, table: Mapping[int, SegmentTrace], k: int, extra: Mapping[Hashable, int] = MappingProxyType({})
    ) -> int:
        """Most bytes of a step of stage `k` above those at its start, temporaries inside operations (`extra`) included.

        What a stage before `k` may hold counts as there until the step's end: this replay may free it before the peak,
        but it is there under a plan in which that stage holds it.
        """
        return table[self.segments[k]].rise(extra, lambda sid: self.first_holders.get(sid, k) < k)

    def _places(self) -> dict[int, Places]:
        """Where the storages of each segment are in the chain."""

        def positioned(table: dict[int, dict[Sid, bool]], g: int) -> tuple[int, ...]:
            return tuple(self.index.get(sid, -1) for sid, can in table.get(g, {}).items() if can)

        kept = self.kept
        return {
            g: Places(positioned(kept.inputs, g), positioned(kept.returned, g), positioned(kept.saved, g), stage=k)
            for k, g in enumerate(self.segments)
        }

    def _times(self, runs: Sequence[_ReplayedRun], target: Target) -> Times:
        """Sums over the operations that each stage ran, and ran again, in the replays."""
        seconds = target.times(
            op.key
            for run in runs
            for table in (run.seen.forward, run.seen.backward)
            for trace in table.values()
            for op in trace.ops
        )

        def total(table: dict[int, SegmentTrace], g: int) -> float:
            return sum(seconds.get(op.key, 0.0) for op in table[g].ops) if g in table else 0.0

        out = Times()
        for k, (g, menu) in enumerate(zip(self.segments, self.menus, strict=True)):
            forward_s, backward_s = total(self.kept.forward, g), total(self.kept.backward, g)
            if g % 2 == 0:
                out.glue_forward_s[g // 2], out.glue_backward_s[g // 2] = forward_s, backward_s
                continue
            kind = self._kind(g)
            out.forward_s[kind], out.backward_s[kind] = forward_s, backward_s
            for run in runs:
                option = menu[run.names[k]]
                if option.runs_again and not option.moves:  # one that moves as well has a copy's operations besides
                    again_s = total(run.seen.backward, g) - backward_s
                    out.recompute_s[kind, option.ops] = max(again_s, 0.0)
        return out


def _shape(menu: _Menu) -> list[tuple[Any, ...]]:
    """Return a value that is equal for menus with the same options, whatever the storages' numbers."""
    return [(name, len(held.saved), len(held.pinned), held.moves, held.way) for name, held in menu.items()]


def _share(group: Sequence[int], options: list[dict[str, Option]], menus: Sequence[_Menu]) -> bool:
    """Give the stages of `group`, which are alike, each other's options; False if those that they share differ."""
    ran: dict[str, Option] = {}
    for k in group:
        for name, option in options[k].items():
            first = ran.setdefault(name, option)
            if (first.forward_bytes, first.backward_bytes) != (option.forward_bytes, option.backward_bytes):
                return False
    for k in group:
        options[k] = _as_in(menus[k], ran)
    return True


def _as_in(menu: _Menu, options: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options that `menu` has, with the storages that they hold there."""
    return {
        name: dataclasses.replace(options[name], saved=held.saved, pinned=held.pinned)
        for name, held in menu.items()
        if name in options
    }
