"""What a step takes that its plan was made without: gradients of thawed parameters, inputs, modules, autocast's casts.

NOTE [Unplanned]
A plan's bytes are those of the step that was profiled. A later step may take another path through the same stages,
which a stage's own arguments don't show:

1. A parameter that was frozen when the plan was applied gets a gradient now: an error, as it would be in `apply`.
2. The model itself gets a tensor that it didn't get, such as labels from which it makes a loss.
3. A module is called that lies in no stage's and wasn't: another head, one more layer.
4. Autocast, off when the plan was applied, is still on when backward begins: it keeps the casts of the weights that it
   has made until it ends.

How much the last three need isn't known, and it may fit, so they are warnings, each once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ckptplan.core.errors import PlanMismatchError
from ckptplan.core.plan import Plan
from ckptplan.runtime.guard.held_over import Warned
from ckptplan.runtime.guard.shapes import ByName, Limits
from ckptplan.runtime.observer import Observer
from ckptplan.runtime.patching import PatchedForward, is_patchable
from ckptplan.runtime.state.cells import below


class Unplanned(Observer):
    """Notices what `plan` was made without (NOTE [Unplanned]).

    Parameters
    ----------
    model : nn.Module
        Without the plan.
    """

    def __init__(self, model: nn.Module, plan: Plan, device: torch.device) -> None:
        self._model, self._device = model, device
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._warned = Warned()
        # One that is around all of this was around profiling, and counts.
        self._autocast = next((kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)), None)
        self._inputs = None
        if plan.fingerprint.inputs != "step()":
            self._by_name = ByName(model.forward)
            self._inputs = Limits(self._by_name.planned(plan.fingerprint.inputs))
        self._outside = None if plan.outside is None else set(plan.outside)
        self._stages = {name.partition("#")[0] for name in plan.stages}

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """A forward begins.

        Raises
        ------
        PlanMismatchError
            If a parameter that was frozen gets a gradient.
        """
        for name, p in self._frozen:
            if p.requires_grad:
                raise PlanMismatchError(
                    f"parameter {name!r} was frozen when the plan was applied, and now gets a gradient: it and what "
                    "its layers save for it are not in the plan; solve again with it, or freeze it"
                )

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called."""
        if self._inputs is None or "inputs" in self._warned.of:
            return
        beyond = self._inputs.first_beyond(*self._by_name(args, kwargs))
        if beyond is not None and beyond[1] is None and beyond[0].shape != ():
            self._warned.once(
                "inputs", f"the model gets {beyond[0]}, and the plan was made without; solve with these inputs"
            )

    def backward_begins(self) -> None:
        """A backward begins."""
        kind = self._device.type
        if self._autocast != kind and torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
            self._warned.once(
                "autocast",
                "autocast is still on when backward begins, so the casts of the weights that it has made stay until it "
                "ends, and the plan doesn't reckon with that; call backward outside of the autocast block",
            )

    def patches(self, active: Callable[[], bool]) -> Iterator[PatchedForward]:
        """One for each module in no stage's that the profiled step didn't call; for calls while `active`."""
        if self._outside is None:
            return
        modules = dict(self._model.named_modules())
        inside = {id(m) for name in self._stages if name in modules for m in below(modules[name])}
        for name, module in modules.items():
            around = any(stage == name or stage.startswith(f"{name}.") for stage in self._stages) or not name
            if not around and id(module) not in inside and name not in self._outside and is_patchable(module):
                yield PatchedForward(module, self._runner(name, active))

    def _runner(
        self, name: str, active: Callable[[], bool]
    ) -> Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]:
        def run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if active():
                self._warned.once("module", f"{name!r} runs, which the planned step didn't call; solve with this step")
            return original(*args, **kwargs)

        return run
