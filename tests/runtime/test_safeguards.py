"""Each safeguard against wrong values, patched away: a small training is wrong without it, and isn't with it.

An entry names a function and what to put in its place. Entries don't depend on each other. `SAFEGUARDS` trains one of
the models of `tests/odd` or of those below: with the function it equals plain training or ends in an error; without it
some value is another one where nothing is checked, and the checks find that, unless the entry says they can't. `CHECKS`
has parts of the checks, each with a training that it finds to be wrong, and `WAITS` what orders streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import odd  # noqa: F401 - registers its cases
import pytest
import stream_programs
import test_streams
import torch
from fake_kernels import Device
from odd.harness import BATCH, CASES, STEPS, WIDTH, Case, Odd, Trial, in_steps, loss_of, one_forward_around, plain_loop
from odd.layers import around, buffer, chain, factored, layer_of
from stream_programs import WAITS, Wait
from torch import nn

from ckptplan.core.errors import CheckError
from ckptplan.profiling.times import timing
from ckptplan.profiling.values import watched
from ckptplan.runtime import patching
from ckptplan.runtime.guard import fused_steps
from ckptplan.runtime.guard.check import Checks, Spots, StageCheck, StageSpots
from ckptplan.runtime.guard.digests import Digest
from ckptplan.runtime.recompute import call, frames, module_tables, segments, selective
from ckptplan.runtime.swap import packing, users_hooks
from ckptplan.runtime.swap.stores import arena, disk
from ckptplan.state import cells, generators, modes, surroundings, variables
from ckptplan.tensors.views import Geometry

Training = str | Callable[[], Odd]
"""The name of a case of `tests/odd`, or a builder."""


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of a function that is called for its effect."""


def no_change(*args: Any) -> Callable[[], None]:
    """In place of a function that changes state and returns what takes the change back."""
    return nothing


# ---------------------------------------------------------------- models that `tests/odd` doesn't have


def between(change: Callable[[Any, torch.Tensor], object]) -> Any:
    """Return a loop with `change`, of model and input, between forward and backward."""

    @in_steps
    def loop(model: nn.Module, x: torch.Tensor) -> list[Any]:
        given = x.clone()
        loss = loss_of(model(given))
        change(model, given)
        loss.backward()
        return [loss.detach()]

    return loop


BIAS = {"bias": lambda: nn.Parameter(torch.zeros(WIDTH))}
SINE = layer_of(lambda m, x: torch.sin(x + m.bias + m.shift), **BIAS, shift=buffer())
"""Autograd saves neither the input nor the parameter and the buffer, which a recompute reads."""


def input_written() -> Odd:
    return chain(SINE, between(lambda model, x: x.mul_(0.5)))


def parameter_written() -> Odd:
    return chain(SINE, between(lambda model, x: model[0].bias.detach().add_(0.5)))


def buffer_written() -> Odd:
    return chain(SINE, between(lambda model, x: model[0].shift.add_(0.5)))


def saved_tensor_written() -> Odd:
    """Of a tensor that is too small to be swapped; plain training ends with PyTorch's error, too."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.factor = m.linear.bias.detach().cos()
        return torch.tanh(m.linear(x)) * m.factor

    def loop(model: Any, x: torch.Tensor) -> Iterator[list[Any]]:
        for _ in range(STEPS):
            loss = loss_of(model(x))
            model[1].factor.mul_(0.5)
            try:
                loss.backward()
                yield ["no error"]
            except RuntimeError as error:
                yield ["modified by an inplace operation" in str(error)]

    return chain(layer_of(forward), loop)


def activation_written() -> Odd:
    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
            x.mul_(0.5)
        return x

    return around(forward, layer_of(lambda m, x: x + torch.tanh(m.linear(x)) + 1))


def views() -> Odd:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        left, right = m.linear(x).chunk(2, -1)
        return torch.tanh(left) * torch.sin(right)

    return chain(layer_of(forward, linear=lambda: nn.Linear(WIDTH, 2 * WIDTH)))


def count_of_calls() -> Odd:
    def factor(m: Any) -> int:
        m.calls += 1
        return m.calls  # type: ignore[no-any-return]

    return chain(factored(factor, calls=lambda: 0))


def dropout() -> Odd:
    return chain(layer_of(lambda m, x: x + nn.functional.dropout(torch.tanh(m.linear(x)), 0.3)))


def autocast_in_forward() -> Odd:
    """Autocast rounds a factor that needs no gradient, so the types of all that is saved are the same without it."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        weight = m.linear.weight.detach()
        return torch.sin(x + m.bias) * torch.sin((weight @ weight).float().sum(0))

    stage = layer_of(forward, **BIAS)
    return chain(stage, one_forward_around(lambda: torch.autocast("cpu", torch.bfloat16)))


TICKS = ctypes.c_int(0)
"""A counter that nothing finds."""


def hidden_counter() -> Odd:
    def factor(m: Any) -> int:
        TICKS.value += 1
        return TICKS.value

    def loop(model: nn.Module, x: torch.Tensor) -> Iterator[list[Any]]:
        TICKS.value = 0
        return plain_loop(model, x)

    return chain(factored(factor), loop)


PROGRAM = types.SimpleNamespace(other=False)
"""A variable of the program, which is another one in backward than in forward."""
in_other = one_forward_around(functools.partial(mock.patch.object, PROGRAM, "other", True))


def another_shape() -> Odd:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x + m.bias) * (
            torch.full((1, WIDTH), 0.5) if PROGRAM.other else torch.full((BATCH, WIDTH), 1.5)
        )

    return chain(layer_of(forward, **BIAS), in_other)


def another_operation() -> Odd:
    return chain(layer_of(lambda m, x: m.linear(torch.sigmoid(x) if PROGRAM.other else torch.tanh(x))), in_other)


def faulty(training: Training, fault: tuple[Any, str, Any], *, late: bool = False) -> Callable[[], Odd]:
    """Return a builder of a model whose training under a plan has a fault; if `late`, behind three steps without."""

    def build() -> Odd:
        made = trial(training).case.build()

        def loop(model: nn.Module, x: torch.Tensor) -> Iterator[list[Any]]:
            for _ in made.loop(model, x) if late else ():
                pass
            with mock.patch.object(*fault):
                yield from made.loop(model, x)

        return Odd(made.model, made.inputs, loop)

    return build


@functools.cache
def trial(training: Training) -> Trial:
    """The trial of a model, plain training of which is done once."""
    return Trial(CASES[training] if isinstance(training, str) else Case(training.__name__, "1", "", training))


# ---------------------------------------------------------------- what keeps values right


@dataclass(frozen=True, slots=True)
class Safeguard:
    """A function without which a training has wrong values.

    Attributes
    ----------
    what : str
        What it does.
    owner, name, instead : object, str, object
        `instead` in place of the attribute `name` of `owner` takes it out.
    training : str or callable
        The model.
    decision : str
        That all stages have.
    unseen : bool
        The checks don't find that: forward and recompute agree, or what the user's hooks give isn't known in forward.
    profiles : bool
        It acts in profiling: the plan is made without it, too.
    """

    what: str
    owner: Any
    name: str
    instead: Any
    training: Training
    decision: str = "recompute"
    unseen: bool = False
    profiles: bool = False


def without_last(put: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `put`: the steps that would call `step` to take a change back are left out."""

    def put_for_good(self: Any, undo: list[Any], *args: Any) -> None:
        put(self, undo, *args)
        undo[:] = [each for each in undo if getattr(each, "func", None) is not step]

    return put_for_good


def unversioned(tensor: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `Held.tensor`: it may have been written to."""

    def found(self: Any) -> torch.Tensor:
        self.version = None
        return tensor(self)

    return found


def of_any_shape(save: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `Frame._save`: what a recompute saves may have another shape."""

    def saved(self: Any, tensor: torch.Tensor) -> Any:
        slot = save(self, tensor)
        self._like[-1] = mock.ANY
        return slot

    return saved


SAFEGUARDS = (
    # Random states, autocast, flags, modes
    Safeguard("a recompute draws the random numbers of its forward",
              surroundings, "_set_random_states", nothing, dropout),
    Safeguard("Python's and numpy's generators too",
              generators.Generators, "put", no_change, "numpy_bit_generator"),
    Safeguard("every draw from those is noticed",
              generators.Generators, "settle", lambda self: self._states.clear(), "numpy_bit_generator"),
    Safeguard("a recompute runs under the autocast of its forward",
              surroundings, "_autocast", lambda kind: (kind, torch.bfloat16, False, True), autocast_in_forward),
    Safeguard("flags are those of the forward",
              surroundings, "set_flags", nothing, "matmul_precision"),
    Safeguard("flags are back behind the recompute",
              surroundings.Surroundings, "put", without_last(surroundings.Surroundings.put, surroundings.set_flags),
              "default_dtype"),
    Safeguard("modes on functions and operations are those of the forward",
              modes.Modes, "differ", lambda self: False, "function_mode"),
    Safeguard("a mode of backward doesn't see the recompute",
              modes.Modes, "differ", lambda self: False, "dispatch_mode_in_backward"),
    Safeguard("context variables are those of the forward",
              variables.Variables, "run", lambda self, run, *args, **kwargs: run(*args, **kwargs), "context_variable"),
    Safeguard("all that a recompute changes is put back, though it ends by an exception",
              call, "put_back", lambda steps: steps[0](), "ema_buffer_through_data"),
    # Buffers and attributes
    Safeguard("buffers that a forward updates are copies in the recompute",
              call, "_cloned", lambda copies: {}, "functional_batch_norm"),
    Safeguard("a write to a buffer that raises no version is found",
              call._State, "_was_seen_written", lambda *args: False, "vector_quantisation"),
    Safeguard("buffers that share memory share it as copies too",
              call, "_copies", lambda tensors: {id(t): t.detach().clone() for t in tensors},
              "buffers_that_share_memory"),
    Safeguard("attributes of a module are as the forward found them",
              cells.Snapshot, "put", no_change, count_of_calls),
    Safeguard("containers in attributes are as the forward found them",
              cells, "_same", lambda *args: True, "set_attribute"),
    Safeguard("a stage that reads what can't be put back isn't recomputed",
              timing, "same_bits", lambda *args: True, hidden_counter, profiles=True),
    # Parameters
    Safeguard("a stage whose parameters the step writes to isn't recomputed",
              watched.WatchedTensors, "changed", lambda *args: [], "weights_written_behind_each_layer",
              profiles=True),
    Safeguard("a parameter that was written to is an error",
              call, "_mark", lambda parameter: (0, None), parameter_written),
    Safeguard("a parameter whose data was replaced is an error",
              call, "_mark", lambda parameter: (parameter._version, None), "parameter_data_replaced_before_backward"),
    Safeguard("parameters that were replaced are back in the recompute",
              call._State, "_put_parameters", nothing, "parameters_replaced_before_backward"),
    Safeguard("a step of a fused optimizer, which raises no version, is an error",
              fused_steps.FusedSteps, "check", nothing, "fused_sgd_between_two_backwards"),
    Safeguard("so it is around a stage that is swapped, inside of the user's hooks",
              fused_steps.FusedSteps, "check", nothing, "fused_sgd_between_two_backwards_of_halves", "swap"),
    Safeguard("optimizers of others count as fused",
              fused_steps, "storages_of", lambda tensor: (), "other_optimizer_between_two_backwards"),
    Safeguard("parameters need gradients as in the forward",
              module_tables.ModuleTables, "_thawed", lambda self: [], "frozen_in_forward_and_thawed_of_equal_shapes"),
    Safeguard("hooks on modules are those of the forward",
              module_tables.ModuleTables, "_replace", nothing, "hooks_that_come_and_go"),
    # Saved tensors and inputs
    Safeguard("a write to what a stage is recomputed from is an error",
              packing.Held, "tensor", unversioned(packing.Held.tensor), input_written),
    Safeguard("a write to a buffer that the stage only reads is an error",
              call, "version_of", lambda tensor: 0, buffer_written),
    Safeguard("a write to a saved tensor of a swapped stage is an error",
              packing.Held, "tensor", unversioned(packing.Held.tensor), saved_tensor_written, "swap", unseen=True),
    Safeguard("in a segment, what was written to since a stage made it isn't made again by that stage",
              segments, "version_of", lambda tensor: 0, activation_written, "segment"),
    Safeguard("a recompute that saves another shape is an error",
              frames.Frame, "_save", of_any_shape(frames.Frame._save), another_shape),
    Safeguard("a saved output belongs to the same operation in the recompute",
              selective, "_operation", nothing, another_operation, "selective"),
    Safeguard("each alias of a swapped storage has its own offset in it",
              Geometry, "on", lambda self, whole: whole.view(self.dtype).as_strided(self.size, self.stride, 0),
              views, "swap", unseen=True),
    Safeguard("swapped storages don't lie on one another",
              arena.Arena, "take", lambda self, nbytes, grow: arena.Extent(self, 0), views, "swap"),
    # The user's own hooks, and copies
    Safeguard("the user's hooks on saved tensors act around a recomputed stage",
              users_hooks.UsersHooks, "around", staticmethod(nothing), "saved_tensors_hooks_of_the_user", unseen=True),
    Safeguard("they act around a swapped stage",
              users_hooks.UsersHooks, "around", staticmethod(nothing), "saved_tensors_hooks_of_the_user", "swap",
              unseen=True),
    Safeguard("they get tensors as in forward",
              users_hooks.Through, "_as_in_forward", lambda self, tensor: tensor, "saved_tensors_hooks_of_the_user",
              unseen=True),
    Safeguard("that they draw random numbers is an error",
              users_hooks.UsersHooks, "applied", lambda self, tensor: self.unpack(self.pack(tensor)),
              "saved_tensors_hooks_that_draw", unseen=True),
    Safeguard("a shallow copy of a stage runs its own weights",
              patching, "_instance_called", nothing, "copied_layer_that_is_trained", unseen=True),
)  # fmt: skip


def outcome(trained: Trial, *args: Any, **kwargs: Any) -> Any:
    """The outcome of a trial; what is taken out may be what puts a flag back."""
    try:
        return trained.outcome(*args, **kwargs)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("safeguard", SAFEGUARDS, ids=lambda safeguard: safeguard.what)
def test_values_are_wrong_without_it(safeguard: Safeguard, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, decision = trial(safeguard.training), safeguard.decision
    plan = trained.plan_for(decision)
    if safeguard.profiles:
        assert plan is None, "no stage has the decision"
    else:
        with_it = outcome(trained, decision, plan=plan, check="off")
        assert with_it.kind in ("equal", "error"), with_it
    monkeypatch.setattr(safeguard.owner, safeguard.name, safeguard.instead)
    if safeguard.profiles:
        plan = Trial(trained.case).plan_for(decision)
    without = outcome(trained, decision, plan=plan, check="off")
    assert without.kind == "DIFFERENT", without
    checked = outcome(trained, decision, plan=plan)
    if safeguard.unseen:
        assert checked.kind == "DIFFERENT", checked
    else:
        assert checked.detail.startswith("CheckError"), checked
        assert checked.step <= without.step


# ---------------------------------------------------------------- what finds wrong values


OTHER_FLAGS = surroundings, "set_flags", nothing
LEFT = call, "put_back", lambda steps: steps[0]()
UNWRITTEN = disk, "_write", nothing
CHECKS = (  # parts of the checks, each with a training that is wrong and that nothing else finds
    Safeguard("digests are compared",
              Digest, "is_like", lambda *args: True, "parameter_data_between_forward_and_backward"),
    Safeguard("what a recompute saves is compared",
              StageCheck, "compare_saved", nothing, faulty("matmul_precision", OTHER_FLAGS)),
    Safeguard("what a recompute leaves behind is compared",
              StageCheck, "unchanged", lambda self: contextlib.nullcontext(), faulty("ema_buffer_through_data", LEFT)),
    Safeguard("what a swap brings back is compared",
              Checks, "leaves", nothing, faulty(views, UNWRITTEN), "swap"),
    Safeguard("what a stage saved and others write to is compared",
              Checks, "backward_begins", nothing, "output_edited_that_its_layer_saved"),
    Safeguard("what the user's hooks get in backward is compared",
              Checks, "saves", lambda *args: nothing, "output_edited_that_the_users_hooks_saved", "swap"),
    Safeguard("in passes without digests, spots of what a recompute saves are compared",
              StageSpots, "compare_saved", nothing, faulty("matmul_precision", OTHER_FLAGS, late=True)),
    Safeguard("and spots of what a swap brings back",
              Spots, "leaves", nothing, faulty(views, UNWRITTEN, late=True), "swap"),
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.what)
def test_wrong_values_are_not_found_without_it(check: Safeguard, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, decision = trial(check.training), check.decision
    plan = trained.plan_for(decision)
    unchecked = outcome(trained, decision, plan=plan, check="off")
    assert unchecked.kind == "DIFFERENT", unchecked
    found = outcome(trained, decision, plan=plan)
    assert found.detail.startswith("CheckError"), found
    monkeypatch.setattr(check.owner, check.name, check.instead)
    without = outcome(trained, decision, plan=plan)
    assert without.kind == "DIFFERENT", without


# ---------------------------------------------------------------- what orders streams


@functools.cache
def plain() -> stream_programs.Run:
    return stream_programs.train(Device.prompt(0), 0, None)


def training(seed: int) -> None:
    """Two steps of a model on several streams, under a plan drawn by the seed, on a device that runs late."""
    run = stream_programs.train(Device(seed), 0, stream_programs.random_plan(0, random.Random(seed)))
    assert run.swapped_bytes or run.recomputed_stages
    assert not stream_programs.differing(run, plain())
    assert run.left_bytes == 0


def records(seed: int) -> None:
    """Storages that are swapped while several streams compute."""
    test_streams.test_records_of_several_streams(seed, "pinned", Path())  # a store that uses no folder


NOTICED: dict[str, tuple[Callable[[int], None], int]] = {
    "a copy out waits for compute": (training, 0),
    "a copy in waits for compute, which had the memory": (training, 0),
    "a copy in waits for its own copy out": (records, 5),
    "a copy out waits for copies that used its host memory": (records, 4),
    "the stream that computes now is asked at every copy": (training, 0),
    "memory is free only behind its copy out": (training, 4),
    "compute waits for a copy in": (training, 0),
    "a target is freed only behind its copy in": (records, 21),
    "copies wait for the stream that saved the storage, and it for them": (records, 0),
    "the allocator knows of all streams that use a storage": (records, 2),
    "each stream that uses what came back waits for it": (records, 0),
    "a recompute runs on the stream of its forward": (training, 7),
}
"""A program and a seed that notice that a wait is missing."""


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.what)
@pytest.mark.long("a copy out waits for compute", "a recompute runs on the stream of its forward")
def test_values_are_wrong_without_a_wait(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    program, seed = NOTICED[wait.what]
    program(seed)
    monkeypatch.setattr(wait.owner, wait.name, wait.instead)
    with pytest.raises((AssertionError, CheckError)):
        program(seed)
