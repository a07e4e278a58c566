"""Frames: a stage's call that saves nothing, and makes again what its backward needs (NOTE [Frames and links])."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from ckptplan.core.errors import PlanMismatchError, UnsupportedModelError
from ckptplan.core.link import Tier
from ckptplan.runtime.guard.check import Checks, StageCheck
from ckptplan.runtime.recompute.call import Call
from ckptplan.runtime.recompute.selective import Selection
from ckptplan.runtime.state.compiled import out_of_sight
from ckptplan.runtime.swap.session import Counters, Held, Packing, SwapSession, unpack
from ckptplan.runtime.swap.users_hooks import UsersHooks, innermost, keep_values


class Slot:
    """The place of one saved tensor."""

    __slots__ = ("__weakref__", "frame", "number")

    def __init__(self, frame: Frame, number: int) -> None:
        self.frame = frame
        self.number = number

    def tensor(self) -> torch.Tensor:
        """What was saved, made again.

        Raises
        ------
        UnsupportedModelError
            If the stage's forward isn't over: making it again would begin with the state that it is about to change.
        """
        if not self.frame.complete:
            raise UnsupportedModelError(
                f"stage {self.frame.name!r}, which is to run again, runs backward inside its own forward, and its "
                "state is half changed then; keep or swap it, as plans from a profile with these inputs do"
            )
        return self.frame.saved(self.number)

    def __del__(self) -> None:
        self.frame.forget(self.number)


class _Enough(BaseException):
    """Every slot of a frame is filled."""


def nothing_saved(_: Any) -> torch.Tensor:
    """Refuse a backward that begins inside of a stage's second run."""
    raise UnsupportedModelError(
        "a stage that runs again runs backward inside its own forward, and didn't the first time; keep or swap it"
    )


class Frame:
    """One stage's call, and all it takes to make it again.

    Parameters
    ----------
    name : str
        The stage, for messages.
    """

    check: StageCheck | None = None
    """In passes that are checked: compares what the runs save."""

    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self.complete = False
        self._call = call
        self._inputs: Sequence[Any] = ()
        self._needs_grad: list[bool] = []
        self._slots: list[weakref.ref[Slot]] = []
        self._like: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._users: UsersHooks | None = None
        self._models_own: dict[int, Held] = {}  # what slots stand for whatever a run saves in their places

    def forward(self, tensors: list[torch.Tensor], inputs: Sequence[Any]) -> Any:
        """Run the stage for the first time; `inputs` is how `tensors` are held."""
        self._inputs = inputs
        self._needs_grad = [t.requires_grad for t in tensors]
        self._users = UsersHooks.around()
        save = self._save if self._users is None else self._users.through(self._save)
        with torch.autograd.graph.saved_tensors_hooks(out_of_sight(save), unpack):
            output = self._call(*tensors)
        self.complete = True
        return output

    def saved(self, number: int) -> torch.Tensor:
        """What slot `number` stands for, in the backward that runs now."""
        raise NotImplementedError

    def forget(self, number: int) -> None:
        """Slot `number` is gone: what it stands for is needed no more."""
        raise NotImplementedError

    def _save(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(self, len(self._slots))
        self._slots.append(weakref.ref(slot))
        self._like.append((tensor.shape, tensor.dtype, tensor.device))
        if self.check is not None:
            self.check.save(tensor)
        return slot

    def fill(self, inputs: list[torch.Tensor], table: dict[int, Held], *, to_the_end: bool = False) -> list[Any]:
        """Run the stage again and put what it saves in `table`.

        Parameters
        ----------
        to_the_end : bool
            False: stop as soon as every slot is filled; nobody needs the outputs.

        Returns
        -------
        list
            The leaves of the output; empty if it stopped early.
        """
        count, last = 0, len(self._slots)

        def save(tensor: torch.Tensor) -> None:
            nonlocal count
            number = count
            count += 1
            if number >= last or (tensor.shape, tensor.dtype, tensor.device) != self._like[number]:
                raise self._another_path(f"saves a {tensor.dtype} {list(tensor.shape)} as tensor number {number}")
            value = tensor.detach() if tensor.requires_grad else tensor
            if self.check is not None:
                self.check.compare_saved(number, value)
            if self._slots[number]() is not None:
                table[number] = self._models_own.get(number) or Held(value)
            if not to_the_end and count == last:
                raise _Enough
            return None

        try:
            leaves = self._again(inputs, save)
        except _Enough:
            return []
        if count != last:
            raise self._another_path(f"saves {count} tensors")
        return leaves

    def _again(self, inputs: list[torch.Tensor], save: Callable[[torch.Tensor], Any]) -> list[Any]:
        """Run the stage, with gradients on, like forward: else some operations take kernels whose results differ."""
        for i, needed in enumerate(self._needs_grad):
            if needed and not isinstance(inputs[i], nn.Parameter):
                inputs[i] = inputs[i].detach().requires_grad_()
        unchanged = contextlib.nullcontext() if self.check is None else self.check.unchanged()
        # Emptied afterwards: a graph holds its hooks, and this hook the frame, which may hold what keeps the graph (a
        # list of features that a module's hook adds to). No collector could free such a ring.
        saves = [save]
        hooks = torch.autograd.graph.saved_tensors_hooks(out_of_sight(lambda t: saves[0](t)), nothing_saved)
        try:
            with unchanged, torch.enable_grad(), hooks:
                return pytree.tree_leaves(self._call(*inputs))
        finally:
            saves.clear()

    def _another_path(self, found: str) -> PlanMismatchError:
        return PlanMismatchError(
            f"stage {self.name!r}, run again, {found}, and {len(self._slots)} tensors as in forward were expected; its "
            "forward depends on something that changed in between"
        )


def at_end_of_task(method: Callable[[int], None], key: int) -> None:
    """Call a method with `key` at the end of the backward that runs now, should its object be alive then."""
    held = weakref.WeakMethod(method)

    def end() -> None:
        alive = held()
        if alive is not None:
            alive(key)

    Variable._execution_engine.queue_callback(end)


class LoneFrame(Frame):
    """The call of a stage that is recomputed by itself, once for each backward that asks for what it saved."""

    def __init__(self, name: str, call: Call) -> None:
        super().__init__(name, call)
        self._tables: dict[int, dict[int, Held]] = {}

    def saved(self, number: int) -> torch.Tensor:
        """What slot `number` stands for, in the backward that runs now."""
        key = torch._C._current_graph_task_id()
        table = self._tables.get(key)
        if table is None:
            table = {}
            if key != -1:  # else somebody looks at a node outside of any backward
                self._tables[key] = table
                at_end_of_task(self.end, key)
            try:
                self.fill([held.tensor() for held in self._inputs], table)
            except BaseException:
                self._tables.pop(key, None)
                raise
        return taken(table, number, self.name)

    def forget(self, number: int) -> None:
        """Slot `number` is gone: what it stands for is needed no more."""
        for table in tuple(self._tables.values()):
            table.pop(number, None)

    def end(self, key: int) -> None:
        """Drop what a backward has left."""
        self._tables.pop(key, None)


def taken(table: dict[int, Held], number: int, name: str) -> torch.Tensor:
    """What `table` has for slot `number`.

    It gives that once, so that memory falls as backward reads, but to a backward written in Python, which may read
    `ctx.saved_tensors` again: its slots end with it, and with them what they stand for, as without a plan.
    """
    again = isinstance(torch._C._current_autograd_node(), BackwardCFunction)
    held = table.get(number) if again else table.pop(number, None)
    if held is None:
        raise UnsupportedModelError(
            f"a tensor saved by stage {name!r} is read twice in one backward, and not by a torch.autograd.Function, "
            "which may; keep or swap this stage"
        )
    return held.tensor()


class Handed(NamedTuple):
    """What PyTorch's hooks around the step (`save_on_cpu`) made of a tensor, and how they give it back."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]
    itself: Held | None
    """The tensor where what they made of it is or has the tensor itself, for a check that nothing wrote to it."""

    def tensor(self) -> torch.Tensor:
        """The tensor, as the hooks give it back; an error if it was written to since and they didn't copy it."""
        if self.itself is not None:
            self.itself.tensor()
        return self.unpack(self.packed)


def hold(tensor: torch.Tensor, packing: Packing | None) -> Held | Handed:
    """A stage's input for its next run; one that may move is packed, one that stays is left to PyTorch's hooks.

    As for what autograd saves, the innermost hooks decide (NOTE [Hooks around a stage]).
    """
    if isinstance(tensor, nn.Parameter):
        return Held(tensor) if packing is None else packing.pack(tensor)
    held = tensor.detach()
    if packing is not None:
        return packing.pack(held)
    hooks = innermost(False)
    if hooks is None or not keep_values(hooks):
        return Held(held)
    packed = hooks[0](held)
    copied = all(leaf is not held for leaf in pytree.tree_leaves(packed))
    return Handed(packed, hooks[1], None if copied else Held(held))


def run_recomputed(
    module: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    counters: Counters,
    device: torch.device,
    *,
    index: int = 0,
    name: str = "",
    ops: tuple[int, ...] = (),
    moves: tuple[int, ...] = (),
    tier: Tier = "host",
    session: SwapSession | None = None,
    planned: Sequence[int] | None = None,
    checks: Checks | None = None,
) -> Any:
    """Call `original(*args, **kwargs)` so that backward recomputes what it saved.

    Tensors anywhere in the arguments are held, and those alone, as they would be if autograd had saved them.

    Parameters
    ----------
    device : torch.device
        Where the plan runs.
    index, name : int, str
        The stage.
    ops : tuple of int
        Operations whose outputs are saved all the same (NOTE [Numbering] in selective.py).
    moves : tuple of int
        Positions of what leaves: saved outputs come first, in the order of `ops`, then the inputs.
    tier : "host" or "disk"
        Where to.
    session : SwapSession, optional
        Holds what is saved; needed where something moves.
    planned : sequence of int, optional
        Bytes of what is saved, in order, as it was planned. With them, a forward that takes another path is recomputed
        whole where its `ops` would hold something else; without, that is an error.
    checks : Checks, optional
        Compares what the recompute reads and saves with what this run does.
    """
    inputs, outputs = (None, None) if session is None else (session.packing(), session.packing())
    selection, check = None, None if checks is None else StageCheck(checks, module, name)
    if ops:
        selection = Selection(ops, None if outputs is None else outputs.pack, name, planned, check)
        original = selection.around(original)
    if check is not None:
        original = check.around(original)
    call = Call(module, original, counters, device, index)
    tensors = call.split(args, kwargs)
    del args, kwargs
    frame = LoneFrame(name, call)
    frame.check = check
    result = frame.forward(tensors, [hold(tensor, inputs) for tensor in tensors])
    del frame  # the graph owns it
    if selection is not None and selection.gave_up:
        counters.other_paths += 1
        if outputs is not None:
            outputs.saved.clear()
    if inputs is not None and outputs is not None and session is not None:
        saved = [*outputs.saved, *inputs.saved]
        outputs.saved.clear()
        inputs.saved.clear()
        session.leave(index, saved, moves, tier)
    return result
