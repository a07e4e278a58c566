"""Memory that a step needs and its plan doesn't include: unfrozen parameters, new inputs and modules, autocast's casts.

NOTE [Unplanned]
A plan's bytes are those of the step that was profiled. A later step may need more, in ways that the arguments of its
stages don't show:

1. A parameter that was frozen when the plan was applied gets a gradient now.
2. The model gets a tensor that it didn't get in the profiled step, such as labels from which it computes a loss.
3. A module is called that the profiled step didn't call, such as another head, or layers that it left out at random.
4. Modules were added or replaced since the plan was applied, as libraries of adapters do. Their calls are no stages'.
   Looked for in the first forwards, and in every eighth.
5. The profiled step ran under autocast and this one doesn't, or under one to another type; or it is on before the
   forward begins, so that it isn't the model which turns it on, and was off.
6. Autocast was off when the plan was applied and is on when backward begins. It keeps its casts of the weights until
   it is left.
7. The loop calls a module that isn't the model's between a forward and its backward: a momentum encoder, a reward
   model, a head of its own. It has 1 % of the model's parameters at least, and the profiled step called none of its
   class. Not looked for in processes that compile (`torch.compile`).

How many bytes they need isn't known, and they may fit. So each is a difference (NOTE [Differences]).

Example of rule 6: with float32 weights of 400 MiB, the cached bfloat16 casts take 200 MiB. In the first step below they
are freed before backward; in the second one they add to its peak::

    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).mean()
    loss.backward()

    with torch.autocast("cuda", torch.bfloat16):
        model(x).mean().backward()  # a warning
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ckptplan.core.plan import Plan
from ckptplan.runtime.guard.differences import Differences
from ckptplan.runtime.guard.shapes import ByName, InputLimits
from ckptplan.runtime.observer import Observer
from ckptplan.runtime.patching import PatchedForward, is_patchable
from ckptplan.tensors.modules import below
from ckptplan.tensors.private import current_graph_task
from ckptplan.training.compiled import compiles
from ckptplan.training.step import check_not_checkpointing, present_autocast

_FIRST, _EVERY = 3, 8
_LEAST_SHARE = 0.01
"""Least parameters of a foreign module, as a share of the model's: a loss with a temperature of its own has fewer."""


def is_foreign(module: nn.Module, own: Container[nn.Module]) -> bool:
    """Whether a module has parameters, and neither is one of a model's `own` modules nor has one."""
    return next(module.parameters(), None) is not None and not any(m in own for m in module.modules())


class Unplanned(Observer):
    """Notes that a step needs memory that `plan` doesn't include (NOTE [Unplanned]), refuses checkpointing of its own.

    Parameters
    ----------
    model : nn.Module
        The model, before the plan is applied to it.
    """

    def __init__(self, model: nn.Module, plan: Plan, device: torch.device, differences: Differences) -> None:
        self._model, self._device = model, device
        # Libraries have an attribute `gradient_checkpointing` on the modules that can checkpoint, and switch it.
        self._checkpoint = [(name, m) for name, m in model.named_modules() if hasattr(m, "gradient_checkpointing")]
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._differences, self._looks_at_autocast = differences, False
        # An autocast context that is entered now was also entered during profiling, so its casts are in the plan.
        self._autocast = next((kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)), None)
        self._inputs, self._planned_autocast = None, ""
        if plan.fingerprint.inputs != "step()":
            self._planned_autocast = plan.fingerprint.autocast
            self._by_name = ByName(model.forward)
            self._inputs = InputLimits(self._by_name.planned(plan.fingerprint.inputs))
        self._outside, self._uncalled = None if plan.outside is None else set(plan.outside), set(plan.uncalled)
        self._stages = {name.partition("#")[0] for name in plan.stages}
        self._modules, self._passes, self._in_forward = weakref.WeakSet(below(model)), 0, False
        self._foreign = None if plan.foreign is None else set(plan.foreign)
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that may be called behind forward
        self._hook: RemovableHandle | None = None
        self._thread = 0
        self._least = _LEAST_SHARE * sum(p.numel() for p in model.parameters())

    def pass_begins(self, waiting: weakref.ref[Any] | None) -> None:
        """Note, when a forward begins, that a frozen parameter was thawed, and that there are new modules.

        Raises
        ------
        UnsupportedModelError
            If a module checkpoints by itself now: stages would run again for both.
        """
        check_not_checkpointing(self._model, self._checkpoint)
        for name, p in self._frozen:
            if p.requires_grad:
                self._differences.note(
                    "thawed",
                    f"parameter {name!r} was frozen when the plan was applied, and now gets a gradient: it and what "
                    "its layers save for it are not in the plan; solve again with it, or freeze it",
                )
                break
        self._passes += 1
        self._in_forward = True
        self.removed()
        looks = self._passes <= _FIRST or not self._passes % _EVERY
        if looks and not all(m in self._modules for m in below(self._model)):
            new = next(name for name, m in self._model.named_modules() if m not in self._modules)
            self._differences.note(
                "new",
                f"module {new!r} was added or replaced since the plan was applied, which doesn't hold for it; call "
                "remove() on its handle, solve and apply again",
            )
        self._looks_at_autocast = self._planned_autocast not in ("", "off")
        if self._planned_autocast == "off" and (now := present_autocast(self._device.type)) != "off":
            self._differences.note(
                "autocast",
                f"forward runs under autocast to {now}, and the plan was made for one without; solve with amp={now!r}",
            )

    def output(self, output: Any, inputs: Any) -> None:
        """Count modules that the first forward has made as the model's, since the profiled forward made them, too."""
        self._in_forward = False
        if self._passes == 1:
            self._modules.update(below(self._model))
        # A hook of all modules would be compiled into what torch.compile traces behind the forward.
        looks = self._foreign is not None and not compiles()
        if looks and self._hook is None and "beside" not in self._differences.unplanned:
            self._thread = threading.get_ident()
            self._hook = register_module_forward_pre_hook(self._called_behind)

    def removed(self) -> None:
        """Stop looking at what is called behind the forward."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _called_behind(self, module: nn.Module, args: Any) -> None:
        if module in self._known or threading.get_ident() != self._thread:
            return
        assert self._foreign is not None
        small = sum(p.numel() for p in module.parameters()) < self._least
        if small or type(module).__qualname__ in self._foreign or not is_foreign(module, self._modules):
            self._known.update(below(module))
            return
        self.removed()
        self._differences.note(
            "beside",
            f"a {type(module).__qualname__} that isn't the model's runs while a forward waits for its backward, and "
            "the plan has no memory for it; move it before that forward or after its backward, or solve with step= or "
            "loss_fn= for a step that has both",
        )

    def stages_begin(self) -> None:
        """Warn if autocast isn't as planned; by now the model may have turned it on by itself, as accelerate's do."""
        if not self._looks_at_autocast:
            return
        self._looks_at_autocast = False
        now = present_autocast(self._device.type)
        if now != self._planned_autocast:
            here = "without autocast" if now == "off" else f"under autocast to {now}"
            self._differences.note(
                "autocast",
                f"forward runs {here}, and the plan was made for one under autocast to {self._planned_autocast}; solve "
                + ("without amp=" if now == "off" else f"with amp={now!r}"),
            )

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn if a call of the model gets a tensor that the profiled step didn't pass."""
        if self._inputs is None or "inputs" in self._differences.unplanned:
            return
        beyond = self._inputs.first_beyond(*self._by_name(args, kwargs))
        if beyond is not None and beyond[1] is None:
            self._differences.note(
                "inputs", f"the model gets {beyond[0]}, and the plan was made without it; solve with these inputs"
            )

    def backward_begins(self) -> None:
        """Warn if autocast is on when a backward begins and was off in the profiled step."""
        self.removed()
        kind = self._device.type
        if self._autocast != kind and torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
            self._differences.note(
                "casts",
                "autocast is still on when backward begins, so the casts of the weights that it has made stay until it "
                "ends, and the plan doesn't include them; call backward outside of the autocast block",
            )

    def patches(self, active: Callable[[], bool]) -> Iterator[PatchedForward]:
        """Yield a patch for each module that the profiled step didn't call, of those inside a stage for the topmost.

        A patched module warns when it is called while `active()` is true.
        """
        if self._outside is None:
            return
        modules = dict(self._model.named_modules())
        inside = {id(m) for name in self._stages if name in modules for m in below(modules[name])}
        for name, module in modules.items():
            around = any(stage == name or stage.startswith(f"{name}.") for stage in self._stages) or not name
            new = not around and id(module) not in inside and name not in self._outside
            if (new or name in self._uncalled) and is_patchable(module):
                yield PatchedForward(module, functools.partial(self._run, name, active))

    def _run(
        self, name: str, active: Callable[[], bool], original: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if active() and current_graph_task() == -1:  # a recompute does what its forward did
            # A plan for a forward's inputs can't include what the loop calls besides.
            kind = "module" if self._in_forward or self._inputs is None else "beside"
            self._differences.note(kind, f"{name!r} runs, which the planned step didn't call; solve with this step")
        return original(*args, **kwargs)
