"""Survey of devices: the largest batch and the plans of a training on each, from few traces.

CUDA devices of one `byte_class` need the same bytes and share every trace; their times are rooflines of the same
operations. Chains of other batches are interpolated from two traced ones, since a storage's bytes are linear in the
batch.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from ckptplan.core.checks import check_count
from ckptplan.core.device import Device
from ckptplan.core.errors import InfeasibleBudgetError
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.core.request import UNSAID, Limits, Report, Training, ignore_progress
from ckptplan.core.resident import ACTIVATIONS, Kind
from ckptplan.core.segment import Segment
from ckptplan.distributed import parallel_of
from ckptplan.distributed.absent import sharded
from ckptplan.distributed.collectives import with_collectives
from ckptplan.fitting.batch import LIMIT, Batches, MakeInputs, largest
from ckptplan.memory.estimate import TrainingBytes
from ckptplan.planning.job import Job
from ckptplan.profiling.profiler import planned_profiles
from ckptplan.profiling.target import find_target
from ckptplan.solving.cost import Evaluator
from ckptplan.solving.peak import smallest_peak

_SPREAD = 8
"""Ratio of the second batch traced to the user's."""
_RETRIES = 4
_STEP_BACK = 0.02
"""If the solver finds no plan for a batch, the next one tried is smaller by this share."""


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """The batches that fit one device.

    Attributes
    ----------
    device : Device
    batch : int
        The user's batch.
    budget_bytes : int
        The device's memory for tensors and the allocator.
    kept_bytes : int
        Bytes of `batch` with everything kept.
    planned_bytes : int
        The smallest budget for which a plan of `batch` was found.
    plan : Plan or None
        The plan of `batch`; None if none is needed or none fits.
    most_kept : int
        Largest batch with everything kept, 0 for none; by estimates of this batch and of the next larger one.
    most_planned : int
        Largest batch with a plan, 0 for none; by interpolated chains.
    most_plan : Plan or None
        The plan of that batch; None if it isn't larger than `most_kept`.
    """

    device: Device
    batch: int
    budget_bytes: int
    kept_bytes: int
    planned_bytes: int
    plan: Plan | None
    most_kept: int
    most_planned: int
    most_plan: Plan | None


def survey(
    model: nn.Module,
    make_inputs: MakeInputs,
    devices: Sequence[Device],
    batch: int,
    training: Training = UNSAID,
    *,
    budget_bytes: int | None = None,
    offload: Sequence[Kind] = ACTIVATIONS,
    time_limit_s: float = 1.0,
    on_progress: Report = ignore_progress,
) -> list[DeviceFit]:
    """Return the batches that fit each device, in the given order.

    Plans decide on whole stages only, so `solve` may find faster ones. On CUDA the bytes of a plan are the peak of its
    tensors times the ratio of reserved bytes to tensors in one estimated plan on the same kind of device.

    Parameters
    ----------
    devices : sequence of Device
    batch : int
        The batch for which plans are made.
    budget_bytes : int, optional
        Budget in place of each device's memory.
    offload : sequence of str
        The kinds of storages that plans may move.
    time_limit_s : float
        Time limit of each plan.

    Returns
    -------
    list of DeviceFit
    """
    check_count(batch=batch)
    groups: dict[object, list[Device]] = {}
    for device in devices:
        target = find_target(model, device)
        # A device without CUDA is traced by itself, with the operations that this machine runs.
        groups.setdefault(target.byte_class or device.name, []).append(device)
    found: dict[str, DeviceFit] = {}
    with sharded(model, training.fsdp):
        for same in groups.values():
            target = find_target(model, same[0])
            batches = Batches(make_inputs, TrainingBytes(model, target, training))
            batches.check()
            group = _AlikeDevices(batches, same, batch, time_limit_s, on_progress, tuple(offload))
            for device in same:
                found[device.name] = group.fit(device, budget_bytes or device.usable_bytes)
    return [found[device.name] for device in devices]


def _shape(chain: Profile) -> list[list[str]]:
    """Return the names of all stages and options."""
    return [[stage.name, *(option.name for option in stage.options)] for stage in chain.stages]


@dataclass
class _AlikeDevices:
    """Devices on which a step needs the same bytes, and chains for any batch on them."""

    batches: Batches
    devices: Sequence[Device]
    batch: int
    time_limit_s: float
    tell: Report
    offload: tuple[Kind, ...] = ACTIVATIONS
    chains: dict[int, dict[str, Profile]] = field(default_factory=dict)
    kept: dict[int, float] = field(default_factory=dict)
    _reference: tuple[tuple[int, ...], tuple[Segment, ...]] | None = None
    _least: dict[int, int] = field(default_factory=dict)
    _share: float = 1.0
    _loaded_bytes: int = 0

    def chain(self, n: int, name: str) -> Profile:
        """Return the chain of a batch on one of the devices, traced or interpolated from two traced ones."""
        # A unit takes the longer of its compute and its collectives, which isn't linear in the batch.
        device = next(device for device in self.devices if device.name == name)
        return with_collectives(self._computing(n, name), parallel_of(self.batches.sizes.model), device)

    def _computing(self, n: int, name: str) -> Profile:
        """Return the same without collectives."""
        for traced in (self.batch, _SPREAD * self.batch):
            self._traced(traced)
        if n not in self.chains:
            known = sorted(self.chains)
            b = known[min(max(bisect.bisect(known, n), 1), len(known) - 1)]
            a = max((m for m in known if 2 * m <= b), default=None)  # nearer ones differ by little but rounding
            if a is not None:
                between = between_batches(self._traced(a)[name], a, self._traced(b)[name], b, n)
                if between is not None:
                    return between
        return self._traced(n)[name]

    def _traced(self, n: int) -> dict[str, Profile]:
        """Return the traced chains by device."""
        if n not in self.chains:
            target = self.batches.target
            tracing = f"{target.description}, batch {n}"
            optimizer = self.batches.sizes.training.optimizer
            profiles = planned_profiles(
                self.batches.step(n),
                optimizer,
                target,
                self.devices,
                report=lambda text: self.tell(f"{tracing}: {text}"),
            )
            self.chains[n] = {device.name: p for device, p in zip(self.devices, profiles, strict=True)}
        return self.chains[n]

    def least_bytes(self, n: int) -> int:
        """Return the smallest budget of a batch, with the plan whose peak is smallest at the second traced batch."""
        if self._reference is None:
            self._reference = self._refer()
        chain = self._leanest(n)
        if _shape(chain) == _shape(self._leanest(_SPREAD * self.batch)):
            peak_bytes = Evaluator(chain).peak(*self._reference)
        else:  # the options differ: small tensors aren't worth moving
            if n not in self._least:
                self._least[n] = smallest_peak(chain, self._limits(4 * self.time_limit_s)).peak_bytes
            peak_bytes = self._least[n]
        return max(math.ceil(peak_bytes * self._share), self._loaded_bytes)

    def _leanest(self, n: int) -> Profile:
        """Return the chain of a batch on the first device from which most weights are away."""
        return Job.of(self.chain(n, self.devices[0].name), self._limits(self.time_limit_s)).leanest.profile

    def _limits(self, time_limit_s: float) -> Limits:
        return Limits(offload=self.offload, time_limit_s=time_limit_s)

    def _refer(self) -> tuple[tuple[int, ...], tuple[Segment, ...]]:
        """Return the plan with the smallest peak at the second traced batch, and set the ratio of reserved bytes."""
        n, limits = _SPREAD * self.batch, self._limits(4 * self.time_limit_s)
        job = Job.of(self.chain(n, self.devices[0].name), limits)
        least = smallest_peak(job.leanest.profile, limits)
        if self.batches.target.is_cuda:
            # Weights that are away between steps are on the device once, and would count in the ratio.
            self._loaded_bytes = self.batches.sizes.loaded_bytes(self.batches.step(n))
            budget_bytes = smallest_peak(job.profile, limits).peak_bytes if job.more else least.peak_bytes
            plan = self._solved(replace(job, limits=self._limits(self.time_limit_s), more=()), budget_bytes)
            if plan is not None:
                reserved = self.batches.sizes.reserved(self.batches.step(n), plan)
                self._share = max(1.0, reserved / plan.peak_bytes)
        return least.codes, least.segments

    def plan(self, device: Device, n: int, budget_bytes: int) -> Plan | None:
        """Return the fastest plan found for a batch, with more time in a second try; None if there is none."""
        chain, limit = self.chain(n, device.name), int(budget_bytes / self._share)
        jobs = (Job.of(chain, self._limits(times * self.time_limit_s)) for times in (1, 4))
        return next(filter(None, (self._solved(job, limit) for job in jobs)), None)

    def _solved(self, job: Job, budget_bytes: int) -> Plan | None:
        try:
            return job.solved(budget_bytes)
        except InfeasibleBudgetError:
            return None

    def fit(self, device: Device, budget_bytes: int) -> DeviceFit:
        """Return the batches that fit one of the devices."""
        kept = self.kept_bytes(self.batch)
        most_kept, _ = largest(self.kept_bytes, budget_bytes, LIMIT, self.kept)
        self.tell(f"{device.name}: planning batch {self.batch}")
        least = self.least_bytes(self.batch)
        plan = self.plan(device, self.batch, budget_bytes) if kept > budget_bytes >= least else None
        most, most_plan = self.most(device, budget_bytes, most_kept)
        if plan is None and most == self.batch:
            plan = most_plan  # within a tight budget, not every run finds the plan in time
        return DeviceFit(device, self.batch, budget_bytes, kept, min(least, kept), plan, most_kept, most, most_plan)

    def kept_bytes(self, n: int) -> int:
        """Return the bytes of a batch with everything kept."""
        if n not in self.kept:
            self.tell(f"{self.batches.target.description}: estimating batch {n}")
            self.kept[n] = self.batches.sizes.reserved(self.batches.step(n))
        return int(self.kept[n])

    def most(self, device: Device, budget_bytes: int, most_kept: int) -> tuple[int, Plan | None]:
        """Return the largest batch with a plan, and the plan."""
        self.tell(f"{device.name}: looking for the largest batch")
        n, _ = largest(self.least_bytes, budget_bytes, LIMIT)
        for _ in range(_RETRIES):
            if n <= most_kept:
                break
            plan = self.plan(device, n, budget_bytes)
            if plan is not None:
                return n, plan
            n -= max(1, int(_STEP_BACK * n))
        return most_kept, None


def between_batches(a: Profile, n_a: int, b: Profile, n_b: int, n: int) -> Profile | None:
    """Return the chain of `n` samples from those of `n_a` and `n_b`; None if other fields than amounts differ.

    Bytes are rounded up. If they are linear up to blocks of 512 bytes, each storage is off by less than two blocks per
    multiple of the distance between the two. Example: 1000 bytes at 1 sample and 3000 at 3 give 2000 at 2.
    """
    share = (n - n_a) / (n_b - n_a)

    def number(x: float, y: float) -> float:
        if isinstance(x, int) and isinstance(y, int):
            return max(0, x + -(-(y - x) * (n - n_a) // (n_b - n_a)))
        return max(0.0, x + (y - x) * share)

    def mixed(x: object, y: object) -> object:
        if isinstance(x, (bool, str)) or x is None:
            if x != y:
                raise _Differs
            return x
        if isinstance(x, (int, float)) and isinstance(y, (int, float)):
            return number(x, y)
        if isinstance(x, tuple) and isinstance(y, tuple):
            if len(x) != len(y):
                raise _Differs
            return tuple(mixed(p, q) for p, q in zip(x, y, strict=True))
        if type(x) is not type(y) or not dataclasses.is_dataclass(x):
            raise _Differs
        fields = {f.name: (getattr(x, f.name), getattr(y, f.name)) for f in dataclasses.fields(x)}
        values = {
            name: p if name in _SAME else q if name in _EITHER else mixed(p, q) for name, (p, q) in fields.items()
        }
        if any(p != q for name, (p, q) in fields.items() if name in _SAME):
            raise _Differs
        return replace(x, **values)  # type: ignore[type-var]

    try:
        chain = mixed(a, b)
    except _Differs:
        return None
    assert isinstance(chain, Profile)
    return chain


class _Differs(Exception):
    pass


_SAME = {"saved", "pinned", "moves", "ops", "ratio", "linked", "born", "program_until", "link"}
"""Fields that must be equal in both chains: positions, not amounts."""
_EITHER = {"kind", "fingerprint", "notes", "stays", "origin"}
"""Fields that depend on shapes and are taken from one of the two chains."""
