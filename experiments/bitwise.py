"""Are gradients those of plain training, bit for bit, step after step, whatever the plan and the copies do?

    python experiments/bitwise.py --out experiments/results

Every architecture is trained plainly and under six plans: everything swapped, everything recomputed, random options of
the stages' menus (twice), nested segments whose held inputs are swapped, and random options with a part of what moves
on the disk tier. A stage's storages move in one transfer or in several, with points at random.
Losses, gradients and buffers of every step are compared bit for bit. Dropout and autocast are on, parameters are
updated in between, swap space is used again from step to step, and copies are delayed at random.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import documents
import made_plans
import models
import small_models
import torch
from torch import nn

import ckptplan
from ckptplan.core.link import TIERS, Tier
from ckptplan.core.option import Option
from ckptplan.core.plan import Decision, Plan
from ckptplan.core.profile import Profile
from ckptplan.core.rules import enforceable_points
from ckptplan.core.schedule import residency
from ckptplan.core.segment import Segment
from ckptplan.runtime import handle as application
from ckptplan.runtime.swap.stores import DiskStore, disk
from ckptplan.tensors.storages import same_bits
from ckptplan.training.step import default_loss

Made = tuple[nn.Module, Any]

SMALL: dict[str, dict[str, int]] = {
    "gpt2": {"batch": 2, "length": 64, "layers": 4}, "bert": {"batch": 2, "length": 64, "layers": 4},
    "vit": {"batch": 1, "layers": 4}, "resnet50": {"batch": 2}, "llama": {"batch": 2, "length": 64, "layers": 4},
    "t5": {"batch": 1, "length": 64, "layers": 2}, "swin": {"batch": 1, "layers": 2}, "convnext": {"batch": 1},
    "mixtral": {"batch": 1, "length": 64}, "lstm": {"batch": 2, "length": 32}, "unet": {"batch": 1},
}  # fmt: skip
"""Sizes at which a step takes some hundredths of a second."""
FROM_TESTS = ("conv_norm", "unet", "nested", "shared", "views", "routed", "low_rank", "custom_function")
WITHOUT_AUTOCAST = ("lstm",)
"""Its oneDNN kernel in bfloat16 has no backward that repeats bit for bit without any plan."""


def architectures() -> dict[str, Callable[[], Made]]:
    """Name -> a model in training mode and its inputs, the same at each call."""

    def of(name: str) -> Callable[[], Made]:
        def build() -> Made:
            torch.manual_seed(0)
            model, inputs = models.MODELS[name](**SMALL[name])
            return model.train(), inputs

        return build

    def of_tests(name: str) -> Callable[[], Made]:
        return lambda: small_models.build(name)

    return {name: of(name) for name in SMALL} | {f"small {name}": of_tests(name) for name in FROM_TESTS}


def random_options(profile: Profile, rng: random.Random) -> list[Option]:
    """Any option of each stage's menu, those that move something more often."""
    return [rng.choice([o for o in stage.options for _ in range(3 if o.moves else 1)]) for stage in profile.stages]


def segmented(profile: Profile, rng: random.Random) -> tuple[list[Option], tuple[Segment, ...]]:
    """Segments one behind the other, half of them with one inside; inputs are swapped where they can be."""
    can = [stage.recompute is not None for stage in profile.stages]
    options = [stage.find("swap") or stage.keep for stage in profile.stages]
    segments: list[Segment] = []
    at = 0
    while at < len(can):
        end = at
        while end < len(can) and (can[end] or profile.stages[end].is_glue):
            end += 1
        inside = [i for i in range(at, end) if can[i]]
        inside = inside[: rng.randint(2, 3)]
        if len(inside) < 2:
            at = end + 1
            continue
        first, last = inside[0], inside[-1]
        inner = (Segment(first, inside[-2]),) if len(inside) > 2 and rng.random() < 0.5 else ()
        segments.append(Segment(first, last, inner))
        for i in inside:
            stage = profile.stages[i]
            again = stage.recompute
            assert again is not None
            options[i] = stage.find("recompute+swap") or again
        for i in range(first, last + 1):
            if profile.stages[i].is_glue:
                options[i] = profile.stages[i].keep
        at = last + 1
    return options, tuple(segments)


def plans(profile: Profile, seed: str) -> dict[str, Plan]:
    """The six plans."""
    rng = random.Random(seed)
    held_together, segments = segmented(profile, rng)
    return {
        "swap": moving(profile, [stage.find("swap") or stage.keep for stage in profile.stages], rng),
        "recompute": moving(profile, [stage.recompute or stage.keep for stage in profile.stages], rng),
        "menu 1": moving(profile, random_options(profile, rng), rng),
        "menu 2": moving(profile, random_options(profile, rng), rng),
        "segments": moving(profile, held_together, rng, segments),
        "tiers": moving(profile, random_options(profile, rng), rng, tiers=TIERS),
    }


def moving(
    profile: Profile,
    options: list[Option],
    rng: random.Random,
    segments: tuple[Segment, ...] = (),
    tiers: tuple[Tier, ...] = ("host",),
) -> Plan:
    """A plan in which most of what may move does, in transfers with points near their stage, at random."""
    n = len(options)
    points = enforceable_points(profile.stages)
    ends = list(range(n))
    for segment in segments:
        ends[segment.first : segment.last + 1] = [segment.last] * (segment.last + 1 - segment.first)
    moves = residency(profile, options, segments).moves
    choices = []
    for i, (option, moved) in enumerate(zip(options, moves, strict=True)):
        transfers = made_plans.random_transfers(rng, moved, i, ends[i], points)
        tier = rng.choice(tiers) if transfers else "host"
        choices.append(Decision(option.action, transfers, option.name, option.ops, tier))
    far = dataclasses.replace(profile, disk=profile.link)
    return small_models.plan_with(far, tuple(choices), segments=segments)


@contextlib.contextmanager
def delayed_copies(seed: int, longest_s: float = 2e-3) -> Iterator[None]:
    """Half of the copies, either way, take up to `longest_s` longer."""
    rng = random.Random(seed)

    def late(copy: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            if rng.random() < 0.5:
                time.sleep(rng.random() * longest_s)
            copy(*arguments)

        return run

    with mock.patch.multiple(disk, _write=late(disk._write), _read=late(disk._read)):
        yield


def train(model: nn.Module, inputs: Any, steps: int, autocast: bool) -> list[dict[str, torch.Tensor]]:
    """Loss, gradients and buffers of each step."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = default_loss(model(**inputs) if isinstance(inputs, dict) else model(inputs))
        loss.backward()
        seen = {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        seen |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
        out.append({"loss": loss.detach(), **seen})
        optimizer.step()
    return out


def differing(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> list[str]:
    """What differs in any bit, by step."""
    out = []
    for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
        names = [name for name in {**a, **b} if name not in a or name not in b or not same_bits(a[name], b[name])]
        out += [f"step {k}: {name}" for name in names]
    return out


def main() -> None:
    """Run all of them."""
    parser = documents.parser(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", type=documents.among(architectures()), help="names of architectures")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*lr_scheduler.*")
    made = architectures()
    names = given.only or list(made)
    rows: list[dict[str, Any]] = []
    for name in names:
        autocast = name not in WITHOUT_AUTOCAST
        model, inputs = made[name]()
        profile = ckptplan.profile(model, inputs, amp="bfloat16" if autocast else None)
        wanted = train(model, inputs, given.steps, autocast)
        again = train(*made[name](), given.steps, autocast)
        if differing(again, wanted):
            raise SystemExit(f"{name} doesn't repeat bit for bit without any plan: {differing(again, wanted)[0]}")
        for what, plan in plans(profile, f"{name} {given.seed}").items():
            model, inputs = made[name]()
            with delayed_copies(given.seed), two_files(), ckptplan.apply(model, plan) as handle:
                found = train(model, inputs, given.steps, autocast)
                stats = handle.stats()
            wrong = differing(found, wanted)
            rows.append({
                "architecture": name, "plan": what, "steps": given.steps, "autocast": autocast,
                "tensors_compared": sum(len(step) for step in wanted), "recomputed_stages": stats.recomputed_stages,
                "swapped_bytes": stats.swapped_out_bytes, "disk_bytes_per_step": plan.disk_bytes,
                "segments": len(plan.segments), "differing": wrong,
            })  # fmt: skip
            print(
                f"{name:<22} {what:<10} {stats.recomputed_stages:>5} recomputed, {len(plan.segments)} segments, "
                f"{stats.swapped_out_bytes / 2**20:8.1f} MiB swapped: {'DIFFERS: ' + wrong[0] if wrong else 'equal'}",
                flush=True,
            )
    wrong_rows = [row for row in rows if row["differing"]]
    compared = sum(row["tensors_compared"] for row in rows)
    print(
        f"{len(names)} architectures x {len(rows) // len(names)} plans x {given.steps} steps, {compared} tensors: "
        f"{len(rows) - len(wrong_rows)} of {len(rows)} bitwise equal"
    )
    if given.out is not None:
        documents.write(rows, given.out / "bitwise.json")
    if wrong_rows:
        raise SystemExit(1)


@contextlib.contextmanager
def two_files() -> Iterator[None]:
    """Plans applied inside have a file for either tier, on the CPU too: the disk tier's is staged, in small chunks."""

    def both(device: torch.device, plan: Plan, *_: Any) -> dict[str, Any]:
        staged = DiskStore(device=device, chunk_bytes=1 << 14)
        return {"host": DiskStore(), "disk": staged}

    with mock.patch.object(application, "make_stores", both):
        yield


if __name__ == "__main__":
    main()
