"""Seeded random profiles, options and segments: textbook chains, and richer ones with all sharing the rules allow."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from ckptplan.core.link import Link
from ckptplan.core.option import Option
from ckptplan.core.profile import Profile
from ckptplan.core.resident import KINDS, PARTS, Resident
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Stage
from ckptplan.core.storage import Storage


def with_stages(chain: Profile, change: Callable[[Stage], Stage]) -> Profile:
    return replace(chain, stages=tuple(map(change, chain.stages)))


def with_options(stage: Stage, change: Callable[[Option], Option]) -> Stage:
    return replace(stage, options=tuple(map(change, stage.options)))


def textbook_chain(rng: random.Random, n: int) -> Profile:
    """A heterogeneous `Profile.from_chain` with a runtime that takes its own time in sweeps."""
    outputs = [rng.randint(1, 20) for _ in range(n)]
    chain = Profile.from_chain(
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
    stages = zip(chain.stages, outputs, strict=True)
    return replace(chain, stages=tuple(replace(s, rerun_overhead_s=float(nbytes % 4)) for s, nbytes in stages))


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


def rich_chain(rng: random.Random, n: int, *, most_options: int = 7, glue_share: float = 0.15) -> Profile:
    """Storages shared by neighbours and across the chain, pins, glue, outputs that stay, menus with gaps.

    Parameters
    ----------
    most_options : int
        Longest menu; brute force over long chains wants short ones.
    glue_share : float
        How many stages are glue.
    """
    storages: list[Storage] = []
    saved: list[list[int]] = [[] for _ in range(n)]
    pinned: list[list[int]] = [[] for _ in range(n)]
    inputs: list[list[int]] = [[] for _ in range(n)]
    linked: list[list[int]] = [[] for _ in range(n)]
    own: list[list[int]] = [[] for _ in range(n)]
    used: list[int] = []
    glue = [rng.random() < glue_share for _ in range(n)]

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
            own[i].append(s)
            hold(s, i, saves=True, pins=rng.random() < 0.15, takes=False)
        for s in everywhere:
            if storages[s].born < i and rng.random() < 0.7:
                hold(s, i, saves=rng.random() < 0.8, pins=rng.random() < 0.2, takes=rng.random() < 0.7)
        before = [*outputs[-1:], *(s for s in outputs[:-1] if rng.random() < 0.2)]
        for s in before:
            takes = rng.random() < 0.95
            hold(s, i, saves=rng.random() < 0.8, pins=rng.random() < 0.1, takes=takes)
            if takes and not glue[storages[s].born] and rng.random() < 0.85:
                linked[i].append(s)
        out = make(f"s{i}.out", rng.randint(1, 15), i)
        own[i].append(out)
        if rng.random() < 0.6:
            hold(out, i, saves=True, pins=rng.random() < 0.1, takes=False)
        outputs.append(out)
    final = []
    for s, storage in enumerate(storages):
        until = min(used[s] + rng.choice((0, 0, 0, 1, 3)), n + 1)
        to_end = (s == outputs[-1] and rng.random() < 0.7) or rng.random() < 0.04
        stays = rng.random() < 0.1
        final.append(Storage(storage.name, storage.nbytes, storage.born, max(until, storage.born), to_end, stays))

    stages = []
    for i in range(n):
        made = sum(final[s].nbytes for s in own[i])
        menu = _menu(rng, saved[i], pinned[i], inputs[i], own[i], made, glue=glue[i])[:most_options]
        stages.append(
            Stage(
                name=f"(glue {i})" if glue[i] else f"s{i}",
                kind=str(i),
                options=tuple(menu),
                forward_s=rng.randint(0, 20) / 4,
                backward_s=rng.randint(0, 40) / 4,
                linked=tuple(linked[i]) if any(option.name == "recompute" for option in menu) else (),
                # No draw of its own, so that seeds go on meaning the chains that they did.
                rerun_overhead_s=made % 4 / 4 if any(option.name == "recompute" for option in menu) else 0.0,
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


def odd_chain(rng: random.Random, n: int) -> Profile:
    """A chain as `random_chain` draws them, with ties, zero times and bytes, and extreme links."""
    chain = rich_chain(rng, n, most_options=5) if rng.random() < 0.7 else textbook_chain(rng, n)
    times = rng.choice(((0.0, 1.0), (0.0, 0.5, 4.0), (1.0,), (1e-9, 3.0)))
    sizes = rng.choice(((0, 8), (5,), (1, 2, 4, 8), (0, 7, 1000)))
    if rng.random() < 0.6:
        chain = with_stages(
            chain, lambda stage: replace(stage, forward_s=rng.choice(times), backward_s=rng.choice(times))
        )
    if rng.random() < 0.6:
        chain = replace(chain, storages=tuple(replace(storage, nbytes=rng.choice(sizes)) for storage in chain.storages))
    if rng.random() < 0.4:
        rates = (1e-3, 0.2, 1.0, 3.0, 100.0, 1e12)
        chain = replace(
            chain, link=Link(rng.choice(rates), rng.choice(rates), rng.choice((0.0, 0.0, 1e-6, 0.25, 50.0)))
        )
    if rng.random() < 0.5:
        chain = with_stages(chain, moving_alone)
    if rng.random() < 0.3:
        chain = with_stages(chain, lambda stage: moving_more(rng, stage))
    return with_stages(chain, dearer_unmoved) if rng.random() < 0.3 else chain


def dearer_unmoved(stage: Stage) -> Stage:
    """The stage with options that are slower where they have no moves."""
    return with_options(stage, lambda o: replace(o, overhead_s=o.overhead_s + (o.recomputes and not o.moves)))


def moving_more(rng: random.Random, stage: Stage) -> Stage:
    """The stage with some of what it keeps saved, and moved, by "recompute+swap" too."""
    option = stage.find("recompute+swap")
    if option is None:
        return stage
    more = tuple(s for s in stage.keep.saved if s not in option.held and rng.random() < 0.5)
    places = range(len(option.saved), len(option.saved) + len(more))
    wider = replace(option, saved=option.saved + more, moves=option.moves + tuple(places))
    return with_options(stage, lambda o: wider if o is option else o)


def moving_alone(stage: Stage) -> Stage:
    """The stage without selective options that save the same as one that moves."""
    moving = {o.name.removesuffix("+swap") for o in stage.options if o.name.endswith("+swap")}
    return replace(stage, options=tuple(o for o in stage.options if not (o.ops and o.name in moving)))


def _menu(
    rng: random.Random, saved: list[int], pinned: list[int], inputs: list[int], own: list[int], made: int, *, glue: bool
) -> list[Option]:
    """A menu for a stage that saves and pins these, takes `inputs`, and makes `own`, `made` bytes in all.

    What moves needs at least as many bytes of its own as the same without moving, as it does in truth.
    """

    def cost() -> tuple[int, int]:
        return made + rng.randint(0, 12), made + rng.randint(0, 20)

    def moving(option: Option, name: str, part: float) -> list[Option]:
        moves = tuple(p for p in range(len(option.saved)) if rng.random() < part)
        more = rng.choice((0, 0, 3))
        if not moves:
            return []
        # No draw here either.
        overhead_s = option.overhead_s + (made + len(moves)) % 3 / 4
        costs = option.backward_bytes + more, overhead_s
        return [replace(option, name=name, moves=moves, backward_bytes=costs[0], overhead_s=costs[1])]

    keep = Option("keep", tuple(saved), tuple(pinned), *cost())
    menu = [keep]
    if glue:
        return menu
    if rng.random() < 0.85:
        menu += moving(keep, "swap", 1.0)
    if rng.random() < 0.85:
        full_s = rng.randint(0, 24) / 4
        fixed = [s for s in inputs if s in pinned or rng.random() < 0.05]
        again = Option(
            "recompute",
            tuple(s for s in inputs if s not in fixed),
            tuple(fixed),
            *cost(),
            recompute_s=full_s,
            recomputes=True,
        )
        menu.append(again)
        if rng.random() < 0.5:
            menu += moving(again, "recompute+swap", 0.9)
        for k in range(rng.choice((0, 0, 1, 2))):
            kept = [s for s in own if s in saved and rng.random() < 0.6]
            if not kept:
                continue
            forward, backward = cost()
            partly = replace(
                again,
                name=f"selective-{k + 1}",
                saved=(*again.saved, *kept),
                forward_bytes=forward,
                backward_bytes=backward,
                recompute_s=rng.randint(0, int(full_s * 4)) / 4,
                ops=tuple(range(k + 1)),
            )
            menu.append(partly)
            if rng.random() < 0.5:
                menu += moving(partly, f"selective-{k + 1}+swap", 0.7)
    if rng.random() < 0.3:
        menu += moving(keep, "swap-1", 0.5)
    return menu


def launched(rng: random.Random, chain: Profile) -> Profile:
    """A chain that a host launches, which takes about as long as computing it: longer for some stages and options."""
    pace = rng.choice((0.5, 1.0, 1.5, 3.0))

    def seconds(about: float) -> float:
        return round(rng.choice((0.0, 1.0, 2.0)) * pace * about * 8) / 8

    def launching(stage: Stage) -> Stage:
        again_s = {o.ops: seconds(o.recompute_s) for o in stage.options}
        copy_s = rng.choice((0.0, 0.0, 0.5))
        return replace(
            with_options(stage, lambda o: replace(o, launch_s=again_s[o.ops] * o.recomputes + copy_s * len(o.moves))),
            forward_launch_s=seconds(stage.forward_s),
            backward_launch_s=seconds(stage.backward_s),
            rerun_overhead_launch_s=seconds(stage.rerun_overhead_s),
        )

    return with_stages(chain, launching)


def enlarged(chain: Profile, times: int) -> Profile:
    """The same chain with so many times as many bytes everywhere."""

    def larger(o: Option) -> Option:
        return replace(o, forward_bytes=o.forward_bytes * times, backward_bytes=o.backward_bytes * times)

    return replace(
        with_stages(chain, lambda stage: with_options(stage, larger)),
        storages=tuple(replace(s, nbytes=s.nbytes * times) for s in chain.storages),
        base_forward_bytes=tuple(n * times for n in chain.base_forward_bytes),
        base_backward_bytes=tuple(n * times for n in chain.base_backward_bytes),
        update_peak_bytes=chain.update_peak_bytes * times,
        resident_bytes=chain.resident_bytes * times,
    )


def dropped(rng: random.Random, chain: Profile) -> Profile:
    """A chain in which forward drops the graphs of some storages that one stage alone may hold, and of whole stages."""
    holders: dict[int, set[int]] = {}
    for i, stage in enumerate(chain.stages):
        for s in {s for option in stage.options for s in option.held}:
            holders.setdefault(s, set()).add(i)
    storages, stages, n = list(chain.storages), list(chain.stages), len(chain.stages)
    for i, stage in enumerate(stages):
        if rng.random() < 0.3:
            last = rng.randint(i, n - 1)
            alone = []
            for s in stage.keep.held:
                if holders[s] == {i} and not storages[s].to_end:
                    alone.append(s)
                    storages[s] = replace(storages[s], graph_until=last)
                else:
                    storages[s] = replace(storages[s], program_until=max(storages[s].program_until, last))
            keep = replace(stage.keep, saved=(), pinned=tuple(alone), backward_bytes=0)
            less = Option("discard", (), (), keep.forward_bytes // 2, 0, recomputes=True, overhead_s=0.25)
            menu = (keep,) if stage.is_glue else (keep, less)
            none_s = dict.fromkeys(
                ("backward_s", "backward_launch_s", "rerun_overhead_s", "rerun_overhead_launch_s"), 0.0
            )
            stages[i] = replace(stage, options=menu, linked=(), **none_s)  # type: ignore[arg-type]
    for s, found in holders.items():
        i = max(found)
        if len(found) == 1 and not storages[s].to_end and storages[s].graph_until is None and rng.random() < 0.3:
            storages[s] = replace(storages[s], graph_until=rng.randint(i, n - 1))
    return replace(chain, stages=tuple(stages), storages=tuple(storages))


def compiled(rng: random.Random, chain: Profile) -> Profile:
    """A chain some of whose stages are compiled: they have variants that save less, of which some are faster."""
    stages = list(chain.stages)
    for i, stage in enumerate(stages):
        if stage.is_glue or not stage.has_backward or stage.find("compiled-1") or rng.random() < 0.4:
            continue
        slower_s, keep = rng.choice((0.0, 0.5, 2.0)), stage.keep
        menu = [replace(option, overhead_s=option.overhead_s + slower_s) for option in stage.options]
        for k in range(rng.randint(1, 2)):
            kept = tuple(s for s in keep.saved if rng.random() < 0.6)
            more, ratio = rng.randint(0, 12), 0.5 / (k + 1)
            variant = Option(
                f"compiled-{k + 1}", kept, keep.pinned, keep.forward_bytes + rng.randint(0, 3),
                keep.backward_bytes + more, rng.choice((0.0, 0.25, 3.0)), recomputes=True, ratio=ratio,
            )  # fmt: skip
            menu.append(variant)
            if kept and rng.random() < 0.5:
                moves = tuple(range(len(kept)))
                menu.append(replace(variant, name=f"compiled-{k + 1}+swap", moves=moves, overhead_s=0.25))
        stages[i] = replace(stage, options=tuple(menu))
    return replace(chain, stages=tuple(stages))


def random_chain(seed: int, n: int, *, most_options: int = 7) -> Profile:
    """One of the two, two rich ones to each textbook one; two in seven are launched, one rich one in five `dropped`.

    One in eleven has `compiled` stages.
    """
    rng = random.Random(seed)
    chain = textbook_chain(rng, n) if seed % 3 == 0 else rich_chain(rng, n, most_options=most_options)
    chain = launched(rng, chain) if seed % 7 < 2 else chain
    chain = dropped(rng, chain) if seed % 3 and seed % 5 == 2 else chain
    return compiled(rng, chain) if seed % 11 == 4 else chain


def with_residents(rng: random.Random, chain: Profile) -> Profile:
    """A chain whose options also move, or move alone: weights, frozen and trained, gradients, optimizer state.

    In some, frozen weights are away between steps as well.
    """
    able = [i for i, stage in enumerate(chain.stages) if not stage.is_glue and stage.has_backward]
    if not able:
        return chain
    residents = []
    for k in range(rng.randint(1, 3)):
        users = sorted({*rng.choices(able, k=rng.randint(1, 2))})
        residents.append(Resident((f"w{k}",), rng.randint(1, 12), tuple(users), rng.random() < 0.5))
    kinds = rng.choice((("weights",), ("optimizer",), ("gradients",), KINDS[1:]))
    for k in range(rng.randint(1, 2)) if "gradients" in kinds else ():
        residents.append(Resident((f"g{k}",), rng.randint(1, 12), (rng.choice(able),), True, kind="gradients"))
    for k in range(rng.randint(1, 2)) if "optimizer" in kinds else ():
        residents.append(Resident((f"s{k}",), rng.randint(1, 12), (), True, kind="optimizer"))
    held = sum(resident.nbytes for resident in residents)
    least = sum(s.nbytes for s in chain.storages if s.to_end)  # the update finds them beside all that is resident
    return replace(
        chain,
        base_forward_bytes=tuple(nbytes + held for nbytes in chain.base_forward_bytes),
        base_backward_bytes=tuple(nbytes + held for nbytes in chain.base_backward_bytes),
        update_peak_bytes=max(chain.update_peak_bytes, least) + held,
        resident_bytes=chain.resident_bytes + held,
        residents=tuple(residents),
    ).offloading(rng.choice((("activations", *kinds), kinds)), rng.choice((0, 1, PARTS)))


def on_the_host(rng: random.Random, profile: Profile) -> Profile:
    """`profile` with storages that the host has already, a few or all."""
    share = rng.choice((0.3, 0.6, 1.0))
    storages = (replace(storage, on_host=rng.random() < share) for storage in profile.storages)
    return replace(profile, storages=tuple(storages))


def with_disk(rng: random.Random, chain: Profile) -> Profile:
    """A chain with a disk behind the host, no faster than the link."""
    link = chain.link
    out, back, latency_s = rng.choice((1, 2, 4, 10)), rng.choice((1, 2, 8)), rng.choice((0, 0.25))
    disk = Link(link.out_bytes_per_s / out, link.in_bytes_per_s / back, link.latency_s + latency_s)
    return replace(chain, disk=disk)


def random_segments(rng: random.Random, profile: Profile, *, share: float = 0.3) -> tuple[Segment, ...]:
    """Disjoint segments, with inner ones, of module stages that can be recomputed; `share` is how many begin one."""
    stages = profile.stages

    def last_of(first: int, least: int, limit: int) -> int | None:
        """A random end in `[least, limit)` for a segment that begins at `first`."""
        if stages[first].is_glue or stages[first].recompute is None:
            return None
        ends = []
        for last in range(first, limit):
            if not stages[last].is_glue and stages[last].recompute is None:
                break
            if last >= least and not stages[last].is_glue:
                ends.append(last)
        return rng.choice(ends) if ends else None

    def fill(first: int, limit: int, shortest: int, likely: float) -> tuple[Segment, ...]:
        found, k = [], first
        while k < limit:
            last = last_of(k, k + shortest, limit) if rng.random() < likely else None
            if last is not None:
                found.append(Segment(k, last, fill(k, last, 0, likely * 0.8)))
                k = last
            k += 1
        return tuple(found)

    return fill(0, len(stages), 1, share)


def random_options(rng: random.Random, profile: Profile, segments: tuple[Segment, ...] = ()) -> tuple[Option, ...]:
    """An option for every stage, with what `segments` ask of theirs."""
    inside = {i for segment in segments for i in range(segment.first, segment.last + 1)}
    found = []
    for i, stage in enumerate(profile.stages):
        menu = stage.options
        if i in inside:
            names = ("keep",) if stage.is_glue else ("recompute", "recompute+swap")
            menu = tuple(option for option in menu if option.name in names)
        found.append(rng.choice(menu))
    return tuple(found)
