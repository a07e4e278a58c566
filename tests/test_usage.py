"""PyTorch as people use it, under every action: bitwise what the plain model gives, or an error that says why not."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from odd.harness import BATCH, WIDTH
from odd.layers import buffer, layer_of, layers_of
from small_models import Operations, assert_same, build, call, decided, gradients, measured, plan_of, products, saving
from small_models import step as plain_step
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ckptplan.core.errors import InvalidInputError, PlanMismatchError, UnsupportedModelError
from ckptplan.core.plan import KEEP, Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.segment import Segment
from ckptplan.profiling import profiler
from ckptplan.profiling.bytes import trace
from ckptplan.profiling.profiler import profile
from ckptplan.profiling.values.repeatable import is_repeatable
from ckptplan.runtime.handle import Handle, apply
from ckptplan.state.parameters import ParameterState
from ckptplan.training.step import default_loss

MIXTURE = ("swap", "recompute", "recompute+swap", "selective")
"""What the stages of a mixed plan do in turn."""
WHATS = ("mixed", "segment")


pytestmark = pytest.mark.usefixtures("no_leak")


def plan_for(
    model: nn.Module, inputs: Any, what: str, amp: torch.dtype | None = None, chain: Profile | None = None
) -> Plan:
    """A plan that does the same in every stage that can, or a mixture; in a segment, from the first to the last."""
    chain = chain or profile(model, inputs, menus=False, amp=amp)
    if what == "segment":
        return decided(chain, what)
    turn = itertools.cycle(MIXTURE)
    wanted = ["keep" if s.is_glue else next(turn) if what == "mixed" else what for s in chain.stages]
    plan = plan_of(chain, ["recompute" if name == "selective" else name for name in wanted])  # type: ignore[misc]
    with torch.autocast("cpu", amp, enabled=amp is not None):
        numbers = products(model, inputs, plan.stages)
    return saving(plan, numbers, [i for i, name in enumerate(wanted) if name == "selective"])


@functools.cache
def profiled(name: str, amp: torch.dtype | None) -> Profile:
    return profile(*build(name), menus=False, amp=amp)


@functools.cache
def planned(name: str, what: str, amp: torch.dtype | None = None) -> Plan:
    return plan_for(*build(name), what, amp, profiled(name, amp))


def really_did(handle: Handle, what: str) -> None:
    """The actions happened (a plan that does nothing is bitwise right, too)."""
    stats = handle.stats()
    assert stats.forwards > 0
    assert what == "swap" or stats.recomputed_stages > 0
    assert what not in ("swap", "mixed") or stats.swapped_out_bytes > 0


def check(make: Callable[[], tuple[nn.Module, Any]], what: str, run: Callable[[nn.Module, Any], Any]) -> None:
    """`run` twice under a plan gives what it gives on the plain model."""

    def built() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        return make()

    plan = plan_for(*built(), what)
    model, inputs = built()
    torch.manual_seed(5)
    wanted = [run(model, inputs), run(model, inputs)]
    model, inputs = built()
    with apply(model, plan) as handle:
        torch.manual_seed(5)
        assert_same([run(model, inputs), run(model, inputs)], wanted)
        really_did(handle, what)


def step(model: nn.Module, inputs: Any) -> list[Any]:
    return [*plain_step(model, inputs), {n: b.clone() for n, b in model.named_buffers()}]


# Ways to train


def autocast(model: nn.Module, x: Any, dtype: torch.dtype) -> Any:
    return plain_step(model, x, torch.autocast("cpu", dtype=dtype)(call))


def scaled(model: nn.Module, x: Any) -> Any:
    """Under a GradScaler; the second update is skipped, since its gradients are infinite."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    out: list[Any] = []
    for k in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = default_loss(model(x)) * (float("inf") if k == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = next(model.parameters()).clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, next(model.parameters())) == (k == 1)
        out.append([p.detach().clone() for p in model.parameters()])
    return [out, scaler.get_scale()]


def accumulated(model: nn.Module, x: Any) -> Any:
    """Over micro-batches of several sizes, into gradients that are zeroed in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        for part in (x[:2], x, x[:3]):
            (default_loss(model(part)) / 3).backward()
        out.append(gradients(model))
        optimizer.step()
    return out


def interleaved(model: nn.Module, x: Any) -> Any:
    """One forward, one backward, two graphs alive."""
    model.zero_grad()
    losses = [default_loss(model(part)) for part in (x, x[:2])]
    out = []
    for part in (x[:3], x):
        losses.append(default_loss(model(part)))
        losses.pop(0).backward()
        out.append(gradients(model))
    for loss in reversed(losses):
        loss.backward()
        out.append(gradients(model))
    return out


def several(model: nn.Module, x: Any) -> Any:
    model.zero_grad()
    losses = [default_loss(model(x)) for _ in range(3)]
    (losses[0] + 2 * losses[2]).backward()  # one graph never runs backward
    return [gradients(model), {n: b.clone() for n, b in model.named_buffers()}]


def twice(model: nn.Module, x: Any) -> Any:
    model.zero_grad()
    loss = default_loss(model(x))
    loss.backward(retain_graph=True)
    first = gradients(model)
    loss.backward()
    return [first, gradients(model)]


def doubly(model: nn.Module, x: Any) -> Any:
    """A gradient penalty."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return [slope.detach(), gradients(model)]


def partly(model: nn.Module, x: Any) -> Any:
    """The gradients of some parameters first, in another order than the graph's; then all."""
    model.zero_grad()
    loss = default_loss(model(x))
    parameters = list(model.parameters())
    part = torch.autograd.grad(loss, [parameters[-1], parameters[len(parameters) // 2]], retain_graph=True)
    loss.backward()
    return [list(part), gradients(model)]


def evaluated(model: nn.Module, x: Any) -> Any:
    """Evaluation in every form between a forward and its backward."""
    model.zero_grad()
    loss = default_loss(model(x))
    state = torch.get_rng_state()
    out = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out.append(model(x).clone())  # still in training mode: buffers move on
        model.eval()
        with context():
            out.append(model(x).clone())
        model.train()
    torch.set_rng_state(state)
    loss.backward()
    return [out, gradients(model), {n: b.clone() for n, b in model.named_buffers()}]


def updated(model: nn.Module, x: Any) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
    out = []
    for _ in range(3):
        optimizer.zero_grad()
        default_loss(model(x)).backward()
        optimizer.step()
        out.append([p.detach().clone() for p in model.parameters()])
    return [*out, {n: b.clone() for n, b in model.named_buffers()}]


USES: dict[str, tuple[str, Callable[[nn.Module, Any], Any]]] = {
    "autocast bfloat16": ("transformer", functools.partial(autocast, dtype=torch.bfloat16)),
    "GradScaler, float16": ("mlp", scaled),
    "accumulation": ("transformer", accumulated),
    "interleaved": ("transformer", interleaved),
    "several forwards": ("conv_norm", several),
    "retain_graph": ("mlp", twice),
    "double backward": ("mlp", doubly),
    "partial backward": ("transformer", partly),
    "evaluation": ("routed", evaluated),
    "frozen": ("low_rank", updated),
    "tied": ("tied", updated),
    "state": ("routed", updated),
    "in place, batch norm": ("conv_norm", updated),
}


@pytest.mark.filterwarnings("ignore:.*a forward without gradients runs while a")
@pytest.mark.filterwarnings("ignore:.*a backward keeps its graph")  # for which some of the plans have no room
@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("use", USES)
def test_a_way_to_train(use: str, what: str) -> None:
    name, run = USES[use]
    plain, inputs = build(name)
    torch.manual_seed(5)
    wanted = [run(plain, inputs), run(plain, inputs)]
    model, _ = build(name)
    noticed = contextlib.nullcontext()
    if run is doubly:
        noticed = pytest.warns(RuntimeWarning, match="a backward makes a graph of its own")
    plan = planned(name, what, getattr(torch, use.split()[1], None) if "float" in use else None)
    with noticed, apply(model, plan) as handle:
        torch.manual_seed(5)
        assert_same([run(model, inputs), run(model, inputs)], wanted)
        really_did(handle, what)


# Modules with state


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm])
def test_normalised_weights(norm: Callable[[nn.Module], nn.Module], what: str) -> None:
    """As in a discriminator: two forwards, then one backward. The older ones set the weight in a hook."""

    def make() -> tuple[nn.Module, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            # Stages are the layers themselves, and blocks around one.
            layers = [norm(nn.Linear(64, 64)) for _ in range(4)]
            return nn.Sequential(layers[0], nn.Tanh(), *(nn.Sequential(m, nn.Tanh()) for m in layers[1:])), x

    def run(model: nn.Module, x: torch.Tensor) -> Any:
        model.zero_grad()
        real, fake = model(x), model(x * 0.5)
        (real.mean() - fake.mean()).backward()
        return [gradients(model), {n: b.clone() for n, b in model.named_buffers()}]

    x = torch.randn(32, 64)
    # A hook that writes to a buffer outside of the stage's forward: nobody can tell whether that forward reads it.
    writes = norm is torch.nn.utils.spectral_norm and what == "segment"
    with pytest.raises(RuntimeError, match="modified by") if writes else contextlib.nullcontext():
        check(make, what, run)
    check(make, what, step)


# What a recompute would read is replaced


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("how", ["assign", "new", "data"])
def test_parameters_replaced_before_backward(how: str, what: str) -> None:
    """The gradient is that of the old parameters, as in the plain model, or an error says why it can't be."""

    def run(model: nn.Module, inputs: Any) -> Any:
        parameters = list(model.parameters())
        torch.manual_seed(5)
        loss = default_loss(model(inputs))
        if how == "assign":
            model.load_state_dict({n: v * 2 for n, v in model.state_dict().items()}, assign=True)
        elif how == "new":
            model[1][0].weight = nn.Parameter(torch.zeros(128, 64))
        else:
            model[1][0].weight.data = torch.zeros(128, 64)
        now = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        assert all(a is b for a, b in zip(model.parameters(), now, strict=True))
        return gradients

    wanted = run(*build("mlp"))
    model, inputs = build("mlp")
    with apply(model, planned("mlp", what)):
        if how == "data":
            with pytest.raises(RuntimeError, match="replaced between forward and backward"):
                run(model, inputs)
        else:
            assert_same(run(model, inputs), wanted)


scaled_by = layer_of(lambda m, x: torch.tanh(m.linear(x) + m.scale), scale=lambda: torch.full((WIDTH,), 2.0))
"""By what is neither parameter nor buffer."""


@pytest.mark.parametrize("what", WHATS)
def test_tensor_attributes_written_before_backward(what: str) -> None:
    model, x = nn.Sequential(*layers_of(scaled_by)), torch.randn(BATCH, WIDTH)
    with apply(model, plan_for(model, x, what)):
        loss = default_loss(model(x))
        model[1].scale.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad()
        loss = default_loss(model(x))
        former, model[1].scale = model[1].scale, torch.zeros(WIDTH)
        loss.backward()  # as in forward
        found = gradients(model)
        assert float(model[1].scale.sum()) == 0
        model[1].scale = former
    assert_same(found, step(model, x)[1])


def test_between_steps() -> None:
    """State saved and loaded, in place and by assignment, another data type and back, while the plan is applied."""
    model, inputs = build("mlp")
    plain, _ = build("mlp")

    def run(model: nn.Module) -> Any:
        torch.manual_seed(3)
        out = [step(model, inputs)]
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        out.append(step(model, inputs))
        model.load_state_dict(state)
        out.append(step(model, inputs))
        model.load_state_dict({n: v * 2 for n, v in state.items()}, assign=True)
        out.append(step(model, inputs))
        model.to(torch.bfloat16)
        model.zero_grad()
        loss = model(inputs.bfloat16()).float().mean()
        loss.backward()
        out.append([loss.detach(), gradients(model)])
        model.zero_grad()
        model.to(torch.float32)
        out.append(step(model, inputs))
        return [out, list(model.state_dict()), state]

    wanted = run(plain)
    with apply(model, planned("mlp", "mixed")) as handle:
        assert_same(run(model), wanted)
        really_did(handle, "mixed")
        assert repr(model) == repr(plain)


# Hooks of the user's own


@pytest.mark.parametrize("what", WHATS)
def test_hooks(what: str) -> None:
    """Each runs as often, and sees the same, as without a plan; a recompute calls no hook of a stage's own."""

    def run(model: nn.Module, x: Any) -> Any:
        seen: list[Any] = []
        handles = []
        for m in model.layers:
            handles += [
                m.register_forward_pre_hook(lambda _, args: (seen.append(args[0].detach().sum()), (args[0] * 1.5,))[1]),
                m.register_forward_hook(lambda _, args, out: (seen.append(out.detach().sum()), out * 0.5)[1]),
                m.register_full_backward_pre_hook(lambda _, g: seen.append(g[0].sum())),
                m.register_full_backward_hook(lambda _, gi, go: seen.append(go[0].sum())),
                m.down.weight.register_hook(lambda g: (seen.append(g.sum()), g * 2)[1]),
                m.down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum())),
            ]
        hidden: list[torch.Tensor] = []
        handles.append(model.layers[1].register_forward_hook(lambda _, args, out: hidden.append(out)))
        model.zero_grad()
        out = model(x)
        hidden[0].retain_grad()
        hidden[0].register_hook(lambda g: seen.append(g.sum()))
        default_loss(out).backward()
        for handle in handles:
            handle.remove()
        assert len(seen) == 4 * 6 + 1
        return [seen, hidden[0].grad, gradients(model)]

    check(functools.partial(build, "transformer"), what, run)


def test_what_a_stage_runs_again_from_is_checked_for_writes_where_hooks_keep_it() -> None:
    """`save_on_cpu` makes no copy of what is on the CPU."""
    model, x = build("mlp")
    with apply(model, plan_of(measured("mlp"), ["recompute"] * len(measured("mlp").stages))):
        given = x.clone()
        with torch.autograd.graph.save_on_cpu():
            loss = default_loss(model(given))
        given.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


SOME = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


def checkpointing(**how: Any) -> nn.Module:
    return layer_of(
        lambda m, x: torch.tanh(m.norm(x + checkpoint(m.inner, x, use_reentrant=False, **how))),
        inner=lambda: nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 64)),
        norm=lambda: nn.LayerNorm(64),
    )()


@pytest.mark.parametrize(("what", "how"), [("mixed", {}), ("mixed", {"context_fn": SOME}), ("segment", {})])
def test_stages_that_checkpoint_inside(what: str, how: dict[str, Any]) -> None:
    """Whole blocks, around a checkpoint of the user's own, which a profile would leave outside of its stages.

    A selective one isn't warned of hooks that aren't the user's (PyTorch 2.14).
    """
    torch.manual_seed(0)
    model, x = nn.Sequential(*(checkpointing(**how) for _ in range(4))), torch.randn(32, 64)
    plain = copy.deepcopy(model)
    again = Decision("recompute")
    mixture = (Decision.moving("swap", (0, 1), 0, 0), again, Decision.moving("swap", (0, 1), 2, 2), again)
    plan = dataclasses.replace(
        plan_for(model, x, "keep"),
        stages=("0", "1", "2", "3"),
        choices=mixture if what == "mixed" else (again,) * 4,
        inputs=(None,) * 4,
        saved_bytes=(),
        kept_bytes=(),
        segments=(Segment(0, 3, (Segment(1, 2),)),) if what == "segment" else (),
        host_bytes=1 << 16 if what == "mixed" else 0,
    )
    torch.manual_seed(5)
    wanted = [step(plain, x), step(plain, x)]
    with apply(model, plan) as handle:
        torch.manual_seed(5)
        assert_same([step(model, x), step(model, x)], wanted)
        really_did(handle, what)


# Tensor subclasses


@contextlib.contextmanager
def or_names_another_path(what: str) -> Iterator[None]:
    """Where the plan names storages or operations that other types of tensors don't have: an error that says so."""
    try:
        yield
    except PlanMismatchError as error:
        if what != "mixed":
            raise
        assert "took another path" in str(error)  # noqa: PT017 - either outcome is right


class _Tagged(torch.Tensor):
    """A subclass by `__torch_function__`, which is passed on to results."""


def keeps(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Saves what comes in and what it makes; whether its input's type arrives is seen in the result."""
    y = torch.tanh(m.linear(x)) * torch.sigmoid(x)
    return y * 2 if isinstance(x, _Tagged) else y


def by_torch_function(model: nn.Module, x: torch.Tensor) -> Any:
    given = x.as_subclass(_Tagged)
    found = step(model, given)
    assert not torch.equal(found[0], default_loss(model(x)))
    assert type(model(given)) is _Tagged
    return found


def by_a_wrapper(model: nn.Module, x: torch.Tensor) -> Any:
    """Its values lie in tensors of its own, so it stays where it is, and comes back as it was."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    model.zero_grad()
    x = two(x.clone(), x * 2).requires_grad_()
    model(x).mean().backward()
    grads = [p.grad for p in (x, *model.parameters())]
    assert all(type(g) is two for g in grads)
    assert not torch.equal(grads[0].a, grads[0].b)  # type: ignore[union-attr]
    return [[g.a.clone(), g.b.clone()] for g in grads]  # type: ignore[union-attr]


def test_parameters_that_wrap_tensors_are_put_back() -> None:
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    p = nn.Parameter(two(torch.ones(3), torch.zeros(3)))
    with ParameterState([p]).restored(), torch.no_grad():
        p.add_(2)
    assert type(p) is two
    assert (p.a.tolist(), p.b.tolist()) == ([1.0] * 3, [0.0] * 3)


def nested(model: nn.Module, x: torch.Tensor) -> Any:
    """Sequences of several lengths in one tensor, inside a stage and between stages."""
    model.zero_grad()
    given = torch.nested.nested_tensor([*x[:22].split((3, 7, 12))], layout=torch.jagged, requires_grad=True)
    model(given).values().mean().backward()
    return [given.grad.values().clone(), gradients(model)]


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("run", [by_torch_function, by_a_wrapper, nested])
def test_tensors_of_other_classes(run: Callable[[nn.Module, torch.Tensor], Any], what: str) -> None:
    model, x = nn.Sequential(*(kind() for kind in [layer_of(keeps)] * 4)), torch.randn(BATCH, WIDTH)
    plan, plain = plan_for(model, x, what), copy.deepcopy(model)
    wanted = run(plain, x)
    with apply(model, plan):
        with or_names_another_path(what):
            assert_same(run(model, x), wanted)
        assert_same(step(model, x), step(plain, x))


def quantised(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A frozen base, in eight bits where asked for, under a trained correction."""
    base = m.base.dequantize() if m.base.is_quantized else m.base.clone()
    return torch.tanh(nn.functional.linear(x, base) + m.linear(x))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_buffers() -> None:
    """PyTorch's own quantised tensors can't be traced; a plan made without them runs with them."""
    torch.manual_seed(0)
    kind = layer_of(quantised, base=buffer(lambda: torch.randn(WIDTH, WIDTH) / 8))
    model, x = nn.Sequential(*(kind() for _ in range(4))), torch.randn(BATCH, WIDTH)
    plain = copy.deepcopy(model)
    plan = plan_for(model, x, "mixed")
    for m in (*model, *plain):
        m.base = torch.quantize_per_tensor(m.base, 0.01, 0, torch.qint8)
    with pytest.raises(InvalidInputError, match="quantized"):
        profile(model, x)

    wanted = plain_step(plain, x)
    with apply(model, plan) as handle:
        assert_same([plain_step(model, x), plain_step(model, x)], [wanted, wanted])
        really_did(handle, "mixed")
    assert all(m.base.is_quantized for m in model)


def test_sparse_gradients() -> None:
    """They can't be traced, which is said; a plan made without them runs with them."""
    model, inputs = build("transformer")
    model.embedding.sparse = True
    with pytest.raises(UnsupportedModelError, match="use sparse=False"):
        profile(model, inputs)
    plain, _ = build("transformer")
    plain.embedding.sparse = True

    def run(model: nn.Module) -> Any:
        torch.manual_seed(5)
        default_loss(model(inputs)).backward()
        assert model.embedding.weight.grad.is_sparse
        return {n: p.grad.to_dense() for n, p in model.named_parameters()}

    wanted = run(plain)
    with apply(model, planned("transformer", "mixed")):
        assert_same(run(model), wanted)


# Function transforms, threads


@pytest.mark.parametrize("what", WHATS)
def test_functional_call(what: str) -> None:
    """Other parameters for one call: backward, too, runs with them."""
    model, inputs = build("mlp")
    plain, _ = build("mlp")
    other = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}

    def run(model: nn.Module) -> Any:
        torch.manual_seed(5)
        loss = torch.func.functional_call(model, other, (inputs,)).mean()
        return torch.autograd.grad(loss, list(other.values()))

    wanted = run(plain)
    with apply(model, planned("mlp", what)):
        assert_same(run(model), wanted)
        torch.manual_seed(5)
        found = step(model, inputs)
    torch.manual_seed(5)
    assert_same(found, step(plain, inputs))


def test_two_models_in_two_threads() -> None:
    """Each has its own plan, its own graphs and its own copies."""
    built = [build("views", seed) for seed in (0, 1)]
    plain = [build("views", seed) for seed in (0, 1)]
    wanted = [[step(model, x) for _ in range(6)] for model, x in plain]
    found: list[list[Any]] = [[], []]
    errors: list[BaseException] = []
    start = threading.Barrier(2)

    def work(k: int) -> None:
        try:
            start.wait()
            for _ in range(6):
                found[k].append(step(*built[k]))
        except BaseException as error:
            errors.append(error)

    with apply(built[0][0], planned("views", "mixed")), apply(built[1][0], planned("views", "mixed")):
        threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert_same(found, wanted)


# Operations that may give other bits when they run again


def gathers(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(m.linear(x))
    index = torch.arange(256) % 64
    if m.how == "index_add":
        return x + torch.tanh(torch.zeros_like(x).index_add(1, index, y))
    if m.how == "cumsum":
        return x + torch.tanh(torch.sigmoid(y.cumsum(1)) * y)[:, :64]
    if m.how == "custom":
        return x + torch.tanh(torch.ops.ckptplan_tests.fickle(y) * y)[:, :64]
    return x + torch.tanh(y)[:, :64]


def gathering(how: str) -> tuple[nn.Sequential, torch.Tensor]:
    kind = layer_of(gathers, linear=lambda: nn.Linear(64, 256), how=lambda: how)
    return nn.Sequential(*layers_of(kind)), torch.randn(32, 64)


@pytest.fixture(scope="module")
def fickle() -> Iterator[None]:
    """A custom operation that says of itself that its bits may differ."""
    library = torch.library.Library("ckptplan_tests", "DEF")
    library.define("fickle(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_bitwise,))
    library.impl("fickle", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("fickle", torch.empty_like, "Meta")
    torch.library.register_autograd("ckptplan_tests::fickle", lambda ctx, g: g * 2, lib=library)
    yield
    library._destroy()


@pytest.mark.parametrize(("how", "device"), [("index_add", "a100-40gb"), ("cumsum", None), ("custom", "a100-40gb")])
def test_what_may_differ_is_not_recomputed(how: str, device: str | None, fickle: None) -> None:
    """No option runs it again, in no segment either, and the profile says which stage and why."""
    model, x = gathering(how)
    model.append(nn.Linear(64, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_MENU_BYTES", 0)
        patch.setattr(profiler, "_beaten", lambda *_: False)  # by times, which are noise here
        chain = profile(model, x, device=device)
    once = how == "custom" or (how != "neither" and device is not None)
    stages = [s for s in chain.stages if s.name in "012" and not s.is_glue]
    assert len(stages) == 3
    assert all((s.recompute is None) == once for s in stages)
    name = {"index_add": "aten.index_add", "cumsum": "aten.cumsum", "custom": "ckptplan_tests.fickle"}.get(how, "-")
    notes = [note for note in chain.notes if "may give other bits" in note]
    assert len(notes) == once
    assert not once or ("0, 1, 2" in notes[0] and name in notes[0])
    ops = {o.ops for s in stages for o in s.options if o.recomputes}
    if how == "custom":
        # Saved, it may be part of a stage that recomputes the rest.
        (number,) = products(model, x, "0", (name.partition(".")[2],))["0"]
        assert ops, "options that save it would do"
        assert all(number in chosen for chosen in ops)


def test_deterministic_algorithms_repeat() -> None:
    model, x = gathering("index_add")
    torch.use_deterministic_algorithms(True)
    try:
        chain = profile(model, x, device="a100-40gb")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(s.recompute is not None for s in chain.stages if not s.is_glue)


def test_saved_operations_that_may_differ_are_not_run_again(fickle: None) -> None:
    """A plan with such an option: the operation runs once, and everything is bitwise right."""
    model, x = gathering("neither")
    plan = plan_for(model, x, "recompute")
    for m in model:
        m.how = "custom"
    numbers = products(model, x, plan.stages, ("fickle",))
    choices = [Decision("recompute", ops=numbers[n]) if n in numbers else KEEP for n in plan.stages]
    assert sum(len(c.ops) for c in choices) == 3
    plan = dataclasses.replace(plan, choices=tuple(choices), saved_bytes=())
    plain = copy.deepcopy(model)
    wanted = step(plain, x)
    with apply(model, plan) as handle, Operations() as ran:
        assert_same(step(model, x), wanted)
        assert handle.stats().recomputed_stages > 0
    assert sum("fickle" in name for name in ran.names) == 3


def test_calls_that_cannot_differ() -> None:
    """Where no place is named twice, where one value goes everywhere, sums of integers."""
    aten = torch.ops.aten
    x, index = torch.zeros(4, 4), torch.tensor([0, 0])
    again = functools.partial(is_repeatable, on_cuda=True)
    assert again(aten.index_put_.default, (x, [x > 0], torch.zeros(())), {})
    assert again(aten.index_put_.default, (x, [x > 0], torch.zeros(3)), {})
    assert again(aten.index_put_.default, (x, [index], torch.zeros(())), {})
    assert not again(aten.index_put_.default, (x, [index], torch.zeros(2, 4)), {})
    assert again(aten.index_put_.default, (x, [index], torch.zeros(2, 4), True), {})
    assert not again(aten.scatter_add_.default, (x, 0, index, x), {})
    assert again(aten.scatter_add_.default, (x.long(), 0, index, x.long()), {})
    assert again(aten.scatter_.value, (x, 0, index, 1.0), {})
    assert not again(aten.scatter_.src, (x, 0, index, x), {})
    assert again(aten.cumsum.default, (x.long(), 0), {})
    assert not again(aten.cumsum.default, (x, 0), {})
    assert again(aten.median.default, (x,), {})
    assert not again(aten.median.dim, (x, 0), {})
    assert again(aten.bincount.default, (index,), {})
    assert not again(aten.bincount.default, (index, x[0]), {})
    convolution = (x, x, None, [1], [0], [1])
    assert again(aten.convolution.default, (*convolution, False, [0], 1), {})
    assert not again(aten.convolution.default, (*convolution, True, [0], 1), {})
    assert is_repeatable(aten.cumsum.default, (x, 0), {}, on_cuda=False)
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        once = is_repeatable(aten.index_put_.default, (x, [index], torch.zeros(2, 4), True), {}, on_cuda=False)
        assert once == (threads == 1)
    torch.set_num_threads(before)
