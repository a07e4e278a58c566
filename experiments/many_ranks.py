"""Do models on several ranks train as without a plan, and within the budget on each?

    python experiments/many_ranks.py --out experiments/results

Groups of two and four processes over gloo, one thread each. Three models, and the first six of a draw by a seed from
all of `transformers` that train (drawn_models.py), each in three ways of `DistributedDataParallel` and three of FSDP2
(`fully_shard`, one unit per layer). Each way has a plan for another budget, from tight to wide, with so little host
memory that it recomputes as well, and ten steps of SGD with dropout on. Held against the same training without a plan:
every loss, and the state at the end, bit for bit; on each rank the measured peak of a step, with buckets, gathered
units and buffers of reductions, against the plan's prediction and the budget; recomputed stages and swapped bytes; the
gathers of a step. The bytes of a sharded model are held against those by a group that isn't there, with PyTorch's fake
process group. Not counted, but printed, is what gloo stages. Plans of models that read values hold for steps that take
the same path, and training leads to others: their peaks are told apart.

Of the draw, models are passed over, and named, that don't train without a plan, or can't follow one on one rank: a
mixture of experts that sends more tokens to an expert than planned for is refused by name there as well.

Prints PASS or FAIL. `--models`, `--ranks` and `--ways` name some of them; then the other rows are those that the file
in `--out` has already.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import documents
import torch
import torch.distributed as dist
from drawn_models import TIMES, build, drawn, loss_of, repeated
from measured_step import Peak, measured
from ranks import Ranks, ranks
from small_models import Transformer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import ckptplan
from ckptplan.core.units import GIB, format_bytes
from ckptplan.distributed.absent import shard

RANKS = "2,4"
STEPS = 10
DRAWN = 6
HOST_SHARE = 0.2
"""Bytes that a rank may swap, as a share of its peak with everything kept, so that plans mix swaps and recomputes."""
MOST_OFF = 0.03
"""Largest share by which a measured peak may differ from the predicted one."""


@dataclass(frozen=True)
class Way:
    """How a model is trained on a group: the budget of its plan, and arguments of its wrapper."""

    budget: str
    options: dict[str, Any] = field(default_factory=dict)
    fsdp: bool = False
    ranks: tuple[int, ...] = (2, 4)

    def settings(self, count: int) -> ckptplan.FSDP:
        """Those of a sharded model, on a group of `count`."""
        options = dict(self.options)
        replicas = options.pop("replicas", 1)
        return ckptplan.FSDP(count // replicas, replicas, **options)


MOST_WITHOUT = 0.2
"""Largest share of the trainings that may not work without a plan either."""

WAYS: dict[str, Way] = {
    "beside": Way("10%"), "in buckets": Way("40%", {"gradient_as_bucket_view": True}),
    "static graph": Way("70%", {"static_graph": True}), "sharded": Way("10%", fsdp=True),
    "sharded, whole until backward": Way("40%", {"reshard_after_forward": False}, fsdp=True, ranks=(2,)),
    "sharded, by two until backward": Way("40%", {"reshard_after_forward": 2}, fsdp=True, ranks=(4,)),
    "sharded, in bfloat16": Way("70%", {"param_dtype": "bfloat16", "reduce_dtype": "float32"}, fsdp=True, ranks=(2,)),
    "sharded by two, replicated": Way("70%", {"replicas": 2}, fsdp=True, ranks=(4,)),
}  # fmt: skip


WITHOUT = "without a plan"
"""Begins what a row failed with that doesn't train without a plan either."""


@dataclass(frozen=True)
class Row:
    """One training of one group; bytes are those of the rank with the largest share of its budget."""

    name: str
    ranks: int
    way: str
    bitwise: bool = False
    one_plan: bool = False
    peak_bytes: int = 0
    predicted_bytes: int = 0
    budget_bytes: int = 0
    plain_peak_bytes: int = 0
    recomputed: int = 0
    swapped_bytes: int = 0
    reads_values: bool = False
    gathers: int = 0
    plain_gathers: int = 0
    segments: int = 0
    staging_bytes: int = 0
    kept_bytes: int = 0
    """Estimated, with everything kept."""
    fake_bytes: int = 0
    """The same of a sharded model by the fake group."""
    failed: str = ""

    @property
    def off(self) -> float:
        """The measured peak against the predicted one, as a share."""
        return self.peak_bytes / self.predicted_bytes - 1 if self.predicted_bytes else float("inf")


def _transformer() -> tuple[nn.Module, dict[str, Any]]:
    return Transformer(6, 64).train(), {"tokens": torch.randint(0, 50, (8, 64))}


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 16, 16, 16, 16]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True), nn.Dropout(0.1))
            for a, b in itertools.pairwise(sizes)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3)))


def _images() -> tuple[nn.Module, dict[str, Any]]:
    return _Images().train(), {"images": torch.randn(8, 3, 32, 32)}


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = GPT2Config(vocab_size=200, n_positions=64, n_embd=64, n_layer=6, n_head=4)
    tokens = torch.randint(0, 200, (8, 64))
    return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


NAMED: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "transformer": _transformer, "images": _images, "gpt2": _gpt2,
}  # fmt: skip


def _made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model with the same weights on each rank, and inputs of the rank's own values."""
    if name not in NAMED:
        model, inputs = build(name).make()
        return model, repeated(dict(inputs), TIMES)
    torch.manual_seed(0)
    model, _ = NAMED[name]()
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    return model, NAMED[name]()[1]


def _loss(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else loss_of(output)


def _wrapped(model: nn.Module, way: Way) -> nn.Module:
    if not way.fsdp:
        return DistributedDataParallel(model, **way.options)
    shard(model, way.settings(dist.get_world_size()))
    return model


def _train(wrapped: nn.Module, inputs: dict[str, Any], way: Way) -> tuple[list[Any], Peak]:
    """Losses and the state at the end, and the largest peak of a step."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    losses, peaks = [], []

    def step() -> torch.Tensor:
        output = wrapped(**inputs)  # held until backward has ended, as in most loops
        loss = _loss(output)
        loss.backward()
        return loss.detach()

    for number in range(STEPS):
        optimizer.zero_grad()
        loss, peak = measured(step, wrapped, [optimizer], inputs)
        losses.append(loss)
        # DDP's buckets are made anew once; the first ones are freed before, which this recording doesn't see.
        if number != (2 if "static_graph" in way.options else 1):
            peaks.append(peak)
        optimizer.step()
    bucket_bytes = 0 if way.fsdp else sum(p.nbytes for p in wrapped.parameters() if p.requires_grad)
    largest = Peak(max(peaks) + bucket_bytes)
    largest.staging, largest.gathers = max(p.staging for p in peaks), peaks[-1].gathers
    state = wrapped.state_dict().values() if way.fsdp else wrapped.module.state_dict().values()
    return [*losses, *((v.to_local() if isinstance(v, DTensor) else v).clone() for v in state)], largest


def _unused(name: str) -> bool:
    """Whether a step leaves a parameter without a gradient, which `DistributedDataParallel` has to know."""
    model, inputs = _made(name)
    _loss(model(**inputs)).backward()
    return any(p.grad is None for p in model.parameters() if p.requires_grad)


_PLAIN: list[tuple[list[Any], Peak]] = []
"""What this rank's last training without a plan gave."""


def _with_unused(name: str, way: Way) -> Way:
    unused = not way.fsdp and "static_graph" not in way.options and _unused(name)
    return replace(way, options={**way.options, "find_unused_parameters": True}) if unused else way


def plain(name: str, way: Way) -> None:
    """Train on this rank without a plan."""
    way = _with_unused(name, way)
    model, inputs = _made(name)
    _PLAIN[:] = [_train(_wrapped(model, way), inputs, way)]


def cell(name: str, way: Way) -> Row:
    """Train on this rank with a plan, and compare."""
    way = _with_unused(name, way)
    count = dist.get_world_size()
    ((without, plain_peak),) = _PLAIN
    model, inputs = _made(name)
    wrapped = _wrapped(model, way)
    kept = ckptplan.estimate(wrapped, inputs, loss_fn=_loss).peak_bytes
    plan = ckptplan.solve(
        wrapped, budget=way.budget, inputs=inputs, loss_fn=_loss, optimizer="sgd", time_limit_s=5,
        host_gb=HOST_SHARE * kept * count / GIB,
    )  # fmt: skip
    with ckptplan.apply(model, plan, check="always") as handle:
        found, peak = _train(wrapped, inputs, way)
        stats = handle.stats()
    plans: list[Any] = [None] * count
    dist.all_gather_object(plans, plan)
    return Row(
        name, count, "", all(map(torch.equal, found, without)), plans == [plan] * count, peak, plan.peak_bytes,
        plan.budget_bytes, plain_peak, stats.recomputed_stages, stats.swapped_out_bytes,
        any(note.startswith("values are needed") for note in plan.notes), peak.gathers, plain_peak.gathers,
        len(plan.segments), peak.staging, kept,
    )  # fmt: skip


def fake_bytes(name: str, way: Way, count: int) -> int:
    """The bytes of the first of `count` ranks, by the fake group."""
    model, inputs = _made(name)
    return ckptplan.estimate(model, inputs, loss_fn=_loss, fsdp=way.settings(count)).peak_bytes


def trains(name: str) -> str:
    """What fails where the model is made and trained without a plan, on one rank alone; empty if nothing does."""
    try:
        _unused(name)
    except Exception as error:
        return documents.brief(error)
    return ""


def _of_group(group: Ranks, name: str, called: str, count: int) -> Row:
    way = WAYS[called]
    for function, without in ((plain, f"{WITHOUT}: "), (cell, "")):
        found = group.run(function, name, way)
        for error in found:
            if isinstance(error, BaseException):
                return Row(name, count, called, failed=without + documents.brief(error))
    worst = max(found, key=lambda row: row.peak_bytes / row.budget_bytes)
    return replace(
        worst, way=called, bitwise=all(row.bitwise for row in found), one_plan=all(row.one_plan for row in found),
        recomputed=min(row.recomputed for row in found), swapped_bytes=min(row.swapped_bytes for row in found),
        kept_bytes=found[0].kept_bytes, fake_bytes=fake_bytes(name, way, count) if way.fsdp else 0,
    )  # fmt: skip


@functools.cache
def _fails_alone(name: str) -> str:
    """What fails where a model that trains is trained with a plan on one rank; empty if nothing does."""
    with ranks(1) as alone:
        way = WAYS["beside"]
        alone.good(plain, name, way)
        found = alone.run(cell, name, way)[0]
    return documents.brief(found) if isinstance(found, BaseException) else ""


def _of_model(name: str, ways: Sequence[str], count: int) -> Iterator[Row]:
    """The rows of a model, by one group of processes as long as none of them ends."""
    left = list(ways)
    while left:
        with ranks(count) as group:
            while left and all(process.is_alive() for process in group.processes):
                found = _of_group(group, name, left.pop(0), count)
                print(found, flush=True)
                yield found


COLUMNS = (
    "model", "ranks", "way", "bits", "peak", "predicted", "off", "budget", "without", "acts", "gathers", "staging",
    "failed",
)  # fmt: skip


def cells(row: Row) -> tuple[Any, ...]:
    """A row of the table."""
    peak, predicted, budget, without, swapped, staging = map(
        format_bytes,
        (row.peak_bytes, row.predicted_bytes, row.budget_bytes, row.plain_peak_bytes, row.swapped_bytes,
         row.staging_bytes),
    )  # fmt: skip
    return (
        row.name.rpartition(".")[2], row.ranks, row.way, "equal" if row.bitwise else None, peak, predicted,
        None if row.failed else f"{row.off:+.1%}", budget, without, f"{row.recomputed}, {swapped}",
        f"{row.gathers} of {row.plain_gathers}", staging, row.failed,
    )  # fmt: skip


def checks(rows: Sequence[Row]) -> list[documents.Check]:
    """The promises, and whether each is kept."""
    planned = [row for row in rows if not row.failed.startswith(WITHOUT)]

    def names(wrong: Callable[[Row], bool]) -> str:
        return (
            ", ".join(f"{row.name} ({row.ranks}, {row.way})" for row in planned if not row.failed and wrong(row))
            or "none"
        )

    kept = {
        "differ from training without a plan": names(lambda row: not row.bitwise),
        "have several plans": names(lambda row: not row.one_plan),
        "are over the budget": names(lambda row: row.peak_bytes > row.budget_bytes and not row.reads_values),
        f"are more than {MOST_OFF:.0%} off the prediction": names(lambda row: abs(row.off) > MOST_OFF),
        "gather more often than without a plan, and no segment does, or more than twice as often": names(
            lambda row: row.gathers > row.plain_gathers * (2 if row.segments else 1)
        ),
        "have other bytes in a group that isn't there": names(
            lambda row: WAYS[row.way].fsdp and row.kept_bytes != row.fake_bytes
        ),
        "neither recompute nor swap": names(lambda row: not row.recomputed and not row.swapped_bytes),
        "fail": ", ".join(f"{row.name} ({row.ranks}, {row.way})" for row in planned if row.failed) or "none",
    }
    return [
        (
            0 < MOST_WITHOUT * len(rows) >= len(rows) - len(planned),
            f"{len(planned)} of {len(rows)} train without a plan",
        ),
        *((found == "none", f"of {len(planned)} trainings, these {what}: {found}") for what, found in kept.items()),
    ]


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--models", help="comma-separated names, in place of the three and the draw")
    parser.add_argument("--ranks", default=RANKS, help="sizes of the groups")
    parser.add_argument("--ways", help="comma-separated parts of names of ways")
    given = parser.parse_args()
    parts = given.ways.split(",") if given.ways else [""]
    if not all(any(part in called for called in WAYS) for part in parts):
        parser.error(f"--ways {given.ways!r}: each has to be in one of {', '.join(WAYS)}")
    torch.set_num_threads(1)  # as in the groups: kernels that work in parallel take more
    names = given.models.split(",") if given.models else [*NAMED, *drawn("ranks")]
    rows: list[Row] = []
    for count in map(int, given.ranks.split(",")):
        count_drawn = 0
        ways = [
            called for called, way in WAYS.items()
            if count in way.ranks and any(part in called for part in parts)
        ]  # fmt: skip
        for name in names:
            if name not in NAMED and not given.models:
                if count_drawn == DRAWN:
                    continue
                with ranks(1) as alone:
                    failed = alone.run(trains, name)[0]
                if failed:
                    print(f"{name} doesn't train without a plan: {failed}")
                    continue
                if why := _fails_alone(name):
                    print(f"{name} can't follow a plan on one rank: {why}")
                    continue
                count_drawn += 1
            rows += _of_model(name, ways, count)
    known = given.out and given.out / "many_ranks.json"
    if known and known.exists() and (given.models or given.ways or given.ranks != RANKS):
        made = {(row.name, row.ranks, row.way): row for row in rows}
        kept = [Row(**row) for row in json.loads(known.read_text())["rows"]]
        rows = [made.pop((row.name, row.ranks, row.way), row) for row in kept] + list(made.values())
    documents.finish(rows, checks(rows), documents.table(COLUMNS, map(cells, rows)), given.out, "many_ranks.json")


if __name__ == "__main__":
    main()
