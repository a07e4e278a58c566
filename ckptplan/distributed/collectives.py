"""The time of a sharded or replicated model's collectives, beside the compute that hides them.

DDP reduces a bucket of gradients while backward makes the next (Li et al., PyTorch Distributed, VLDB 2020).
FSDP2 gathers the next unit, and reduces the gradients of the last one, on streams of their own while a unit computes
(Zhao et al., PyTorch FSDP, VLDB 2023, section 3.3). So a unit takes, in each direction, the longer of its compute and
its communication. A recompute is free as far as it fills time that backward waits anyway. Where a unit has several
stages, each has a part of the communication in proportion to its time. Not counted: the first gather and the last
reduction of a step, which no compute hides, and latencies.

On devices that aren't here the rate is the device's; of ranks that are here it is measured, by gathers of their own.

Example: a unit of 1.7e9 bytes over 8 ranks with 370e9 bytes a second is gathered in 1.7e9 * 7/8 / 370e9 = 4.0 ms. If
its forward computes for 3 ms, it takes 4.0 ms.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ckptplan.core.device import Device
from ckptplan.core.profile import COLLECTIVES, Profile
from ckptplan.core.stage import Stage
from ckptplan.distributed.group import GroupCall
from ckptplan.distributed.parallel import Parallel
from ckptplan.distributed.rates import Links, Unit, holds
from ckptplan.tensors.accelerator import synchronize

MOST_GATHERED_BYTES = 64 << 20
"""Largest gather that is measured, in bytes: with more of them the rate changes little."""
GATHERS = 5
"""Number of gathers that are measured; their median counts."""


def with_collectives(
    profile: Profile, parallel: Parallel, device: Device | None, call: GroupCall | None = None
) -> Profile:
    """Return a profile with the time of its collectives; the same one if there are none whose rate is known.

    Without a `device`, ranks that are here make this `call` together, and gathers are measured, which takes the memory
    of the largest unit's parameters, as training does, or of a bucket.
    """
    ranks = parallel.counted_ranks(profile, here=device is None)
    links = device if device is not None or call is None or not ranks else _measured(parallel, call)
    if not ranks or links is None:
        return profile
    missing = [] if links.peer_bytes_per_s is not None else ["peer_bytes_per_s"]
    if ranks > links.machine_devices and links.network_bytes_per_s is None:
        missing.append("network_bytes_per_s")
    if missing:
        note = f"collectives take no time here: device {links.name!r} has no {' and no '.join(missing)}"
        return dataclasses.replace(profile, notes=(*profile.notes, note))
    units = parallel.units(profile, links)
    own = {k: stage.name.partition("#")[0] for k, stage in enumerate(profile.stages) if not stage.is_glue}
    waits_s = {lane: [0.0] * len(profile.stages) for lane in ("forward_s", "backward_s")}
    total_s = left_s = 0.0
    for unit, places in zip(units, _places(units, own), strict=True):
        both = unit.seconds(max(Counter(own[k] for k in places).values(), default=1))
        left_s += 0.0 if places else sum(both)
        total_s += sum(both) if places else 0.0
        for (lane, waits), seconds in zip(waits_s.items(), both, strict=True):
            computes = [getattr(profile.stages[k], lane) for k in places]
            whole = sum(computes)
            for k, c in zip(places, computes, strict=True):  # each hides a part in proportion to its compute
                waits[k] += seconds * (c / whole if whole else 1 / len(places))
    stages = tuple(map(_filled, profile.stages, *waits_s.values()))
    before, after = (sum(stage.forward_s + stage.backward_s for stage in some) for some in (profile.stages, stages))
    shown_s = after - before
    note = f"{COLLECTIVES} {ranks} ranks take {total_s:.3g} s a step, of which compute hides all but {shown_s:.3g} s"
    if left_s:
        note += f"; not counted are at most {left_s:.3g} s of units without a stage"
    return dataclasses.replace(profile, stages=stages, notes=(*profile.notes, note))


def _measured(parallel: Parallel, call: GroupCall) -> Links:
    """Return the rate of the largest gather; the slowest rank's."""
    process_group, numbers = parallel.largest_gather()
    ranks, device = process_group.size(), next(parallel.model.parameters()).device
    shard = torch.zeros(max(min(numbers, MOST_GATHERED_BYTES // ranks // 4), 1), device=device)
    whole = torch.empty(shard.numel() * ranks, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    taken_s = []
    call.exchange(None)  # raises if a rank has failed
    for _ in range(1 + GATHERS):
        synchronize(device)
        begin = time.perf_counter()
        gather(whole, shard, group=process_group)
        synchronize(device)
        taken_s.append(time.perf_counter() - begin)
    rate = whole.nbytes * (ranks - 1) / ranks / statistics.median(taken_s[1:])
    return Links(min(call.exchange(rate)))


def _places(units: Sequence[Unit], own: Mapping[int, str]) -> list[list[int]]:
    """Return the stages whose compute hides each unit's collectives: those in it, or the one that it lies in.

    Parameters
    ----------
    own : mapping
        Stage -> the name of its module.
    """
    inside: list[list[int]] = [[] for _ in units]
    for k, name in own.items():
        depths = [max((len(n) for n in unit.names if holds(n, name)), default=-1) for unit in units]
        if max(depths) >= 0:
            inside[depths.index(max(depths))].append(k)
    for unit, places in zip(units, inside, strict=True):
        if not places:
            around = (k for k, stage in own.items() if any(holds(stage, name) for name in unit.names))
            places += itertools.islice(around, 1)
    return inside


def _filled(stage: Stage, forward_s: float, backward_s: float) -> Stage:
    """Return a stage whose times are at least those of its collectives."""
    waits_s = max(0.0, backward_s - stage.backward_s)
    return dataclasses.replace(
        stage,
        forward_s=max(stage.forward_s, forward_s),
        backward_s=stage.backward_s + waits_s,
        options=tuple(
            dataclasses.replace(option, recompute_s=max(0.0, option.recompute_s - waits_s)) for option in stage.options
        ),
    )
