"""Do trainings whose steps vary run with a plan as without one, bit for bit, and within the budget or with a warning?

    python experiments/varying.py --workers 2 --out experiments/results

Each seed draws a training of ten steps: a family of models (`varying_models.py`), a way to plan it (a plain loop with
`solve` and `apply`, one with `apply` alone, transformers' Trainer or Lightning with its callback), a budget between the
smallest peak and everything kept, and what varies from step to step: masks, lengths, numbers of samples, frozen layers,
layers behind which the graph is cut, autocast, evaluation and generation in between, micro-batches, two forwards before
a backward, an output that the loop goes on holding. Routed tokens and layers left out at random vary in the families
that have them. `trainings.py` says what is compared and measured.

Promised: each training that ends without a plan ends with one, bitwise; no step is over the budget without a warning
that names the cause; at most 2 % of the steps are after a plan was made for them. Exits with 1 if that is broken.
`--seed` shows some in full.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import documents
import lightning as L
import torch
import transformers
from torch import nn
from torch.utils import _pytree as pytree
from trainings import OVER, Record, Row, shown, tried
from varying_models import FAMILIES, MASKS, Family

import ckptplan
from ckptplan.integrations.lightning import ActivationPlanner
from ckptplan.integrations.transformers import ActivationPlanCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

STEPS = 10
NUMBER = 300
TIME_LIMIT_S = 900.0
"""Of one training."""
MOST_AGAIN = 0.02
"""Largest share of steps that may be over the budget after a plan was made for them."""
WAYS = ("solve", "apply", "Trainer", "Lightning")
VARIES = (
    "masks", "lengths", "batches", "frozen", "detached", "autocast", "evaluation", "generation", "accumulation",
    "pairs", "held output",
)  # fmt: skip
LOOPS = ("pairs", "held output")
"""What varies in loops alone."""
SHARES = (2, 10, 20, 35, 50, 70)


@dataclass(frozen=True)
class Varied:
    """What one step is like."""

    samples: int = 6
    length: int = 32
    mask: str = "none"
    frozen: tuple[int, ...] = ()
    detached: int | None = None
    autocast: bool = False
    pair: bool = False
    evaluates: bool = False
    generates: bool = False

    @property
    def like(self) -> str:
        """The kind of step: what its memory depends on."""
        parts = [f"{self.samples} x {self.length}", self.mask]
        parts += [f"frozen {self.frozen}"] * bool(self.frozen) + [f"detached {self.detached}"] * (
            self.detached is not None
        )
        return ", ".join(parts + ["autocast"] * self.autocast + ["pair"] * self.pair)


@dataclass(frozen=True)
class Spec:
    """One training; `factor` is of the plain peak of the first step, `share` in percent."""

    seed: int
    family: str
    way: str
    varies: tuple[str, ...]
    share: int | None
    factor: float | None
    optimizer: str
    menus: bool
    autocast: str
    freezing: str

    @property
    def micro(self) -> int:
        """Micro-batches of an update."""
        return 2 if "accumulation" in self.varies else 1


def draw(seed: int) -> Spec:
    """The training of a seed; consecutive seeds go through all families and ways."""
    rng = random.Random(seed)
    names = list(FAMILIES)
    way = WAYS[seed % len(WAYS)]
    able = [what for what in VARIES if what not in LOOPS or way in WAYS[:2]]
    varies = rng.sample(able, rng.choice((1, 2, 2, 3, 4)))
    fixed = way != "Lightning" and rng.random() < 0.25
    return Spec(
        seed, names[seed % len(names)], way, tuple(what for what in VARIES if what in varies),
        None if fixed else rng.choice(SHARES), rng.uniform(0.75, 1.0) if fixed else None,
        rng.choice(("sgd", "adamw")), rng.random() < 0.2, rng.choice(("always", "sometimes", "backward")),
        rng.choice(("one at a time", "thawing", "freezing")),
    )  # fmt: skip


def possible(spec: Spec, family: Family) -> tuple[str, ...]:
    """What can vary in a family."""
    lacks = {"masks": not family.masks, "lengths": not family.lengths, "generation": family.generates is None}
    return tuple(what for what in spec.varies if not lacks.get(what, False)) or ("batches",)


def steps(spec: Spec, family: Family) -> list[Varied]:
    """What each step is like."""
    rng = random.Random(spec.seed + 1)
    varies = possible(spec, family)
    masks = rng.choice((MASKS, ("full", "padded"), ("none", "padded")))
    lengths = rng.sample((16, 24, 32, 40, 48), 3)
    samples = rng.sample((2, 3, 4, 6, 8), 3)
    everything = tuple(range(len(family.layers)))
    found = []
    for k in range(STEPS):
        frozen: tuple[int, ...] = ()
        if "frozen" in varies:
            frozen = {
                "one at a time": tuple(i for i in everything if i != (k // 2 * 5 + spec.seed) % len(everything)),
                "thawing": everything[: max(0, len(everything) - 1 - k // 3)],
                "freezing": everything[: k // 3],
            }[spec.freezing]
        found.append(
            Varied(
                rng.choice(samples) if "batches" in varies else 6,
                rng.choice(lengths) if "lengths" in varies else 32,
                rng.choice(masks) if "masks" in varies else "none",
                frozen,
                rng.choice((None, *everything[:-1])) if "detached" in varies else None,
                "autocast" in varies and (spec.autocast != "sometimes" or rng.random() < 0.5),
                "pairs" in varies and rng.random() < 0.4,
                "evaluation" in varies and k % 3 == 1,
                "generation" in varies and k % 4 == 1,
            )
        )
    return found


class Varying:
    """A family's model as its steps vary it, and the batches of these."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.family = FAMILIES[spec.family]()
        self.model = self.family.model.train()
        self.steps = steps(spec, self.family)
        self.batches = [self.family.batch(s.samples, s.length, s.mask) for s in self.steps]
        self.now = self.steps[0]
        for i, layer in enumerate(self.family.layers):
            layer.register_forward_hook(functools.partial(self._cut, i))

    def _cut(self, i: int, module: nn.Module, args: Any, output: Any) -> Any:
        if self.now.detached != i:
            return None
        return pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, output)

    def like(self, k: int) -> str:
        """The kind of a step; where paths through the model are drawn anew, each step is of a kind of its own."""
        held = ", held output" if k and "held output" in self.spec.varies else ""
        return f"{self.now.like}{held}" + (f", path of step {k}" if self.family.routed else "")

    def begin(self, k: int) -> None:
        """Freeze and thaw for a step."""
        self.now = self.steps[k]
        for i, layer in enumerate(self.family.layers):
            layer.requires_grad_(i not in self.now.frozen)

    def between(self, k: int) -> list[Any]:
        """What is done after a step; returns what is to be compared."""
        found: list[Any] = []
        if not (self.now.evaluates or self.now.generates):
            return found
        self.model.eval()
        with torch.no_grad():
            if self.now.evaluates:
                found.append(self.model(**self.batches[(k + 3) % STEPS])["loss"])
            if self.now.generates and self.family.generates is not None:
                found.append(self.family.generates(self.batches[k]))
        self.model.train()
        return found

    def optimizer(self) -> torch.optim.Optimizer:
        if self.spec.optimizer == "sgd":
            return torch.optim.SGD(self.model.parameters(), lr=0.05)
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def asked(self, record: Record) -> dict[str, Any]:
        """The budget and what else is asked of a plan."""
        found: dict[str, Any] = {"time_limit_s": 0.3, "menus": self.spec.menus}
        if self.spec.share is not None:
            return {"budget": f"{self.spec.share}%", **found}
        assert record.plain is not None
        assert self.spec.factor is not None
        record.budget_bytes = int(record.plain.steps[0].peak_bytes * self.spec.factor)
        return {"budget_gb": record.budget_bytes / 2**30, **found}


def in_a_loop(record: Record, varying: Varying) -> None:
    """A plain loop, planned by `solve` and `apply` on the first batch, or by `apply` alone."""
    spec, model, optimizer = varying.spec, varying.model, varying.optimizer()
    handle: Any = None
    if record.planned:
        quiet: dict[str, Any] = {"on_progress": lambda text: None, "optimizer": optimizer}
        asked = varying.asked(record)
        if spec.way == "apply":
            handle = ckptplan.apply(model, **asked, **quiet)
        else:
            varying.begin(0)
            if varying.now.autocast:
                quiet["amp"] = "bfloat16"
            plan = ckptplan.solve(model, inputs=varying.batches[0], **asked, **quiet)
            handle = ckptplan.apply(model, plan)
    record.watch(model, optimizers=[optimizer], handle=lambda: handle)
    held: dict[str, Any] = {}
    for k, batch in enumerate(varying.batches):
        varying.begin(k)
        now = varying.now
        given = {**batch} if not now.pair else {**batch, "other": {n: t.clone() for n, t in batch.items()}}

        def one(k: int = k, now: Varied = now, batch: Any = batch, given: Any = given) -> torch.Tensor:
            if k % spec.micro == 0:
                optimizer.zero_grad()
            with contextlib.ExitStack() as stack:
                if now.autocast:
                    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                output = model(**batch)
                loss = output["loss"]
                if now.pair:
                    loss = loss + model(**given["other"])["loss"]
                if spec.autocast == "backward":
                    loss.backward()
            if spec.autocast != "backward":
                loss.backward()
            if (k + 1) % spec.micro == 0:
                optimizer.step()
            if "held output" in spec.varies:
                held["output"] = output
            return loss.detach()  # type: ignore[no-any-return]

        record.step(one, given, varying.like(k))
        record.also(varying.between(k))
    if handle is not None:
        handle.remove()


def in_a_trainer(record: Record, varying: Varying) -> None:
    """Transformers' Trainer with the callback."""
    spec = varying.spec

    class Measured(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            k = len(record.steps)
            varying.begin(k)
            record.watch(varying.model, optimizers=[self.optimizer.optimizer], handle=handle)
            step = super().training_step
            loss = record.step(lambda: step(model, inputs, *args), inputs, varying.like(k))
            record.also(varying.between(k))
            return loss

    class Casting(Measured):
        """Its loss casts by itself."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=varying.now.autocast):
                return super().compute_loss(model, inputs, *args, **kwargs)

    callback = ActivationPlanCallback(**varying.asked(record)) if record.planned else None

    def handle() -> Any:
        return None if callback is None else callback.handle

    bf16 = "autocast" in spec.varies and spec.autocast == "always"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = transformers.TrainingArguments(
            folder, max_steps=STEPS // spec.micro, per_device_train_batch_size=1, use_cpu=True, report_to=[],
            disable_tqdm=True, logging_steps=100, save_strategy="no", remove_unused_columns=False, log_level="error",
            train_sampling_strategy="sequential", gradient_accumulation_steps=spec.micro, bf16=bf16,
            optim="sgd" if spec.optimizer == "sgd" else "adamw_torch", learning_rate=0.01,
            eval_strategy="steps" if "evaluation" in spec.varies else "no", eval_steps=3,
            prediction_loss_only=True,
        )  # fmt: skip
        kind = Casting if "autocast" in spec.varies and not bf16 else Measured
        trainer = kind(
            varying.model, args, train_dataset=varying.batches, eval_dataset=varying.batches[:2],  # type: ignore[arg-type]
            data_collator=lambda rows: dict(rows[0]), callbacks=[callback] if callback else [],
        )  # fmt: skip
        trainer.train()


class Module(L.LightningModule):
    def __init__(self, record: Record, varying: Varying, callback: ActivationPlanner | None) -> None:
        super().__init__()
        self.net = varying.model
        self._held = (record, varying, callback)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._held[1].begin(batch_idx)
        self._batch = batch

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:  # type: ignore[override]
        record, varying, callback = self._held
        step = super().optimizer_step
        record.watch(
            self.net, optimizers=[optimizer.optimizer], handle=lambda: None if callback is None else callback.handle
        )
        record.step(lambda: step(epoch, batch_idx, optimizer, closure), self._batch, varying.like(batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        record, varying, _ = self._held
        between = varying.between(batch_idx)
        if record.steps:
            record.also([outputs["loss"], *between])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        varying = self._held[1]
        with torch.autocast("cpu", torch.bfloat16, enabled=varying.now.autocast and varying.spec.autocast != "always"):
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        return self._held[1].optimizer()


def in_lightning(record: Record, varying: Varying) -> None:
    """Lightning's Trainer with the callback."""
    spec = varying.spec
    callback = ActivationPlanner(**varying.asked(record)) if record.planned else None
    bf16 = "autocast" in spec.varies and spec.autocast == "always"
    evaluates = "evaluation" in spec.varies
    loader, few = (
        torch.utils.data.DataLoader(rows, batch_size=None, collate_fn=lambda row: row)  # type: ignore[arg-type]
        for rows in (varying.batches, varying.batches[:2])
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu", default_root_dir=folder, callbacks=[callback] if callback else [], logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, max_epochs=1,
            accumulate_grad_batches=spec.micro, precision="bf16-mixed" if bf16 else "32-true",
            num_sanity_val_steps=0, **({"val_check_interval": 3} if evaluates else {}),
        )  # fmt: skip
        trainer.fit(Module(record, varying, callback), loader, few if evaluates else None)


RUN: dict[str, Callable[[Record, Varying], None]] = {
    "solve": in_a_loop, "apply": in_a_loop, "Trainer": in_a_trainer, "Lightning": in_lightning,
}  # fmt: skip


@dataclass
class Result:
    """One training, what varied in it and its end; `failed`: why it couldn't be trained without a plan."""

    seed: int
    family: str
    way: str
    varies: tuple[str, ...]
    seconds: float = 0.0
    failed: str = ""
    broken: str = ""
    row: Row = field(default_factory=Row)


def trial(seed: int) -> Result:
    """Train a seed's training both ways."""
    torch.set_num_threads(1)
    spec, begun = draw(seed), time.perf_counter()

    def training(record: Record) -> None:
        RUN[spec.way](record, Varying(spec))

    row, broken, failed = tried(training, seed)
    varies = possible(spec, FAMILIES[spec.family]())
    took_s = round(time.perf_counter() - begun, 1)
    return Result(seed, spec.family, spec.way, varies, took_s, failed, broken, row)


def results_of(seeds: Iterable[int], workers: int) -> Iterator[Result]:
    """Try seeds, each in a process of its own."""
    for seed, found in documents.in_processes(trial, seeds, jobs=workers, time_limit_s=TIME_LIMIT_S, method="fork"):
        if isinstance(found, Result):
            yield found
        else:
            spec = draw(seed)
            yield Result(seed, spec.family, spec.way, spec.varies, broken="ended", row=Row("ended", found))


def checks(results: Sequence[Result]) -> list[documents.Check]:
    """The promises, and whether each is kept."""
    n = sum(r.row.steps for r in results)
    over = {kind: sum(len(r.row.over.get(kind, ())) for r in results) for kind in OVER}
    bad = {kind: [r.seed for r in results if r.row.kind == kind] for kind in ("DIFFERENT", "ended", "refused")}
    failed = [r.seed for r in results if r.failed]
    return [
        (not failed, f"all {len(results)} train without a plan: not {failed or 'one'}"),
        (not bad["DIFFERENT"], f"the same bits: different {bad['DIFFERENT'] or 'none'}"),
        (not bad["ended"] + bad["refused"], f"end as without a plan: ended {bad['ended']}, refused {bad['refused']}"),
        (not over["silent"], f"{over['silent']} of {n} steps over the budget without a warning that names the cause"),
        (
            over["again"] <= MOST_AGAIN * n,
            f"{over['again']} of {n} steps over it after a plan was made for them, at most {MOST_AGAIN:.0%}; before: "
            f"{over['first']}, where no plan fits: {over['no plan']}",
        ),
    ]


def table(results: Iterable[Result]) -> Any:
    """Outcomes by family and way."""
    ends = ("equal", "infeasible", "refused", "ended", "DIFFERENT")
    cells = []
    groups: dict[str, list[Result]] = {}
    for r in results:
        for name in (r.family, r.way, *r.varies, "all"):
            groups.setdefault(name, []).append(r)
    for name in (*FAMILIES, *WAYS, *VARIES, "all"):
        of = groups.get(name, [])
        kinds = Counter(r.row.kind for r in of if not r.failed)
        over = [sum(len(r.row.over.get(kind, ())) for r in of) for kind in OVER]
        cells.append((name, len(of), *(kinds[k] for k in ends), sum(r.row.steps for r in of), *over))
    return documents.table(("", "trainings", *ends, "steps", *OVER), cells)


def show(result: Result) -> Result:
    """Print one in full."""
    print(f"{draw(result.seed)}\n{result.varies} {result.failed}{shown(result.row)}", flush=True)
    return result


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--number", type=int, default=NUMBER)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, action="append", help="this one alone, in full")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    given = parser.parse_args()
    if given.seed is not None:
        results = [show(trial(seed)) for seed in given.seed]
        sys.exit(any(r.broken for r in results))
    seeds = range(given.first, given.first + given.number)
    results = []
    for result in results_of(seeds, given.workers):
        results.append(result)
        if result.broken:
            print(f"seed {result.seed}: {result.broken}. {result.row.detail}{result.failed}", flush=True)
    results.sort(key=lambda r: r.seed)
    documents.finish(results, checks(results), table(results), given.out, "varying.json")


if __name__ == "__main__":
    main()
