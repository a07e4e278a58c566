"""Frames: calls of stages that save no tensors and recompute those that backward needs (NOTE [Frames and links])."""

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
from ckptplan.runtime.guard.check import Checks, Spots, StageCheck, StageSpots
from ckptplan.runtime.recompute.call import Call, PlannedStage
from ckptplan.runtime.recompute.selective import SavedOutputs
from ckptplan.runtime.swap.packing import Held, Packing, unpack
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.users_hooks import OwnHooks, UsersHooks, keep_values
from ckptplan.tensors.private import current_graph_task, current_node, next_sequence_number, saved_tensors_hooks
from ckptplan.tensors.views import plain, version_of
from ckptplan.training.compiled import out_of_sight


class Slot:
    """The placeholder of one saved tensor, which the autograd graph holds in place of the tensor."""

    __slots__ = ("__weakref__", "frame", "number")

    def __init__(self, frame: Frame, number: int) -> None:
        self.frame = frame
        self.number = number

    def tensor(self) -> torch.Tensor:
        """Return the saved tensor, recomputed.

        Raises
        ------
        UnsupportedModelError
            If the stage's forward hasn't ended: which state it changes, and so what to restore, isn't known yet.
        """
        if not self.frame.complete:
            raise UnsupportedModelError(
                f"stage {self.frame.name!r}, which is to run again, runs backward inside its own forward, and its "
                "state is half changed then; keep or swap it, as plans from a profile with these inputs do"
            )
        return self.frame.saved(self.number)

    def __del__(self) -> None:
        self.frame.forget(self.number)


class Enough(BaseException):
    """Raised in a recompute to end it once every slot of the frame is filled."""


def nothing_saved(_: Any) -> torch.Tensor:
    """Refuse a backward that starts inside a stage's recompute.

    Raises
    ------
    UnsupportedModelError
    """
    raise UnsupportedModelError(
        "a stage that runs again runs backward inside its own forward, and didn't the first time; keep or swap it"
    )


class Frame:
    """One call of a stage, with its inputs and the state to repeat it.

    Parameters
    ----------
    name : str
        The stage's name, for messages.

    Attributes
    ----------
    complete : bool
        Whether the stage's forward has ended.
    """

    check: StageCheck | StageSpots | None = None
    """Compares the tensors that the runs save."""

    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self.complete = False
        self._call = call
        self._inputs: Sequence[Any] = ()
        self._made: list[bool | None] = []  # by input: an operation made it; None if it needs no gradient
        self._slots: list[weakref.ref[Slot]] = []
        self._like: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._filled: set[int] = set()  # slots whose tensors a kernel fills after they were saved
        self._fresh: tuple[int, torch.Size, torch.dtype] | None = None  # the last saved tensor, if that may be so
        self._users: UsersHooks | None = None
        self._models_own: dict[int, Held] = {}  # by slot: the model's tensor, returned in place of a recomputed one

    def forward(self, tensors: list[torch.Tensor], inputs: Sequence[Any]) -> Any:
        """Run the stage for the first time; `inputs` holds `tensors`, in the same order, for the recompute."""
        self._inputs = inputs
        self._made = [t.grad_fn is not None if t.requires_grad else None for t in tensors]
        self._users = UsersHooks.around()
        save = self._save if self._users is None else self._users.through(self._save)
        try:
            with OwnHooks(out_of_sight(save), unpack):
                output = self._call(*tensors)
        finally:
            if self.check is not None:
                self.check.ended(len(self._slots))
        self.complete = True
        return output

    def saved(self, number: int) -> torch.Tensor:
        """Return the tensor of slot `number` for the backward that runs now, recomputed if necessary."""
        raise NotImplementedError

    def forget(self, number: int) -> None:
        """Drop the recomputed tensor of slot `number`, which the graph has freed."""
        raise NotImplementedError

    def _save(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(self, len(self._slots))
        self._slots.append(weakref.ref(slot))
        self._like.append((tensor.shape, tensor.dtype, tensor.device))
        if self.check is not None and slot.number in self.check.numbers:
            self.check.save(slot.number, tensor)
        self._note_filled(tensor)
        return slot

    def _note_filled(self, tensor: torch.Tensor) -> None:
        """Find out whether the tensor saved before `tensor` is filled after it was saved.

        `rrelu_with_noise` is the only operation of PyTorch whose backward reads an argument that its kernel fills, and
        it saves new memory for the noise immediately before its input or result, which is of the same shape.
        """
        # The node of the operation that saves has the newest number.
        like = next_sequence_number(), tensor.shape, tensor.dtype
        if tensor.requires_grad:
            if like == self._fresh:
                number = len(self._slots) - 2
                self._filled.add(number)
                if self.check is not None:
                    self.check.skip(number)
            self._fresh = None
        else:
            new = tensor.is_floating_point() and not isinstance(tensor, nn.Parameter) and version_of(tensor) == 0
            self._fresh = like if new and not tensor._is_view() else None

    def fill(self, inputs: list[torch.Tensor], table: dict[int, Held], *, to_the_end: bool = False) -> list[Any]:
        """Run the stage again and put the tensors that it saves into `table`, by the number of their slot.

        Parameters
        ----------
        to_the_end : bool
            Whether the outputs are needed. If not, the run stops as soon as every slot is filled, unless the operation
            that saves last fills one of its tensors only then.

        Returns
        -------
        list
            The leaves of the output; empty if the run stopped early.

        Raises
        ------
        PlanMismatchError
            If the run saves other tensors than forward did.
        """
        count, last = 0, len(self._slots)
        # The kernel that fills a tensor hasn't run yet when its operation saves the input.
        to_the_end |= last - 2 in self._filled

        def save(tensor: torch.Tensor) -> None:
            nonlocal count
            number = count
            count += 1
            if number >= last or (tensor.shape, tensor.dtype, tensor.device) != self._like[number]:
                raise self._another_path(f"saves a {tensor.dtype} {list(tensor.shape)} as tensor number {number}")
            value = tensor.detach() if tensor.requires_grad else tensor
            if self.check is not None and number in self.check.numbers:
                self.check.compare_saved(number, value)
            if self._slots[number]() is not None:
                table[number] = self._models_own.get(number) or Held(value)
            if not to_the_end and count == last:
                raise Enough
            return None

        try:
            leaves = self._again(inputs, save)
        except Enough:
            leaves = []
        if count != last:
            raise self._another_path(f"saves {count} tensors")
        stage = self._call.stage
        if stage.paths is not None:
            stage.paths.look(stage, last, lambda: [h.value for h in table.values() if h.value is not None])
        return leaves

    def _again(self, inputs: list[torch.Tensor], save: Callable[[torch.Tensor], Any]) -> list[Any]:
        """Run the stage with gradients on, as in forward: without them some operations choose kernels that differ.

        Return the leaves of the output.
        """
        for i, made in enumerate(self._made):
            if made is not None and not isinstance(inputs[i], nn.Parameter):
                leaf = inputs[i].detach().requires_grad_()
                with torch.enable_grad():  # a view is no leaf: autocast casts leaves once, other tensors at each use
                    inputs[i] = leaf[...] if made and plain(leaf) else leaf
        unchanged = contextlib.nullcontext() if self.check is None else self.check.unchanged()
        # Emptied afterwards to break a reference cycle that Python's collector can't see: the graph holds this hook,
        # the hook the frame, and the frame may hold the graph, by a list to which a module's hook appends features.
        saves = [save]
        hooks = OwnHooks(out_of_sight(lambda t: saves[0](t)), nothing_saved)
        try:
            with unchanged, torch.enable_grad(), hooks:
                return pytree.tree_leaves(self._call(*inputs))
        finally:
            saves.clear()

    def _another_path(self, found: str) -> PlanMismatchError:
        return PlanMismatchError(
            f"stage {self.name!r}, run again, {found}, unlike its forward, which saved {len(self._slots)} tensors: it "
            "depends on something that changed in between; take that out of its forward, or keep or swap this stage"
        )


def at_end_of_task(method: Callable[[int], None], key: int) -> None:
    """Call a method with `key` at the end of the backward that runs now, if its object is still alive then."""
    held = weakref.WeakMethod(method)

    def end() -> None:
        alive = held()
        if alive is not None:
            alive(key)

    Variable._execution_engine.queue_callback(end)


class LoneFrame(Frame):
    """The call of a stage that is recomputed alone, once for each backward that reads its saved tensors."""

    def __init__(self, name: str, call: Call) -> None:
        super().__init__(name, call)
        self._tables: dict[int, dict[int, Held]] = {}

    def saved(self, number: int) -> torch.Tensor:
        """Return the tensor of slot `number` for the backward that runs now, recomputed if necessary."""
        key = current_graph_task()
        table = self._tables.get(key)
        if table is None:
            table = {}
            if key != -1:  # -1: a saved tensor is read outside of any backward
                self._tables[key] = table
                at_end_of_task(self.end, key)
            try:
                self.fill([held.tensor() for held in self._inputs], table)
            except BaseException:
                self._tables.pop(key, None)
                raise
        return taken(table, number, self.name)

    def forget(self, number: int) -> None:
        """Drop the recomputed tensor of slot `number`, which the graph has freed."""
        for table in tuple(self._tables.values()):
            table.pop(number, None)

    def end(self, key: int) -> None:
        """Drop the recomputed tensors that a backward didn't read."""
        self._tables.pop(key, None)


def taken(table: dict[int, Held], number: int, name: str) -> torch.Tensor:
    """Return the tensor in `table` for slot `number` and remove it, so that memory falls while backward proceeds.

    In the backward of a `torch.autograd.Function` written in Python the tensor stays, since that may read
    `ctx.saved_tensors` again. It is dropped when the graph frees the slot, as without a plan.

    Raises
    ------
    UnsupportedModelError
        If the tensor was removed by an earlier read.
    """
    again = isinstance(current_node(), BackwardCFunction)
    held = table.get(number) if again else table.pop(number, None)
    if held is None:
        raise UnsupportedModelError(
            f"a tensor saved by stage {name!r} is read twice in one backward, which after a recompute only a "
            "torch.autograd.Function may do; keep or swap this stage"
        )
    return held.tensor()


class Handed(NamedTuple):
    """A tensor packed by the user's saved-tensor hooks around the step (`save_on_cpu`), and the unpacking hook."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]
    itself: Held | None
    """The tensor if the packed value contains it, to check that nothing wrote to it; None if the hook copied it."""

    def tensor(self) -> torch.Tensor:
        """Return the tensor that the hook unpacks.

        Raises
        ------
        RuntimeError
            If the hook didn't copy the tensor, and it was written to since.
        """
        if self.itself is not None:
            self.itself.tensor()
        return self.unpack(self.packed)


def hold(tensor: torch.Tensor, packing: Packing | None) -> Held | Handed:
    """Hold a stage's input for its recompute: packed if it may be swapped, otherwise by the user's hooks, if any.

    As for tensors that autograd saves, the innermost hooks decide (NOTE [Hooks around a stage]).
    """
    if isinstance(tensor, nn.Parameter):
        return Held(tensor) if packing is None else packing.pack(tensor)
    held = tensor.detach()
    if packing is not None:
        return packing.pack(held)
    hooks = saved_tensors_hooks(False)
    if hooks is None or not keep_values(hooks):
        return Held(held)
    packed = hooks[0](held)
    copied = all(leaf is not held for leaf in pytree.tree_leaves(packed))
    return Handed(packed, hooks[1], None if copied else Held(held))


def run_recomputed(
    stage: PlannedStage,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    session: SwapSession | None = None,
    checks: Checks | Spots | None = None,
) -> Any:
    """Call `original(*args, **kwargs)` so that backward recomputes the tensors that autograd would have saved.

    Only the tensors in the arguments are held, as if autograd had saved them, and the outputs of the stage's `ops`
    (NOTE [Numbering] in selective.py). If `stage.planned_bytes` is given, and forward takes another path on which `ops`
    would save other outputs, the stage is recomputed completely. Without planned bytes, such a path is an error.

    Parameters
    ----------
    stage : PlannedStage
        Its `moves` are positions among the held tensors: the outputs of `ops` come first, in order, then the inputs.
    session : SwapSession, optional
        Holds the saved tensors; required if the stage moves any.
    checks : Checks or Spots, optional
        Compares the tensors that the recompute reads and saves with those of this run.

    Returns
    -------
    object
        The output of the stage.
    """
    choice = stage.choice
    inputs, outputs = (None, None) if session is None else (session.packing(), session.packing())
    selection, check = None, None if checks is None else checks.stage(stage)
    if choice.ops:
        pack = None if outputs is None else outputs.pack
        selection = SavedOutputs(choice.ops, pack, stage.name, stage.planned_bytes, check)
        original = selection.around(original)
    if check is not None:
        original = check.around(original)
    call = Call(stage, original)
    tensors = call.split(args, kwargs)
    del args, kwargs
    frame = LoneFrame(stage.name, call)
    frame.check = check
    result = frame.forward(tensors, [hold(tensor, inputs) for tensor in tensors])
    del frame  # the graph owns it
    if selection is not None and selection.gave_up:
        stage.counters.other_paths += 1
        if outputs is not None:
            outputs.saved.clear()
    if inputs is not None and outputs is not None and session is not None:
        saved = [*outputs.saved, *inputs.saved]
        outputs.saved.clear()
        inputs.saved.clear()
        session.leave(stage.index, saved, choice.transfers, choice.tier)
    return result
