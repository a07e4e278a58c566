"""Runs a model's stages as a plan decides: keeps, swaps or recomputes each, and starts the copies at their points.

NOTE [Watching backward]
A hook on a stage's output runs when the stage's backward begins. It costs as much as all other work for a kept stage,
so a stage is hooked (*watched*) only if something needs it:

1. In every pass, these stages are watched: those at which a prefetch is due, the last stage, and the first one whose
   output has a graph. Between them they see the beginning of backward, and so its end, too.
2. All stages of a pass are watched if a consumer needs every stage's backward: observers of stages, a pass that is
   timed, reports of where memory ran out, segments (which end when a backward begins), and passes that are recognized
   by their stages' calls.
3. A model whose backward passes through none of the stages of rule 1 is noticed at its next forward, because the last
   pass has no backward. From then on all its stages are watched.

Example: stages 0 to 9, of which stage 4 is swapped with its prefetch at stage 6. In an untimed pass stages 0, 6 and 9
are watched: three hooks instead of ten. Backward begins with the hook of stage 9; stage 6's starts the copies in.

NOTE [Dropped graphs]
A stage whose output the program detaches, or that runs without gradients, holds nothing when backward begins, and the
plan's bytes are without it. If a later step doesn't detach, it holds what it saves. So for each stage the first
backward under a plan shows whether its graph is alive, and one that is alive later but wasn't then is a difference.

Example: `x = layer(x).detach()` in the first epoch, and `x = layer(x)` from the second on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from ckptplan.core.errors import PlanMismatchError, UnsupportedModelError
from ckptplan.core.link import Tier
from ckptplan.core.option import DISCARD
from ckptplan.core.plan import Decisions
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Phase
from ckptplan.distributed.own import OwnNames, OwnStorages
from ckptplan.runtime.guard.check import Checks, Spots
from ckptplan.runtime.guard.compiled import CompiledStages
from ckptplan.runtime.guard.engine import OldGraph
from ckptplan.runtime.guard.paths import Paths, made_nodes
from ckptplan.runtime.guard.shapes import InputLimits
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.observe.meter import BACKWARD, KINDS
from ckptplan.runtime.observer import Observer, listeners
from ckptplan.runtime.patching import PatchedForward
from ckptplan.runtime.recompute.call import Call, NotRepeatableError, PlannedStage
from ckptplan.runtime.recompute.frames import run_recomputed
from ckptplan.runtime.recompute.segments import OpenSegment
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.stores import Store
from ckptplan.runtime.swap.weights import Group, OnMove, Weights
from ckptplan.tensors.private import current_graph_task, transform
from ckptplan.tensors.storages import tensors_in
from ckptplan.training.compiled import compilations, is_compiled, is_compilers
from ckptplan.training.variants import at_ratio, check_variants


@dataclass(frozen=True, slots=True)
class Place:
    """The point that the program has reached in a step.

    Attributes
    ----------
    phase : str
        "update" from the end of a backward to the next forward.
    stage : int
        Index of the last stage that began in this phase.
    inside : bool
        In forward: whether that stage is still running.
    """

    phase: Phase
    stage: int
    inside: bool = False


def is_glue(name: str) -> bool:
    """Whether a stage name stands for glue: operations outside of any stage's module call."""
    return name.startswith("(")


class _Mark:
    """Lives as long as the graph of a stage's output."""

    __slots__ = ("__weakref__",)


def _marked(output: Any) -> weakref.ref[_Mark] | None:
    """Return a reference that lives as long as the graph of an output; None if it has none."""
    nodes = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
    if not nodes:
        return None
    mark = _Mark()
    for node in nodes:
        node.metadata[_Mark] = mark  # type: ignore[index]
    return weakref.ref(mark)


class _Pass:
    """One forward pass and its backward."""

    def __init__(self, session: SwapSession, own: OwnStorages, checks: Checks | Spots | None, *, watched: bool) -> None:
        self.session = session
        self.checks = checks
        self.own = own
        self.watched = watched  # NOTE [Watching backward]
        self.calls: dict[nn.Module, int] = {}
        self.backward_begun = False
        self.partial = False  # begun by a call of another stage than the first
        self.begun: set[int] = set()  # hooked stages whose backward has begun
        self.start: tuple[int, weakref.ref[_Mark] | None] | None = None  # the first hooked stage, and its graph
        self.open: OpenSegment | None = None
        self.in_model = False  # the model's own forward is running
        self.last = -1  # largest index of a stage that has begun
        self.graphs: dict[int, weakref.ref[_Mark] | None] = {}  # NOTE [Dropped graphs]
        self.inner: dict[int, tuple[set[int], set[int]]] = {}  # stage -> graph tasks begun in it, plain and creating

    @property
    def alive(self) -> set[int]:
        """The stages whose graphs are alive."""
        return {i for i, mark in self.graphs.items() if mark is not None and mark() is not None}


class Controller:
    """Patches the stages' modules so that every training forward follows `decisions`.

    Parameters
    ----------
    model : nn.Module
    decisions : Decisions
    stores : mapping of tier to Store
        One per tier that the decisions move storages to.
    device : torch.device
    observers : sequence of Observer
    one_forward : bool
        True: a step calls the model's own forward once, and this call begins a pass. False: a pass begins when the
        calls of the stages start again.
    counters : Counters, optional
        Counters to go on with; by default new ones.
    checks : Checks, optional
        Compares the tensors of backward with those of forward.
    on_move : callable, optional
        As of `Weights`.

    Raises
    ------
    PlanMismatchError
        If a stage names no module of the model, or a segment begins or ends in glue.
    UnsupportedModelError
        If a module is patched already.
    """

    def __init__(
        self,
        model: nn.Module,
        decisions: Decisions,
        stores: Mapping[Tier, Store],
        device: torch.device,
        *,
        observers: Sequence[Observer] = (),
        one_forward: bool = True,
        counters: Counters | None = None,
        checks: Checks | None = None,
        on_move: OnMove | None = None,
    ) -> None:
        self._model = model
        self._stages, self._choices, segments = decisions.stages, decisions.choices, decisions.segments
        # Earlier stages may hold the storages that a stage moves; all must hold them through the same record.
        self._moves = any(choice.transfers for choice in self._choices)
        asks_what_is_own = self._moves or bool(segments) or any(c.action == "swap" for c in self._choices)
        asks_what_is_own |= bool(decisions.weights)
        self._own_names = OwnNames(model) if asks_what_is_own else None
        self._stores = stores
        self._device = device
        self._limits = [InputLimits(planned) for planned in decisions.inputs or [None] * len(self._stages)]
        self._saved = decisions.saved_bytes
        self.counters = counters or Counters()
        self.weights = Weights(model, decisions.weights, stores, device, self.counters, on_move)
        kept_bytes = decisions.kept_bytes
        self._paths = Paths(model, kept_bytes, self.counters.differences) if kept_bytes else None
        self._training = model.training
        self._pass: _Pass | None = None
        self._session: SwapSession | None = None
        self.checks = checks
        # Made once, not at every call: inside forward, after forward, in backward.
        self._places = tuple(
            (Place("forward", i, inside=True), Place("forward", i), Place("backward", i))
            for i in range(len(self._stages))
        )
        self.place = Place("forward", 0)
        self.old_graph: OldGraph | None = None
        """Frees the memory that a failed backward leaves behind."""
        self.before_forward: Callable[[tuple[Any, ...], dict[str, Any]], Controller] | None = None
        self.on_error: Callable[[BaseException], None] | None = None
        self.holds: object = None
        """An object that must live as long as the model is patched, whether or not the caller keeps the handle."""
        self.is_inner: Callable[[int], bool] | None = None
        """Return whether a backward that begins in a stage runs inside forward; set where forward's end is known."""
        self._task = -1
        self._met: set[int] = set()  # stages that a backward under this plan has met, NOTE [Dropped graphs]
        self._dropped: set[int] = set()  # those of them without a graph
        self._find_stages()
        self._find_segments(segments)
        inner = {each.stage: each for each in decisions.differentiated}
        self._differentiated = {i: inner[self._stages[i]] for i in self._planned if self._stages[i] in inner}
        self._find_points()
        self._listen(observers)
        self._find_patches(observers, one_forward=one_forward)
        discarded = (i for i, choice in enumerate(self._choices) if choice.option == DISCARD)
        using = filter(self.weights.uses, range(len(self._stages)))  # a recompute needs its weights on the device
        self._always_watched = frozenset((*self._prefetch_at, *self._weights_at, *using, self._last, *discarded))
        self._watches = bool(self._segments) or bool(self._enter or self._exit or self._backward)
        self._watches |= bool(self.weights.returning)  # such weights leave once backward has passed their stage

    def _find_stages(self) -> None:
        """Find the module of each stage that isn't glue."""
        self._indices: dict[nn.Module, list[int]] = {}
        self._planned: dict[int, PlannedStage] = {}
        modules = dict(self._model.named_modules())
        for index, name in enumerate(self._stages):
            if is_glue(name):
                continue
            module = modules.get(name.partition("#")[0])
            if module is None:
                kind = type(self._model).__name__
                raise PlanMismatchError(f"the plan's stage {name!r} names no module of this {kind}")
            self._indices.setdefault(module, []).append(index)
            self._planned[index] = PlannedStage(
                module,
                self._choices[index],
                self._device,
                self.counters,
                index=index,
                name=name,
                planned_bytes=self._saved[index] if self._saved else None,
                paths=self._paths,
            )
        if not self._planned:
            raise PlanMismatchError("the plan has no stage that is a module of the model")
        self._first, self._last = min(self._planned), max(self._planned)

    def _find_segments(self, segments: Sequence[Segment]) -> None:
        """Find the segment of each stage, with the stages in it that are modules."""
        self._segments: dict[int, tuple[Segment, tuple[int, ...]]] = {}
        for segment in segments:
            inside = tuple(i for i in self._planned if segment.first <= i <= segment.last)
            self._check_ends(segment, inside)
            self._segments.update((i, (segment, inside)) for i in inside)

    def _find_points(self) -> None:
        """Find the stages at which transfers are released and prefetched.

        A point inside glue is moved to the nearest stage boundary that keeps the bytes within the plan. A release moves
        to the start of the next stage, or to the end of the last one, a prefetch to the next stage's backward.
        """
        self._release_before: dict[int, list[tuple[int, int]]] = {}  # stage -> (stage, number of the transfer)
        self._release_after: dict[int, list[tuple[int, int]]] = {}
        self._prefetch_at: dict[int, list[tuple[int, int]]] = {}
        for index, choice in enumerate(self._choices):
            for number, transfer in enumerate(choice.transfers):
                at, after = self._release_point(transfer.release)
                (self._release_after if after else self._release_before).setdefault(at, []).append((index, number))
                self._prefetch_at.setdefault(self._prefetch_point(transfer.prefetch), []).insert(0, (index, number))
        self._weights_before: dict[int, list[Group]] = {}
        self._weights_after: dict[int, list[Group]] = {}
        self._weights_at: dict[int, list[Group]] = {}
        for group in self.weights.groups:
            if group.release is None or group.prefetch is None:
                continue
            at, after = self._release_point(group.release)
            (self._weights_after if after else self._weights_before).setdefault(at, []).append(group)
            if group.prefetch >= 0:  # otherwise it returns when backward has ended
                self._weights_at.setdefault(self._prefetch_point(group.prefetch), []).insert(0, group)

    def _release_point(self, release: int) -> tuple[int, bool]:
        """Return the stage before or after which a transfer is released, and whether it is after."""
        later = [i for i in self._planned if i > release]
        if release in self._planned or not later:
            return max(i for i in self._planned if i <= release), True
        return later[0], False

    def _prefetch_point(self, prefetch: int) -> int:
        return max(i for i in self._planned if i <= prefetch)

    def _listen(self, observers: Sequence[Observer]) -> None:
        self._pass_begins = listeners(observers, "pass_begins")
        self._inputs = listeners(observers, "inputs")
        self._stages_begin = listeners(observers, "stages_begin")
        self._enter = listeners(observers, "enter")
        self._exit = listeners(observers, "exit")
        self._output = listeners(observers, "output")
        self._backward_begins = listeners(observers, "backward_begins")
        self._backward = listeners(observers, "backward")
        self._removed = listeners(observers, "removed")

    def _find_patches(self, observers: Sequence[Observer], *, one_forward: bool) -> None:
        self._patches = [PatchedForward(module, functools.partial(self._run_stage, module)) for module in self._indices]
        self._compiled = [patch for patch in self._patches if patch.is_compiled]
        self._compiled_modules = {patch.module for patch in self._patches if is_compiled(patch.module)}
        self._compiled_stages = CompiledStages(self.counters.differences)
        for patch in self._patches:
            if any(self._choices[i].ratio for i in self._indices[patch.module]) and not isinstance(
                patch.original, PatchedForward
            ):
                check_variants(patch.module, patch.original)
        self._sees_model = one_forward and self._model not in self._indices
        if self._sees_model:
            self._patches.append(PatchedForward(self._model, self._run_model))
        for observer in observers:
            self._patches += observer.patches(self._active)

    def _check_ends(self, segment: Segment, inside: tuple[int, ...]) -> None:
        for i, verb in ((segment.first, "begins"), (segment.last, "ends")):
            if i not in inside:
                where = f"segment {segment.first}..{segment.last}"
                raise PlanMismatchError(f"{where} {verb} in {self._stages[i]!r}, which is no module's call")
        for inner in segment.inner:
            self._check_ends(inner, inside)

    def install(self) -> None:
        """Patch every stage, or none."""
        for patch in self._patches:
            if type(patch.module.__dict__.get(patch.attribute)) is PatchedForward:
                raise UnsupportedModelError(
                    "a plan is applied to this model already, or to one with which it shares layers; take it off "
                    "first: ckptplan.remove(model), or apply(..., replace=True) in one call"
                )
        for patch in self._patches:
            patch.install()
        self.weights.open()

    def remove(self) -> None:
        """Restore every forward; graphs that are alive can still run backward."""
        for patch in reversed(self._patches):
            patch.remove()
        for removed in self._removed:
            removed()
        self.weights.close()
        self._pass = None
        self._drop_leftovers()

    def _drop_leftovers(self) -> None:
        """Free the memory that a failed backward left behind (NOTE [Leftovers of a failed backward])."""
        if self.old_graph is not None and current_graph_task() == -1:
            self.old_graph.drop_leftovers()

    def _active(self) -> bool:
        """Return whether a forward follows the plan: with gradients, in evaluation mode, too, where some train.

        Inside a transform of `torch.func`, which has no saved tensors that a plan could move or make again, none does.
        """
        if not torch.is_grad_enabled():
            return False
        if transform() is not None:
            self.counters.differences.note(
                "transform",
                "the model runs inside a transform of torch.func, which has no saved tensors that a plan could move or "
                "make again, so it runs without the plan",
            )
            return False
        return True

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward of the last forward hasn't begun."""
        return self._pass is not None and not self._pass.backward_begun

    def note_beside(self, what: str) -> None:
        """Note what runs without the plan while the graph of a forward is alive and waits for its backward."""
        waiting = self._pass
        if waiting is not None and not waiting.in_model and not waiting.backward_begun and waiting.alive:
            self.counters.differences.note(
                "beside",
                f"{what} while a forward waits for its backward, and the plan has no memory for it; move it before "
                "that forward or after its backward, or solve with step= for a step that has both",
            )

    def _mark_mode(self) -> None:
        """Mark differences of evaluation: one with gradients need not have a backward, and is no reason for a plan."""
        self.counters.differences.instead = "evaluation" if self._training and not self._model.training else None

    def _begin(self, *, by_call: bool = False) -> _Pass:
        self._drop_leftovers()
        former, self._pass = self._pass, None
        waiting = None
        if former is not None and not former.backward_begun:
            self._watches |= not former.watched
            waiting = weakref.ref(former)
        del former  # its graph alone holds it now
        bypassed = next((patch.module for patch in self._compiled if patch.bypassed), None)
        if bypassed is not None:
            raise UnsupportedModelError(
                f"a {type(bypassed).__name__}, which is a stage of the plan, was compiled anew, or set back to "
                "uncompiled, after the plan was applied; call remove() on its handle, then solve and apply again"
            )
        if self._model.training and not self._training:
            self.counters.differences.note(
                "mode",
                "the model is in training mode, and the plan was made for evaluation mode, in which dropout and "
                "batch statistics are off and hold no memory; call model.train() before solve and apply",
            )
        for pass_begins in self._pass_begins:
            pass_begins(waiting)
        checks = None if self.checks is None else self.checks.begin(self._stages)
        self.weights.begin(checks)
        own = OwnStorages(self._own_names, self.weights.away())
        self.counters.forwards += 1
        tell = self.counters.meter.begin()
        for tier, store in self._stores.items():
            store.on_copy = None if tell is None else functools.partial(tell, tier)
        session = SwapSession(self._stores, self._device, own, self.counters, self._saved, checks, self.weights)
        watched = self._watches or by_call or tell is not None
        self._session, self._pass = session, _Pass(session, own, checks, watched=watched)
        return self._pass

    def _run_model(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._active():
            self.weights.bring_back_within()
            self.note_beside("a forward without gradients runs")
            return original(*args, **kwargs)
        self._mark_mode()
        now = self if self.before_forward is None else self.before_forward(args, kwargs)
        if now is not self:
            return now._run_model(original, args, kwargs)
        current = self._begin()
        if self._moves:
            current.session.takes((args, kwargs))
        for inputs in self._inputs:
            inputs(args, kwargs)
        current.in_model = True
        try:
            output = original(*args, **kwargs)
        except BaseException as error:  # also between stages: what an open segment holds goes with the error
            current.open = self._pass = None
            self.weights.bring_back_within()
            if self.on_error is not None:
                self.on_error(error)
            raise
        finally:
            current.in_model = False
        self._release_until(current, len(self._stages))
        if current.checks is not None:
            current.checks.stage_ended()
        for ended in self._output:
            ended(output, (args, kwargs))
        return output

    def _run_stage(
        self, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._active():
            with self.weights.running_alone(self._indices[module]):
                return original(*args, **kwargs)
        current = self._pass
        index = None if current is None else self._next_call(current, module)
        again = index is None  # called more often than planned: by the decision of its last planned call
        if current is None or (not current.in_model and self._begins_a_pass(current, module, again=again)):
            self._note_unfinished(current, module)
            current = None  # the graph of the pass before holds it alone
            self._mark_mode()
            current = self._begin(by_call=True)
            current.partial = self._indices[module][0] != self._first
            index, again = self._next_call(current, module), False
        if index is None:
            index = self._indices[module][-1]
            self._note_further_call(self._indices[module])
        current.calls[module] = current.calls.get(module, 0) + 1
        inside, behind, _ = self._places[index]
        self.place = inside
        self.counters.meter.mark(index * KINDS)
        try:
            if index == self._first:
                for stages_begin in self._stages_begin:
                    stages_begin()
            self._note_larger(index, args, kwargs)
            self._release_until(current, index)
            for place in self._release_before.get(index, ()):
                current.session.release(*place)
            if self.weights.groups:
                self._weights_of(index)
            if current.checks is not None:
                current.checks.stage_ended()
            for enter in self._enter:
                enter(index, args, kwargs)
            first = made_nodes() if self.weights.groups else 0
            before = compilations() if module in self._compiled_modules else None
            output = self._run_choice(current, self._planned[index], original, args, kwargs, again=again)
            del args, kwargs
            if before is not None:
                self._compiled_stages.look(self._planned[index], before, output)
            if self.weights.groups:
                self.weights.stage_ends(index, output, first)
            for place in self._release_after.get(index, ()):
                current.session.release(*place)
            for group in self._weights_after.get(index, ()):
                group.leave()
            if again:  # the release points may have passed
                for number in range(len(self._choices[index].transfers)):
                    current.session.release(index, number)
            for leave in self._exit:
                leave(index, output)
        except BaseException as error:
            current.open = self._pass = None
            self.weights.bring_back_within()
            if self.on_error is not None:
                self.on_error(error)
            raise
        self.place = behind
        current.graphs[index] = _marked(output)
        if current.watched or current.start is None or index in self._always_watched:
            watched = self._watch_backward(current, index, output)
            if watched and current.start is None:
                current.start = index, current.graphs[index]
        self.counters.meter.mark(min(index + 1, len(self._stages) - 1) * KINDS)
        if index == self._last and not self._sees_model:
            for ended in self._output:
                ended(output, ())
        return output

    def _weights_of(self, index: int) -> None:
        """Move the weights that leave or return before a stage, and bring back those that it uses."""
        for group in self._weights_before.get(index, ()):
            group.leave()
        for group in self.weights.returning.get(index, ()):
            group.start_returning()
        self.weights.ensure(index)

    def _note_further_call(self, indices: list[int]) -> None:
        self.counters.differences.note(
            "calls",
            f"module {self._stages[indices[0]]!r} is called more than the {len(indices)} times a step that the plan "
            "was made for; solve again with this step",
        )

    def _note_larger(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (beyond := self._limits[index].beyond(self._stages[index], args, kwargs)) is not None:
            self.counters.differences.note("stage", beyond)
        if self._paths is not None:
            (self._paths.larger.discard if beyond is None else self._paths.larger.add)(index)

    def _run_choice(
        self,
        current: _Pass,
        stage: PlannedStage,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        again: bool,
    ) -> Any:
        choice, index = stage.choice, stage.index
        current.own.enter(stage.module)
        if (choice.action == "recompute" and not choice.ratio) or index in self._segments:
            try:
                return self._run_recomputed(current, stage, original, args, kwargs, again=again)
            except NotRepeatableError as error:  # before the stage has run
                self.counters.differences.note("repeat", f"stage {stage.name!r} is kept: {error}", error)
        self.counters.runs[index] += 1
        if not choice.ratio:
            return self._run_once(current, stage, original, args, kwargs)
        try:
            with at_ratio(choice.ratio):
                return self._run_once(current, stage, original, args, kwargs)
        except Exception as error:
            if not is_compilers(error):
                raise
            self.counters.differences.note(
                "compiled",
                f"stage {stage.name!r} runs as the model was compiled, and saves more than planned: it can't be "
                f"compiled to save less ({type(error).__name__})",
            )
            return self._run_once(current, stage, original, args, kwargs)

    def _run_once(
        self, current: _Pass, stage: PlannedStage, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run a stage whose forward isn't called again in backward."""
        choice, index = stage.choice, stage.index
        if choice.transfers or choice.action == "swap" or self.weights.uses(index):
            with current.session.stage(index, choice.transfers, choice.tier):
                return original(*args, **kwargs)
        if self._paths is None:
            return original(*args, **kwargs)
        first = made_nodes()
        output = original(*args, **kwargs)
        self._paths.kept(stage, first, output)
        return output

    def _run_recomputed(
        self,
        current: _Pass,
        stage: PlannedStage,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        again: bool,
    ) -> Any:
        index = stage.index
        if index in self._segments and not again:
            segment, inside = self._segments[index]
            if current.open is None or current.open.segment is not segment:
                current.open = OpenSegment(segment, inside, current.session, moves=self._moves)
            check = None
            if current.checks is not None:
                check = current.checks.stage(stage)
                original = check.around(original)
            call = Call(stage, original, current.own.whole(stage.module))
            output = current.open.run(stage, call, call.split(args, kwargs), check)
            if current.open.ended:
                current.open = None
            return output
        return run_recomputed(
            stage, original, args, kwargs, session=current.session if self._moves else None, checks=current.checks
        )

    def _release_until(self, current: _Pass, index: int) -> None:
        """Make the releases of stages before `index` that this forward leaves out."""
        for skipped in range(current.last + 1, index):
            for place in (*self._release_before.get(skipped, ()), *self._release_after.get(skipped, ())):
                current.session.release(*place)
            for group in (*self._weights_before.get(skipped, ()), *self._weights_after.get(skipped, ())):
                group.leave()
        current.last = max(current.last, index)

    def _begins_a_pass(self, current: _Pass, module: nn.Module, *, again: bool) -> bool:
        """Return whether a call of a stage outside of the model's call is of the next step.

        `again`: it is beyond those planned. What such calls have begun ends with the next call of the first stage.
        """
        first = self._indices[module][0] == self._first
        return (again and (current.backward_begun or first)) or (first and current.backward_begun and current.partial)

    def _note_unfinished(self, former: _Pass | None, module: nn.Module) -> None:
        """Note that forward goes on after a backward of its own, which leaves the graph of the first stage."""
        if former is None or former.start is None or not former.backward_begun:
            return
        if self._indices[module][0] == self._first:
            return
        first, mark = former.start
        if first not in former.begun and mark is not None and mark() is not None:
            self.counters.differences.note(
                "calls",
                f"module {self._stages[self._indices[module][0]]!r} is called after a backward that hasn't come to "
                f"{self._stages[first]!r}: forward runs a backward of its own, which the plan doesn't count; solve "
                "with step= for a step that has both",
            )

    def _next_call(self, current: _Pass, module: nn.Module) -> int | None:
        indices = self._indices[module]
        call = current.calls.get(module, 0)
        return indices[call] if call < len(indices) else None

    def _watch_backward(self, current: _Pass, index: int, output: Any) -> bool:
        """Hook the beginning of a stage's backward; return False if its output has no graph."""

        def begin(_: Any) -> None:
            if self._is_inner(current, index):
                return
            if not current.backward_begun:
                current.backward_begun = True
                self._release_until(current, len(self._stages))
                self._note_graphs(current)
                for backward_begins in self._backward_begins:
                    backward_begins()
                if current.checks is not None:
                    current.checks.backward_begins()
            current.open = None
            current.begun.add(index)
            if self._choices[index].option == DISCARD:
                self.counters.differences.note(
                    "attached",
                    f"stage {self._stages[index]!r} runs backward, but its graph was dropped in forward when the plan "
                    "was made, so the plan has no memory for its recompute; solve again with this step",
                )
            self.counters.meter.mark(index * KINDS + BACKWARD)
            self._enter_backward(index)
            for backward in self._backward:
                backward(index)
            self.weights.backward_begins(index)
            for group in self._weights_at.get(index, ()):
                group.start_returning()
            for place in self._prefetch_at.get(index, ()):
                current.session.prefetch(*place)
            segment, inside = self._segments.get(index, (None, ()))
            again = inside if segment is not None and segment.last == index else (index,)
            self.weights.ensure_all(again)

        # Most outputs are one tensor, and searching a tree for tensors costs as much as all the rest here.
        leaves = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
        nodes = {t.grad_fn for t in leaves if isinstance(t, torch.Tensor)} - {None}
        for node in nodes:
            node.register_prehook(begin)  # type: ignore[union-attr]
        return bool(nodes)

    def _is_inner(self, current: _Pass, index: int) -> bool:
        """Return whether the backward that begins in a stage is one of forward's own, as far as was planned."""
        if self.is_inner is not None:
            return self.is_inner(index)
        planned = self._differentiated.get(index)
        if planned is None:
            return False
        creates = torch.is_grad_enabled()
        tasks = current.inner.setdefault(index, (set(), set()))
        tasks[creates].add(current_graph_task())
        if creates and len(tasks[1]) > planned.creating:
            self._note_created()
            return len(tasks[0]) + len(tasks[1]) <= planned.plain + planned.creating
        return len(tasks[creates]) <= (planned.creating if creates else planned.plain)

    def _note_created(self) -> None:
        self.counters.differences.note(
            "graph",
            "a backward makes a graph of its own (create_graph=True), so what the stages saved, and what their "
            "recomputes bring back, stays until that graph has run backward, too; the plan frees it before; "
            "solve with step= for a step that has both backwards",
        )

    def _note_graphs(self, current: _Pass) -> None:
        """Note a stage whose graph is alive although the planned step dropped it (NOTE [Dropped graphs])."""
        alive = current.alive
        new = current.graphs.keys() - self._met
        self._met |= new
        self._dropped |= new - alive
        told = {"thawed", "graph"} & self.counters.differences.unplanned
        if (back := alive & self._dropped) and not told:
            self.counters.differences.note(
                "attached",
                f"the graph of stage {self._stages[min(back)]!r} is there when backward begins, and in the first step "
                "under the plan it wasn't (detached, frozen or without gradients), so what the stage saves isn't "
                "planned for; solve again with this step",
            )
        current.graphs.clear()

    def _enter_backward(self, index: int) -> None:
        self.place = self._places[index][2]
        task = current_graph_task()
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self._leave_backward)
            if torch.is_grad_enabled():
                self._note_created()

    def _leave_backward(self) -> None:
        self.weights.backward_ended(self._stages)
        self.place = Place("update", self.place.stage)
        self.counters.meter.backward_ended()
