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
import math
import statistics
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptplan.core.ddp import DDP
from ckptplan.core.device import Device
from ckptplan.core.profile import COLLECTIVES, Profile
from ckptplan.core.stage import Stage
from ckptplan.distributed.group import GroupCall
from ckptplan.distributed.sharded import outermost, parameter_groups, reduced_dtype, resharded_over, sizes_of, states
from ckptplan.runtime.accelerator import synchronize


@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit's modules by name, and the seconds of a gather in forward and in backward, and of its reductions."""

    names: tuple[str, ...]
    gather_s: float
    again_s: float
    reduce_s: float

    def depth_around(self, stage: str) -> int:
        """Return the length of the name of the module that holds or is `stage`; -1 if none does."""
        return max((len(name) for name in self.names if _holds(name, stage)), default=-1)

    def seconds(self, calls: int) -> tuple[float, float]:
        """Return the seconds in forward and in backward; a unit that stays whole gathers for the first call alone."""
        return self.gather_s * (calls if self.again_s else 1), self.again_s * calls + self.reduce_s


@dataclass(frozen=True, slots=True)
class Links:
    """The rates of collectives between ranks that are here; fields as in `Device`."""

    peer_bytes_per_s: float | None
    name: str = "here"
    machine_devices: int = 1 << 30
    network_bytes_per_s: float | None = None


MOST_GATHERED_BYTES = 64 << 20
"""In a gather that is measured: from there on the rate changes little."""
GATHERS = 5
"""That are measured, of which the median counts."""


def with_measured_collectives(profile: Profile, model: nn.Module, ddp: DDP | None, call: GroupCall) -> Profile:
    """Return the profile of a model of ranks that are here, with the time of their collectives.

    All ranks make this call together. Gathers are measured, which takes the memory of the largest unit's parameters, as
    training does, or of a bucket. Of a replicated model each stage reduces its gradients while the next ones run
    backward, in steps that don't accumulate: others may leave that to a later one.
    """
    groups = parameter_groups(model)
    if groups:
        largest = max(groups, key=lambda group: sum(p._sharded_param_data.numel() for p in group.fsdp_params))
        numbers = sum(p._sharded_param_data.numel() for p in largest.fsdp_params)
        return with_collectives(profile, model, _measured(largest._all_gather_process_group, numbers, model, call))
    if ddp is None or profile.fingerprint.accumulates or len(call.ranks) < dist.get_world_size():
        return profile
    most = min(int(ddp.bucket_cap_mb * 2**20) // 4, sum(p.numel() for p in model.parameters()))
    numbers = most // len(call.ranks)
    links = _measured(dist.group.WORLD, numbers, model, call)
    modules = dict(model.named_modules())
    counted: set[int] = set()
    units = []
    for name in dict.fromkeys(s.name.partition("#")[0] for s in profile.stages if not s.is_glue):
        own = [p for p in modules[name].parameters() if p.requires_grad and id(p) not in counted]
        counted.update(map(id, own))
        units.append(_Unit((name,), 0.0, 0.0, 2 * ring_s(sum(p.nbytes for p in own), len(call.ranks), links)))
    return _with_units(profile, units, len(call.ranks))


def _measured(process_group: Any, numbers: int, model: nn.Module, call: GroupCall) -> Links:
    """Return the rate of gathers, of which each rank gives so many numbers of four bytes; the slowest rank's."""
    ranks, device = process_group.size(), next(model.parameters()).device
    shard = torch.zeros(max(min(numbers, MOST_GATHERED_BYTES // ranks // 4), 1), device=device)
    whole = torch.empty(shard.numel() * ranks, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    taken_s = []
    call.exchange(None)  # none has failed
    for _ in range(1 + GATHERS):
        synchronize(device)
        begin = time.perf_counter()
        gather(whole, shard, group=process_group)
        synchronize(device)
        taken_s.append(time.perf_counter() - begin)
    rate = whole.nbytes * (ranks - 1) / ranks / statistics.median(taken_s[1:])
    return Links(min(call.exchange(rate)))


def ring_s(nbytes: float, ranks: int, device: Device | Links) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `nbytes` in all, over a ring of `ranks` devices.

    Each device sends and receives (ranks - 1) / ranks of the bytes (Thakur et al., Optimization of Collective
    Communication Operations in MPICH, 2005).
    """
    return nbytes * (ranks - 1) / ranks / _rate(ranks, device)


def _rate(ranks: int, device: Device | Links) -> float:
    """Return the bytes a second between devices of a machine, or between machines where that is less."""
    assert device.peer_bytes_per_s is not None
    if ranks > device.machine_devices and device.network_bytes_per_s is not None:
        return min(device.peer_bytes_per_s, device.network_bytes_per_s)
    return device.peer_bytes_per_s


def with_collectives(profile: Profile, model: nn.Module, device: Device | Links) -> Profile:
    """Return the profile of a sharded model with the time of its collectives; the same one if it isn't sharded."""
    groups = parameter_groups(model)
    if not groups:
        return profile
    ranks = max(math.prod(sizes_of(group)) for group in groups)
    missing = [] if device.peer_bytes_per_s is not None else ["peer_bytes_per_s"]
    if ranks > device.machine_devices and device.network_bytes_per_s is None:
        missing.append("network_bytes_per_s")
    if missing:
        note = f"collectives take no time here: device {device.name!r} has no {' and no '.join(missing)}"
        return dataclasses.replace(profile, notes=(*profile.notes, note))
    names, outer = {module: name for name, module in model.named_modules()}, outermost(model)
    return _with_units(profile, [_unit(state, names, device, outer) for state in states(model)], ranks)


def _with_units(profile: Profile, units: Sequence[_Unit], ranks: int) -> Profile:
    """Return the profile with the time of each unit's collectives."""
    own = {k: stage.name.partition("#")[0] for k, stage in enumerate(profile.stages) if not stage.is_glue}
    waits: dict[int, list[tuple[float, float]]] = {}
    total_s = left_s = 0.0
    for unit, places in zip(units, _places(units, own), strict=True):
        both = unit.seconds(max(Counter(own[k] for k in places).values(), default=1))
        if places:
            total_s += sum(both)
            for k, part in zip(places, _parts([profile.stages[k] for k in places], both), strict=True):
                waits.setdefault(k, []).append(part)
        else:
            left_s += sum(both)
    stages = tuple(
        _filled(stage, *map(sum, zip(*waits[k], strict=True))) if k in waits else stage
        for k, stage in enumerate(profile.stages)
    )
    before, after = (sum(stage.forward_s + stage.backward_s for stage in some) for some in (profile.stages, stages))
    shown_s = after - before
    note = f"{COLLECTIVES} {ranks} ranks take {total_s:.3g} s a step, of which compute hides all but {shown_s:.3g} s"
    if left_s:
        note += f"; not counted are at most {left_s:.3g} s of units without a stage"
    return dataclasses.replace(profile, stages=stages, notes=(*profile.notes, note))


def _holds(module: str, stage: str) -> bool:
    """Whether a module, by its name, is a stage's module or one around it."""
    return not module or stage == module or stage.startswith(f"{module}.")


def _unit(state: Any, names: dict[nn.Module, str], device: Device | Links, outer: Collection[Any]) -> _Unit:
    gather_s = again_s = reduce_s = 0.0
    for group in state._fsdp_param_groups:
        ranks, replicas = sizes_of(group)
        gathered = reduced = 0
        for p in group.fsdp_params:
            count = p._sharded_param_data.numel() * ranks
            gathered += count * (p.mp_policy.param_dtype or p.sharded_param.dtype).itemsize
            reduced += count * reduced_dtype(p).itemsize * p.sharded_param.requires_grad
        again = resharded_over(state, group, outer)
        gather_s += ring_s(gathered, ranks, device)
        again_s += 0.0 if again is None else ring_s(gathered, again, device)
        reduce_s += ring_s(reduced, ranks, device)
        if replicas > 1:  # each rank's shard is all-reduced, and those of a machine share its network
            shares = min(ranks, device.machine_devices) if ranks * replicas > device.machine_devices else 1
            sent = 2 * (replicas - 1) / replicas * reduced / ranks
            reduce_s += sent * shares / _rate(ranks * replicas, device)
    return _Unit(tuple(names.get(m, "") for m in state._modules), gather_s, again_s, reduce_s)


def _places(units: Sequence[_Unit], own: Mapping[int, str]) -> list[list[int]]:
    """Return the stages whose compute hides each unit's collectives: those in it, or the one that it lies in.

    Parameters
    ----------
    own : mapping
        Stage -> the name of its module.
    """
    inside: list[list[int]] = [[] for _ in units]
    for k, name in own.items():
        depths = [unit.depth_around(name) for unit in units]
        if max(depths) >= 0:
            inside[depths.index(max(depths))].append(k)
    for number, unit in enumerate(units):
        if not inside[number]:
            around = (k for k, stage in own.items() if any(_holds(stage, name) for name in unit.names))
            inside[number] = list(itertools.islice(around, 1))
    return inside


def _parts(stages: Sequence[Stage], both: tuple[float, float]) -> list[tuple[float, float]]:
    """Return what of a unit's collectives each of its stages hides, in proportion to its compute."""
    found = []
    for lane, seconds in zip(("forward_s", "backward_s"), both, strict=True):
        computes = [getattr(stage, lane) for stage in stages]
        whole = sum(computes)
        found.append([seconds * (c / whole if whole else 1 / len(stages)) for c in computes])
    return list(zip(*found, strict=True))


def _filled(stage: Stage, forward_s: float, backward_s: float) -> Stage:
    """Return a stage that takes as long as these collectives, where they take longer."""
    waits_s = max(0.0, backward_s - stage.backward_s)
    return dataclasses.replace(
        stage,
        forward_s=max(stage.forward_s, forward_s),
        backward_s=stage.backward_s + waits_s,
        options=tuple(
            dataclasses.replace(option, recompute_s=max(0.0, option.recompute_s - waits_s)) for option in stage.options
        ),
    )
