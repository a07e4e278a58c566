"""Do trainings rebuilt from public reports run with a plan as without one, bit for bit, and within the budget or said?

    python experiments/rebuilt.py --workers 2 --out experiments/results

Each function of the table trains a small model for six steps in a way that users report; its docstring says what the
user does. Up to its first `yield` it prepares and plans (`plan`); each further one ends a step, with what is to be
compared besides parameters, gradients and buffers. What the loop itself goes on holding, which no plan counts, is made
`aside`. `trainings.py` says what is compared and measured. Promised: none is silently different, none ends that ends
without a plan, and no step is over the budget without a warning that names the cause. Exits with 1 if that is broken.
`--only` runs those whose names contain a text, in full.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import itertools
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import documents
import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trainings import OVER, Record, Row, aside, compared, shown

import ckptplan

STEPS = 6
WIDTH, LABELS, VOCABULARY = 32, 10, 100
BUDGET = "30%"
Steps = Iterator[Any]
Training = Callable[[Record], Steps]

TABLE: dict[str, Training] = {}


def training(function: Training) -> Training:
    """Enter a training into the table."""
    TABLE[function.__name__] = function
    return function


# ---------------------------------------------------------------- what they are built of


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, depth: int = 4, out: int = LABELS, dropout: float = 0.1, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, out)

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Language(nn.Module):
    """A causal transformer."""

    def __init__(self, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.place = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 96, 0.1, batch_first=True) for _ in range(depth)
        )
        if tied:
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

    def __init__(self, channels: int = 3, out: int = LABELS) -> None:
        super().__init__()
        sizes = (channels, 16, 32, 32)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout2d(0.1))
                for a, b in itertools.pairwise(sizes)
            )
        )
        self.head = nn.Linear(32, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def rows(k: int, n: int = 128, width: int = WIDTH) -> Tensor:
    """The vectors of batch `k`."""
    return torch.randn(n, width, generator=torch.Generator().manual_seed(k))


def labels(k: int, n: int = 128) -> Tensor:
    return torch.randint(LABELS, (n,), generator=torch.Generator().manual_seed(k))


def tokens(k: int, n: int = 8, length: int = 24) -> Tensor:
    return torch.randint(1, VOCABULARY, (n, length), generator=torch.Generator().manual_seed(k))


def images(k: int, n: int = 8, side: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(k))


def classified(model: Callable[[Tensor], Tensor], k: int, n: int = 128) -> Tensor:
    """The loss of batch `k`."""
    return F.cross_entropy(model(rows(k, n)), labels(k, n))


def next_token(logits: Tensor, text: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def sgd(*models: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=lr, momentum=0.9)


def adamw(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for model in models for p in model.parameters()], lr=1e-3)


def plan(
    record: Record,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Any = None,
    *,
    others: Iterable[nn.Module] = (),
    alone: bool = False,
    **options: Any,
) -> Any:
    """Plan the model for a first batch, as users do; the handle, or None in the training without a plan.

    Parameters
    ----------
    others : iterable of nn.Module
        Compared as well, and not planned.
    alone : bool
        By `apply` alone, in the first forward.
    """
    handle: Any = None
    options = {"budget": BUDGET, "time_limit_s": 0.3, "menus": False, "on_progress": lambda text: None, **options}
    if isinstance(optimizer, torch.optim.LBFGS):
        options["optimizer"] = None
    if record.planned:
        options = {"optimizer": optimizer, **options}
        if alone:
            handle = ckptplan.apply(model, **options)
        else:
            if "step" not in options:
                options["inputs"] = rows(0) if inputs is None else inputs
            handle = ckptplan.apply(model, ckptplan.solve(model, **options))
    record.watch(model, *others, optimizers=[] if optimizer is None else [optimizer], handle=lambda: handle)
    return handle


def updated(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Backward, update, and no gradients left."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def cross(output: Tensor) -> Tensor:
    """The loss that a plan for `rows(0)` is made with."""
    return F.cross_entropy(output, labels(0, len(output)))


def frozen(module: nn.Module, on: bool = True) -> None:
    module.requires_grad_(not on)


# ---------------------------------------------------------------- batches and loops


@training
def plain_loop(record: Record) -> Steps:
    """Trains in the usual loop."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        yield updated(optimizer, classified(model, k))


@training
def gradients_dropped_late(record: Record) -> Steps:
    """Calls `zero_grad` between forward and backward."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        loss = classified(model, k)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


@training
def planned_by_apply(record: Record) -> Steps:
    """Lets the first forward plan."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross, alone=True)
    yield
    for k in range(STEPS):
        yield updated(optimizer, classified(model, k))


@training
def gradient_accumulation(record: Record) -> Steps:
    """Runs four micro-batches before each update."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, rows(0, 32), loss_fn=cross)
    yield
    for k in range(STEPS):
        optimizer.zero_grad()
        for i in range(4):
            loss = classified(model, 4 * k + i, 32) / 4
            loss.backward()
        optimizer.step()
        yield loss


@training
def accumulation_with_a_longer_last_batch(record: Record) -> Steps:
    """Accumulates, and drops no gradients before a larger batch comes."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, rows(0, 32), loss_fn=cross)
    yield
    for k in range(STEPS):
        loss = classified(model, k, 32 + 16 * (k % 3))
        loss.backward()
        if k % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        yield loss


@training
def two_forwards_before_backward(record: Record) -> Steps:
    """Adds the losses of two batches and runs one backward."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        yield updated(optimizer, classified(model, k) + classified(model, k + 100))


@training
def two_forwards_two_backwards(record: Record) -> Steps:
    """Runs both forwards first, then both backwards."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        optimizer.zero_grad()
        a, b = classified(model, k), classified(model, k + 100)
        a.backward()
        b.backward()
        optimizer.step()
        yield a, b


@training
def last_batch_smaller(record: Record) -> Steps:
    """Has a smaller batch at the end of each epoch."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        yield updated(optimizer, classified(model, k, 128 if k % 3 < 2 else 37))


@training
def warm_up_of_the_batch_size(record: Record) -> Steps:
    """Lets the batch grow in the course of the training."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, rows(0, 32), loss_fn=cross)
    yield
    for k in range(STEPS):
        yield updated(optimizer, classified(model, k, 32 + 24 * k))


@training
def padding_sometimes(record: Record) -> Steps:
    """Passes a mask only if the batch has padding."""
    model = Language()
    optimizer = adamw(model)
    plan(record, model, optimizer, tokens(0), loss_fn=lambda output: next_token(output, tokens(0)))
    yield
    for k in range(STEPS):
        text, padding = tokens(k), None
        if k % 2:
            padding = torch.zeros(text.shape, dtype=torch.bool)
            padding[1:, 20:] = True
        yield updated(optimizer, next_token(model(text, padding), text))


@training
def variable_lengths(record: Record) -> Steps:
    """Pads each batch to its own longest text."""
    model = Language()
    optimizer = adamw(model)
    plan(record, model, optimizer, tokens(0), loss_fn=lambda output: next_token(output, tokens(0)))
    yield
    for k in range(STEPS):
        text = tokens(k, 8, (24, 11, 30, 17, 40, 24)[k])
        yield updated(optimizer, next_token(model(text), text))


@training
def buckets_of_lengths(record: Record) -> Steps:
    """Keeps the number of tokens of a batch, so that short texts come in larger batches."""
    model = Language()
    optimizer = adamw(model)
    plan(record, model, optimizer, tokens(0), loss_fn=lambda output: next_token(output, tokens(0)))
    yield
    for k in range(STEPS):
        text = tokens(k, *((8, 24), (16, 12), (4, 48), (16, 12), (8, 24), (4, 48))[k])
        yield updated(optimizer, next_token(model(text), text))


@training
def curriculum_of_resolutions(record: Record) -> Steps:
    """Trains on small images first."""
    model = Images()
    optimizer = sgd(model)
    plan(record, model, optimizer, images(0))
    yield
    for k in range(STEPS):
        yield updated(optimizer, F.cross_entropy(model(images(k, 8, 16 + 8 * (k // 2))), labels(k, 8)))


@training
def curriculum_of_lengths(record: Record) -> Steps:
    """Lets the texts grow, planned by the first forward."""
    model = Language()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=lambda output: output.square().mean(), alone=True)
    yield
    for k in range(STEPS):
        text = tokens(k, 8, 12 + 6 * k)
        yield updated(optimizer, next_token(model(text), text))


@training
def output_kept_for_metrics(record: Record) -> Steps:
    """Holds the last output in a variable of the loop."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    right = 0.0
    for k in range(STEPS):
        output = model(rows(k))
        loss = F.cross_entropy(output, labels(k))
        updated(optimizer, loss)
        right += float((output.argmax(1) == labels(k)).float().mean())
        yield loss, right


@training
def losses_kept_in_a_list(record: Record) -> Steps:
    """Appends losses with their graphs to a list."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    kept: list[Tensor] = []
    for k in range(STEPS):
        loss = classified(model, k)
        kept.append(loss)
        updated(optimizer, loss)
        yield sum(float(each) for each in kept)


@training
def steps_skipped_at_nan(record: Record) -> Steps:
    """Leaves out the update, and backward, where the loss isn't finite."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        optimizer.zero_grad()
        loss = classified(model, k) * (float("nan") if k % 3 == 1 else 1.0)
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
        yield loss


@training
def gradients_clipped(record: Record) -> Steps:
    """Clips the norm of the gradients."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        optimizer.zero_grad()
        classified(model, k).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        yield norm


@training
def half_of_the_batch_again(record: Record) -> Steps:
    """Mines the hardest half of each batch by a forward without gradients."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, rows(0, 64), loss_fn=cross)
    yield
    for k in range(STEPS):
        with torch.no_grad():
            hard = F.cross_entropy(model(rows(k)), labels(k), reduction="none").topk(64).indices
        yield updated(optimizer, F.cross_entropy(model(rows(k)[hard]), labels(k)[hard]))


# ---------------------------------------------------------------- precision


@training
def autocast_in_forward(record: Record) -> Steps:
    """Casts to bfloat16 around forward and loss."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross, amp="bfloat16")
    yield
    for k in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = classified(model, k)
        yield updated(optimizer, loss)


@training
def autocast_that_was_not_planned(record: Record) -> Steps:
    """Plans without casts, and trains with them from the third step on."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=k > 1):
            loss = classified(model, k)
        yield updated(optimizer, loss)


@training
def autocast_around_everything(record: Record) -> Steps:
    """Has backward and update within autocast, too."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = updated(optimizer, classified(model, k))
        yield loss


@training
def a_gradient_scaler(record: Record) -> Steps:
    """Scales the loss for float16, and skips the steps that overflow."""
    model = Net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    plan(record, model, optimizer, loss_fn=cross, amp="float16")
    yield
    for k in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = classified(model, k)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss, scaler.get_scale()


@training
def contrastive_pairs_under_autocast(record: Record) -> Steps:
    """Runs the model twice within one autocast, on batches that grow."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, rows(0, 64), loss_fn=cross, amp="bfloat16")
    yield
    for k in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            a, b = (F.normalize(model(rows(k + i, 64 + 8 * k + 8 * i)[:64]), dim=1) for i in range(2))
            loss = F.cross_entropy(a @ b.t() / 0.1, torch.arange(64))
        yield updated(optimizer, loss)


# ---------------------------------------------------------------- frozen, thawed and changed parameters


@training
def layers_by_turns(record: Record) -> Steps:
    """LISA: trains other layers every second step, the rest frozen."""
    model = Net()
    optimizer = sgd(model)
    for i, block in enumerate(model.blocks):
        frozen(block, i != 0)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        for i, block in enumerate(model.blocks):
            frozen(block, i != k // 2)
        yield updated(optimizer, classified(model, k))


@training
def blocks_by_turns_from_the_last(record: Record) -> Steps:
    """BAdam: trains one block at a time, each with an optimizer of its own, from the last to the first."""
    model = Net()
    frozen(model)
    frozen(model.blocks[3], False)
    plan(record, model, sgd(model.blocks[3]), loss_fn=cross)
    yield
    for k in range(STEPS):
        frozen(model)
        now = model.blocks[3 - k // 2]
        frozen(now, False)
        yield updated(sgd(now), classified(model, k))


@training
def backbone_thawed(record: Record) -> Steps:
    """Fine-tunes the head first, then everything."""
    model = Net()
    frozen(model.blocks)
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        if k == 3:
            frozen(model.blocks, False)
        yield updated(optimizer, classified(model, k))


@training
def gradual_thawing(record: Record) -> Steps:
    """Thaws one more layer at every step, from the head on."""
    model = Net()
    optimizer = adamw(model)
    frozen(model.blocks)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        for i, block in enumerate(model.blocks):
            frozen(block, i < 4 - k)
        yield updated(optimizer, classified(model, k))


@training
def batch_norm_frozen(record: Record) -> Steps:
    """Puts the norms into evaluation mode after some steps."""
    model = Images()
    optimizer = sgd(model)
    plan(record, model, optimizer, images(0))
    yield
    for k in range(STEPS):
        model.train()
        if k > 1:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval().requires_grad_(False)
        yield updated(optimizer, F.cross_entropy(model(images(k)), labels(k, 8)))


@training
def a_head_replaced(record: Record) -> Steps:
    """Puts another head onto the model for another task."""
    model = Net()
    plan(record, model, sgd(model), loss_fn=cross)
    yield
    for k in range(STEPS):
        if k == 3:
            model.head = nn.Linear(WIDTH, LABELS)
        yield updated(sgd(model), classified(model, k))


@training
def layers_added(record: Record) -> Steps:
    """Stacks another block onto the model after some steps (progressive growing)."""
    model = Net(3)
    plan(record, model, sgd(model), loss_fn=cross)
    yield
    for k in range(STEPS):
        if k in (2, 4):
            model.blocks.append(Block())
        yield updated(sgd(model), classified(model, k))


@training
def layers_pruned(record: Record) -> Steps:
    """Removes a block after some steps."""
    model = Net(4)
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        if k == 3:
            del model.blocks[1]
        yield updated(optimizer, classified(model, k))


@training
def weights_pruned(record: Record) -> Steps:
    """Prunes weights by masks, which `torch.nn.utils.prune` makes parametrizations of."""
    model = Net()
    plan(record, model, sgd(model), loss_fn=cross)
    yield
    for k in range(STEPS):
        if k == 2:
            nn.utils.prune.l1_unstructured(model.blocks[1].up, "weight", 0.3)
        yield updated(sgd(model), classified(model, k))


@training
def embeddings_resized(record: Record) -> Steps:
    """Adds tokens to the vocabulary while training."""
    model = Language()
    plan(record, model, sgd(model), tokens(0), loss_fn=mean_square)
    yield
    for k in range(STEPS):
        if k == 3:
            larger = nn.Embedding(VOCABULARY + 20, WIDTH)
            with torch.no_grad():
                larger.weight[:VOCABULARY] = model.embed.weight
            model.embed = larger
        text = tokens(k)
        yield updated(sgd(model), next_token(model(text), text))


@training
def tied_weights(record: Record) -> Steps:
    """Ties the head to the embedding."""
    model = Language(tied=True)
    optimizer = adamw(model)
    plan(record, model, optimizer, tokens(0), loss_fn=lambda output: next_token(output, tokens(0)))
    yield
    for k in range(STEPS):
        text = tokens(k)
        yield updated(optimizer, next_token(model(text), text))


@training
def weights_averaged(record: Record) -> Steps:
    """Swaps averaged weights in for an evaluation, and out again."""
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross, others=[average])
    yield
    for k in range(STEPS):
        loss = updated(optimizer, classified(model, k))
        average.update_parameters(model)
        with torch.no_grad():
            evaluated = average(rows(k))
        yield loss, evaluated


@training
def loaded_in_the_middle(record: Record) -> Steps:
    """Saves the state, and loads it again after steps that went wrong."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    saved: Any = None
    for k in range(STEPS):
        if k == 2:
            with aside():
                file = io.BytesIO()
                torch.save((model.state_dict(), optimizer.state_dict()), file)
                file.seek(0)
                saved = torch.load(file)
        if k == 4:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        yield updated(optimizer, classified(model, k))


@training
def copied_in_the_middle(record: Record) -> Steps:
    """Keeps a deep copy of the model as the best so far, and evaluates and trains it."""
    model = Net()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        loss = updated(optimizer, classified(model, k))
        best = copy.deepcopy(model)
        with torch.no_grad():
            evaluated = best.eval()(rows(k))
        yield loss, evaluated


@training
def another_optimizer_later(record: Record) -> Steps:
    """Changes the optimizer and the learning rate."""
    model = Net()
    optimizer: torch.optim.Optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        if k == 3:
            optimizer = sgd(model)
        optimizer.param_groups[0]["lr"] *= 0.5
        yield updated(optimizer, classified(model, k))


@training
def spectral_norms(record: Record) -> Steps:
    """Parametrizes the weights by their spectral norms, which forward updates."""
    model = Net()
    for block in model.blocks:
        nn.utils.parametrizations.spectral_norm(block.up)
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        yield updated(optimizer, classified(model, k))


# ---------------------------------------------------------------- teachers, pairs and adversaries


@training
def a_teacher_of_averages(record: Record) -> Steps:
    """Mean teacher: a copy follows the model by an exponential average and gives targets."""
    model = Net()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    plan(record, model, optimizer, others=[teacher], loss_fn=mean_square)
    yield
    for k in range(STEPS):
        with torch.no_grad():
            target = teacher(rows(k) + 0.1)
        loss = updated(optimizer, F.mse_loss(model(rows(k)), target) + classified(model, k))
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
        yield loss


def contrasted(record: Record, *, whole: bool) -> Steps:
    """MoCo, planned as one step or by the model alone."""
    model = Net()
    keys = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    queue = F.normalize(rows(99, 64, LABELS), dim=1)

    def loss_of(k: int = 0) -> tuple[Tensor, Tensor]:
        q = F.normalize(model(rows(k)), dim=1)
        with torch.no_grad():
            positive = F.normalize(keys(rows(k) + 0.1), dim=1)
        logits = torch.cat([(q * positive).sum(1, keepdim=True), q @ queue.t()], 1) / 0.1
        return F.cross_entropy(logits, torch.zeros(128, dtype=torch.long)), positive

    plan(record, model, optimizer, others=[keys], **({"step": lambda: loss_of()[0]} if whole else {}))
    yield
    for k in range(STEPS):
        with torch.no_grad():
            for p, r in zip(keys.parameters(), model.parameters(), strict=True):
                p.mul_(0.9).add_(r, alpha=0.1)
        loss, positive = loss_of(k)
        updated(optimizer, loss)
        queue = torch.cat([positive, queue])[:64]
        yield loss


@training
def momentum_contrast(record: Record) -> Steps:
    """MoCo: a queue of the keys that a momentum encoder gives between forward and backward; planned as one step."""
    yield from contrasted(record, whole=True)


@training
def momentum_contrast_with_a_plan_of_the_model(record: Record) -> Steps:
    """MoCo: the same, with a plan of the model alone, which doesn't know what is between forward and backward."""
    yield from contrasted(record, whole=False)


@training
def siamese_with_a_stopped_gradient(record: Record) -> Steps:
    """SimSiam: two views through one model, with one side detached."""
    model, predictor = Net(out=16), nn.Linear(16, 16)
    optimizer = sgd(model, predictor)
    plan(record, model, optimizer, others=[predictor])
    yield
    for k in range(STEPS):
        a, b = model(rows(k)), model(rows(k) + 0.1)
        loss = -F.cosine_similarity(predictor(a), b.detach()).mean()
        loss = loss - F.cosine_similarity(predictor(b), a.detach()).mean()
        yield updated(optimizer, loss)


@training
def siamese_planned_as_one_step(record: Record) -> Steps:
    """The same, planned by `step=`."""
    model = Net(out=16)
    optimizer = sgd(model)

    def loss_of(k: int = 0) -> Tensor:
        a, b = model(rows(k)), model(rows(k) + 0.1)
        return -F.cosine_similarity(a, b.detach()).mean() - F.cosine_similarity(b, a.detach()).mean()

    plan(record, model, optimizer, step=loss_of)
    yield
    for k in range(STEPS):
        yield updated(optimizer, loss_of(k))


@training
def self_distillation(record: Record) -> Steps:
    """DINO: several crops through the student, two through a teacher, whose outputs are centred."""
    model = Images(out=16)
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    plan(record, model, optimizer, images(0), others=[teacher])
    yield
    center = torch.zeros(16)
    for k in range(STEPS):
        crops = [images(k), images(k + 50), images(k + 100, 8, 8), images(k + 150, 8, 8)]
        outputs = [model(crop) for crop in crops]
        with torch.no_grad():
            targets = [((teacher(crop) - center) / 0.1).softmax(1) for crop in crops[:2]]
            center = 0.9 * center + 0.1 * targets[0].mean(0)
        losses = [-(t * o.log_softmax(1)).sum(1).mean() for t in targets for o in outputs]
        yield updated(optimizer, sum(losses) / len(losses))  # type: ignore[arg-type]


@training
def bootstrapped_targets(record: Record) -> Steps:
    """BYOL: a predictor of what a slowly moving target makes of the other view."""
    model = Net(out=16)
    target, predictor = copy.deepcopy(model).requires_grad_(False), nn.Linear(16, 16)
    optimizer = sgd(model, predictor)
    plan(record, model, optimizer, others=[target, predictor])
    yield
    for k in range(STEPS):
        loss = torch.zeros(())
        for a, b in ((rows(k), rows(k) + 0.1), (rows(k) + 0.1, rows(k))):
            with torch.no_grad():
                wanted = target(b)
            loss = loss + F.mse_loss(F.normalize(predictor(model(a)), dim=1), F.normalize(wanted, dim=1))
        updated(optimizer, loss)
        for p, q in zip(target.parameters(), model.parameters(), strict=True):
            p.data.lerp_(q.data, 0.1)
        yield loss


@training
def triplets(record: Record) -> Steps:
    """Runs anchor, positive and negative one by one."""
    model = Net(out=16)
    optimizer = sgd(model)
    plan(record, model, optimizer)
    yield
    for k in range(STEPS):
        anchor, near, far = (model(rows(k + 100 * i)) for i in range(3))
        yield updated(optimizer, F.triplet_margin_loss(anchor, near, far))


@training
def knowledge_distillation(record: Record) -> Steps:
    """A large teacher without gradients, a small student; the teacher isn't in evaluation mode."""
    teacher, model = Net(6), Net(3)
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=cross, others=[teacher])
    yield
    for k in range(STEPS):
        with torch.no_grad():
            soft = (teacher(rows(k)) / 2).softmax(1)
        hard = model(rows(k))
        yield updated(optimizer, F.kl_div((hard / 2).log_softmax(1), soft) + F.cross_entropy(hard, labels(k)))


@training
def adversaries(record: Record) -> Steps:
    """GAN: a planned generator, a discriminator beside it, an optimizer each."""
    model, judge = Net(out=WIDTH), Net(out=1)
    ours, theirs = adamw(model), adamw(judge)
    plan(record, model, ours, others=[judge], loss_fn=lambda made: judge(made).mean())
    yield
    for k in range(STEPS):
        made = model(rows(k))
        theirs.zero_grad()
        (F.softplus(judge(made.detach())) + F.softplus(-judge(rows(k + 100)))).mean().backward()
        theirs.step()
        ours.zero_grad()
        loss = F.softplus(-judge(made)).mean()
        loss.backward()
        ours.step()
        yield loss


@training
def a_planned_discriminator(record: Record) -> Steps:
    """GAN: the discriminator is planned; it runs on real and made samples, then for the generator."""
    made_by, model = Net(out=WIDTH), Net(out=1)
    ours, theirs = adamw(model), adamw(made_by)
    plan(record, model, ours, others=[made_by])
    yield
    for k in range(STEPS):
        made = made_by(rows(k))
        updated(ours, (F.softplus(model(made.detach())) + F.softplus(-model(rows(k + 100)))).mean())
        yield updated(theirs, F.softplus(-model(made)).mean())


@training
def a_gradient_penalty(record: Record) -> Steps:
    """WGAN-GP: the penalty needs the gradient's gradient."""
    model = Net(out=1, dropout=0.0)
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=lambda output: output.mean())
    yield
    for k in range(STEPS):
        loss = model(rows(k)).mean() - model(rows(k + 100)).mean()
        between = (0.3 * rows(k) + 0.7 * rows(k + 100)).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        yield updated(optimizer, loss + 10 * (slope.norm(dim=1) - 1).square().mean())


@training
def a_penalty_now_and_then(record: Record) -> Steps:
    """R1 regularization every third step (lazy regularization)."""
    model = Net(out=1, dropout=0.0)
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=lambda output: output.mean())
    yield
    for k in range(STEPS):
        x = rows(k).requires_grad_(k % 3 == 2)
        output = model(x)
        loss = F.softplus(-output).mean()
        if k % 3 == 2:
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            loss = loss + slope.square().sum(1).mean()
        yield updated(optimizer, loss)


@training
def adversarial_examples(record: Record) -> Steps:
    """PGD: the gradient with respect to the input first, then a step on the changed input."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        with aside():
            x = rows(k).requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), labels(k)), x)
        with aside():
            changed = (x + 0.05 * slope.sign()).detach()
        del slope
        yield updated(optimizer, F.cross_entropy(model(changed), labels(k)))


# ---------------------------------------------------------------- gradients of another kind


@training
def inner_steps_by_functions(record: Record) -> Steps:
    """MAML: an inner step by `functional_call`, and a loss behind it."""
    model = Net(dropout=0.0)
    optimizer = sgd(model)
    plan(record, model, optimizer, rows(0, 64), loss_fn=cross)
    yield
    for k in range(STEPS):
        own = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, own, (rows(k, 64),)), labels(k, 64))
        slopes = torch.autograd.grad(inner, list(own.values()), create_graph=True)
        moved = {n: p - 0.1 * g for (n, p), g in zip(own.items(), slopes, strict=True)}
        output = torch.func.functional_call(model, moved, (rows(k + 100, 64),))
        yield updated(optimizer, F.cross_entropy(output, labels(k + 100, 64)))


@training
def inner_steps_on_a_copy(record: Record) -> Steps:
    """Reptile: trains a copy, then moves the model towards it; every second step is a usual one."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        if k % 2:
            twin = copy.deepcopy(model)
            for i in range(2):
                loss = updated(sgd(twin), classified(twin, 10 * k + i))
            with torch.no_grad():
                for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                    p.lerp_(q, 0.5)
            del twin
        else:
            loss = updated(optimizer, classified(model, k))
        yield loss


@training
def gradients_of_each_sample(record: Record) -> Steps:
    """Looks at per-sample gradients by `vmap` between steps."""
    model = Net(dropout=0.0)
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield

    def loss_of(own: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, own, (x[None],)), y[None])

    for k in range(STEPS):
        loss = updated(optimizer, classified(model, k))
        norms = torch.zeros(())
        if k % 2:
            own = {n: p.detach() for n, p in model.named_parameters()}
            each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(own, rows(k)[:4], labels(k)[:4])
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        yield loss, norms


@training
def the_sharpest_point(record: Record) -> Steps:
    """SAM: a step up to where the loss is largest nearby, and the gradient there."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        optimizer.zero_grad()
        classified(model, k).backward()
        with torch.no_grad(), aside():
            up = [0.05 * p.grad / (p.grad.norm() + 1e-9) for p in model.parameters()]  # type: ignore[operator, union-attr]
            for p, e in zip(model.parameters(), up, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        loss = classified(model, k)
        loss.backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), up, strict=True):
                p.sub_(e)
        optimizer.step()
        yield loss


@training
def looking_ahead(record: Record) -> Steps:
    """Lookahead: slow weights are put back every third step through `.data`."""
    model = Net()
    optimizer = adamw(model)
    slow = [p.detach().clone() for p in model.parameters()]
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        loss = updated(optimizer, classified(model, k))
        if k % 3 == 2:
            for p, s in zip(model.parameters(), slow, strict=True):
                s.lerp_(p.detach(), 0.5)
                p.data.copy_(s)
        yield loss


@training
def a_closure_called_often(record: Record) -> Steps:
    """LBFGS runs forward and backward several times a step."""
    model = Net(dropout=0.0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=2)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):

        def closure(k: int = k) -> Tensor:
            optimizer.zero_grad()
            loss = classified(model, k)
            loss.backward()
            return loss

        yield optimizer.step(closure)


@training
def backward_twice(record: Record) -> Steps:
    """Runs backward of two losses through one graph (`retain_graph`)."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        optimizer.zero_grad()
        output = model(rows(k))
        F.cross_entropy(output, labels(k)).backward(retain_graph=True)
        output.square().mean().backward()
        optimizer.step()
        del output
        yield None


@training
def gradients_of_some_parameters(record: Record) -> Steps:
    """Runs `backward(inputs=...)` for the head in some steps."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        optimizer.zero_grad()
        loss = classified(model, k)
        loss.backward(inputs=list((model.head if k % 2 else model).parameters()))
        optimizer.step()
        yield loss


@training
def conflicting_gradients(record: Record) -> Steps:
    """PCGrad: each task's gradient by `autograd.grad`, projected, then put into `.grad`."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        output = model(rows(k))
        losses = F.cross_entropy(output, labels(k)), output.square().mean()
        own = list(model.parameters())
        a = torch.autograd.grad(losses[0], own, retain_graph=True)
        b = torch.autograd.grad(losses[1], own)
        for p, g, h in zip(own, a, b, strict=True):
            p.grad = g + h - torch.clamp((g * h).sum() / (h.norm() ** 2 + 1e-9), max=0) * h
        optimizer.step()
        del output
        yield losses


@training
def gradients_balanced(record: Record) -> Steps:
    """GradNorm: weights of tasks follow the norms of their gradients, by a graph of the gradient."""
    model = Net(dropout=0.0)
    weights = nn.Parameter(torch.ones(2))
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        output = model(rows(k))
        losses = torch.stack([F.cross_entropy(output, labels(k)), output.square().mean()])
        last = model.blocks[-1].down.weight
        norms = torch.stack(
            [torch.autograd.grad(weights[i] * losses[i], last, create_graph=True)[0].norm() for i in range(2)]
        )
        (slope,) = torch.autograd.grad((norms - norms.mean().detach()).abs().sum(), weights, retain_graph=True)
        optimizer.zero_grad()
        (weights.detach() * losses).sum().backward()
        optimizer.step()
        with torch.no_grad():
            weights -= 0.1 * slope
        del output, norms
        yield losses, weights


@training
def steps_in_hooks(record: Record) -> Steps:
    """Updates each parameter as soon as its gradient is there, and frees the gradient."""
    model = Net()
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    plan(record, model, None, loss_fn=cross)
    yield
    for k in range(STEPS):
        loss = classified(model, k)
        loss.backward()
        yield loss


# ---------------------------------------------------------------- paths through the model


class Dropping(Net):
    """Leaves blocks out at random."""

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.4:
                x = block(x)
        return x


@training
def stochastic_depth(record: Record) -> Steps:
    """Leaves blocks out at random."""
    model = Dropping()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        yield updated(optimizer, classified(model, k))


class Deciding(Net):
    """Runs as many blocks as the caller says, or as it needs."""

    depth: int | None = None

    def features(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.depth is not None and i + 1 >= self.depth:
                break
        return x


@training
def early_exit(record: Record) -> Steps:
    """Plans at half the depth; later steps leave at other depths."""
    model = Deciding()
    model.depth = 2
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        model.depth = (2, 1, 4, 3, 4, 2)[k]
        yield updated(optimizer, classified(model, k))


class Pondering(Net):
    """Runs its first block again until it is sure."""

    def features(self, x: Tensor) -> Tensor:
        for i in range(5):
            x = self.blocks[0](x)
            if float(x.detach().std()) > 1.15 + 0.1 * i:
                break
        for block in self.blocks[1:]:
            x = block(x)
        return x


@training
def adaptive_computation(record: Record) -> Steps:
    """Calls one layer as often as the data needs it."""
    model = Pondering()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        yield updated(optimizer, F.cross_entropy(model(rows(k) * (0.5 + 0.25 * k)), labels(k)))


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


@training
def mixture_of_experts(record: Record) -> Steps:
    """Routes each sample to two experts, some of which get none."""
    model = Experts()
    optimizer = sgd(model, lr=1.0)
    plan(record, model, optimizer, loss_fn=lambda output: cross(output[0]) + output[1])
    yield
    for k in range(STEPS):
        output, balance = model(rows(k) * (k + 1))
        loss = F.cross_entropy(output, labels(k)) + balance
        del output
        yield updated(optimizer, loss)


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Net(3, WIDTH)
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, LABELS), "b": Net(2), "c": nn.Linear(WIDTH, LABELS)})

    def forward(self, x: Tensor, tasks: tuple[str, ...] = ("a",)) -> list[Tensor]:
        x = self.body(x)
        return [self.heads[task](x) for task in tasks]


@training
def heads_of_tasks(record: Record) -> Steps:
    """Trains other heads in other steps, sometimes several."""
    model = Tasks()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=lambda outputs: cross(outputs[0]))
    yield
    for k in range(STEPS):
        tasks = (("a",), ("b",), ("a", "c"), ("a", "b", "c"), ("c",), ("b",))[k]
        losses = [F.cross_entropy(output, labels(k)) for output in model(rows(k), tasks)]
        yield updated(optimizer, sum(losses))  # type: ignore[arg-type]


class Supervised(Net):
    """Has a head behind each block."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Linear(WIDTH, LABELS) for _ in self.blocks)
        self.uses_sides = True

    def forward(self, x: Tensor) -> Any:
        found = []
        for block, side in zip(self.blocks, self.sides, strict=True):
            x = block(x)
            if self.uses_sides:
                found.append(side(x))
        return [self.head(x), *found]


@training
def auxiliary_losses(record: Record) -> Steps:
    """Adds losses of intermediate layers, and leaves them out later."""
    model = Supervised()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=lambda outputs: sum(map(cross, outputs)))
    yield
    for k in range(STEPS):
        model.uses_sides = k % 3 < 2
        yield updated(optimizer, sum(F.cross_entropy(o, labels(k)) for o in model(rows(k))))  # type: ignore[arg-type]


@training
def layers_local_to_their_losses(record: Record) -> Steps:
    """Detaches between blocks, each with a loss of its own, after a first end-to-end step."""

    class Local(Supervised):
        local = False

        def forward(self, x: Tensor) -> Any:
            found = []
            for block, side in zip(self.blocks, self.sides, strict=True):
                x = block(x.detach() if self.local else x)
                found.append(side(x))
            return [self.head(x), *found]

    model = Local()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=lambda outputs: sum(map(cross, outputs)))
    yield
    for k in range(STEPS):
        model.local = k % 2 == 1
        yield updated(optimizer, sum(F.cross_entropy(o, labels(k)) for o in model(rows(k))))  # type: ignore[arg-type]


class Stopping(Net):
    """Cuts its graph behind a block."""

    cut: int | None = None

    def features(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == self.cut:
                x = x.detach()
        return x


@training
def a_graph_cut_at_first(record: Record) -> Steps:
    """Trains only the upper half by a `detach` in forward, then everything."""
    model = Stopping()
    model.cut = 1
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        model.cut = 1 if k < 3 else None
        yield updated(optimizer, classified(model, k))


@training
def features_without_gradients_at_first(record: Record) -> Steps:
    """Runs the body under `no_grad` in the first steps (as speech encoders do), then trains it."""

    class Warm(Net):
        cold = True

        def features(self, x: Tensor) -> Tensor:
            with contextlib.nullcontext() if not self.cold else torch.no_grad():
                return super().features(x)

    model = Warm()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        model.cold = k < 3
        yield updated(optimizer, classified(model, k))


@training
def outputs_asked_for_in_some_steps(record: Record) -> Steps:
    """Asks for attentions in some steps, to plot them."""
    config = transformers.BertConfig(
        hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCABULARY,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    optimizer = adamw(model)
    batch = {"input_ids": tokens(0), "labels": tokens(0)}
    plan(record, model, optimizer, batch)
    yield
    for k in range(STEPS):
        output = model(input_ids=tokens(k), labels=tokens(k), output_attentions=k % 2 == 1)
        loss, shown = output.loss, [a.detach().mean() for a in output.attentions or ()]
        del output
        yield updated(optimizer, loss), shown


@training
def features_by_hooks(record: Record) -> Steps:
    """Collects features by hooks for a loss of perception."""
    model = Images()
    optimizer = sgd(model)
    found: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: found.append(output))
    plan(record, model, optimizer, images(0))
    yield
    for k in range(STEPS):
        found.clear()
        output = model(images(k))
        loss = F.cross_entropy(output, labels(k, 8)) + sum(f.square().mean() for f in found)
        del output
        updated(optimizer, loss)
        found.clear()
        yield loss


@training
def hooks_on_gradients(record: Record) -> Steps:
    """Registers hooks on gradients of activations in some steps (Grad-CAM, clipping inside)."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        seen: list[Tensor] = []
        handles = []
        if k % 2:
            handles = [
                block.register_full_backward_hook(lambda m, i, o, seen=seen: seen.append(o[0].norm()))  # type: ignore[misc]
                for block in model.blocks
            ]
        loss = updated(optimizer, classified(model, k))
        for handle in handles:
            handle.remove()
        yield loss, seen


@training
def a_wrapper_around(record: Record) -> Steps:
    """Calls the planned model through a wrapper that splits the batch."""
    model = Net()
    optimizer = sgd(model)

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.module(part) for part in x.chunk(2)])

    wrapper = Split()
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        yield updated(optimizer, classified(wrapper, k))


@training
def a_checkpoint_around_parts(record: Record) -> Steps:
    """Checkpoints the head by hand."""

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: torch.tanh(x) @ self.head.weight.t(), self.features(x), use_reentrant=False)

    model = Checkpointed()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        yield updated(optimizer, classified(model, k))


# ---------------------------------------------------------------- recurrent, generative and reinforced


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.front, self.cell, self.back = Block(), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), Block()

    def forward(self, text: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        hidden, state = self.cell(self.front(self.embed(text)), state)
        return self.head(self.back(hidden)), state


@training
def truncated_backpropagation(record: Record) -> Steps:
    """Carries a detached state from one part of a text to the next."""
    model = Recurrent()
    optimizer = sgd(model)
    plan(record, model, optimizer, tokens(0), loss_fn=lambda output: output[0].square().mean())
    yield
    state: Any = None
    for k in range(STEPS):
        text = tokens(k)
        logits, state = model(text, state)
        loss = next_token(logits, text)
        del logits
        updated(optimizer, loss)
        state = tuple(s.detach() for s in state)
        yield loss, state


@training
def a_loop_over_time(record: Record) -> Steps:
    """Calls a cell for each place of a text, as many times as it is long."""

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), Net(2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(x.shape[1], WIDTH)
            for each in x:
                h = self.cell(each, h)
            return self.head(h)

    model = Unrolled()
    optimizer = sgd(model)
    plan(record, model, optimizer, rows(0, 6 * 64).view(6, 64, WIDTH), loss_fn=cross)
    yield
    for k in range(STEPS):
        n = 4 + k
        x = rows(k, n * 64).view(n, 64, WIDTH)
        yield updated(optimizer, F.cross_entropy(model(x), labels(k, 64)))


@training
def scheduled_sampling(record: Record) -> Steps:
    """Feeds the model's own tokens to it in some steps, by a forward without gradients."""
    model = Language()
    optimizer = adamw(model)
    plan(record, model, optimizer, tokens(0), loss_fn=lambda output: next_token(output, tokens(0)))
    yield
    for k in range(STEPS):
        text = tokens(k)
        given = text
        if k % 2:
            with torch.no_grad():
                own = model(text).argmax(2).roll(1, 1)
            given = torch.where(torch.rand(text.shape) < 0.3, own, text)
        yield updated(optimizer, next_token(model(given), text))


@training
def diffusion(record: Record) -> Steps:
    """Predicts noise at a random time, with classifier-free guidance: the label is left out at random."""

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.kind, self.net = nn.Embedding(100, WIDTH), nn.Embedding(LABELS, WIDTH), Net(4, WIDTH)

        def forward(self, x: Tensor, t: Tensor, kind: Tensor | None = None) -> Tensor:
            x = x + self.time(t)
            return self.net(x if kind is None else x + self.kind(kind))

    model = Denoiser()
    optimizer = adamw(model)
    plan(record, model, optimizer, (rows(0), torch.zeros(128, dtype=torch.long), labels(0)), loss_fn=mean_square)
    yield
    for k in range(STEPS):
        t = torch.randint(100, (128,))
        noise = torch.randn(128, WIDTH)
        level = (t / 100)[:, None]
        kind = labels(k) if torch.rand(()) > 0.4 else None
        yield updated(optimizer, F.mse_loss(model(rows(k) * (1 - level) + noise * level, t, kind), noise))


@training
def diffusion_with_self_conditioning(record: Record) -> Steps:
    """Gives the model its own estimate, from a forward without gradients, in half of the steps."""

    class Denoiser(Net):
        def __init__(self) -> None:
            super().__init__(4, WIDTH)
            self.join = nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor, own: Tensor | None = None) -> Tensor:
            own = torch.zeros_like(x) if own is None else own
            return super().forward(self.join(torch.cat([x, own], 1)))

    model = Denoiser()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=mean_square)
    yield
    for k in range(STEPS):
        own = None
        if torch.rand(()) < 0.5:
            with torch.no_grad():
                own = model(rows(k))
        yield updated(optimizer, F.mse_loss(model(rows(k), own), rows(k + 100)))


@training
def a_variational_encoder(record: Record) -> Steps:
    """VAE: draws from what it encodes; the weight of the divergence grows from 0."""

    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Net(2, 2 * WIDTH), Net(2, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, spread = self.encoder(x).chunk(2, 1)
            return self.decoder(mean + spread.exp() * torch.randn_like(mean)), mean, spread

    model = Auto()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=lambda found: sum(map(mean_square, found)))
    yield
    for k in range(STEPS):
        made, mean, spread = model(rows(k))
        loss = F.mse_loss(made, rows(k))
        if k:
            loss = loss + 0.1 * k * (mean.square() + (2 * spread).exp() - 2 * spread).mean()
        del made, mean, spread
        yield updated(optimizer, loss)


@training
def a_codebook(record: Record) -> Steps:
    """VQ-VAE: the gradient goes straight through the nearest codes, which follow by averages in buffers."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Net(2, WIDTH), Net(2, WIDTH)
            self.register_buffer("codes", torch.randn(16, WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.encoder(x)
            near = torch.cdist(z, self.codes).argmin(1)
            q = self.codes[near]
            if self.training:
                with torch.no_grad():
                    self.codes.index_add_(0, near, 0.01 * (z - q))
            return self.decoder(z + (q - z).detach()), F.mse_loss(z, q.detach())

    model = Quantized()
    optimizer = adamw(model)
    plan(record, model, optimizer, loss_fn=lambda found: mean_square(found[0]) + found[1])
    yield
    for k in range(STEPS):
        made, commitment = model(rows(k))
        loss = F.mse_loss(made, rows(k)) + commitment
        del made, commitment
        yield updated(optimizer, loss)


@training
def policy_gradient(record: Record) -> Steps:
    """REINFORCE: acts step by step with graphs, then one backward for the episode."""
    model = Net(3, 4)
    optimizer = adamw(model)
    plan(record, model, optimizer, rows(0, 16))
    yield
    for k in range(STEPS):
        state, chances, rewards = rows(k, 16), [], []
        for _ in range(3 + k % 2):
            policy = torch.distributions.Categorical(logits=model(state))
            act = policy.sample()
            chances.append(policy.log_prob(act))
            rewards.append((act == 1).float())
            state = state.roll(1, 1) + act[:, None]
        del policy
        yield updated(optimizer, -(torch.stack(chances) * torch.stack(rewards)).mean())


@training
def actor_and_critic(record: Record) -> Steps:
    """PPO: collects without gradients, then several epochs of small batches on two heads."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = Net(3, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = torch.relu(self.body(x))
            return self.actor(x), self.critic(x)[:, 0]

    model = Both()
    optimizer = adamw(model)
    plan(record, model, optimizer, rows(0, 64), loss_fn=lambda found: sum(map(mean_square, found)))
    yield
    for k in range(STEPS):
        with torch.no_grad(), aside():
            logits, value = model(rows(k))
            policy = torch.distributions.Categorical(logits=logits)
            acts = policy.sample()
            old, gain = policy.log_prob(acts), (acts == 1).float() - value
        for part in torch.randperm(128).split(64):
            logits, value = model(rows(k)[part])
            ratio = (torch.distributions.Categorical(logits=logits).log_prob(acts[part]) - old[part]).exp()
            loss = -torch.min(ratio * gain[part], ratio.clamp(0.8, 1.2) * gain[part]).mean()
            loss = loss + F.mse_loss(value, gain[part])
            del logits, value, ratio
            updated(optimizer, loss)
        yield loss


@training
def q_learning(record: Record) -> Steps:
    """Bootstraps from the next state by the same network without gradients, and copies targets now and then."""
    model = Net(3, 4)
    target = copy.deepcopy(model)
    optimizer = adamw(model)
    plan(record, model, optimizer, others=[target])
    yield
    for k in range(STEPS):
        with torch.no_grad():
            best = model(rows(k + 100)).argmax(1, keepdim=True)
            wanted = target(rows(k + 100)).gather(1, best)[:, 0]
        loss = updated(optimizer, F.mse_loss(model(rows(k))[:, 0], wanted))
        if k % 3 == 2:
            target.load_state_dict(model.state_dict())
        yield loss


# ---------------------------------------------------------------- language models as they are tuned


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=3, n_head=2, use_cache=False, bos_token_id=0,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def adapted(model: Any, **more: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.1, **more))


def chosen(logits: Tensor, text: Tensor) -> Tensor:
    """The log-probability of each text."""
    return logits[:, :-1].log_softmax(2).gather(2, text[:, 1:, None])[..., 0].sum(1)


@training
def adapters(record: Record) -> Steps:
    """Fine-tunes by LoRA."""
    model = adapted(gpt2())
    optimizer = adamw(model)
    plan(record, model, optimizer, {"input_ids": tokens(0), "labels": tokens(0)})
    yield
    for k in range(STEPS):
        yield updated(optimizer, model(input_ids=tokens(k), labels=tokens(k)).loss)


@training
def adapters_switched(record: Record) -> Steps:
    """Trains two adapters by turns."""
    model = adapted(gpt2())
    model.add_adapter("other", peft.LoraConfig(r=8, target_modules=["c_attn"]))
    model.set_adapter("default")
    plan(record, model, adamw(model), {"input_ids": tokens(0), "labels": tokens(0)})
    yield
    for k in range(STEPS):
        model.set_adapter("other" if k % 2 else "default")
        yield updated(sgd(model), model(input_ids=tokens(k), labels=tokens(k)).loss)


@training
def adapters_added_later(record: Record) -> Steps:
    """Adds a second adapter after some steps."""
    model = adapted(gpt2())
    plan(record, model, adamw(model), {"input_ids": tokens(0), "labels": tokens(0)})
    yield
    for k in range(STEPS):
        if k == 2:
            model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"]))
            model.set_adapter("other")
        yield updated(sgd(model), model(input_ids=tokens(k), labels=tokens(k)).loss)


@training
def preferences_without_adapters(record: Record) -> Steps:
    """DPO: the reference is the model with its adapters disabled; both answers in one batch."""
    model = adapted(gpt2())
    optimizer = adamw(model)
    plan(record, model, optimizer, {"input_ids": tokens(0)}, loss_fn=lambda output: output.logits.square().mean())
    yield
    for k in range(STEPS):
        text = tokens(k)
        with torch.no_grad(), model.disable_adapter():
            before = chosen(model(input_ids=text).logits, text)
        gain = chosen(model(input_ids=text).logits, text) - before
        yield updated(optimizer, -F.logsigmoid(0.1 * (gain[:4] - gain[4:])).mean())


@training
def preferences_one_by_one(record: Record) -> Steps:
    """DPO with two forwards, of the chosen and of the rejected answer, with padding to their own lengths."""
    model = adapted(gpt2())
    optimizer = adamw(model)
    plan(record, model, optimizer, {"input_ids": tokens(0)}, loss_fn=lambda output: output.logits.square().mean())
    yield
    for k in range(STEPS):
        good, bad = tokens(k), tokens(k + 100, 8, 24 - k)
        gain = chosen(model(input_ids=good).logits, good) - chosen(model(input_ids=bad).logits, bad)
        yield updated(optimizer, -F.logsigmoid(0.1 * gain).mean())


@training
def reward_model(record: Record) -> Steps:
    """Ranks pairs in one batch by a head on the last token."""
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCABULARY,
        pad_token_id=0, num_labels=1, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config).train()
    optimizer = adamw(model)
    batch = {"input_ids": tokens(0), "attention_mask": torch.ones(8, 24, dtype=torch.long)}
    plan(record, model, optimizer, batch, loss_fn=lambda output: output.logits.mean())
    yield
    for k in range(STEPS):
        mask = torch.ones(8, 24, dtype=torch.long)
        if k % 2:
            mask[2:, 20 - k :] = 0
        score = model(input_ids=tokens(k) * mask, attention_mask=mask).logits[:, 0]
        yield updated(optimizer, -F.logsigmoid(score[:4] - score[4:]).mean())


@training
def generation_between_steps(record: Record) -> Steps:
    """GRPO: generates answers with the model being trained, then trains on them, of whatever length."""
    model = gpt2()
    optimizer = adamw(model)
    plan(
        record, model, optimizer, {"input_ids": tokens(0, 8, 16)}, loss_fn=lambda output: output.logits.square().mean()
    )
    yield
    for k in range(STEPS):
        model.eval()
        with torch.no_grad():
            text = model.generate(
                input_ids=tokens(k, 8, 6), attention_mask=torch.ones(8, 6, dtype=torch.long), do_sample=True,
                max_new_tokens=6 + 3 * k, min_new_tokens=6 + 3 * k,
            )  # fmt: skip
        model.train()
        gain = (text[:, 6:] == 7).float().sum(1)
        gain = (gain - gain.mean()) / (gain.std() + 1e-4)
        yield updated(optimizer, -(chosen(model(input_ids=text).logits, text) * gain).mean()), text


@training
def generation_in_training_mode(record: Record) -> Steps:
    """Generates without leaving training mode."""
    model = gpt2()
    optimizer = adamw(model)
    plan(record, model, optimizer, {"input_ids": tokens(0), "labels": tokens(0)})
    yield
    for k in range(STEPS):
        loss = updated(optimizer, model(input_ids=tokens(k), labels=tokens(k)).loss)
        made = model.generate(
            input_ids=tokens(k, 2, 4),
            attention_mask=torch.ones(2, 4, dtype=torch.long),
            max_new_tokens=4,
            do_sample=True,
        )
        yield loss, made


@training
def labels_in_some_steps(record: Record) -> Steps:
    """Plans with labels, and computes the loss outside in some steps."""
    model = gpt2()
    optimizer = adamw(model)
    plan(
        record, model, optimizer, {"input_ids": tokens(0)}, loss_fn=lambda output: next_token(output.logits, tokens(0))
    )
    yield
    for k in range(STEPS):
        if k % 2:
            loss = model(input_ids=tokens(k), labels=tokens(k)).loss
        else:
            loss = next_token(model(input_ids=tokens(k)).logits, tokens(k))
        yield updated(optimizer, loss)


@training
def prompts_tuned(record: Record) -> Steps:
    """Trains embeddings in front of a frozen model."""
    model = gpt2()
    frozen(model)
    prompt = nn.Parameter(0.1 * torch.randn(4, WIDTH))
    optimizer = torch.optim.AdamW([prompt], lr=0.01)

    def given(k: int) -> Tensor:
        return torch.cat([prompt.expand(8, -1, -1), model.transformer.wte(tokens(k))], 1)

    plan(
        record, model, optimizer, {"inputs_embeds": given(0).detach().requires_grad_()},
        loss_fn=lambda output: output.logits.square().mean(),
    )  # fmt: skip
    yield
    for k in range(STEPS):
        logits = model(inputs_embeds=given(k)).logits[:, 4:]
        loss = next_token(logits, tokens(k))
        del logits
        updated(optimizer, loss)
        yield loss, prompt


# ---------------------------------------------------------------- what else runs in between


@training
def evaluation_in_between(record: Record) -> Steps:
    """Evaluates without gradients on larger batches between steps."""
    model = Images()
    optimizer = sgd(model)
    plan(record, model, optimizer, images(0))
    yield
    for k in range(STEPS):
        loss = updated(optimizer, F.cross_entropy(model(images(k)), labels(k, 8)))
        model.eval()
        with torch.inference_mode(), aside():
            found = model(images(k, 16)).sum()
        model.train()
        yield loss, float(found)


@training
def evaluation_with_gradients(record: Record) -> Steps:
    """Looks at gradients of the input in evaluation mode between steps (saliency)."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        loss = updated(optimizer, classified(model, k))
        model.eval()
        x = rows(k, 16).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        model.train()
        yield loss, slope


@training
def evaluation_mode_forgotten(record: Record) -> Steps:
    """Trains on in evaluation mode after the first evaluation."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        if k == 2:
            model.eval()
        yield updated(optimizer, classified(model, k))


@training
def planned_in_evaluation_mode(record: Record) -> Steps:
    """Plans a model as it was loaded, in evaluation mode, and trains it in training mode."""
    model = Net().eval()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    model.train()
    yield
    for k in range(STEPS):
        yield updated(optimizer, classified(model, k))


@training
def training_at_test_time(record: Record) -> Steps:
    """Adapts the norms by the entropy of each test batch, then predicts, and puts the weights back."""
    model = Images()
    frozen(model)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for m in norms:
        frozen(m, False)
    optimizer = sgd(*norms)
    plan(record, model, optimizer, images(0), loss_fn=lambda output: -(output.softmax(1) * output.log_softmax(1)).sum())
    yield
    before = copy.deepcopy(model.state_dict())
    for k in range(STEPS):
        output = model(images(k, 8 if k % 2 else 5))
        loss = -(output.softmax(1) * output.log_softmax(1)).sum()
        del output
        updated(optimizer, loss)
        with torch.no_grad():
            found = model(images(k))
        if k % 3 == 2:
            model.load_state_dict(before)
        yield loss, found


@training
def mixed_samples(record: Record) -> Steps:
    """Mixup in some steps, with two targets."""
    model = Images()
    optimizer = sgd(model)
    plan(record, model, optimizer, images(0), loss_fn=lambda output: F.cross_entropy(output, labels(0, 8)))
    yield
    for k in range(STEPS):
        x, share, order = images(k), 1.0, torch.arange(8)
        if k % 2:
            share, order = random.betavariate(1, 1), torch.randperm(8)
            x = share * x + (1 - share) * x[order]
        output = model(x)
        loss = share * F.cross_entropy(output, labels(k, 8)) + (1 - share) * F.cross_entropy(
            output, labels(k, 8)[order]
        )
        del output
        yield updated(optimizer, loss)


@training
def consistency_of_unlabelled_samples(record: Record) -> Steps:
    """FixMatch: labelled and unlabelled samples, of which only the sure ones count."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        loss = classified(model, k, 64)
        with torch.no_grad():
            sure, guess = model(rows(k + 100)).softmax(1).max(1)
        some = (sure > 0.25).nonzero()[:, 0]
        if len(some):
            loss = loss + F.cross_entropy(model(rows(k + 100)[some] + 0.1), guess[some])
        yield updated(optimizer, loss)


@training
def rehearsal(record: Record) -> Steps:
    """Continual learning: a batch of the memory is joined to the present one from the second task on."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, rows(0, 64), loss_fn=cross)
    yield
    for k in range(STEPS):
        x, y = rows(k, 64), labels(k, 64)
        if k > 1:
            x, y = torch.cat([x, rows(0, 32)]), torch.cat([y, labels(0, 32)])
        yield updated(optimizer, F.cross_entropy(model(x), y))


@training
def plan_taken_off_and_put_on(record: Record) -> Steps:
    """Pauses the plan for some steps."""
    model = Net()
    optimizer = sgd(model)
    handle = plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        with handle.paused() if handle is not None and k % 3 == 2 else contextlib.nullcontext():
            n = 32 if k % 3 == 2 else 128
            loss = updated(optimizer, classified(model, k, n))
        yield loss


@training
def an_interrupted_step(record: Record) -> Steps:
    """Catches an error in a forward or before backward, and goes on with the next batch."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield
    for k in range(STEPS):
        try:
            if k == 1:
                model(rows(k, 128, WIDTH + 1))
            loss = classified(model, k)
            if k == 3:
                raise ValueError
            updated(optimizer, loss)
        except (RuntimeError, ValueError):
            loss = torch.zeros(())
        yield loss


@training
def a_failed_backward(record: Record) -> Steps:
    """Has a hook that raises in backward in one step."""
    model = Net()
    optimizer = sgd(model)
    plan(record, model, optimizer, loss_fn=cross)
    yield

    def fail(gradient: Tensor) -> None:
        raise ValueError

    for k in range(STEPS):
        optimizer.zero_grad()
        loss = classified(model, k)
        handle = model.blocks[1].up.weight.register_hook(fail) if k == 2 else None
        with contextlib.suppress(ValueError):
            loss.backward()
            optimizer.step()
        if handle is not None:
            handle.remove()
            optimizer.zero_grad()
        yield loss


# ---------------------------------------------------------------- running them


@dataclass
class Result:
    """A training of the table, and its end; `failed`: why it doesn't train without a plan."""

    name: str
    about: str
    broken: str = ""
    failed: str = ""
    row: Row = field(default_factory=Row)


def drive(name: str, record: Record) -> None:
    """Train by a function of the table."""
    steps = TABLE[name](record)
    next(steps)
    for _ in range(STEPS):
        record.step(functools.partial(next, steps))
    steps.close()  # type: ignore[attr-defined]


def trial(name: str) -> Result:
    """Train both ways."""
    torch.set_num_threads(1)
    result = Result(name, " ".join((TABLE[name].__doc__ or "").split()))
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            result.row = compared(functools.partial(drive, name))
            result.broken = result.row.broken
        except Exception as error:
            result.failed = f"{type(error).__name__}: {error}"[:400]
            result.broken = "not trained"
    return result


def checks(results: list[Result]) -> list[tuple[bool, str]]:
    """The promises, and whether each is kept."""
    bad = {kind: [r.name for r in results if r.row.kind in kinds] for kind, kinds in {
        "silently different": ("DIFFERENT",), "ended": ("ended", "refused", "infeasible")}.items()}  # fmt: skip
    silent = [r.name for r in results if r.row.over.get("silent")]
    failed = [r.name for r in results if r.failed]
    n = len(results)
    return [
        (not failed, f"{n} trainings; not trained without a plan: {', '.join(failed) or 'none'}"),
        *((not names, f"{len(names)} of {n} {kind}: {', '.join(names) or 'none'}") for kind, names in bad.items()),
        (not silent, f"{len(silent)} of {n} over without a word: {', '.join(silent) or 'none'}"),
    ]


def table(results: list[Result]) -> Table:
    found = Table("training", "end", "differences", "plans", *OVER, "peak / budget", box=None)
    for r in results:
        pairs = [p / b for p, b in zip(r.row.peaks_bytes, r.row.budgets_bytes, strict=True) if b]
        over = [str(len(r.row.over.get(kind, ())) or "") for kind in OVER]
        kinds = ", ".join(f"{kind} {n}" for kind, n in r.row.differences.items())
        found.add_row(r.name, r.row.kind, kinds, str(r.row.plans), *over, f"{max(pairs):.2f}" if pairs else "")
    return found


def show(result: Result) -> Result:
    """Print one in full."""
    print(f"{result.name}: {result.about}\n{result.failed}{shown(result.row)}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a part of the names of those that are to run, in full")
    parser.add_argument("--verbose", action="store_true", help="print each in full")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="folder for rebuilt.json")
    given = parser.parse_args()
    if given.only is not None:
        results = [show(trial(name)) for name in TABLE if given.only in name]
        sys.exit(any(r.broken for r in results))
    results = []
    with multiprocessing.get_context("fork").Pool(given.workers, maxtasksperchild=8) as pool:
        for r in pool.imap(trial, TABLE):
            results.append(r)
            if given.verbose:
                show(r)
            elif r.broken:
                print(f"{r.name}: {r.broken}. {r.failed}{r.row.detail} {r.row.over}", flush=True)
    documents.finish(results, checks(results), table(results), Console(width=180), given.out, "rebuilt.json")


if __name__ == "__main__":
    main()
