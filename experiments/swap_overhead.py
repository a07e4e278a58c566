"""What does swapping's bookkeeping cost per saved storage, beside a pair of hooks that does nothing?

    python experiments/swap_overhead.py --out experiments/results
    python experiments/swap_overhead.py --quick

One stage multiplies `count` times and so saves as many storages, small ones, since bookkeeping doesn't depend on sizes;
then it runs backward. Seven ways, interleaved, in seconds of the calling thread's CPU, every other round in reverse:

- plain: without hooks.
- identity: under a pair of `torch.autograd.graph.saved_tensors_hooks` that returns what it is given.
- checked: under a pair that keeps PyTorch's check for writes in place, which any hooks switch off: an object for each
  tensor with its version, compared when it is unpacked. In Python no less will do.
- emptied: under a pair that drops the tensor and makes an empty one in its place when it is unpacked: the least that
  leaving and returning cost where copies take no time.
- stays: as a stage of a plan whose storages all stay: packed, recorded, compared by their versions, unpacked.
- mostly: nine of ten stay, the tenth leaves, is released, prefetched and unpacked.
- moves: all do.

The store copies nothing, so what is left are bookkeeping and the device's memory given back and taken again. With
--file, `moves` is also timed through the swap file, whose copies are other threads' work but for their issue.
A way's cost is what it adds to `plain`, per storage, by the least of all rounds, which others' work in the same caches
disturbed least; medians are beside it. Ratios are of costs, over identity's.
"""

from __future__ import annotations

import argparse
import gc
import operator
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import documents
import torch
from overhead import spread

from ckptplan.core.plan import Transfer
from ckptplan.runtime.observe.counters import Counters
from ckptplan.runtime.swap.session import SwapSession
from ckptplan.runtime.swap.stores import NULL_STORES, DiskStore, Store

SCHEMA = "ckptplan.swap_overhead/1"
ELEMENTS = 64
COUNTS = (300, 1000, 2000)
PROMISE = 3.0
GROWTH = 2.2

CPU = torch.device("cpu")


class Checked:
    """A saved tensor with its version."""

    __slots__ = ("value", "version")

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.version = value, value._version

    def tensor(self) -> torch.Tensor:
        if self.value._version != self.version:
            raise RuntimeError(f"version {self.value._version} of a tensor that was saved at version {self.version}")
        return self.value


class Emptied:
    """A saved tensor that isn't held, but for what it takes to make one like it."""

    __slots__ = ("device", "dtype", "size")

    def __init__(self, value: torch.Tensor) -> None:
        self.size, self.dtype, self.device = value.size(), value.dtype, value.device

    def tensor(self) -> torch.Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=self.device)


class Work:
    """A stage's forward and backward that saves `count` storages."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._x = torch.ones(ELEMENTS, requires_grad=True)
        self._factors = [torch.ones(ELEMENTS) for _ in range(count)]

    def _forward(self) -> torch.Tensor:
        y = self._x
        for factor in self._factors:
            y = y * factor  # saves the factor
        return y

    def plain(self) -> None:
        self._forward().sum().backward()

    def identity(self) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = self._forward()
        y.sum().backward()

    def checked(self) -> None:
        with torch.autograd.graph.saved_tensors_hooks(Checked, operator.methodcaller("tensor")):
            y = self._forward()
        y.sum().backward()

    def emptied(self) -> None:
        with torch.autograd.graph.saved_tensors_hooks(Emptied, operator.methodcaller("tensor")):
            y = self._forward()
        y.sum().backward()

    def planned(self, moves: tuple[int, ...], store: Store) -> None:
        sizes = [[ELEMENTS * 4] * self.count]
        session = SwapSession({"host": store}, CPU, lambda storage: False, Counters(), sizes)
        with session.stage(0, (Transfer(moves, 0, 0),) if moves else ()):
            y = self._forward()
        loss = y.sum()
        del y
        session.release(0)
        session.prefetch(0)
        loss.backward()


Way = tuple[int, str]
"""How many storages, and how they are saved."""


def timed(ways: dict[Way, Callable[[], None]], rounds: int) -> dict[Way, list[float]]:
    """CPU seconds of each way in each round, after two that don't count."""
    found: dict[Way, list[float]] = {way: [] for way in ways}
    for number in range(-2, rounds):
        gc.collect()  # whose turn it would be is chance
        gc.disable()
        for way in ways if number % 2 == 0 else reversed(ways):
            ways[way]()  # what ran before has left its own memory in the caches
            begin = time.thread_time()
            ways[way]()
            seconds = time.thread_time() - begin
            if number >= 0:
                found[way].append(seconds)
        gc.enable()
    return found


def ways_of(count: int, file: DiskStore | None) -> dict[Way, Callable[[], None]]:
    """The ways to save that many storages."""
    work, store = Work(count), NULL_STORES["host"]
    ways: dict[str, Callable[[], None]] = {
        "plain": work.plain,
        "identity": work.identity,
        "checked": work.checked,
        "emptied": work.emptied,
        "stays": lambda: work.planned((), store),
        "mostly": lambda: work.planned(tuple(range(0, count, 10)), store),
        "moves": lambda: work.planned(tuple(range(count)), store),
    }
    if file is not None:
        ways["moves through the file"] = lambda: work.planned(tuple(range(count)), file)
    return {(count, name): way for name, way in ways.items()}


def summary(count: int, found: dict[Way, list[float]]) -> dict[str, dict[str, float]]:
    """Per way: what it takes and what it adds to plain per storage, in µs, and the latter over identity's."""
    plain = found[count, "plain"]
    out: dict[str, dict[str, float]] = {}
    for name, seconds in [(name, seconds) for (of, name), seconds in found.items() if of == count]:
        added = spread([(own - without) / count * 1e6 for own, without in zip(seconds, plain, strict=True)])
        out[name] = {
            "in_all_us": min(seconds) / count * 1e6,
            "added_us": (min(seconds) - min(plain)) / count * 1e6,
            "added_us_median": added["median"],
            "added_us_error": added["error"],
        }
    identity = out["identity"]
    for each in out.values():
        each["over_identity"] = each["added_us"] / identity["added_us"]
        each["over_identity_median"] = each["added_us_median"] / identity["added_us_median"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--file", action="store_true", help="also through the swap file")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = max(args.rounds // 4, 4) if args.quick else args.rounds
    file = DiskStore(capacity_bytes=max(COUNTS) * ELEMENTS * 4) if args.file else None
    found = timed({way: run for count in COUNTS for way, run in ways_of(count, file).items()}, rounds)
    results = {count: summary(count, found) for count in COUNTS}
    if file is not None:
        file.close()
    print(f"{'storages':>8}  {'':<22}{'in all':>9}{'added':>9}{'over identity':>15}{'medians: added':>23}{'over':>7}")
    for count, ways in results.items():
        for name, q in ways.items():
            print(
                f"{count:>8}  {name:<22}{q['in_all_us']:6.2f} µs{q['added_us']:6.2f} µs{q['over_identity']:15.2f}"
                f"{q['added_us_median']:13.2f} ± {q['added_us_error']:4.2f} µs{q['over_identity_median']:7.2f}"
            )
    growth = {
        name: statistics.median(a / b for a, b in zip(found[2000, name], found[1000, name], strict=True))
        for name in results[1000]
    }
    for name, factor in growth.items():
        print(f"2000 storages take {factor:.2f} times as long as 1000: {name}")
    kept = max(results[count]["stays"]["over_identity"] for count in COUNTS)
    print(f"what stays costs at most {kept:.2f} identity pairs (promised: {PROMISE})")
    if args.out is not None:
        document = {
            "schema": SCHEMA,
            "command": documents.command(),
            "environment": documents.environment(1),
            "rounds": rounds,
            "results": results,
            "growth": growth,
            "promise_kept": kept <= PROMISE and max(growth.values()) <= GROWTH,
        }
        documents.write(document, args.out / "swap_overhead.json")


if __name__ == "__main__":
    main()
