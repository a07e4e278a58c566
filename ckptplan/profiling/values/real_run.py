"""Run a step for real, one stage at a time, to note the results of operations that can't run on fake tensors.

Forward runs as in training but saves nothing for backward, so only a stage's outputs outlive it. If operations of
backward need values too, the step runs with every stage recomputed that can be, and takes the memory of that plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from ckptplan.core.errors import UnsupportedModelError
from ckptplan.core.plan import KEEP, Decision, Decisions
from ckptplan.distributed import apart
from ckptplan.profiling.bytes.operations import written_to
from ckptplan.profiling.bytes.replays import find_stages, replay
from ckptplan.profiling.bytes.tracker import stage_segment
from ckptplan.profiling.target import Target
from ckptplan.profiling.values.answers import (
    PACK,
    READ_ARRAY,
    VALUES_LIMIT,
    Answer,
    Answers,
    Layout,
    NeedsValues,
    Phase,
    Question,
    Same,
    around_forwards,
    reading_watched,
    sizes_of,
)
from ckptplan.profiling.values.compiled import NeedsVariantError, note_compiled, undisturbed
from ckptplan.profiling.values.variants import note_at
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.swap.stores import NULL_STORES
from ckptplan.runtime.swap.users_hooks import OwnHooks
from ckptplan.tensors.accelerator import allocated_by, is_accelerator, ranges_do_nothing
from ckptplan.tensors.private import TorchDispatchMode, current_node
from ckptplan.tensors.storages import tensors_in
from ckptplan.tensors.views import whole_storage
from ckptplan.training.compiled import compiled_modules
from ckptplan.training.measure import peaks_within, recorded_allocations
from ckptplan.training.step import TrainingStep, without_graph

T = TypeVar("T")


def answered(
    run: Callable[[], T],
    step: TrainingStep,
    target: Target,
    rewind: Callable[[], None],
    report: Callable[[str], None] = lambda text: None,
) -> T:
    """Return `run()`, which traces `step` for `target`; each time it needs values, run the step for real and try again.

    Raises
    ------
    UnsupportedModelError
        If the step can't run for real, since its weights lie on `meta`, or takes another path each time.
    """
    with ranges_do_nothing() if target.spec is not None else contextlib.nullcontext():
        return _answered(run, step, target, rewind, report)


def _answered(
    run: Callable[[], T],
    step: TrainingStep,
    target: Target,
    rewind: Callable[[], None],
    report: Callable[[str], None],
) -> T:
    if target.answers is not None:
        target.answers.belong_to(step, has_values=step.has_values)
    if compiled_modules(step.model) and (target.answers is None or not target.answers.compiled):
        report("running the step for real, since parts of it are compiled")
        rewind()
        note_compiled(step, target)
        rewind()
    while True:
        try:
            return run()
        except NeedsVariantError as need:
            rewind()
            note_at(step, target, *need.args)
            rewind()
        except NeedsValues as need:
            report(f"running the step for real, since {need}")
            rewind()
            _learn(need, step, target, rewind)
            rewind()


def _learn(need: NeedsValues, step: TrainingStep, target: Target, rewind: Callable[[], None]) -> None:
    """Note answers in `target.answers`: those of `need`'s operation and phase, and all that were needed before."""
    answers = target.answers
    if answers is None:
        raise need
    if not answers.has_values and need.refused:
        assert need.__cause__ is not None
        raise need.__cause__
    if not answers.has_values:
        raise UnsupportedModelError(
            f"{need}, and the model or its inputs lie on 'meta', without any; make them on the CPU, so that the step "
            "can run for real, one stage at a time, or have the model decide without values (a mixture of experts in "
            "transformers: experts_implementation='batched_mm')"
        ) from need
    if need.func in answers.failed and need.phase in answers.phases:
        raise UnsupportedModelError(
            f"{need}, but a real run of the step has no such call: the step takes another path on fake tensors; remove "
            "the check of the tensors' type from it"
        ) from need
    answers.failed.add(need.func)
    answers.phases |= {need.phase, "forward"}
    answers.queues.clear()
    phases: tuple[Phase, ...] = ("forward", "inference", "backward")
    for phase in phases:
        if phase in answers.phases:
            _witness(phase, answers, step, target, rewind)
            rewind()


def _witness(phase: Phase, answers: Answers, step: TrainingStep, target: Target, rewind: Callable[[], None]) -> None:
    """Run one phase for real and note its answers."""
    witness = _Witness(phase, answers, target.device if target.spec is None else torch.device("cpu"), step.model)
    if phase == "backward":
        names = find_stages(step, target).stages
        rewind()
        fixed = replay(step, Decisions(names, (KEEP,) * len(names)), target, saves=False).modifies
        rewind()
        choices = tuple(KEEP if stage_segment(j) in fixed else Decision("recompute") for j in range(len(names)))
        one_forward = step.fn is None
        controller = Controller(
            step.model, Decisions(names, choices), NULL_STORES, target.device, one_forward=one_forward
        )
        modules = dict(step.model.named_modules())
        with apart(step.model), around_forwards([modules[name.partition("#")[0]] for name in names], witness.stage):
            controller.install()
            try:
                with torch.enable_grad():
                    witness.watch(lambda: step.forward()[1].backward())
            finally:
                controller.remove()
        return
    saves_nothing = OwnHooks(lambda tensor: None, _nothing_saved)
    with torch.enable_grad() if phase == "forward" else without_graph(), saves_nothing:
        witness.watch(step.forward)


def _nothing_saved(_: None) -> torch.Tensor:
    """Raise: a backward runs inside of forward, for which nothing was saved."""
    raise UnsupportedModelError(
        "forward runs backward inside (autograd.grad for a slope, say) and also reads values, or uses operations "
        "without fake kernels, for which it has to run for real and save nothing; take one of the two out of the step"
    )


class _Witness(TorchDispatchMode):
    """Dispatch mode that notes the answers of one phase of a real step."""

    def __init__(self, phase: Phase, answers: Answers, device: torch.device, model: nn.Module) -> None:
        super().__init__()
        self._phase, self._answers, self._device, self._model = phase, answers, device, model
        self._found: list[tuple[Question, Answer]] = []
        self._in_forward = 0
        self._made: set[int] = set()
        self._outside: set[int] = set()
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def watch(self, run: Callable[[], Any]) -> None:
        """Call `run` and note its answers; tensors from before that it writes to get their values back."""

        def watched() -> None:
            with self, undisturbed(self._model), reading_watched(self._read, by_item=lambda: True):
                run()

        peaks: dict[str, int] = {}
        try:
            if is_accelerator(self._device):
                watched()
            else:
                peaks = peaks_within(*recorded_allocations(watched))
        finally:
            with torch.no_grad():
                for tensor, before in self._written.values():
                    if tensor.untyped_storage().nbytes():  # of a sharded unit: it has freed it since
                        tensor.data.copy_(before)
        for number, (question, answer) in enumerate(self._found):
            peak = peaks.get(_label(number), answer.peak_bytes)
            noted = Answer(answer.sizes, answer.result, answer.values, peak)
            self._answers.queues.setdefault(question, []).append(noted)

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """Wrap a stage's own forward, so that backward's operations are told from those of a recompute."""
        self._in_forward += 1
        try:
            yield
        finally:
            self._in_forward -= 1

    @property
    def _listens(self) -> bool:
        """Whether the present operation is of the phase that is noted; a backward's recomputes aren't part of it."""
        if self._phase != "backward":
            return True
        return self._in_forward == 0 and current_node() is not None

    def _read(self, tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
        if self._listens and READ_ARRAY in self._answers.failed:
            if tensor.numel() > VALUES_LIMIT:
                raise UnsupportedModelError(
                    f"the model reads a tensor of {tensor.numel()} elements as an array; at most {VALUES_LIMIT} are "
                    "kept; read it in parts, or move the code that depends on it out of the step"
                )
            array = torch._C.TensorBase.numpy(tensor.detach()).copy()
            self._found.append((Question.now(self._phase, READ_ARRAY), Answer(sizes_of(tensor), None, array)))
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._outside.update(_storages((args, kwargs)) - self._made)
        self._keep_written(func, args, kwargs)
        wanted = self._listens and self._answers.wants(func, args)
        sizes = sizes_of((args, kwargs)) if wanted else ()
        if wanted and is_accelerator(self._device):
            result, peak = allocated_by(self._device, func, *args, **kwargs)
        elif wanted:
            with record_function(_label(len(self._found))):
                result, peak = func(*args, **kwargs), 0
        else:
            result, peak = func(*args, **kwargs), 0
        self._made.update(_storages(result) - self._outside)
        if wanted:
            values = (None, result[1].detach().clone()) if func is PACK else None
            noted = Answer(sizes, _as_layouts(result, (args, kwargs)), values, peak)
            self._found.append((Question.now(self._phase, func), noted))
        elif self._listens and self._answers.wants_drawn(func, result):
            values = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), result)
            noted = Answer(sizes_of((args, kwargs)), _as_layouts(result, (args, kwargs)), values)
            self._found.append((Question.now(self._phase, func), noted))
        return result

    def _keep_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Copy what was there before the run, before an operation writes to it."""
        for tensor in written_to(func, args, kwargs):
            key = tensor.untyped_storage()._cdata
            if key in self._outside and key not in self._written:
                whole = whole_storage(tensor)
                self._written[key] = whole, whole.clone()


def _storages(tree: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors_in(tree)}


def _label(number: int) -> str:
    return f"ckptplan answer {number}"


def _as_layouts(result: Any, operands: Any) -> Any:
    """A result with a layout in place of each tensor, or `Same` for a tensor that is one of the operands."""
    given = tensors_in(operands)

    def layout(tensor: torch.Tensor) -> Layout | Same:
        for number, operand in enumerate(given):
            same = operand.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            if same and Layout.of(operand) == Layout.of(tensor):
                return Same(number)
        return Layout.of(tensor)

    return pytree.tree_map_only(torch.Tensor, layout, result)
