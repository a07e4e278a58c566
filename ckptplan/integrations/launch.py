"""A training script, run as it is, with the memory of its training planned.

NOTE [What of a script is planned]
1. A `transformers.Trainer`, of TRL's too, gets an `ActivationPlanCallback` when it is made, unless it has one. Its
   module is watched for on the import path, since the script imports it later, or never.
2. Lightning's `Trainer` gets an `ActivationPlanner` by the entry point that `environment.py` speaks of. Ranks that
   Lightning starts itself, without this launcher, have the variables, too.
3. In a plain loop, the first module that is called for training, and that has all parameters of an optimizer, is
   planned for this call's inputs (`ckptplan.apply`). Until then every call of a module is looked at; from then on none.

Several optimizers whose parameters the module has count together. Where there is a Trainer, no plain loop is planned.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from ckptplan.core.errors import InvalidInputError
from ckptplan.integrations.environment import BUDGET, OPTIONS
from ckptplan.integrations.training import PlanningCallback, Together
from ckptplan.planning.applying import apply
from ckptplan.planning.first_forward import FirstForward
from ckptplan.planning.log import is_first_rank, say
from ckptplan.runtime.handle import Handle

_TRAINER, _LIGHTNING = "transformers.trainer", "lightning.pytorch.trainer.trainer"


class _WhenImported(MetaPathFinder):
    """Calls a function with a module as soon as that has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's specification as the other finders give it, if it is the one."""
        if name != self.name:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: ModuleType) -> None:
                run(module)
                self.then(module)

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


class _Watch:
    """What is looked for in a script, and what was planned (NOTE).

    Parameters
    ----------
    options : dict
        Of `ckptplan.apply` and the callbacks.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.handle: Handle | None = None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._loops = ExitStack()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look for what trains inside."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, self._environment()))
            stack.enter_context(self._loops)
            call, init = nn.Module.__call__, torch.optim.Optimizer.__init__

            @functools.wraps(call)
            def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if module.training and torch.is_grad_enabled():
                    self._look_at(module)
                return call(module, *args, **kwargs)

            @functools.wraps(init)
            def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
                init(optimizer, *args, **kwargs)
                self._optimizers.add(optimizer)

            self._loops.enter_context(mock.patch.object(nn.Module, "__call__", called))
            self._loops.enter_context(mock.patch.object(torch.optim.Optimizer, "__init__", made))
            for name, then in ((_TRAINER, self._give_trainers), (_LIGHTNING, self._note_lightning)):
                if name in sys.modules:
                    then(sys.modules[name], stack)
                    continue
                finder = _WhenImported(name, functools.partial(then, undo=stack))
                sys.meta_path.insert(0, finder)
                stack.callback(sys.meta_path.remove, finder)
            yield

    def _environment(self) -> dict[str, str]:
        options = {name: value for name, value in self.options.items() if name != "budget"}
        return {BUDGET: self.options["budget"], OPTIONS: json.dumps(options)}

    def _give_trainers(self, module: ModuleType, undo: ExitStack) -> None:
        """Let every Trainer that is made have a callback."""
        from ckptplan.integrations.transformers import ActivationPlanCallback

        def then(trainer: Any) -> None:
            if not any(isinstance(c, ActivationPlanCallback) for c in trainer.callback_handler.callbacks):
                trainer.add_callback(ActivationPlanCallback(**self.options))

        self._after_init(module.Trainer, then, undo)

    def _note_lightning(self, module: ModuleType, undo: ExitStack) -> None:
        """Leave Lightning's trainers to their own callback."""
        self._after_init(module.Trainer, lambda trainer: None, undo)

    def _after_init(self, cls: Any, then: Callable[[Any], None], undo: ExitStack) -> None:
        init = cls.__init__

        @functools.wraps(init)
        def made(trainer: Any, *args: Any, **kwargs: Any) -> None:
            init(trainer, *args, **kwargs)
            self._loops.close()
            then(trainer)

        undo.enter_context(mock.patch.object(cls, "__init__", made))

    def _look_at(self, module: nn.Module) -> None:
        """Plan a module if it has all parameters of an optimizer."""
        own = {id(p) for p in module.parameters() if p.requires_grad}
        found = [optimizer for optimizer in self._optimizers if set() < _trained(optimizer) <= own]
        if not found:
            return
        self._loops.close()
        optimizer = found[0] if len(found) == 1 else Together(found)
        self.handle = apply(module, optimizer=optimizer, **self.options)

    def has_planned(self) -> bool:
        """Whether a plan was made for a plain loop."""
        return isinstance(self.handle, FirstForward) and self.handle.is_made


def _trained(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def launch(target: str, arguments: Sequence[str], *, as_module: bool = False, **options: Any) -> None:
    """Run a script as `python` does, with a plan for what it trains, and say if there was nothing to plan.

    Parameters
    ----------
    target : str
        A file, or with `as_module` the name of a module.
    arguments : sequence of str
        The script's.
    **options
        Of the callbacks: `budget`, as text, `offload`, `time_limit_s` and so on.

    Raises
    ------
    InvalidInputError
        If there is no such file, or an option can't be used. Whatever the script raises passes.
    """
    PlanningCallback(**options)  # for its errors, now
    watch, before = _Watch(options), PlanningCallback.plans_applied
    try:
        with watch.watching():
            _run(target, arguments, as_module=as_module)
    finally:
        if is_first_rank() and not watch.has_planned() and PlanningCallback.plans_applied == before:
            say(
                "ckptplan: nothing was planned: the script trained no transformers or Lightning Trainer, and called no "
                "model for training that has the parameters of a torch.optim optimizer"
            )


def _run(target: str, arguments: Sequence[str], *, as_module: bool) -> None:
    sys.argv = [target, *arguments]
    if as_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    file = Path(target)
    if not file.is_file():
        raise InvalidInputError(f"there is no file {target!r}; give the script that trains, or a module with -m")
    sys.path[0] = str(file.resolve().parent)
    # It stays the program's, unlike that of `runpy.run_path`: what the script leaves for the end finds its names.
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__file__=target, __builtins__=builtins)
    exec(compile(file.read_bytes(), target, "exec", dont_inherit=True), vars(main))
