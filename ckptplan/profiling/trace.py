"""Bytes of a step: replay it without memory under a few uniform plans and read off storages, holders and transients.

Four replays, all through the same controller and hooks that run a real plan:

- *program*: nothing is saved at all, so what lives on is what the program's own variables hold;
- *keep*: what every stage and the glue between them saves, and the bytes no decision changes;
- *recompute* and *swap*: the same chain with every stage that way, for the transients of these actions.

A storage has the same name in all replays (where it was made, and as which of how many), since the forward runs the
same operations in each.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckptplan.core.chain import Action, Link, Stage, Storage, Transient
from ckptplan.core.plan import KEEP, Decision
from ckptplan.core.profile import Fingerprint, Profile
from ckptplan.core.schedule import Residency, residency
from ckptplan.profiling.fake import fake_parameters
from ckptplan.profiling.tracker import SegmentTrace, Sid, Tracker, owners_of_a_lone_gradient
from ckptplan.profiling.workspace import measure_workspaces
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.measure import no_cycles_collected
from ckptplan.runtime.step import TrainingStep
from ckptplan.runtime.stores import NullStore
from ckptplan.runtime.swap import MIN_SWAP_BYTES, movable


@dataclass
class Replay:
    """What one replay saw.

    Attributes
    ----------
    forward, backward : dict
        Segment -> its trace.
    saved : dict
        Segment -> storages autograd saved, in order, with whether they could be moved.
    inputs : dict
        Segment -> storages passed in.
    input_bytes : dict
        Segment -> bytes of the tensors passed in.
    modifies : set
        Segments that write to what is passed in: such a stage can't run a second time.
    sizes : dict
        Storage -> bytes.
    output : set
        Storages of the model's output.
    end_bytes : int
        Live bytes after backward, gradients included.
    wrapped_bytes : int
        Numbers that became tensors, which no replay sees.
    peak_bytes : int
        Most bytes of the step's own making alive at once, temporaries inside operations not counted.
    """

    forward: dict[int, SegmentTrace] = field(default_factory=dict)
    backward: dict[int, SegmentTrace] = field(default_factory=dict)
    saved: dict[int, dict[Sid, bool]] = field(default_factory=dict)
    inputs: dict[int, set[Sid]] = field(default_factory=dict)
    input_bytes: dict[int, int] = field(default_factory=dict)
    modifies: set[int] = field(default_factory=set)
    sizes: dict[Sid, int] = field(default_factory=dict)
    output: set[Sid] = field(default_factory=set)
    end_bytes: int = 0
    wrapped_bytes: int = 0
    peak_bytes: int = 0


class _Watcher:
    """Tells the tracker where the program is."""

    def __init__(self, tracker: Tracker, replay: Replay) -> None:
        self._tracker = tracker
        self._replay = replay
        self._position = 0
        self._segments: dict[int, int] = {}
        self._given: list[tuple[torch.Tensor, int]] = []

    def enter(self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._position += 1
        self._segments[stage] = self._position
        self._tracker.enter_segment(self._position)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self._given = [(t, t._version) for t in tensors]
        sids = {sid: t for t in tensors if (sid := self._tracker.sid(t)) is not None}
        self._replay.inputs[self._position] = set(sids)
        for sid, tensor in sids.items():
            self._replay.sizes[sid] = self._tracker.size_of(tensor.untyped_storage())
        self._replay.input_bytes[self._position] = sum(t.numel() * t.element_size() for t in tensors)

    def exit(self, stage: int, output: Any) -> None:
        if any(t._version != version for t, version in self._given):
            self._replay.modifies.add(self._position)
        self._given = []
        self._position += 1
        self._tracker.enter_segment(self._position)

    def backward(self, stage: int) -> None:
        self._tracker.enter_backward(self._segments[stage])

    @property
    def segment(self) -> int:
        return self._position


def replay(
    step: TrainingStep,
    stages: tuple[str, ...],
    choices: tuple[Decision, ...],
    device: torch.device,
    *,
    round_to: int = 1,
    saves: bool = True,
) -> Replay:
    """Run one step without memory under `choices` and count.

    Parameters
    ----------
    stages, choices
        Module stages only.
    saves : bool
        False: let autograd save nothing, and run no backward.
    """
    out = Replay()
    owners_of_a_lone_gradient()  # measured now: inside the replay it would be in its own way
    tracker = Tracker(round_to, device.type)
    watcher = _Watcher(tracker, out)
    one_forward = step.fn is None
    with fake_parameters(step.model, tracker):
        own = [*step.model.parameters(), *step.model.buffers()]
        for tensor in (*own, *(p.grad for p in own if p.grad is not None)):
            tracker.outside(tensor)
        belongs = {t.untyped_storage()._cdata for t in own}
        outside: dict[int, tuple[int, torch.Tensor]] = {}
        controller = Controller(
            step.model, stages, choices, NullStore(), device, observer=watcher, one_forward=one_forward
        )

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            sid = tracker.sid(tensor)
            can = movable(tensor, device, lambda storage: storage._cdata in belongs)
            if sid is None and can:
                # From outside the step: it never moves, but it counts in the order of saving.
                cdata = tensor.untyped_storage()._cdata
                sid = ("outside", 0, outside.setdefault(cdata, (len(outside), tensor.detach()))[0])
            if sid is not None:
                out.sizes[sid] = tracker.size_of(tensor.untyped_storage())
                out.saved.setdefault(watcher.segment, {}).setdefault(sid, can)
            return tensor if saves else None

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        controller.install()
        try:
            with no_cycles_collected(), tracker:
                given = fake_inputs(step, tracker.fake, tracker.outside)
                with hooks:
                    output, loss = given.forward()
                out.output = {
                    sid
                    for t in pytree.tree_leaves((output, loss))
                    if isinstance(t, torch.Tensor) and (sid := tracker.sid(t))
                }
                out.sizes.update(
                    (sid, tracker.size_of(t.untyped_storage()))
                    for t in pytree.tree_leaves((output, loss))
                    if isinstance(t, torch.Tensor) and (sid := tracker.sid(t))
                )
                if saves:
                    tracker.enter_backward()
                    loss.backward()
                tracker.finish()
                out.end_bytes = tracker.live_bytes
                del output, loss
        finally:
            controller.remove()
    out.peak_bytes = tracker.peak_bytes
    out.forward, out.backward, out.wrapped_bytes = tracker.forward, tracker.backward, tracker.wrapped_bytes
    return out


def fake_inputs(
    step: TrainingStep,
    fake: Callable[[torch.Tensor], torch.Tensor],
    outside: Callable[[torch.Tensor], None] = lambda tensor: None,
) -> TrainingStep:
    """The step on fake twins of its floating inputs; `outside` is told of what was there before."""

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        outside(tensor)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        replaced = fake(tensor)
        outside(replaced)
        return replaced

    return dataclasses.replace(
        step,
        args=pytree.tree_map_only(torch.Tensor, twin, step.args),
        kwargs=pytree.tree_map_only(torch.Tensor, twin, step.kwargs),
    )


def trace_chain(
    step: TrainingStep,
    names: tuple[str, ...],
    device: torch.device,
    *,
    resident_bytes: int,
    update_bytes: int,
    round_to: int,
    fingerprint: Fingerprint,
) -> Profile:
    """The chain of `step` with exact bytes and without times.

    Parameters
    ----------
    names : tuple of str
        The module stages, in call order.
    resident_bytes : int
        What is on the device before the step: parameters, buffers, gradients, optimizer state, inputs.
    update_bytes : int
        What the optimizer's update adds to what is live after backward.
    """
    return _Tracing(step, names, device, resident_bytes, update_bytes, round_to).profile(fingerprint)


class _Tracing:
    """The replays of one step, and the chain read off them."""

    def __init__(
        self,
        step: TrainingStep,
        names: tuple[str, ...],
        device: torch.device,
        resident_bytes: int,
        update_bytes: int,
        round_to: int,
    ) -> None:
        self.step, self.names, self.device, self.round_to = step, names, device, round_to
        self.resident_bytes, self.update_bytes = resident_bytes, update_bytes
        self.notes: list[str] = []
        self.held: dict[Action, Residency] = {}
        n = len(names)
        self.program = self._run((KEEP,) * n, saves=False)
        self.kept = self._run((KEEP,) * n)
        self.recomputed = self._run(
            tuple(KEEP if 2 * j + 1 in self.kept.modifies else Decision("recompute") for j in range(n))
        )
        self.resident_bytes += self.kept.wrapped_bytes
        self.segments = self._nonempty()
        self.storages, self.index = self._storages()

    def _run(self, choices: tuple[Decision, ...], *, saves: bool = True) -> Replay:
        return replay(self.step, self.names, choices, self.device, round_to=self.round_to, saves=saves)

    def _nonempty(self) -> list[int]:
        """Segments that are stages or do something."""
        return [
            g
            for g in range(2 * len(self.names) + 1)
            if g % 2 or self.kept.forward[g].ops or (g in self.kept.backward and self.kept.backward[g].ops)
        ]

    def _storages(self) -> tuple[list[Storage], dict[Sid, int]]:
        position = {g: k for k, g in enumerate(self.segments)}

        def at(segment: int) -> int:
            while segment not in position:
                segment -= 1
                if segment < 0:
                    return -1
            return position[segment]

        last_seen: dict[Sid, int] = {}
        for k, g in enumerate(self.segments):
            for sid in self.program.forward[g].present:
                last_seen[sid] = k
        wanted: dict[Sid, int] = {}
        for sids in (*self.kept.saved.values(), *self.kept.inputs.values(), self.kept.output):
            for sid in sids:
                if sid[0] != "backward":
                    wanted.setdefault(sid, self.kept.sizes[sid])
        storages: list[Storage] = []
        index: dict[Sid, int] = {}
        for sid, nbytes in wanted.items():
            if sid[0] == "outside":
                index[sid] = len(storages)
                storages.append(Storage(f"input {sid[2]}", nbytes, -1, -1, to_end=True))
                continue
            born = at(sid[1])
            until = max(last_seen.get(sid, born), born)
            index[sid] = len(storages)
            name = f"{self._name(sid[1])}/{sid[2]}"
            storages.append(
                Storage(name, nbytes, born, until, to_end=sid in self.kept.output, stays=nbytes < MIN_SWAP_BYTES)
            )
        return storages, index

    def _name(self, segment: int) -> str:
        if segment % 2:
            return self.names[segment // 2]
        before, after = segment // 2 - 1, segment // 2
        if after == len(self.names):
            return f"(after {self.names[before]})"
        return f"(before {self.names[after]})"

    def _extra(self, nbytes: int, name: str, k: int) -> int:
        self.storages.append(Storage(name, nbytes, k, k))
        return len(self.storages) - 1

    def profile(self, fingerprint: Fingerprint) -> Profile:
        draft = self._draft(fingerprint)
        base_forward, base_backward, stages = self._bases(draft)
        draft = dataclasses.replace(
            draft,
            stages=stages,
            storages=tuple(self.storages),
            base_forward_bytes=base_forward,
            base_backward_bytes=base_backward,
        )
        tight = residency(draft, [_can(stage, "swap") for stage in stages])
        # Away in every step but its stage's own. The controller counts module stages alone.
        modules = [k for k, g in enumerate(self.segments) if g % 2]
        swapped = self._run(
            tuple(
                Decision("swap", tight.moves[k], j, j) if tight.moves[k] else Decision(_can(draft.stages[k], "swap"))
                for j, k in enumerate(modules)
            )
        )
        peaks = self._peaks(swapped)
        final = []
        for k, stage in enumerate(draft.stages):
            keep = self._transient(draft, peaks["keep"], "keep", k)
            recompute = None if stage.recompute is None else self._transient(draft, peaks["recompute"], "recompute", k)
            swap = None if stage.swap is None else self._transient(draft, peaks["swap"], "swap", k)
            final.append(dataclasses.replace(stage, keep=keep, recompute=recompute, swap=swap))
        end = self.resident_bytes + self.kept.end_bytes
        return dataclasses.replace(
            draft,
            stages=tuple(final),
            resident_bytes=self.resident_bytes,
            update_peak_bytes=end + self.update_bytes,
            notes=tuple(self.notes),
        )

    def _draft(self, fingerprint: Fingerprint) -> Profile:
        zero = Transient(0, 0)
        stages = []
        for g in self.segments:
            saved = {s: can for s, can in self.kept.saved.get(g, {}).items() if s in self.index}
            is_stage = g % 2 == 1
            inputs = tuple(sorted(self.index[s] for s in self.kept.inputs.get(g, ()) if s in self.index))
            stages.append(
                Stage(
                    name=self._name(g),
                    kind=self._kind(g),
                    saved=tuple(self.index[s] for s, can in saved.items() if can and is_stage),
                    pinned=tuple(self.index[s] for s, can in saved.items() if not (can and is_stage)),
                    inputs=inputs if is_stage else (),
                    keep=zero,
                    swap=zero if is_stage and saved else None,
                    recompute=zero if is_stage and saved and g not in self.kept.modifies else None,
                    forward_s=0.0,
                    backward_s=0.0,
                    recompute_s=0.0,
                    input_bytes=self.kept.input_bytes.get(g, 0),
                )
            )
        n = len(stages)
        return Profile(
            tuple(stages), tuple(self.storages), (0,) * n, (0,) * n, 0, Link(1.0, 1.0), fingerprint=fingerprint
        )

    def _kind(self, g: int) -> str:
        digest = hashlib.sha256()
        for _, _, key in self.kept.forward[g].ops:
            digest.update(repr(key).encode())
        return f"{'stage' if g % 2 else 'glue'} {digest.hexdigest()[:12]}"

    def _bases(self, draft: Profile) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Stage, ...]]:
        """Bytes that no decision changes, and what stages hold beyond what hooks show.

        Autograd nodes may hold tensors that no hook sees (attributes of a custom Function, for one): such bytes show as
        a base that is larger under keep than under recompute, and are pinned to the stage where the difference begins.
        """
        keep = [_can(s, "keep") for s in draft.stages]
        again = [_can(s, "recompute") for s in draft.stages]
        held_keep, held_again = residency(draft, keep), residency(draft, again)
        kept_f = [self.kept.forward[g].start_bytes - held_keep.forward_bytes[k] for k, g in enumerate(self.segments)]
        again_f = [
            self.recomputed.forward[g].start_bytes - held_again.forward_bytes[k] for k, g in enumerate(self.segments)
        ]
        stages = list(draft.stages)
        hidden_keep = hidden_again = 0
        base_forward = []
        for k in range(len(stages)):
            base_forward.append(self.resident_bytes + min(kept_f[k] - hidden_keep, again_f[k] - hidden_again))
            if k + 1 == len(stages):
                break
            difference = (kept_f[k + 1] - hidden_keep) - (again_f[k + 1] - hidden_again)
            stage = stages[k]
            if difference > 0:
                s = self._extra(difference, f"{stage.name}/unseen", k)
                stages[k] = dataclasses.replace(stage, pinned=(*stage.pinned, s))
                hidden_keep += difference
            elif difference < 0 and stage.recompute is not None:
                s = self._extra(-difference, f"{stage.name}/unseen", k)
                stages[k] = dataclasses.replace(stage, inputs=(*stage.inputs, s))
                hidden_again -= difference
        if self.device.type == "cpu":
            # checkpoint keeps the generator's state on the CPU, where it counts; fake replays don't see it.
            state = torch.get_rng_state().numel()
            for k, stage in enumerate(stages):
                if stage.recompute is not None:
                    s = self._extra(state, f"{stage.name}/random state", k)
                    stages[k] = dataclasses.replace(stages[k], inputs=(*stages[k].inputs, s))
        complete = dataclasses.replace(draft, stages=tuple(stages), storages=tuple(self.storages))
        held_keep, held_again = residency(complete, keep), residency(complete, again)
        base_backward = []
        rng = 0 if self.device.type != "cpu" else torch.get_rng_state().numel()
        for k, g in enumerate(self.segments):
            recomputable = sum(1 for s in stages[: k + 1] if s.recompute is not None)
            kept_b = self.kept.backward[g].start_bytes - held_keep.backward_bytes[k]
            again_b = self.recomputed.backward[g].start_bytes - (held_again.backward_bytes[k] - rng * recomputable)
            base_backward.append(self.resident_bytes + max(kept_b, again_b))
        return tuple(base_forward), tuple(base_backward), tuple(stages)

    def _peaks(self, swapped: Replay) -> dict[Action, list[tuple[int, int]]]:
        """Per action and step, live bytes at the worst moment of forward and backward, temporaries included."""
        replays: dict[Action, Replay] = {"keep": self.kept, "recompute": self.recomputed, "swap": swapped}
        keys = [
            key
            for r in replays.values()
            for table in (r.forward, r.backward)
            for trace in table.values()
            for _, _, key in trace.ops
        ]
        extra, failed = measure_workspaces(keys, self.device)
        if failed:
            self.notes.append(f"temporaries not measured for: {', '.join(sorted(set(failed)))}")
        out: dict[Action, list[tuple[int, int]]] = {}
        for action, r in replays.items():
            out[action] = [
                (_peak(r.forward[g], extra), _peak(r.backward[g], extra) if g in r.backward else 0)
                for g in self.segments
            ]
        return out

    def _transient(self, draft: Profile, peaks: list[tuple[int, int]], action: Action, k: int) -> Transient:
        if action not in self.held:
            self.held[action] = residency(draft, [_can(stage, action) for stage in draft.stages])
        held = self.held[action]
        state = torch.get_rng_state().numel() if action == "recompute" and self.device.type == "cpu" else 0
        rng_held = state * sum(1 for s in draft.stages[:k] if s.recompute is not None)
        forward = self.resident_bytes + peaks[k][0] - (held.forward_bytes[k] - rng_held)
        rng_held = state * sum(1 for s in draft.stages[: k + 1] if s.recompute is not None)
        backward = self.resident_bytes + peaks[k][1] - (held.backward_bytes[k] - rng_held)
        return Transient(max(forward, 0) + state, max(backward, 0) + 2 * state)


def _can(stage: Stage, action: Action) -> Action:
    return action if stage.transient(action) is not None else "keep"


def _peak(trace: SegmentTrace, extra: dict[Hashable, int]) -> int:
    peak = max(trace.start_bytes, 0)
    for before, after, key in trace.ops:
        peak = max(peak, after, before + extra.get(key, 0))
    return peak
