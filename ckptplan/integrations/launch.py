"""`ckptplan run`: a training script runs unchanged, with the memory of its training planned.

NOTE [What of a script is planned]
1. A `transformers.Trainer`, of TRL's too, gets an `ActivationPlanCallback` when it begins to train, and Lightning's an
   `ActivationPlanner`, unless it has one. Their modules are watched for on the import path, since the script imports
   them later, or never. Ranks that Lightning starts itself, without this launcher, have the variables of
   `environment.py`.
2. In a plain loop, the first module that is called for training, and that has all parameters of an optimizer, is
   planned for this call's inputs (`ckptplan.apply`). Until then every call of a module is checked; from then on none.
   The plan is taken off when a Trainer begins.

Several optimizers whose parameters the module has count together. A model that can't be planned is reported and runs
without a plan; a budget below the smallest peak ends the script.
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

import torch
from torch import nn

from ckptplan.core.errors import CkptPlanError, InfeasibleBudgetError, InvalidInputError
from ckptplan.integrations.environment import BUDGET, OPTIONS, callback_options
from ckptplan.integrations.training import PlanningCallback, Together
from ckptplan.planning.applying import apply
from ckptplan.planning.first_forward import FirstForward
from ckptplan.planning.log import is_first_rank

_TRAINER, _LIGHTNING = "transformers.trainer", "lightning.pytorch.trainer.trainer"


class _WhenImported(MetaPathFinder):
    """Calls a function with a module once the module has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the watched module's specification from the other finders; None for other modules."""
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
    """The search for a script's training, and its plan (NOTE [What of a script is planned]).

    Parameters
    ----------
    options : dict
        Of `ckptplan.apply` and the callbacks.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.has_found = False
        self._handle: FirstForward | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._is_looking = True
        self._loops = ExitStack()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look for a training within the block."""
        with ExitStack() as stack:
            options = {name: value for name, value in self.options.items() if name != "budget"}
            for name, text in ((BUDGET, self.options["budget"]), (OPTIONS, json.dumps(options))):
                stack.callback(_set_variable, name, os.environ.get(name))
                _set_variable(name, text)
            stack.enter_context(self._loops)
            call, init = nn.Module.__call__, torch.optim.Optimizer.__init__

            @functools.wraps(call)
            def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if self._is_looking and module.training and torch.is_grad_enabled():
                    optimizers = self._optimizers_of(module)
                    if optimizers:
                        return self._first(call, module, optimizers, args, kwargs)
                return call(module, *args, **kwargs)

            @functools.wraps(init)
            def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
                init(optimizer, *args, **kwargs)
                self._optimizers.append(weakref.ref(optimizer))

            _put(self._loops, nn.Module, "__call__", called)
            _put(self._loops, torch.optim.Optimizer, "__init__", made)
            for name, then in ((_TRAINER, self._plan_trainers), (_LIGHTNING, self._plan_lightning)):
                if name in sys.modules:
                    then(stack, sys.modules[name])
                    continue
                finder = _WhenImported(name, functools.partial(then, stack))
                sys.meta_path.insert(0, finder)
                stack.callback(sys.meta_path.remove, finder)
            yield
        # torch.compile, if it was imported meanwhile, still refers to the functions that were put in place.
        self._handle, self._optimizers = None, []

    # What follows runs while the framework is imported, so this package's integration is imported by `give`, later.

    def _plan_trainers(self, undo: ExitStack, module: ModuleType) -> None:
        def give(trainer: Any) -> None:
            from ckptplan.integrations.transformers import ActivationPlanCallback

            if not any(isinstance(c, ActivationPlanCallback) for c in trainer.callback_handler.callbacks):
                trainer.add_callback(ActivationPlanCallback(**self.options))

        self._before(undo, module.Trainer, "train", give)

    def _plan_lightning(self, undo: ExitStack, module: ModuleType) -> None:
        def give(trainer: Any) -> None:
            from ckptplan.integrations.lightning import ActivationPlanner, AskedFor

            if not any(isinstance(c, ActivationPlanner) for c in trainer.callbacks):  # the entry point isn't installed
                trainer.callbacks.append(AskedFor(**self.options))

        self._before(undo, module.Trainer, "fit", give)

    def _before(self, undo: ExitStack, trainers: Any, name: str, give: Callable[[Any], None]) -> None:
        """Have trainers, before their method `name`, end the planning of plain loops and get a callback from `give`."""
        original = getattr(trainers, name)

        @functools.wraps(original)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._stop_looking()
            if self._handle is not None:
                self._handle.remove()
            give(trainer)
            return original(trainer, *args, **kwargs)

        _put(undo, trainers, name, train)

    def _stop_looking(self) -> None:
        self._is_looking = False
        self._loops.close()

    def _optimizers_of(self, module: nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose parameters are all a module's; of those with the same ones the last."""
        known = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        if not known:
            return []
        own = {id(p) for p in module.parameters() if p.requires_grad}
        found: list[torch.optim.Optimizer] = []
        for optimizer in reversed(known):  # a wrapper that makes its inner optimizer is listed after that
            trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
            if trained and trained <= own:
                own -= trained
                found.insert(0, optimizer)
        return found

    def _first(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module with a plan for this call's inputs."""
        self._stop_looking()
        self.has_found = True
        optimizer = optimizers[0] if len(optimizers) == 1 else Together(optimizers)
        try:
            handle = apply(module, optimizer=optimizer, **self.options)
            assert isinstance(handle, FirstForward)
            self._handle = handle
            return call(module, *args, **kwargs)
        except InfeasibleBudgetError:
            raise
        except CkptPlanError as error:
            if self._handle is not None:
                if self._handle.is_made:
                    raise
                self._handle.remove()
            _tell(f"ckptplan: {type(module).__name__} runs without a plan: {error}")
        return call(module, *args, **kwargs)


def _put(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a class until `undo` is closed, or another has been set by then."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    undo.callback(lambda: setattr(owner, name, before) if getattr(owner, name) is value else None)


def _set_variable(name: str, text: str | None) -> None:
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text


def _tell(text: str) -> None:
    """Print a line that no setting of the script's logging hides."""
    if is_first_rank():
        print(text, file=sys.stderr)


def launch(target: str, arguments: Sequence[str], *, as_module: bool = False, **options: Any) -> None:
    """Run a script as `python` does, with a plan for what it trains, and say if there was nothing to plan.

    Parameters
    ----------
    target : str
        A file, or with `as_module` the name of a module.
    arguments : sequence of str
        The script's.
    **options
        Of the callbacks: `budget`, as text, `offload`, `time_limit_s` and so on. Others of `$CKPTPLAN_OPTIONS` hold.

    Raises
    ------
    InvalidInputError
        If there is no such file, or an option can't be used. Whatever the script raises passes.
    """
    options = {**callback_options(), **options}
    PlanningCallback(**options)  # raises its errors before the script runs
    watch, before = _Watch(options), PlanningCallback.plans_applied
    end: SystemExit | None = None
    with watch.watching():
        try:
            _run(target, arguments, as_module=as_module)
        except SystemExit as error:
            end = error
    if not watch.has_found and PlanningCallback.plans_applied == before:
        _tell(
            "ckptplan: nothing was planned: no transformers or Lightning Trainer has trained, and no model with all "
            "parameters of a torch.optim optimizer was called for training"
        )
    if end is not None:
        raise end


def _run(target: str, arguments: Sequence[str], *, as_module: bool) -> None:
    file = os.path.abspath(target)
    if not as_module and not Path(file).is_file():
        raise InvalidInputError(f"there is no file {target!r}; give the script that trains, or a module with -m")
    sys.argv = [target, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.realpath(file))
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    # Unlike with `runpy.run_path` the module stays in place, so that code which runs at exit finds its names.
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__file__=file, __builtins__=builtins)
    exec(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True), vars(main))


def of_script(error: Exception) -> Exception:
    """Return an error with the part of its traceback that begins in the script."""
    trace = error.__traceback__
    ours = (os.path.dirname(os.path.dirname(__file__)), runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return error.with_traceback(trace or error.__traceback__)
