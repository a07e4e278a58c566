"""Apply a plan to a model, and take it off again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from ckptplan.core.errors import PlanMismatchError
from ckptplan.core.plan import Plan
from ckptplan.core.units import budget_to_bytes, format_bytes, format_seconds
from ckptplan.runtime.controller import Controller, is_glue
from ckptplan.runtime.step import TrainingStep, check_supported, fingerprint, model_device, training_config
from ckptplan.runtime.stores import DISK_BLOCK_BYTES, Store, make_store


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """What an applied plan has done so far, beside what it planned for one step.

    Attributes
    ----------
    forwards : int
        Training forwards.
    recomputed_stages, planned_recomputed_stages : int
        Stages recomputed in all, and planned per step.
    swapped_out_bytes, swapped_in_bytes, planned_swapped_bytes : int
        Bytes copied out and in in all, and planned per step (either way).
    runs, planned_runs : tuple of int
        Per stage, how often its forward ran in all, first runs included, and is to run per step; glue counts 0.
    host_wait_s : float
        Time the calling thread waited for copies (on CUDA compute waits on the device, and this stays near 0).
    """

    forwards: int
    recomputed_stages: int
    planned_recomputed_stages: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    planned_swapped_bytes: int
    runs: tuple[int, ...]
    planned_runs: tuple[int, ...]
    host_wait_s: float

    def since(self, earlier: Stats) -> Stats:
        """What was added after `earlier`."""
        counted = ("forwards", "recomputed_stages", "swapped_out_bytes", "swapped_in_bytes", "host_wait_s")
        added = {name: getattr(self, name) - getattr(earlier, name) for name in counted}
        runs = tuple(a - b for a, b in zip(self.runs, earlier.runs, strict=True))
        return dataclasses.replace(self, runs=runs, **added)

    def __str__(self) -> str:
        n = max(self.forwards, 1)
        return "\n".join(
            [
                f"{self.forwards} training forwards",
                f"recomputed stages per forward: {self.recomputed_stages / n:g} "
                f"(planned {self.planned_recomputed_stages})",
                f"swapped out per forward: {format_bytes(self.swapped_out_bytes / n)} "
                f"(planned {format_bytes(self.planned_swapped_bytes)}), in {format_bytes(self.swapped_in_bytes / n)}",
                f"waited for copies per forward: {format_seconds(self.host_wait_s / n)}",
            ]
        )


class Handle:
    """An applied plan; `remove()` it, or use it as a context manager."""

    def __init__(self, plan: Plan, controller: Controller, store: Store, config: contextlib.ExitStack) -> None:
        self.plan = plan
        self._controller = controller
        self._store = store
        self._config = config
        self._removed = False

    def remove(self) -> None:
        """Restore the model exactly; calling it again does nothing.

        Graphs that are still alive keep what they need: their swap space goes when they go.
        """
        if self._removed:
            return
        self._removed = True
        self._controller.remove()
        self._config.close()
        self._store.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The plain model inside; the plan goes on afterwards."""
        self._controller.remove()
        try:
            yield
        finally:
            if not self._removed:
                self._controller.install()

    def stats(self) -> Stats:
        """What happened since the plan was applied."""
        counters = self._controller.counters
        planned = planned_runs(self.plan)
        return Stats(
            forwards=counters.forwards,
            recomputed_stages=counters.recomputed_stages,
            planned_recomputed_stages=sum(max(runs - 1, 0) for runs in planned),
            swapped_out_bytes=counters.swapped_out_bytes,
            swapped_in_bytes=counters.swapped_in_bytes,
            planned_swapped_bytes=self.plan.host_bytes,
            runs=tuple(counters.runs[i] for i in range(len(planned))),
            planned_runs=planned,
            host_wait_s=counters.host_wait_s,
        )

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def planned_runs(plan: Plan) -> tuple[int, ...]:
    """Per stage, how often its forward runs in one step; 0 for glue."""
    runs = [
        0 if is_glue(name) else 1 + (c.action == "recompute") for name, c in zip(plan.stages, plan.choices, strict=True)
    ]
    for segment in plan.segments:
        for i in range(segment.first, segment.last + 1):
            runs[i] = 0 if is_glue(plan.stages[i]) else 1 + segment.depth(i)
    return tuple(runs)


def apply(model: nn.Module, plan: Plan, *, swap_dir: str | Path | None = None, host_gb: float | None = None) -> Handle:
    """Make every training forward of `model` follow `plan`.

    The model's classes, parameter names, `state_dict` and hooks stay as they are; only `forward` of the stages is
    replaced on the instances. Forwards without gradients, or in evaluation mode, run as if no plan were there. The
    `use_cache` of a Hugging Face configuration is off while the plan is applied.

    Parameters
    ----------
    swap_dir : path, optional
        Where a CPU plan's swap file lives (unnamed, at most the plan's swapped bytes per living graph).
    host_gb : float, optional
        Limit on pinned host memory for a CUDA plan, in units of 2**30 bytes.

    Returns
    -------
    Handle

    Raises
    ------
    PlanMismatchError
        If the plan was made for another model, device or library version.
    UnsupportedModelError
        If a plan is applied already, or the model checkpoints by itself or is compiled.
    InvalidInputError
        If the swap directory can't be written or is too small. The model is unchanged after any of these.
    """
    device = model_device(model)
    if not plan.fingerprint.model:
        raise PlanMismatchError(
            "the plan comes from a profile written by hand, which belongs to no model; it can be simulated only"
        )
    plan.fingerprint.require(fingerprint(TrainingStep(model)), ignore=("inputs",))
    check_supported(model)
    limit = None if host_gb is None else budget_to_bytes(host_gb, name="host_gb")
    blocks = sum(len(choice.moves) for choice in plan.choices)
    capacity = plan.host_bytes + blocks * DISK_BLOCK_BYTES if device.type == "cpu" else plan.host_bytes
    store = make_store(device, capacity_bytes=capacity, directory=swap_dir, limit_bytes=limit)
    try:
        controller = Controller(
            model,
            plan.stages,
            plan.choices,
            store,
            torch.device(device),
            segments=plan.segments,
            input_bytes=plan.input_bytes,
            one_forward=plan.fingerprint.inputs != "step()",
        )
        controller.install()
    except BaseException:
        store.close()
        raise
    config = contextlib.ExitStack()
    config.enter_context(training_config(model))
    return Handle(plan, controller, store, config)
