"""Seeded random profiles for tests: textbook chains, and richer ones with every kind of sharing the rules allow."""

from __future__ import annotations

import random

from ckptplan.core.chain import Link, Stage, Storage, Transient
from ckptplan.core.profile import Profile


def textbook_chain(rng: random.Random, n: int) -> Profile:
    """A heterogeneous `Profile.from_chain`."""
    outputs = [rng.randint(1, 20) for _ in range(n)]
    return Profile.from_chain(
        [rng.randint(1, 20) / 4 for _ in range(n)],
        [rng.randint(1, 40) / 4 for _ in range(n)],
        outputs,
        [o + rng.choice((0, rng.randint(0, 60))) for o in outputs],
        input_bytes=rng.randint(0, 20),
        forward_temp_bytes=[rng.randint(0, 10) for _ in range(n)],
        backward_temp_bytes=[rng.randint(0, 10) for _ in range(n)],
        out_bytes_per_s=rng.choice((0.5, 2.0, 8.0, 30.0)),
        in_bytes_per_s=rng.choice((0.5, 2.0, 8.0, 30.0)),
    )


def homogeneous_chain(n: int, *, link_ratio: float, forward_s: float = 0.010, width: int = 1 << 20) -> Profile:
    """Equal stages; `link_ratio` is what the link carries during one forward, as a share of what one stage saves."""
    saved = 10 * width
    return Profile.from_chain(
        [forward_s] * n,
        [2 * forward_s] * n,
        [width] * n,
        [saved] * n,
        input_bytes=width,
        forward_temp_bytes=[2 * width] * n,
        backward_temp_bytes=[3 * width] * n,
        out_bytes_per_s=link_ratio * saved / forward_s,
        in_bytes_per_s=link_ratio * saved / forward_s,
    )


def rich_chain(rng: random.Random, n: int) -> Profile:
    """Storages shared by neighbours and across the chain, pins, glue, outputs that stay, menus with gaps."""
    storages: list[Storage] = []
    saved: list[list[int]] = [[] for _ in range(n)]
    pinned: list[list[int]] = [[] for _ in range(n)]
    inputs: list[list[int]] = [[] for _ in range(n)]
    used: list[int] = []

    def make(name: str, nbytes: int, born: int) -> int:
        storages.append(Storage(name, nbytes, born, max(born, 0)))
        used.append(max(born, 0))
        return len(storages) - 1

    def hold(s: int, i: int, *, saves: bool, pins: bool, takes: bool) -> None:
        if saves:
            (pinned if pins else saved)[i].append(s)
        if takes:
            inputs[i].append(s)
        used[s] = max(used[s], i)

    everywhere = [make(f"mask{m}", rng.randint(0, 8), rng.choice((-1, 0))) for m in range(rng.choice((0, 0, 1, 2)))]
    outputs: list[int] = []
    for i in range(n):
        for part in range(rng.randint(0, 2)):
            s = make(f"s{i}.inner{part}", rng.randint(0, 30), i)
            hold(s, i, saves=True, pins=rng.random() < 0.15, takes=False)
        for s in everywhere:
            if storages[s].born < i and rng.random() < 0.7:
                hold(s, i, saves=rng.random() < 0.8, pins=rng.random() < 0.2, takes=rng.random() < 0.7)
        before = [*outputs[-1:], *(s for s in outputs[:-1] if rng.random() < 0.2)]
        for s in before:
            hold(s, i, saves=rng.random() < 0.8, pins=rng.random() < 0.1, takes=rng.random() < 0.95)
        out = make(f"s{i}.out", rng.randint(1, 15), i)
        if rng.random() < 0.6:
            hold(out, i, saves=True, pins=rng.random() < 0.1, takes=False)
        outputs.append(out)
    final = []
    for s, storage in enumerate(storages):
        until = min(used[s] + rng.choice((0, 0, 0, 1, 3)), n + 1)
        to_end = (s == outputs[-1] and rng.random() < 0.7) or rng.random() < 0.04
        stays = rng.random() < 0.1
        final.append(Storage(storage.name, storage.nbytes, storage.born, max(until, storage.born), to_end, stays))

    def transient(low: int) -> Transient:
        return Transient(low + rng.randint(0, 12), low + rng.randint(0, 20))

    stages = []
    for i in range(n):
        own = sum(final[s].nbytes for s in range(len(final)) if final[s].born == i)
        glue = rng.random() < 0.15
        keep = transient(own)
        stages.append(
            Stage(
                name=f"(glue {i})" if glue else f"s{i}",
                kind=str(i),
                saved=tuple(saved[i]),
                pinned=tuple(pinned[i]),
                inputs=tuple(inputs[i]),
                keep=keep,
                swap=None if glue or rng.random() < 0.15 else rng.choice((keep, transient(own))),
                recompute=None if glue or rng.random() < 0.15 else transient(own),
                forward_s=rng.randint(0, 20) / 4,
                backward_s=rng.randint(0, 40) / 4,
                recompute_s=rng.randint(0, 24) / 4,
                input_bytes=rng.randint(0, 9),
            )
        )
    base = rng.randint(0, 40)
    growth = rng.randint(0, 6)
    return Profile(
        stages=tuple(stages),
        storages=tuple(final),
        base_forward_bytes=tuple(base + rng.randint(0, 3) for _ in range(n)),
        base_backward_bytes=tuple(base + growth * (n - i) for i in range(n)),
        update_peak_bytes=rng.choice((0, base, base + growth * n + rng.randint(0, 30))),
        link=Link(rng.choice((0.5, 2.0, 8.0, 30.0)), rng.choice((0.5, 2.0, 8.0, 30.0)), rng.choice((0.0, 0.0, 0.5))),
    )


def random_chain(seed: int, n: int) -> Profile:
    """One of the two, two rich ones to each textbook one."""
    rng = random.Random(seed)
    return textbook_chain(rng, n) if seed % 3 == 0 else rich_chain(rng, n)
