"""Selective recompute, moved inputs and segments: every plan here is written by hand, no profile is involved."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from by_hand import AGAIN, CPU, carried_out
from counting import Log
from odd.harness import BATCH, WIDTH
from odd.layers import Around, Layer, in_turn, layer_of, layers_of
from small_models import Operations, assert_same, build, call, gradients
from small_models import train as trained
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from ckptplan.core.errors import PlanMismatchError, UnsupportedModelError
from ckptplan.core.plan import KEEP, Decision, Decisions
from ckptplan.core.segment import Segment
from ckptplan.runtime.controller import Controller
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.recompute.selective import NumberedOps, alias, can_be_saved, is_random
from ckptplan.runtime.swap.stores import NULL_STORES, make_store
from ckptplan.training.measure import no_cycles_collected
from ckptplan.training.step import model_device

train = functools.partial(trained, steps=2)


@contextlib.contextmanager
def applied(
    model: nn.Module, stages: Sequence[str], choices: Sequence[Decision] | None = None, segments: Sequence[Segment] = ()
) -> Iterator[Controller]:
    device = model_device(model)
    store = make_store(device, capacity_bytes=1 << 24, directory=None, limit_bytes=None)
    with carried_out(model, stages, choices, segments, stores={"host": store}, device=device) as controller:
        yield controller
    store.close()


def planned_runs(stages: Sequence[str], choices: Sequence[Decision], segments: Sequence[Segment]) -> list[int]:
    runs = [1 + (choice.action == "recompute") for choice in choices]
    for segment in segments:
        for i in range(segment.first, segment.last + 1):
            runs[i] = 1 + segment.depth(i)
    return [0 if name.startswith("(") else n for name, n in zip(stages, runs, strict=True)]


def check(
    model: nn.Module,
    inputs: Any,
    stages: Sequence[str],
    choices: Sequence[Decision] | None = None,
    segments: Sequence[Segment] = (),
    run: Callable[[nn.Module, Any], Any] = train,
    steps: int = 2,
) -> Controller:
    """Everything bitwise as in the plain model, and every stage run exactly as often as planned."""
    choices = choices or [AGAIN] * len(stages)
    want = run(copy.deepcopy(model), inputs)
    with applied(model, stages, choices, segments) as controller:
        found = run(model, inputs)
        assert_same(found, want)
    counted = [controller.counters.runs[i] for i in range(len(stages))]
    assert counted == [steps * n for n in planned_runs(stages, choices, segments)]
    return controller


# Models


def loop(glue: bool = False) -> Any:
    """`for layer in self.layers`, with dropout, and operations between the calls if wanted."""
    forward = in_turn(lambda layer, x: x + torch.tanh(layer(x)) if glue else layer(x))
    blocks = (nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Dropout(0.1)) for _ in range(6))
    return Around(blocks, forward), torch.randn(32, 64), [f"layers.{i}" for i in range(6)]


def glued() -> Any:
    model, x, stages = loop(glue=True)
    return model, x, [name for stage in stages for name in (stage, f"(after {stage})")]


def conv() -> Any:
    return *build("conv_norm"), [str(i) for i in range(4)]


def shared() -> Any:
    return *build("shared"), ["blocks.0", "blocks.0#2", "blocks.0#3", "blocks.1"]


def unet() -> Any:
    """Outputs of early stages used by the next one and by a late one."""

    def forward(layers: Any, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for i, layer in enumerate(layers):
            x = layer(x) if i < 4 else layer(x, skips.pop())
            skips += [x] * (i < 3)
        return x

    def block(m: Any, x: torch.Tensor, *skip: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(torch.tanh(m.norm(m.linear(sum(skip, x)))), 0.1)

    blocks = (layer_of(block, norm=lambda: nn.LayerNorm(WIDTH))() for _ in range(7))
    return Around(blocks, forward), torch.randn(BATCH, WIDTH), [f"layers.{i}" for i in range(7)]


MODELS = {f.__name__: f for f in (loop, glued, conv, shared, unet)}


def make(name: str) -> tuple[nn.Module, Any, list[str]]:
    torch.manual_seed(0)
    model, inputs, stages = MODELS[name]()
    return model.train(), inputs, stages


def modules_of(stages: Sequence[str]) -> list[int]:
    return [i for i, name in enumerate(stages) if not name.startswith("(")]


# Segments


@pytest.mark.parametrize(
    ("name", "how"), [("loop", "chain"), ("loop", "single"), ("glued", "nested"), ("conv", "two"), ("unet", "nested")]
)
def test_gradients_and_runs(name: str, how: str) -> None:
    model, inputs, stages = make(name)
    m = modules_of(stages)
    n = len(m)
    shapes: dict[str, Callable[[], list[Segment]]] = {
        "two": lambda: [Segment(m[0], m[n // 2 - 1]), Segment(m[n // 2], m[-1])],
        "nested": lambda: [Segment(m[0], m[-1], (Segment(m[0], m[1]), Segment(m[2], m[n - 2])))],
        "chain": lambda: [Segment(m[0], m[-1], (Segment(m[0], m[3], (Segment(m[0], m[2], (Segment(m[0], m[1]),)),)),))],
        "single": lambda: [Segment(m[1], m[-1], (Segment(m[1], m[1]), Segment(m[3], m[3])))],
    }
    choices = [AGAIN if i in m else KEEP for i in range(len(stages))]
    check(model, inputs, stages, choices, shapes[how]())


def test_frozen_stages_and_inputs_that_need_gradients() -> None:
    model, x, stages = make("loop")
    for p in (*model.layers[0].parameters(), *model.layers[3].parameters()):
        p.requires_grad_(False)
    # Nothing in the first stage needs a gradient: it saves nothing, and only runs again for the others.
    check(copy.deepcopy(model), x, stages, segments=[Segment(0, 5, (Segment(0, 3),))])
    x.requires_grad_()

    def run(model: nn.Module, x: torch.Tensor) -> Any:
        x.grad = None
        return [*train(model, x), x.grad]

    check(model, x, stages, segments=[Segment(0, 5, (Segment(0, 3),))], run=run)


NESTED = [Segment(0, 5, (Segment(0, 3, (Segment(0, 1),)),))]


@pytest.mark.parametrize("at", [1, 4])
def test_partial_backward_then_the_rest(at: int) -> None:
    """A backward that begins in the middle of a segment runs what it needs and no later stage, and leaves nothing."""

    def run(model: nn.Module, x: torch.Tensor) -> Any:
        torch.manual_seed(1)
        kept: list[torch.Tensor] = []
        hook = model.layers[at].register_forward_hook(lambda _, __, output: kept.append(output))
        loss = call(model, x)
        hook.remove()
        del log[:]
        part = torch.autograd.grad(kept.pop().sum(), list(model.layers[: at + 1].parameters()), retain_graph=True)
        assert all(output.expired() for _, _, output in log)
        between = dict(counters[0].runs) if counters else {}
        loss.backward()
        return [list(part), gradients(model)], between

    counters: list[Counters] = []
    log = Log()
    model, x, stages = make("loop")
    want, _ = run(copy.deepcopy(model), x)
    with applied(model, stages, segments=NESTED) as controller, live_outputs(model, stages, log), no_cycles_collected():
        counters.append(controller.counters)
        found, between = run(model, x)
        assert_same(found, want)
        assert all(between[i] == 1 for i in range(at + 1, 6))
        assert all(2 <= between[i] <= 4 for i in range(at + 1))


def test_saved_tensors_looked_at_outside_of_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    x = torch.randn(4, 8)
    with applied(model, ["0", "1"], segments=[Segment(0, 1)]):
        out = model(x)
        assert torch.equal(out.grad_fn._saved_result, out)
        assert torch.equal(out.grad_fn._saved_result, out)
        out.sum().backward()


def test_hooks_that_read_a_saved_tensor_twice() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()))
    with applied(model, ["0", "1"]):
        out = model(torch.randn(4, 8))
        out.grad_fn.register_prehook(lambda grads: [out.grad_fn._saved_result, None][1])
        with pytest.raises(UnsupportedModelError, match="'1' is read twice in one backward"):
            out.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "cast"), [("loop", False), ("conv", True), ("unet", False)])
def test_on_a_gpu(name: str, cast: bool) -> None:
    """Backward runs in another thread there, and the device has random states of its own."""
    model, inputs, stages = make(name)
    model, inputs = model.cuda(), pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), inputs)
    context = functools.partial(torch.autocast, "cuda", dtype=torch.bfloat16, enabled=cast)
    run = functools.partial(train, context=context)
    n = len(stages)
    check(copy.deepcopy(model), inputs, stages, run=run, segments=[Segment(0, n - 1, (Segment(0, n - 2),))])
    choices = [moving((0,), i, n - 1) if i == 1 else AGAIN for i in range(n)]
    check(model, inputs, stages, choices, [Segment(1, n - 1, (Segment(1, n - 2),))], run=run)


@pytest.mark.gpu
def test_stages_on_several_streams() -> None:
    model, x, stages = make("loop")
    model, x = model.cuda(), x.cuda()

    def hook(*_: Any) -> None:
        torch.cuda.set_stream(torch.cuda.Stream())

    model.layers[2].register_forward_hook(hook)
    try:
        with (
            applied(model, stages, segments=[Segment(0, 5)]),
            pytest.raises(UnsupportedModelError, match="another stream"),
        ):
            model(x)
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())


# Memory


@contextlib.contextmanager
def live_outputs(model: nn.Module, stages: Sequence[str], log: list[Any]) -> Iterator[None]:
    """Keep weak references to every run's input and output storages: (stage, its input, its output)."""

    def note(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: torch.Tensor) -> None:
            log.append((index, *(StorageWeakRef(t.untyped_storage()) for t in (args[0], output))))

        return hook

    inner = [model.get_submodule(name) for name in stages]
    handles = [module[-1].register_forward_hook(note(i)) for i, module in enumerate(inner)]
    yield
    for handle in handles:
        handle.remove()


def test_what_a_sweep_holds() -> None:
    """By the book (NOTE [Residency], rule 6): of inner segments their first inputs, of the others what keep saves."""
    model, x, stages = make("loop")
    model.layers[5][3].p = 0.0  # saves nothing by itself
    log, at_start = Log(), Log()

    def begins(i: int, *_: Any) -> None:
        at_start.append((i, [j for j, _, output in log if not output.expired()]))

    for i, layer in enumerate(model.layers):
        layer[0].register_forward_pre_hook(functools.partial(begins, i))
    segments = [Segment(0, 5, (Segment(0, 1), Segment(2, 3)))]
    with applied(model, stages, segments=segments), live_outputs(model, stages, log), no_cycles_collected():
        loss = call(model, x)
        assert [i for i, _, output in log if not output.expired()] == []
        log.clear()
        at_start.clear()
        loss.backward()
    assert at_start == [
        # The sweep: 0 1 | 2 3 | 4, then the last stage. 2 gets 1's output, and the inner segment 2..3 keeps it.
        (0, []),
        (1, [0]),
        (2, [1]),
        (3, [1, 2]),
        (4, [1, 3]),
        (5, [1, 3, 4]),
        # 3..2 swept before the backward of 3, from what 2 held; nothing above is left.
        (2, [1]),
        (3, [1, 2]),
        (0, []),
        (1, [0]),
    ]
    assert all(output.expired() for _, _, output in log)


def one_inside_another(n: int) -> Segment:
    """The least memory: every stage but the last is run again for each later one."""
    return functools.reduce(lambda inside, last: Segment(0, last, (inside,)), range(1, n), Segment(0, 0))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.long
def test_long_segments_and_deep_nests_need_no_deep_recursion(nested: bool) -> None:
    torch.manual_seed(0)
    n = 40 if nested else 200
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(n)))
    stages, x = [str(i) for i in range(n)], torch.randn(4, 8)
    halves = Segment(0, n - 1, (Segment(0, n // 2, (Segment(0, n // 4),)), Segment(n // 2 + 1, n - 2)))
    segments = [one_inside_another(n) if nested else halves]
    limit = sys.getrecursionlimit()
    want = train(copy.deepcopy(model), x, steps=1)
    with applied(model, stages, segments=segments):
        sys.setrecursionlimit(len(inspect.stack(0)) + 150)
        try:
            assert_same(train(model, x, steps=1), want)
            loss = call(model, x)
            del loss  # and no deep recursion to free it
        finally:
            sys.setrecursionlimit(limit)


# Failures


class Planted(Exception):
    """Thrown by the tests on purpose."""


RUNS = Log()


@pytest.mark.parametrize(("stage", "run"), [(0, 3), (2, 2), (5, 1)])
def test_after_an_exception_the_next_step_is_right(stage: int, run: int) -> None:
    """In forward, in a sweep, in an inner sweep; then the same graph again, where it is still there."""
    model, x, stages = make("loop")
    want = train(copy.deepcopy(model), x, steps=1)
    RUNS.clear()

    def fail(*_: Any) -> None:
        RUNS.append(stage)
        if len(RUNS) == run:
            raise Planted

    with applied(model, stages, segments=NESTED):
        hook = model.layers[stage][2].register_forward_hook(fail)
        loss = None
        planted = run <= 1 + NESTED[0].depth(stage)
        with pytest.raises(Planted) if planted else contextlib.nullcontext():
            torch.manual_seed(7)
            loss = call(model, x)
            loss.backward(retain_graph=True)
        hook.remove()
        RUNS.extend(range(run))  # graphs of that forward still call it
        if loss is not None:
            model.zero_grad()
            loss.backward()
            assert_same([loss.detach(), gradients(model)], want[0][:2])
        model.zero_grad()
        assert_same(train(model, x, steps=1), want)


def test_an_exception_between_stages_frees_what_an_open_segment_holds() -> None:
    model, x, stages = make("loop")

    def fail(*_: Any) -> None:
        raise Planted

    choices = [AGAIN, AGAIN, moving((0,), 2, 3), AGAIN, AGAIN, AGAIN]
    with applied(model, stages, choices, [Segment(2, 5)]) as controller:
        hook = model.layers[4].register_forward_pre_hook(fail)  # called before the stage's own code
        with pytest.raises(Planted):
            call(model, x)
        hook.remove()
        gc.collect()
        assert not controller._stores["host"].used_bytes  # type: ignore[attr-defined]


def slope_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    inside = x.detach().requires_grad_()
    y = nn.functional.dropout(torch.tanh(m.linear(inside)), 0.5)
    return torch.autograd.grad(y.sum(), inside, create_graph=True)[0] * x


@pytest.mark.parametrize(
    ("run", "segments", "match"),
    [
        (lambda m, x: x.mul_(2), [Segment(0, 2)], "stage '1' writes to its inputs"),
        (slope_inside, [Segment(0, 2)], "stage '1', which is to run again, runs backward inside"),
        (slope_inside, [], "stage '1', which is to run again, runs backward inside"),
    ],
)
def test_what_a_stage_may_not_do(run: Any, segments: list[Segment], match: str) -> None:
    model = nn.Sequential(Layer(), layer_of(run)(), Layer())
    with applied(model, ["0", "1", "2"], segments=segments), pytest.raises(UnsupportedModelError, match=match):
        model(torch.randn(4, WIDTH))


PATHS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "same": lambda m, x: torch.tanh(m.linear(x)),
    "more": lambda m, x: torch.tanh(torch.sigmoid(m.linear(x))),
    "fewer": lambda m, x: m.linear(x),
    "scaled": lambda m, x: torch.tanh(m.linear(x * 2)),
    "bytes": lambda m, x: torch.tanh(m.linear(x))[:, :16].repeat(1, 3)[:, :WIDTH],
}


def fickle(what: str) -> nn.Module:
    """Takes another path from its second call on."""
    calls = (n for n in itertools.count())  # unlike a number, nothing puts it back
    return layer_of(lambda m, x: PATHS[what if next(calls) else "same"](m, x))()


@pytest.mark.parametrize(("what", "inner"), [("more", ()), ("fewer", (Segment(0, 1),)), ("bytes", (Segment(0, 2),))])
def test_a_forward_that_takes_another_path(what: str, inner: tuple[Segment, ...]) -> None:
    model = nn.Sequential(Layer(), fickle(what), Layer(), Layer())
    with applied(model, ["0", "1", "2", "3"], segments=[Segment(0, 3, inner)]):
        loss = call(model, torch.randn(BATCH, WIDTH))
        with pytest.raises(PlanMismatchError, match="'1', run again"):
            loss.backward()


def test_segments_that_cannot_be() -> None:
    model, _, stages = make("glued")
    again = [AGAIN if i % 2 == 0 else KEEP for i in range(12)]
    for segment, said in (
        (Segment(0, 3), "ends in '.after layers.1"),
        (Segment(1, 4), "1..4 begins in '.after layers.0"),
    ):
        with pytest.raises(PlanMismatchError, match=f"{said}.', which is no module's call"):
            Controller(model, Decisions(tuple(stages), tuple(again), (segment,)), NULL_STORES, CPU)


# Moved inputs


def moving(positions: tuple[int, ...], release: int, prefetch: int, **more: Any) -> Decision:
    return Decision.moving("recompute", positions, release, prefetch, **{"option": "recompute+swap", **more})


def test_a_segments_input_moves() -> None:
    """It is gone until the segment's last stage's backward; what is linked counts in the order and never moves."""
    model, x, stages = make("loop")
    choices = [AGAIN, AGAIN, moving((0,), 2, 5), AGAIN, AGAIN, AGAIN]
    nested = [Segment(2, 5, (Segment(2, 3),))]
    counters = check(copy.deepcopy(model), x, stages, choices, nested).counters
    assert counters.swapped_out_bytes == counters.swapped_in_bytes == 2 * 32 * 64 * 4
    log = Log()
    with applied(model, stages, choices, nested), live_outputs(model, stages, log):
        loss = call(model, x)
        held = [i for i, _, output in log if not output.expired()]
        assert held == [0]  # the input of the second stage, alone; the caller's output is the loss
        loss.backward()
    choices[3] = moving((0,), 3, 5)
    want = train(copy.deepcopy(model), x)
    with applied(model, stages, choices, nested) as controller:
        assert_same(train(model, x), want)
        assert controller.counters.differences.counts == {"saved": 2}  # what its segment makes again doesn't move


def test_positions_count_linked_inputs() -> None:
    """unet's last stages get an input made inside the segment first, and one from outside second."""
    model, x, stages = make("unet")
    choices = [AGAIN] * 5 + [moving((1,), 5, 6), AGAIN]
    check(copy.deepcopy(model), x, stages, choices, [Segment(4, 6)])
    choices[5] = moving((0,), 5, 6)
    want = train(copy.deepcopy(model), x)
    with applied(model, stages, choices, [Segment(4, 6)]) as controller:
        assert_same(train(model, x), want)
        assert controller.counters.differences.counts == {"saved": 2}


# Selective recompute


def operations(model: nn.Module, stage: str, inputs: Any) -> tuple[list[Any], list[int]]:
    """The operations of a stage's forward by their numbers, and which may be saved: nothing writes over them."""
    found: list[Any] = []
    made: list[tuple[int, torch.Tensor]] = []
    name, _, wanted = stage.partition("#")
    module = model.get_submodule(name)
    real = type(module).forward
    calls = 0

    def run(number: int, func: Any, args: Any, kwargs: Any) -> Any:
        found.append(func)
        result = func(*args, **kwargs)
        if can_be_saved(func) and "unsafe_view" not in str(func):
            made.extend((number, alias(t)) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        return result

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        with NumberedOps(run) if calls == int(wanted or 1) else contextlib.nullcontext():
            return real(module, *args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]
    try:
        call(model, inputs)
    finally:
        del module.forward
    written = {number for number, tensor in made if tensor._version}
    return found, sorted({number for number, _ in made} - written)


@pytest.mark.parametrize(
    ("name", "seed", "swap"),
    [("loop", 0, True), ("shared", 1, False), ("conv", 2, True), ("unet", 3, False), ("unet", 4, True)],
)
def test_selective(name: str, seed: int, swap: bool) -> None:
    """Random choices of operations in every stage, some moved: gradients bitwise; the chosen ones run once.

    One model is run under autocast: a recompute casts parameters that forward found in autocast's cache.
    """
    model, inputs, stages = make(name)
    context = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=name == "shared")
    rng = random.Random(f"{name} {seed}")
    choices = []
    for i, stage in enumerate(stages):
        with context():
            found, can = operations(copy.deepcopy(model), stage, inputs)
        can = [n for n in can if not is_random(found[n])]
        ops = tuple(sorted(rng.sample(can, rng.randint(1, len(can)))))
        if not swap:
            choices.append(Decision("recompute", ops=ops, option="selective-1"))
            continue
        moves = tuple(sorted(rng.sample(range(len(ops)), rng.randint(1, len(ops)))))
        choices.append(moving(moves, i, i, ops=ops, option="selective-1+swap"))
    counters = check(model, inputs, stages, choices, run=functools.partial(train, context=context)).counters
    assert counters.swapped_out_bytes == counters.swapped_in_bytes
    assert (counters.swapped_out_bytes > 0) == swap


def test_saved_operations_run_once() -> None:
    model, x, stages = make("loop")

    def products(choice: Decision) -> tuple[int, int]:
        with applied(model, stages, [choice] * 6), Operations() as ran:
            call(model, x).backward()
        return ran.names.count("aten.addmm.default"), ran.names.count("aten.gelu.default")

    assert products(KEEP) == (12, 6)
    # The second product isn't needed by dropout's backward, but it comes before what is.
    assert products(AGAIN) == (24, 12)
    assert products(Decision("recompute", ops=(0,), option="selective-1")) == (18, 12)
    assert products(Decision("recompute", ops=(0, 1, 2), option="selective-2")) == (12, 6)


def draws(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Draws twice: number 1 and number 4 are random and no view of anything."""
    x = x * torch.rand_like(x)
    return torch.tanh(m.linear(x * torch.bernoulli(x.sigmoid())))


def test_random_operations_are_saved_from_the_last_on() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*layers_of(layer_of(draws))), torch.randn(BATCH, WIDTH)
    found, _ = operations(model, "1", x)
    first, second = [i for i, func in enumerate(found) if is_random(func)]
    stages = ["0", "1", "2"]
    for ops in ((second,), (first, second), (first, second, first + 1)):
        check(copy.deepcopy(model), x, stages, [Decision("recompute", ops=tuple(sorted(ops)))] * 3)
    with (
        applied(model, stages, [Decision("recompute", ops=(first,))] * 3),
        pytest.raises(PlanMismatchError, match=f"saves the random operation number {first} and replays"),
    ):
        call(model, x)
    check(model, x, stages)


@pytest.mark.parametrize(
    ("op", "match"),
    [
        (4, r"number 4, aten\.bernoulli_\.float, which is a view"),
        (99, "ran 7 operations"),
        ("_unsafe_view", r"aten\._unsafe_view\.default, which is a view"),
    ],
)
def test_operations_that_cannot_be_saved(op: int | str, match: str) -> None:
    """A product over more than two dimensions ends in a view by another name, whose schema doesn't say that it is."""
    model, x, stages = make("loop")
    if isinstance(op, str):
        model, x, stages = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()), torch.randn(2, 4, 8), ["0"]
        op = next(i for i, func in enumerate(operations(model, "0", x)[0]) if str(op) in str(func))
    choices = [Decision("recompute", ops=(op,))] * len(stages)
    with applied(model, stages, choices), pytest.raises(PlanMismatchError, match=match):
        call(model, x)


overwriting = layer_of(lambda m, x: m.last(m.linear(x).add_(1.0).relu_()), last=lambda: nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("moves", [(), (0,)])
def test_a_saved_output_written_over(moves: tuple[int, ...]) -> None:
    """An error, never the value after."""
    model, x = nn.Sequential(overwriting(), overwriting()), torch.randn(BATCH, WIDTH)
    choice = moving(moves, 0, 0, ops=(0,)) if moves else Decision("recompute", ops=(0,))
    with applied(model, ["0", "1"], [choice, AGAIN]):
        loss = call(model, x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_selective_stage_that_takes_another_path() -> None:
    model = nn.Sequential(fickle("scaled"))
    with applied(model, ["0"], [Decision("recompute", ops=(1,))]):
        loss = call(model, torch.randn(BATCH, WIDTH))
        with pytest.raises(PlanMismatchError, match=r"number 0 was aten\.addmm\.default .* and is aten\.mul\.Tensor"):
            loss.backward()
