"""Do trainings rebuilt from public reports run with a plan as without one, bit for bit, and within the budget or said?

    python experiments/rebuilt.py --workers 2 --out experiments/results

Each case trains a small model for six steps in a way that users report; its docstring says what the user does. A case
is one step, a function of the training (`Loop`) and the step's number; its decorator says what is made and planned
before. It returns what is to be compared besides parameters, gradients and buffers. What the loop itself goes on
holding, which no plan counts, is made `aside`. `trainings.py` says what is compared and measured. Promised: none is
silently different, none ends that ends without a plan, and no step is over the budget without a warning that names the
cause. Exits with 1 if that is broken. `--only` runs those whose names contain a text, in full.

Of 110 reports those are here that differ in mechanism. Folded into one of them are, for example, all that only change
lengths or numbers of samples (buckets, curricula of resolutions, rehearsal, mixup), a second forward of the model
(triplets, SimSiam, BYOL, mean teachers, preferences one by one), forwards without gradients in between (scheduled
sampling, Q-learning, PPO, evaluation), changes of weights between steps (SAM, Lookahead, averages), kept graphs
(PCGrad, GradNorm), exchanged modules (resized embeddings) and adapters that nothing changes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import documents
import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trainings import OVER, Record, Row, aside, shown, tried

import ckptplan

STEPS = 6
WIDTH, LABELS, VOCABULARY = 32, 10, 100
BUDGET = "30%"


# ---------------------------------------------------------------- models and batches


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, depth: int = 4, out: int = LABELS, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, out)

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Language(nn.Module):
    """A causal transformer, its head tied to the embedding."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.place = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 96, 0.1, batch_first=True) for _ in range(depth)
        )
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        n = tokens.shape[1]
        x = self.embed(tokens) + self.place(torch.arange(n))
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask, src_key_padding_mask=padding)
        return self.head(x)


class Images(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self, out: int = LABELS) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout2d(0.1))
            for a, b in itertools.pairwise((3, 16, 32, 32))
        ))  # fmt: skip
        self.head = nn.Linear(32, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def seeded(k: int) -> torch.Generator:
    return torch.Generator().manual_seed(k)


def rows(k: int, n: int = 128, width: int = WIDTH) -> Tensor:
    """The vectors of batch `k`."""
    return torch.randn(n, width, generator=seeded(k))


def labels(k: int, n: int = 128) -> Tensor:
    return torch.randint(LABELS, (n,), generator=seeded(k))


def tokens(k: int, n: int = 8, length: int = 24) -> Tensor:
    return torch.randint(1, VOCABULARY, (n, length), generator=seeded(k))


def images(k: int, n: int = 8, side: int = 16) -> Tensor:
    return torch.randn(n, 3, side, side, generator=seeded(k))


def cross(output: Tensor, k: int = 0) -> Tensor:
    """The loss of batch `k`."""
    return F.cross_entropy(output, labels(k, len(output)))


def classified(model: Callable[[Tensor], Tensor], k: int, n: int = 128) -> Tensor:
    return cross(model(rows(k, n)), k)


def next_token(logits: Tensor, text: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def mean_square(output: Any) -> Tensor:
    return getattr(output, "logits", output).square().mean()


def sgd(*models: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=lr, momentum=0.9)


def adamw(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for model in models for p in model.parameters()], lr=1e-3)


def frozen(module: nn.Module, on: bool = True) -> None:
    module.requires_grad_(not on)


# ---------------------------------------------------------------- trainings


class Loop:
    """One training: the model that is planned, its optimizer, what is beside it, and the plan's handle."""

    def __init__(self, case: Case, record: Record) -> None:
        self.model: Any = case.make()
        self.beside: Any = None if case.beside is None else case.beside(self.model)
        self.optimizer: Any = None if case.optimizer is None else case.optimizer(self.model)
        self.handle: Any = None
        self.state: Any = None
        others = [self.beside] if isinstance(self.beside, nn.Module) else []
        if record.planned:
            self.handle = self._planned(case)
        optimizers = [] if self.optimizer is None else [self.optimizer]
        record.watch(self.model, *others, optimizers=optimizers, handle=lambda: self.handle)
        if case.then is not None:
            case.then(self)

    def _planned(self, case: Case) -> Any:
        options: dict[str, Any] = {
            "budget": BUDGET, "time_limit_s": 0.3, "menus": False, "on_progress": lambda text: None,
            "optimizer": None if isinstance(self.optimizer, torch.optim.LBFGS) else self.optimizer, **case.options,
        }  # fmt: skip
        if case.alone:
            return ckptplan.apply(self.model, **options)
        if case.step is not None:
            options["step"] = functools.partial(case.step, self)
        else:
            options["inputs"] = case.inputs() if callable(case.inputs) else case.inputs
        return ckptplan.apply(self.model, ckptplan.solve(self.model, **options))

    def update(self, loss: Tensor) -> Tensor:
        """Backward, update, and no gradients left."""
        return updated(self.optimizer, loss)


def updated(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@dataclass
class Case:
    """One report: how a training is made and planned, and its steps.

    Attributes
    ----------
    beside : callable, optional
        Makes what is beside the model from it; compared as well if it is a module, and not planned.
    inputs : Any
        Those that the plan is made for.
    alone : bool
        Planned by `apply` alone, in the first forward.
    step : callable, optional
        The whole step that is planned, a function of the training.
    then : callable, optional
        Runs on the training when it is planned.
    """

    run: Callable[[Loop, int], Any]
    make: Callable[[], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] | None
    inputs: Any
    beside: Callable[[Any], Any] | None = None
    alone: bool = False
    step: Callable[[Loop], Tensor] | None = None
    then: Callable[[Loop], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


TABLE: dict[str, Case] = {}


def case(
    make: Callable[[], Any] = Net, optimizer: Any = sgd, inputs: Any = None, loss: Any = cross, **more: Any
) -> Any:
    """Enter a training into the table."""

    def entered(run: Callable[[Loop, int], Any]) -> Callable[[Loop, int], Any]:
        own = {key: more.pop(key) for key in ("beside", "alone", "step", "then") if key in more}
        options = more if loss is None else {"loss_fn": loss, **more}
        given = rows(0) if inputs is None else inputs
        TABLE[run.__name__] = Case(run, make, optimizer, given, **own, options=options)
        return run

    return entered


def text_loss(output: Tensor) -> Tensor:
    return next_token(output, tokens(0))


# ---------------------------------------------------------------- batches and loops


@case(Net, adamw)
def plain_loop(t: Loop, k: int) -> Any:
    """Trains in the usual loop."""
    return t.update(classified(t.model, k))


@case(Net, adamw)
def gradients_dropped_late(t: Loop, k: int) -> Any:
    """Calls `zero_grad` between forward and backward."""
    loss = classified(t.model, k)
    t.optimizer.zero_grad()
    loss.backward()
    t.optimizer.step()
    return loss


@case(inputs=rows(0, 32))
def gradient_accumulation(t: Loop, k: int) -> Any:
    """Runs four micro-batches before each update."""
    t.optimizer.zero_grad()
    for i in range(4):
        loss = classified(t.model, 4 * k + i, 32) / 4
        loss.backward()
    t.optimizer.step()
    return loss


@case(Net, adamw)
def two_forwards_two_backwards(t: Loop, k: int) -> Any:
    """Runs both forwards first, then both backwards."""
    t.optimizer.zero_grad()
    a, b = classified(t.model, k), classified(t.model, k + 100)
    a.backward()
    b.backward()
    t.optimizer.step()
    return a, b


@case(Net, adamw, rows(0, 32))
def warm_up_of_the_batch_size(t: Loop, k: int) -> Any:
    """Lets the batch grow in the course of the training, with a smaller one at the end."""
    return t.update(classified(t.model, k, 32 + 24 * k if k < 5 else 37))


@case(Language, adamw, tokens(0), text_loss)
def padding_sometimes(t: Loop, k: int) -> Any:
    """Passes a mask only if the batch has padding."""
    text, padding = tokens(k), None
    if k % 2:
        padding = torch.zeros(text.shape, dtype=torch.bool)
        padding[1:, 20:] = True
    return t.update(next_token(t.model(text, padding), text))


@case(Language, adamw, tokens(0), text_loss)
def variable_lengths(t: Loop, k: int) -> Any:
    """Pads each batch to its own longest text, in which the runtime can't tell lengths from other changes."""
    text = tokens(k, 8, (24, 11, 30, 17, 40, 24)[k])
    return t.update(next_token(t.model(text), text))


@case(Language, adamw, loss=mean_square, alone=True)
def curriculum_of_lengths(t: Loop, k: int) -> Any:
    """Lets the texts grow, planned by the first forward."""
    text = tokens(k, 8, 12 + 6 * k)
    return t.update(next_token(t.model(text), text))


@case(Net, adamw)
def steps_skipped_at_nan(t: Loop, k: int) -> Any:
    """Leaves out the update, and backward, where the loss isn't finite."""
    t.optimizer.zero_grad()
    loss = classified(t.model, k) * (float("nan") if k % 3 == 1 else 1.0)
    if torch.isfinite(loss):
        loss.backward()
        t.optimizer.step()
    return loss


@case(Net, adamw, rows(0, 64))
def half_of_the_batch_again(t: Loop, k: int) -> Any:
    """Mines the hardest half of each batch by a forward without gradients."""
    with torch.no_grad():
        hard = F.cross_entropy(t.model(rows(k)), labels(k), reduction="none").topk(64).indices
    return t.update(F.cross_entropy(t.model(rows(k)[hard]), labels(k)[hard]))


# ---------------------------------------------------------------- precision


@case(Net, adamw)
def autocast_that_was_not_planned(t: Loop, k: int) -> Any:
    """Plans without casts, and trains with them from the third step on."""
    with torch.autocast("cpu", torch.bfloat16, enabled=k > 1):
        loss = classified(t.model, k)
    return t.update(loss)


@case(Net, adamw)
def autocast_around_everything(t: Loop, k: int) -> Any:
    """Has backward and update within autocast, too."""
    with torch.autocast("cpu", torch.bfloat16):
        return t.update(classified(t.model, k))


@case(beside=lambda model: torch.amp.GradScaler("cpu", init_scale=2.0**18), amp="float16")
def a_gradient_scaler(t: Loop, k: int) -> Any:
    """Scales the loss for float16, skips the steps that overflow, and clips gradients."""
    t.optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = classified(t.model, k)
    t.beside.scale(loss).backward()
    t.beside.unscale_(t.optimizer)
    nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
    t.beside.step(t.optimizer)
    t.beside.update()
    return loss, t.beside.get_scale()


@case(Net, adamw, rows(0, 64), amp="bfloat16")
def contrastive_pairs_under_autocast(t: Loop, k: int) -> Any:
    """Runs the model twice within one autocast, on batches that grow."""
    with torch.autocast("cpu", torch.bfloat16):
        a, b = (F.normalize(t.model(rows(k + i, 64 + 8 * k + 8 * i)[:64]), dim=1) for i in range(2))
        loss = F.cross_entropy(a @ b.t() / 0.1, torch.arange(64))
    return t.update(loss)


# ---------------------------------------------------------------- frozen, thawed and changed parameters


def one_thawed(model: Net, only: int) -> None:
    for i, block in enumerate(model.blocks):
        frozen(block, i != only)


def with_first_thawed() -> Net:
    model = Net()
    one_thawed(model, 0)
    return model


@case(with_first_thawed)
def layers_by_turns(t: Loop, k: int) -> Any:
    """LISA: trains other layers every second step, the rest frozen."""
    one_thawed(t.model, k // 2)
    return t.update(classified(t.model, k))


def frozen_blocks() -> Net:
    model = Net()
    frozen(model.blocks)
    return model


@case(frozen_blocks, adamw)
def gradual_thawing(t: Loop, k: int) -> Any:
    """Thaws one more layer at every step, from the head on."""
    for i, block in enumerate(t.model.blocks):
        frozen(block, i < 4 - k)
    return t.update(classified(t.model, k))


@case(Images, sgd, images(0), None)
def batch_norm_frozen(t: Loop, k: int) -> Any:
    """Puts the norms into evaluation mode after some steps."""
    t.model.train()
    for module in t.model.modules() if k > 1 else ():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    return t.update(cross(t.model(images(k)), k))


@case()
def a_head_replaced(t: Loop, k: int) -> Any:
    """Puts another head onto the model for another task."""
    if k == 3:
        t.model.head = nn.Linear(WIDTH, LABELS)
    return updated(sgd(t.model), classified(t.model, k))


@case(lambda: Net(3))
def layers_added_and_pruned(t: Loop, k: int) -> Any:
    """Stacks another block onto the model after some steps (progressive growing), and later removes one."""
    if k in (2, 3):
        t.model.blocks.append(Block())
    if k == 5:
        del t.model.blocks[1]
    return updated(sgd(t.model), classified(t.model, k))


@case()
def weights_pruned(t: Loop, k: int) -> Any:
    """Prunes weights by masks, which `torch.nn.utils.prune` makes parametrizations of."""
    if k == 2:
        nn.utils.prune.l1_unstructured(t.model.blocks[1].up, "weight", 0.3)
    return updated(sgd(t.model), classified(t.model, k))


def with_spectral_norms() -> Net:
    model = Net()
    for block in model.blocks:
        nn.utils.parametrizations.spectral_norm(block.up)
    return model


@case(with_spectral_norms)
def spectral_norms(t: Loop, k: int) -> Any:
    """Parametrizes the weights by their spectral norms, which forward updates."""
    return t.update(classified(t.model, k))


@case(Net, adamw)
def loaded_in_the_middle(t: Loop, k: int) -> Any:
    """Saves the state, and loads it again after steps that went wrong."""
    if k == 2:
        with aside():
            file = io.BytesIO()
            torch.save((t.model.state_dict(), t.optimizer.state_dict()), file)
            file.seek(0)
            t.state = torch.load(file)
    if k == 4:
        t.model.load_state_dict(t.state[0])
        t.optimizer.load_state_dict(t.state[1])
    return t.update(classified(t.model, k))


@case(Net, adamw)
def another_optimizer_later(t: Loop, k: int) -> Any:
    """Changes the optimizer and the learning rate."""
    if k == 3:
        t.state = sgd(t.model)
    optimizer = t.state or t.optimizer
    optimizer.param_groups[0]["lr"] *= 0.5
    return updated(optimizer, classified(t.model, k))


# ---------------------------------------------------------------- teachers, pairs and adversaries


def followed(model: nn.Module) -> nn.Module:
    """A copy that isn't trained."""
    return copy.deepcopy(model).requires_grad_(False)


def follow(copied: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for p, q in zip(copied.parameters(), model.parameters(), strict=True):
            p.mul_(0.9).add_(q, alpha=0.1)


def contrasted(t: Loop, k: int = 0) -> tuple[Tensor, Tensor]:
    """The loss of MoCo, and the new keys."""
    q = F.normalize(t.model(rows(k)), dim=1)
    with torch.no_grad():
        positive = F.normalize(t.beside(rows(k) + 0.1), dim=1)
    queue = F.normalize(rows(99, 64, LABELS), dim=1) if t.state is None else t.state
    logits = torch.cat([(q * positive).sum(1, keepdim=True), q @ queue.t()], 1) / 0.1
    return F.cross_entropy(logits, torch.zeros(128, dtype=torch.long)), positive


@case(beside=followed, loss=None, step=lambda t: contrasted(t)[0])
def momentum_contrast(t: Loop, k: int) -> Any:
    """MoCo: a queue of the keys that a momentum encoder gives between forward and backward; planned as one step."""
    follow(t.beside, t.model)
    loss, positive = contrasted(t, k)
    t.update(loss)
    t.state = torch.cat([positive, rows(99, 64, LABELS) if t.state is None else t.state])[:64]
    return loss


@case(beside=followed, loss=None)
def momentum_contrast_with_a_plan_of_the_model(t: Loop, k: int) -> Any:
    """MoCo: the same, with a plan of the model alone, which doesn't know what is between forward and backward."""
    return momentum_contrast(t, k)


@case(lambda: Images(16), sgd, images(0), None, beside=followed)
def self_distillation(t: Loop, k: int) -> Any:
    """DINO: several crops through the student, two through a teacher, whose outputs are centred."""
    crops = [images(k), images(k + 50), images(k + 100, 8, 8), images(k + 150, 8, 8)]
    outputs = [t.model(crop) for crop in crops]
    center = torch.zeros(16) if t.state is None else t.state
    with torch.no_grad():
        targets = [((t.beside(crop) - center) / 0.1).softmax(1) for crop in crops[:2]]
        t.state = 0.9 * center + 0.1 * targets[0].mean(0)
    losses = [-(target * o.log_softmax(1)).sum(1).mean() for target in targets for o in outputs]
    return t.update(sum(losses) / len(losses))  # type: ignore[arg-type]


@case(lambda: Net(3), adamw, beside=lambda model: Net(6))
def knowledge_distillation(t: Loop, k: int) -> Any:
    """A large teacher without gradients, a small student; the teacher isn't in evaluation mode."""
    with torch.no_grad():
        soft = (t.beside(rows(k)) / 2).softmax(1)
    hard = t.model(rows(k))
    return t.update(F.kl_div((hard / 2).log_softmax(1), soft) + cross(hard, k))


class Judge(Net):
    """A discriminator with an optimizer of its own."""

    def __init__(self, out: int = 1) -> None:
        super().__init__(out=out)
        self.__dict__["own"] = adamw(self)


@case(lambda: Net(out=WIDTH), adamw, loss=mean_square, beside=lambda model: Judge())
def adversaries(t: Loop, k: int) -> Any:
    """GAN: a planned generator, a discriminator beside it, an optimizer each."""
    made, judge = t.model(rows(k)), t.beside
    judge.own.zero_grad()
    (F.softplus(judge(made.detach())) + F.softplus(-judge(rows(k + 100)))).mean().backward()
    judge.own.step()
    t.optimizer.zero_grad()
    loss = F.softplus(-judge(made)).mean()
    loss.backward()
    t.optimizer.step()
    return loss


@case(lambda: Net(out=1), adamw, loss=None, beside=lambda model: Judge(WIDTH))
def a_planned_discriminator(t: Loop, k: int) -> Any:
    """GAN: the discriminator is planned; it runs on real and made samples, then for the generator."""
    made = t.beside(rows(k))
    t.update((F.softplus(t.model(made.detach())) + F.softplus(-t.model(rows(k + 100)))).mean())
    return updated(t.beside.own, F.softplus(-t.model(made)).mean())


def critic() -> Net:
    return Net(out=1, dropout=0.0)


@case(critic, adamw, loss=torch.mean)
def a_gradient_penalty(t: Loop, k: int) -> Any:
    """WGAN-GP: the penalty needs the gradient's gradient."""
    loss = t.model(rows(k)).mean() - t.model(rows(k + 100)).mean()
    between = (0.3 * rows(k) + 0.7 * rows(k + 100)).requires_grad_()
    (slope,) = torch.autograd.grad(t.model(between).sum(), between, create_graph=True)
    return t.update(loss + 10 * (slope.norm(dim=1) - 1).square().mean())


@case(critic, adamw, loss=torch.mean)
def a_penalty_now_and_then(t: Loop, k: int) -> Any:
    """R1 regularization every third step (lazy regularization)."""
    x = rows(k).requires_grad_(k % 3 == 2)
    output = t.model(x)
    loss = F.softplus(-output).mean()
    if k % 3 == 2:
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = loss + slope.square().sum(1).mean()
    return t.update(loss)


# ---------------------------------------------------------------- gradients of another kind


@case(lambda: Net(dropout=0.0), inputs=rows(0, 64))
def inner_steps_by_functions(t: Loop, k: int) -> Any:
    """MAML: an inner step by `functional_call`, and a loss behind it."""
    own = dict(t.model.named_parameters())
    inner = cross(torch.func.functional_call(t.model, own, (rows(k, 64),)), k)
    slopes = torch.autograd.grad(inner, list(own.values()), create_graph=True)
    moved = {n: p - 0.1 * g for (n, p), g in zip(own.items(), slopes, strict=True)}
    return t.update(cross(torch.func.functional_call(t.model, moved, (rows(k + 100, 64),)), k + 100))


@case()
def inner_steps_on_a_copy(t: Loop, k: int) -> Any:
    """Reptile: trains a copy, then moves the model towards it; every second step is a usual one."""
    if k % 2 == 0:
        return t.update(classified(t.model, k))
    twin = copy.deepcopy(t.model)
    for i in range(2):
        loss = updated(sgd(twin), classified(twin, 10 * k + i))
    with torch.no_grad():
        for p, q in zip(t.model.parameters(), twin.parameters(), strict=True):
            p.lerp_(q, 0.5)
    return loss


@case(lambda: Net(dropout=0.0))
def gradients_of_each_sample(t: Loop, k: int) -> Any:
    """Looks at per-sample gradients by `vmap` between steps."""

    def loss_of(own: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(t.model, own, (x[None],)), y[None])

    loss = t.update(classified(t.model, k))
    norms = torch.zeros(())
    if k % 2:
        own = {n: p.detach() for n, p in t.model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(own, rows(k)[:4], labels(k)[:4])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    return loss, norms


@case(
    lambda: Net(dropout=0.0),
    lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=2),
)
def a_closure_called_often(t: Loop, k: int) -> Any:
    """LBFGS runs forward and backward several times a step."""

    def closure() -> Tensor:
        t.optimizer.zero_grad()
        loss = classified(t.model, k)
        loss.backward()
        return loss

    return t.optimizer.step(closure)


@case()
def backward_twice(t: Loop, k: int) -> Any:
    """Runs backward of two losses through one graph (`retain_graph`)."""
    t.optimizer.zero_grad()
    output = t.model(rows(k))
    cross(output, k).backward(retain_graph=True)
    output.square().mean().backward()
    t.optimizer.step()


def stepping_in_hooks() -> Net:
    model = Net()
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step(p: Any) -> None:
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    return model


@case(stepping_in_hooks, None)
def steps_in_hooks(t: Loop, k: int) -> Any:
    """Updates each parameter as soon as its gradient is there, and frees the gradient."""
    loss = classified(t.model, k)
    loss.backward()
    return loss


# ---------------------------------------------------------------- paths through the model


class Path(Net):
    """Runs some of its blocks, and cuts its graph, as it is told."""

    depth, cut, dropped, cold, repeats = 4, -1, 0.0, False, False

    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad() if self.cold else contextlib.nullcontext():
            for i in range(4) if self.repeats else ():
                x = self.blocks[0](x)
                if float(x.detach().std()) > 1.15 + 0.1 * i:
                    break
            for i, block in enumerate(self.blocks[: self.depth]):
                if not self.dropped or torch.rand(()) > self.dropped:
                    x = block(x)
                if i == self.cut:
                    x = x.detach()
        return x


def path(**how: Any) -> Callable[[], Path]:
    def make() -> Path:
        model = Path()
        model.__dict__.update(how)
        return model

    return make


@case(path(dropped=0.4))
def stochastic_depth(t: Loop, k: int) -> Any:
    """Leaves blocks out at random."""
    return t.update(classified(t.model, k))


@case(path(depth=2))
def early_exit(t: Loop, k: int) -> Any:
    """Plans at half the depth; later steps leave at other depths."""
    t.model.depth = (2, 1, 4, 3, 4, 2)[k]
    return t.update(classified(t.model, k))


@case(path(repeats=True))
def adaptive_computation(t: Loop, k: int) -> Any:
    """Calls one layer as often as the data needs it."""
    return t.update(cross(t.model(rows(k) * (0.5 + 0.25 * k)), k))


@case(path(cut=1))
def a_graph_cut_at_first(t: Loop, k: int) -> Any:
    """Trains only the upper half by a `detach` in forward, then everything."""
    t.model.cut = 1 if k < 3 else -1
    return t.update(classified(t.model, k))


@case(path(cold=True))
def features_without_gradients_at_first(t: Loop, k: int) -> Any:
    """Runs the body under `no_grad` in the first steps (as speech encoders do), then trains it."""
    t.model.cold = k < 3
    return t.update(classified(t.model, k))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = Block(), nn.Linear(WIDTH, 4)
        self.experts, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        chances = self.gate(x).softmax(1)
        weight, chosen = chances.topk(2, 1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, column = (chosen == i).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, expert(x[row]) * weight[row, column, None])
        return self.head(out), chances.mean(0).square().sum()


@case(Experts, lambda model: sgd(model, lr=1.0), loss=lambda output: cross(output[0]) + output[1])
def mixture_of_experts(t: Loop, k: int) -> Any:
    """Routes each sample to two experts, some of which get none."""
    output, balance = t.model(rows(k) * (k + 1))
    loss = cross(output, k) + balance
    del output
    return t.update(loss)


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Net(3, WIDTH)
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, LABELS), "b": Net(2), "c": nn.Linear(WIDTH, LABELS)})

    def forward(self, x: Tensor, tasks: tuple[str, ...] = ("a",)) -> list[Tensor]:
        x = self.body(x)
        return [self.heads[task](x) for task in tasks]


@case(Tasks, loss=lambda outputs: cross(outputs[0]))
def heads_of_tasks(t: Loop, k: int) -> Any:
    """Trains other heads in other steps, sometimes several."""
    tasks = (("a",), ("b",), ("a", "c"), ("a", "b", "c"), ("c",), ("b",))[k]
    return t.update(sum(cross(output, k) for output in t.model(rows(k), tasks)))  # type: ignore[arg-type]


def small(kind: Any, config: Any, **more: Any) -> Callable[[], Any]:
    """A language model of transformers."""
    return lambda: kind(config(vocab_size=VOCABULARY, **more)).train()


bert = small(
    transformers.BertForMaskedLM, transformers.BertConfig, hidden_size=WIDTH, intermediate_size=96,
    num_hidden_layers=3, num_attention_heads=4, attn_implementation="eager",
)  # fmt: skip
gpt2 = small(
    transformers.GPT2LMHeadModel, transformers.GPT2Config, n_positions=64, n_embd=WIDTH, n_layer=3, n_head=2,
    use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip


def labelled(k: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(k), "labels": tokens(k)}


@case(bert, adamw, labelled(0), None)
def outputs_asked_for_in_some_steps(t: Loop, k: int) -> Any:
    """Asks for attentions in some steps, to plot them."""
    output = t.model(**labelled(k), output_attentions=k % 2 == 1)
    loss, plotted = output.loss, [a.detach().mean() for a in output.attentions or ()]
    del output
    return t.update(loss), plotted


@case()
def a_wrapper_around(t: Loop, k: int) -> Any:
    """Calls the planned model through a wrapper that splits the batch."""
    return t.update(classified(lambda x: torch.cat([t.model(part) for part in x.chunk(2)]), k))


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(x) @ self.head.weight.t(), self.features(x), use_reentrant=False)


@case(Checkpointed)
def a_checkpoint_around_parts(t: Loop, k: int) -> Any:
    """Checkpoints the head by hand."""
    return t.update(classified(t.model, k))


# ---------------------------------------------------------------- recurrent, generative and reinforced


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.front, self.cell, self.back = Block(), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), Block()

    def forward(self, text: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        hidden, state = self.cell(self.front(self.embed(text)), state)
        return self.head(self.back(hidden)), state


@case(Recurrent, sgd, tokens(0), lambda output: mean_square(output[0]))
def truncated_backpropagation(t: Loop, k: int) -> Any:
    """Carries a detached state from one part of a text to the next."""
    text = tokens(k)
    logits, state = t.model(text, t.state)
    loss = next_token(logits, text)
    del logits
    t.update(loss)
    t.state = tuple(s.detach() for s in state)
    return loss, t.state


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), Net(2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1], WIDTH)
        for each in x:
            h = self.cell(each, h)
        return self.head(h)


@case(Unrolled, inputs=rows(0, 6 * 64).view(6, 64, WIDTH))
def a_loop_over_time(t: Loop, k: int) -> Any:
    """Calls a cell for each place of a text, as many times as it is long."""
    return t.update(cross(t.model(rows(k, (4 + k) * 64).view(-1, 64, WIDTH)), k))


@case(lambda: Net(3, 4), adamw, rows(0, 16), None)
def policy_gradient(t: Loop, k: int) -> Any:
    """REINFORCE: acts step by step with graphs, then one backward for the episode."""
    state, chances, rewards = rows(k, 16), [], []
    for _ in range(3 + k % 2):
        policy = torch.distributions.Categorical(logits=t.model(state))
        act = policy.sample()
        chances.append(policy.log_prob(act))
        rewards.append((act == 1).float())
        state = state.roll(1, 1) + act[:, None]
    del policy
    return t.update(-(torch.stack(chances) * torch.stack(rewards)).mean())


# ---------------------------------------------------------------- language models as they are tuned


def adapted() -> Any:
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.1)
    return peft.get_peft_model(gpt2(), config)


def with_two_adapters() -> Any:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=8, target_modules=["c_attn"]))
    model.set_adapter("default")
    return model


def chosen(logits: Tensor, text: Tensor) -> Tensor:
    """The log-probability of each text."""
    return logits[:, :-1].log_softmax(2).gather(2, text[:, 1:, None])[..., 0].sum(1)


@case(with_two_adapters, adamw, labelled(0), None)
def adapters_switched(t: Loop, k: int) -> Any:
    """Trains two adapters by turns."""
    t.model.set_adapter("other" if k % 2 else "default")
    return updated(sgd(t.model), t.model(**labelled(k)).loss)


@case(adapted, adamw, labelled(0), None)
def adapters_added_later(t: Loop, k: int) -> Any:
    """Adds a second adapter after some steps."""
    if k == 2:
        t.model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"]))
        t.model.set_adapter("other")
    return updated(sgd(t.model), t.model(**labelled(k)).loss)


def generated(model: Any, prompt: Tensor, count: int) -> Tensor:
    mask = torch.ones(prompt.shape, dtype=torch.long)
    return model.generate(  # type: ignore[no-any-return]
        input_ids=prompt, attention_mask=mask, do_sample=True, max_new_tokens=count, min_new_tokens=count
    )


@case(gpt2, adamw, {"input_ids": tokens(0, 8, 16)}, mean_square)
def generation_between_steps(t: Loop, k: int) -> Any:
    """GRPO: generates answers with the model being trained, then trains on them, of whatever length."""
    t.model.eval()
    with torch.no_grad():
        text = generated(t.model, tokens(k, 8, 6), 6 + 3 * k)
    t.model.train()
    gain = (text[:, 6:] == 7).float().sum(1)
    gain = (gain - gain.mean()) / (gain.std() + 1e-4)
    return t.update(-(chosen(t.model(input_ids=text).logits, text) * gain).mean()), text


def frozen_gpt2() -> Any:
    model = gpt2()
    frozen(model)
    model.__dict__["prompt"] = nn.Parameter(0.1 * torch.randn(4, WIDTH))
    return model


@case(
    frozen_gpt2, lambda model: torch.optim.AdamW([model.prompt], lr=0.01),
    {"inputs_embeds": torch.randn(8, 28, WIDTH, generator=seeded(0), requires_grad=True)}, mean_square,
)  # fmt: skip
def prompts_tuned(t: Loop, k: int) -> Any:
    """Trains embeddings in front of a frozen model."""
    given = torch.cat([t.model.prompt.expand(8, -1, -1), t.model.transformer.wte(tokens(k))], 1)
    logits = t.model(inputs_embeds=given).logits[:, 4:]
    loss = next_token(logits, tokens(k))
    del logits
    return t.update(loss), t.model.prompt


# ---------------------------------------------------------------- what else runs in between


@case(Images, sgd, images(0), None)
def evaluation_in_between(t: Loop, k: int) -> Any:
    """Evaluates without gradients on larger batches between steps."""
    loss = t.update(cross(t.model(images(k)), k))
    t.model.eval()
    with torch.inference_mode(), aside():
        found = t.model(images(k, 16)).sum()
    t.model.train()
    return loss, float(found)


@case(lambda: Net().eval(), then=lambda t: t.model.train())
def planned_in_evaluation_mode(t: Loop, k: int) -> Any:
    """Plans a model as it was loaded, in evaluation mode, and trains it in training mode."""
    return t.update(classified(t.model, k))


@case()
def consistency_of_unlabelled_samples(t: Loop, k: int) -> Any:
    """FixMatch: labelled and unlabelled samples, of which only the sure ones count."""
    loss = classified(t.model, k, 64)
    with torch.no_grad():
        sure, guess = t.model(rows(k + 100)).softmax(1).max(1)
    some = (sure > 0.25).nonzero()[:, 0]
    if len(some):
        loss = loss + F.cross_entropy(t.model(rows(k + 100)[some] + 0.1), guess[some])
    return t.update(loss)


@case()
def plan_taken_off_and_put_on(t: Loop, k: int) -> Any:
    """Pauses the plan for some steps."""
    pauses = k % 3 == 2
    with t.handle.paused() if t.handle is not None and pauses else contextlib.nullcontext():
        return t.update(classified(t.model, k, 32 if pauses else 128))


@case()
def an_interrupted_step(t: Loop, k: int) -> Any:
    """Catches an error in a forward or before backward, and goes on with the next batch."""
    loss = torch.zeros(())
    with contextlib.suppress(RuntimeError, ValueError):
        if k == 1:
            t.model(rows(k, 128, WIDTH + 1))
        found = classified(t.model, k)
        if k == 3:
            raise ValueError
        loss = t.update(found)
    return loss


@case()
def a_failed_backward(t: Loop, k: int) -> Any:
    """Has a hook that raises in backward in one step."""

    def fail(gradient: Tensor) -> None:
        raise ValueError

    t.optimizer.zero_grad()
    loss = classified(t.model, k)
    handle = t.model.blocks[1].up.weight.register_hook(fail) if k == 2 else None
    with contextlib.suppress(ValueError):
        loss.backward()
        t.optimizer.step()
    if handle is not None:
        handle.remove()
        t.optimizer.zero_grad()
    return loss


# ---------------------------------------------------------------- running them


@dataclass
class Result:
    """A training of the table, and its end; `failed`: why it doesn't train without a plan."""

    name: str
    about: str
    row: Row
    broken: str
    failed: str


def drive(name: str, record: Record) -> None:
    """Train by a case of the table."""
    one = TABLE[name]
    loop = Loop(one, record)
    for k in range(STEPS):
        record.step(functools.partial(one.run, loop, k))


def trial(name: str) -> Result:
    """Train both ways."""
    torch.set_num_threads(1)
    about = " ".join((TABLE[name].run.__doc__ or "").split())
    return Result(name, about, *tried(functools.partial(drive, name)))


def checks(results: list[Result]) -> list[documents.Check]:
    """The promises, and whether each is kept."""
    wrong = {
        "not trained without a plan": [r.name for r in results if r.failed],
        "silently different": [r.name for r in results if r.row.kind == "DIFFERENT"],
        "ended": [r.name for r in results if r.row.kind in ("ended", "refused", "infeasible")],
        "over without a word": [r.name for r in results if r.row.over.get("silent")],
    }
    return [
        (not names, f"{len(names)} of {len(results)} {what}: {', '.join(names) or 'none'}")
        for what, names in wrong.items()
    ]


def table(results: Iterable[Result]) -> Any:
    cells = []
    for r in results:
        pairs = [p / b for p, b in zip(r.row.peaks_bytes, r.row.budgets_bytes, strict=True) if b]
        over = [len(r.row.over.get(kind, ())) or "" for kind in OVER]
        kinds = ", ".join(f"{kind} {n}" for kind, n in r.row.differences.items())
        cells.append((r.name, r.row.kind, kinds, r.row.plans, *over, f"{max(pairs):.2f}" if pairs else None))
    return documents.table(("training", "end", "differences", "plans", *OVER, "peak / budget"), cells)


def show(result: Result) -> Result:
    """Print one in full."""
    print(f"{result.name}: {result.about}\n{result.failed}{shown(result.row)}", flush=True)
    return result


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--only", help="a part of the names of those that are to run, in full")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    given = parser.parse_args()
    if given.only is not None:
        results = [show(trial(name)) for name in TABLE if given.only in name]
        sys.exit(any(r.broken for r in results))
    results = []
    with multiprocessing.get_context("fork").Pool(given.workers, maxtasksperchild=8) as pool:
        for r in pool.imap(trial, TABLE):
            results.append(r)
            if r.broken:
                print(f"{r.name}: {r.broken}. {r.failed}{r.row.detail} {r.row.over}", flush=True)
    documents.finish(results, checks(results), table(results), given.out, "rebuilt.json")


if __name__ == "__main__":
    main()
