"""Plan: one decision per stage with its transfer schedule, predictions and a proven bound, as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckptplan.core import rules
from ckptplan.core.checks import check_fields, check_kind, check_number, is_int, short_repr
from ckptplan.core.errors import InvalidInputError, PlanMismatchError
from ckptplan.core.files import Saved
from ckptplan.core.late import late
from ckptplan.core.link import Tier
from ckptplan.core.option import ACTIONS, DISCARD, Action, check_ratio
from ckptplan.core.page import Page
from ckptplan.core.profile import Fingerprint, Profile
from ckptplan.core.resident import ACTIVATIONS, UPDATE, Kind, Resident, check_between
from ckptplan.core.segment import Segment
from ckptplan.core.stage import Differentiated, InputTensor
from ckptplan.core.trace import Trace
from ckptplan.core.units import format_bytes, format_seconds, format_table

Status = Literal["optimal", "feasible"]
OPTIMAL_GAP = 1e-6
"""Largest gap at which a plan counts as optimal: smaller ones are rounding in sums of some thousand numbers."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Storages of one stage that leave the device and return together: one copy in each direction.

    Parameters
    ----------
    moves : tuple of int
        Positions in the option's `saved`, at least one.
    release : int
        Release point: the forward step by whose end the storages have left the device. It isn't below the index of the
        stage itself.
    prefetch : int
        Prefetch point: the backward step at whose start their return is issued. It isn't below the index of the stage
        itself or, in a segment, of the outermost segment's last stage.
    """

    moves: tuple[int, ...]
    release: int
    prefetch: int

    def __post_init__(self) -> None:
        check_fields("transfer", self)
        if not self.moves:
            raise InvalidInputError("a transfer with moves=() moves nothing; leave it out")
        for point in (self.release, self.prefetch):
            if not (is_int(point) and point >= 0):
                raise InvalidInputError(f"release={self.release!r}, prefetch={self.prefetch!r} must be stage indices")


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on one stage: its option, and the transfers of what it moves.

    Parameters
    ----------
    action : "keep", "swap" or "recompute"
        "recompute" if the option recomputes; otherwise "swap" if it moves storages.
    transfers : tuple of Transfer
        In the order in which they leave. Of those with one prefetch point, the last returns first.
    option : str
        Name of the option; by default the action.
    ops : tuple of int
        The option's `ops`, so that a plan can be applied without its profile.
    tier : "host" or "disk"
        Destination of the moved storages.
    ratio : float
        The option's `ratio`.
    """

    action: Action
    transfers: tuple[Transfer, ...] = ()
    option: str = ""
    ops: tuple[int, ...] = ()
    tier: Tier = "host"
    ratio: float = 0.0

    def __post_init__(self) -> None:
        check_fields("decision", self)
        if self.tier != "host" and not self.transfers:
            raise InvalidInputError(f"tier={self.tier!r} of a stage that moves nothing must be 'host'")
        if self.transfers and self.action == "keep":
            raise InvalidInputError(f"a stage with action 'keep' can't move storages, but moves={self.moves}")
        if len(set(self.moves)) != len(self.moves):
            raise InvalidInputError(f"transfers of {self.moves} move a storage twice; give each position once")
        if (self.ops or self.ratio) and self.action != "recompute":
            raise InvalidInputError(
                f"a stage with action {self.action!r} can't save operations' outputs, or run a part again, but "
                f"ops={self.ops}, ratio={self.ratio}"
            )
        check_ratio("decision", self.ratio, self.ops)
        if not self.option:
            object.__setattr__(self, "option", self.action)

    @classmethod
    def moving(
        cls, action: Action, moves: tuple[int, ...], release: int, prefetch: int, option: str = "", **fields: Any
    ) -> Decision:
        """The decision that moves all of `moves` in one transfer; nothing if they are none."""
        return cls(action, (Transfer(moves, release, prefetch),) if moves else (), option, **fields)

    @staticmethod
    def upgraded(data: dict[str, Any]) -> dict[str, Any]:
        """The fields in JSON from those of "ckptplan.plan/3", where one transfer's are beside the others."""
        moves, release, prefetch = (data.pop(name, None) for name in ("moves", "release", "prefetch"))
        if moves or release is not None or prefetch is not None:
            data["transfers"] = [{"moves": moves or [], "release": release, "prefetch": prefetch}]
        return data

    @property
    def runs_again(self) -> bool:
        """Whether backward calls the stage's forward again, as it does for options with `Option.runs_again`."""
        return self.action == "recompute" and self.option != DISCARD and not self.ratio

    @property
    def moves(self) -> tuple[int, ...]:
        """Positions in the option's `saved` that leave the device, transfer by transfer."""
        return tuple(p for transfer in self.transfers for p in transfer.moves)


KEEP = Decision("keep")


@dataclass(frozen=True, slots=True)
class WeightMove:
    """What leaves the device in forward and returns in backward besides activations (NOTE [Offloaded weights]).

    Parameters
    ----------
    resident : Resident
        The storages that leave.
    stage : int
        The stage that moves it; -1: the update.
    release, prefetch : int or None
        As of a `Transfer`; -1: where forward begins, and where backward has ended. None: it is there in between, and
        away between steps.
    tier : "host" or "disk"
    """

    resident: Resident
    stage: int
    release: int | None
    prefetch: int | None
    tier: Tier = "host"


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions of a step, without budget or predictions, which a controller carries out.

    Parameters
    ----------
    stages : tuple of str
        Names in forward order; glue in parentheses.
    choices : tuple of Decision
        One per stage.
    segments : tuple of Segment
        Stages recomputed together, by index.
    inputs : tuple of (tuple of InputTensor, or None), optional
        Per stage, the largest tensors that the choices are valid for; None: any.
    saved_bytes : tuple of (tuple of int)
        Per stage, the bytes of each storage that it is planned to save, in order; empty: not known.
    kept_bytes : tuple of int
        Per stage, the bytes that it saves if it is kept; empty: not known.
    differentiated : tuple of Differentiated
        Stages through which forward itself runs a backward.
    weights : tuple of WeightMove
        What leaves besides what the stages save.
    """

    stages: tuple[str, ...]
    choices: tuple[Decision, ...]
    segments: tuple[Segment, ...] = ()
    inputs: tuple[tuple[InputTensor, ...] | None, ...] | None = None
    saved_bytes: tuple[tuple[int, ...], ...] = ()
    kept_bytes: tuple[int, ...] = ()
    differentiated: tuple[Differentiated, ...] = ()
    weights: tuple[WeightMove, ...] = ()


@dataclass(frozen=True, slots=True, repr=False, weakref_slot=True)
class Plan(Saved):
    """A decision for every stage of a profile, with predictions and a proven bound.

    Parameters
    ----------
    stages : tuple of str
        The profile's stage names, in forward order.
    choices : tuple of Decision
        One per stage.
    status : "optimal" or "feasible"
        "optimal": the step and the bound agree to within 1e-6 (`OPTIMAL_GAP`).
    budget_bytes : int
        The limit that the plan was made for.
    peak_bytes : int
        Predicted peak on the device.
    host_bytes : int
        Bytes moved to the host tier.
    step_s, baseline_step_s : float
        Predicted step, and the step with everything kept. A step takes the time of compute and copies, or that of
        launching if it is longer.
    lower_bound_s : float
        Proven: no plan of `space` has a shorter step.
    space : str
        The plans to which the bound refers.
    planner : str
        Name of the planner that made the plan.
    fingerprint : Fingerprint
        The profile's.
    inputs : tuple of (tuple of InputTensor, or None)
        Per stage, the largest tensors that the plan is valid for; None: not known.
    segments : tuple of Segment
        Stages recomputed together, in order and disjoint.
    peak_bound_bytes : int or None
        For a plan solved for a largest slowdown: no plan of `space` within that slowdown has a smaller peak.
    allocated_bytes, reserved_bytes : int or None
        On CUDA, the predicted peaks of the caching allocator's blocks and segments in training with the plan; they
        include the optimizer's update if it was given to `solve`. None on other devices, and for a plan of a profile.
    disk_bytes : int
        Bytes moved to the disk tier.
    saved_bytes : tuple of (tuple of int)
        Per stage, the bytes of each storage that its option saves, in the order of saving; empty: not known. The
        runtime compares them with a forward that takes another path for other inputs.
    kept_bytes : tuple of int
        Per stage, the bytes that it saves if it is kept, for the same purpose; empty: not known.
    launch_s, baseline_launch_s : float
        Time in which the host launches the step, and the step with everything kept; 0 if the host isn't modelled. Where
        `launch_s` is `step_s`, the device waits for the host.
    forward_peak_bytes, between_bytes : int or None
        The peak of forward alone, and the bytes that forward leaves for backward, including the output. The runtime
        uses them to decide whether tensors that a loop holds of the forward before fit too. None: not known.
    outside : tuple of str or None
        As in the profile.
    uncalled : tuple of str
        As in the profile.
    differentiated : tuple of Differentiated
        As in the profile.
    foreign : tuple of str or None
        As in the profile.
    least_peak_bytes, most_peak_bytes : int or None
        The smallest peak that was found for the profile, and the peak with everything kept: budgets between them make a
        difference. None: not known.
    budget_share : float or None
        The budget as a share of the way between these two peaks, 0 to 1. A plan for other inputs gets the same share of
        their way. None: the budget was given in bytes.
    notes : tuple of str
        Notes of the profile: inputs and loss that were guessed, stages that can't be recomputed. Notes on the budget
        and the search: a faster plan that wasn't taken, copies to the disk that the bound counts as faster than they
        are.
    asked : str
        The request, for a plan kept in a file for later runs (`plan_file=`); empty for others.
    offload : tuple of str
        As in the profile.
    residents : tuple of Resident
        Those of the profile that the plan may move. In a stage that uses some, their positions in transfers follow all
        of its `saved_bytes`.
    between : int
        As in the profile.
    """

    SCHEMA = "ckptplan.plan/4"
    OLDER = ("ckptplan.plan/3",)

    stages: tuple[str, ...]
    choices: tuple[Decision, ...]
    status: Status
    budget_bytes: int
    peak_bytes: int
    host_bytes: int
    step_s: float
    baseline_step_s: float
    lower_bound_s: float
    space: str
    planner: str
    fingerprint: Fingerprint
    inputs: tuple[tuple[InputTensor, ...] | None, ...]
    segments: tuple[Segment, ...] = ()
    peak_bound_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    disk_bytes: int = 0
    saved_bytes: tuple[tuple[int, ...], ...] = ()
    kept_bytes: tuple[int, ...] = ()
    launch_s: float = 0.0
    baseline_launch_s: float = 0.0
    forward_peak_bytes: int | None = None
    between_bytes: int | None = None
    outside: tuple[str, ...] | None = None
    uncalled: tuple[str, ...] = ()
    differentiated: tuple[Differentiated, ...] = ()
    foreign: tuple[str, ...] | None = None
    least_peak_bytes: int | None = None
    most_peak_bytes: int | None = None
    budget_share: float | None = None
    notes: tuple[str, ...] = ()
    asked: str = ""
    offload: tuple[Kind, ...] = ACTIVATIONS
    residents: tuple[Resident, ...] = ()
    between: int = 0

    @staticmethod
    def upgraded(data: dict[str, Any]) -> dict[str, Any]:
        """The fields in JSON from those of files whose `step_s` was that of compute and copies alone.

        Raises
        ------
        InvalidInputError
            If it is a plan for several forwards at once, of an earlier version.
        """
        data.pop("others_bytes", None)
        if (count := data.pop("in_flight", 1)) != 1:
            raise InvalidInputError(
                f"the plan is for in_flight={short_repr(count)} forwards, and plans are for one at a time: solve again "
                "with the budget less what the others hold (docs/devices.md, Pipelines)"
            )
        kept_s = data.get("baseline_launch_s", 0.0)
        launched = {"step_s": data.get("launch_s", 0.0), "baseline_step_s": kept_s}
        if any(0 <= data.get(name, math.inf) < launch_s for name, launch_s in launched.items()):
            launched["lower_bound_s"] = kept_s
            data |= {name: max(data.get(name, 0.0), launch_s) for name, launch_s in launched.items()}
            data["status"] = status_of(data["step_s"], data["lower_bound_s"])
        return data

    @property
    def decided(self) -> Decisions:
        """The decisions, without predictions, and without the stage that stands for the update."""
        first = self.first_stage
        return Decisions(
            self.stages[first:],
            tuple(self._of_activations(i, first) for i in range(first, len(self.choices))),
            tuple(segment.shifted(-first) for segment in self.segments),
            self.inputs[first:],
            self.saved_bytes[first:],
            self.kept_bytes[first:],
            self.differentiated,
            tuple(self._weight_moves(first)),
        )

    @property
    def waiting_bytes(self) -> tuple[int, ...]:
        """Bytes of each weight that is away between steps and not within them: on the host beside `host_bytes`."""
        return tuple(move.resident.nbytes for move in self.decided.weights if move.release is None)

    @property
    def first_stage(self) -> int:
        """The index of the model's first stage: 1 behind the one that stands for the update, else 0."""
        return int(self.stages[:1] == (UPDATE,))

    @property
    def replayed(self) -> Decisions:
        """The decisions alone, for a replay of the step that was profiled."""
        return replace(self.decided, inputs=None, saved_bytes=(), kept_bytes=(), differentiated=())

    def _of_activations(self, i: int, first: int) -> Decision:
        """The decision on stage `i` without the residents that it moves, its points counted from stage `first` on."""
        choice = self.choices[i]
        if not self.residents or not choice.transfers:
            return choice
        own = len(self.saved_bytes[i])
        moves = ((tuple(p for p in t.moves if p < own), t) for t in choice.transfers)
        transfers = tuple(Transfer(left, t.release - first, t.prefetch - first) for left, t in moves if left)
        if transfers:
            return replace(choice, transfers=transfers)
        action: Action = "keep" if choice.action == "swap" else choice.action
        return Decision(action, (), choice.option, choice.ops, ratio=choice.ratio)

    def _weight_moves(self, first: int) -> Iterator[WeightMove]:
        moved: set[str] = set()
        for i, choice in enumerate(self.choices if self.residents else ()):
            own = [r for r in self.residents if i in r.users]
            begin = len(self.saved_bytes[i])
            for t in choice.transfers:
                for p in t.moves:
                    if p >= begin:
                        resident = own[p - begin].behind(first)
                        moved.add(resident.names[0])
                        yield WeightMove(resident, i - first, t.release - first, t.prefetch - first, choice.tier)
        for resident in self.residents:
            if resident.returns is not None and resident.names[0] not in moved:
                yield WeightMove(resident.behind(first), resident.users[-1] - first, None, None)

    @property
    def counted_bytes(self) -> int:
        """What is held against the budget: on CUDA what the allocator reserves, where that is known."""
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes

    @property
    def fragment_bytes(self) -> int:
        """What the allocator reserves beyond the peak in tensors; 0 where it isn't known."""
        return 0 if self.reserved_bytes is None else max(self.reserved_bytes - self.peak_bytes, 0)

    @property
    def tensor_budget_bytes(self) -> int:
        """The budget less what the allocator reserves beyond this plan's tensors; for other plans that may differ."""
        return max(self.budget_bytes - self.fragment_bytes, 1)

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """Stage name -> decision."""
        return dict(zip(self.stages, self.choices, strict=True))

    @property
    def overhead(self) -> float:
        """Excess of the predicted step over the step with everything kept, as a fraction."""
        return self.step_s / self.baseline_step_s - 1 if self.baseline_step_s else 0.0

    @property
    def gap(self) -> float:
        """(step_s - lower_bound_s) / lower_bound_s."""
        return (self.step_s - self.lower_bound_s) / self.lower_bound_s if self.lower_bound_s else 0.0

    @property
    def verdict(self) -> str:
        """In one line: whether the plan fits its budget, what it adds to a step, and how near to the best it is."""
        needs, budget = format_bytes(self.counted_bytes), format_bytes(self.budget_bytes)
        unit = budget[budget.index(" ") :]
        if self.counted_bytes > self.budget_bytes:  # the bound is only on plans that fit
            return f"doesn't fit: {needs} needed, {budget} given; step {self.overhead:+.1%}"
        best = "no plan is faster" if self.status == "optimal" else f"within {self.gap:.2%} of the best"
        if not self.lower_bound_s:
            best = "how near to the best isn't known"
        return f"fits {needs.removesuffix(unit)} of {budget}, step {self.overhead:+.1%}, {best}"

    def report(
        self,
        profile: Profile,
        *,
        frontier: Sequence[Plan] = (),
        time_limit_s: float | None = None,
        trace: Trace | None = None,
        verification: object = None,
        commands: Sequence[str] = (),
        on_progress: Callable[[str], None] | None = None,
    ) -> Page:
        """A page with the step's memory over time, the decisions and why, to save or to show in a notebook.

        Parameters
        ----------
        profile : Profile
            The one that the plan was made from.
        frontier : sequence of Plan, optional
            Plans for other budgets, as `ckptplan.frontier` returns them.
        time_limit_s : float, optional
            Seconds to find them, where they aren't given; None: the report is made without.
        trace : Trace, optional
            A measured step (`ckptplan.trace`), which is drawn over the predicted one.
        verification : Verification, optional
            What `ckptplan.verify` found.
        commands : sequence of str
            How to make the plan again.
        on_progress : callable, optional
            Called with what is being worked out; default: shown in notebooks.

        Returns
        -------
        Page
            `report.save("plan.html")` writes it.

        Raises
        ------
        PlanMismatchError
            If the plan isn't one of this profile.
        """
        return late("reporting", "report_of_plan")(  # type: ignore[no-any-return]
            profile, self, frontier=frontier, time_limit_s=time_limit_s, trace=trace, verification=verification,
            commands=commands, on_progress=on_progress,
        )  # fmt: skip

    def to_context_fn(self) -> dict[str, Callable[[], Any]]:
        """Return the plan for `torch.utils.checkpoint`, to train without this package: modules, and what each saves.

        For plans that only recompute, module by module (`actions=("keep", "recompute"), segments=False`). Modules that
        aren't named are kept. Values aren't checked there, and a step that differs from the planned one isn't noticed.
        A recompute changes once more what the module's forward changes, such as the buffers of a batch normalization.
        Enter autocast anew for each step: with casts of an earlier one, PyTorch takes operations for others.

            for name, context_fn in plan.to_context_fn().items():
                module = model.get_submodule(name)
                module.forward = functools.partial(
                    checkpoint, module.forward, use_reentrant=False, context_fn=context_fn
                )

        Returns
        -------
        dict
            Name of a module -> its `context_fn`.

        Raises
        ------
        InvalidInputError
            If the plan does what `torch.utils.checkpoint` can't, with the first such stage and the option that leaves
            it out.
        """
        return late("runtime.recompute.contexts", "context_fns")(self)  # type: ignore[no-any-return]

    def save_regions(self) -> dict[str, Callable[..., Any]]:
        """Return the plan for `torch_remat` (0.2), to train without this package: modules, and their wrappers.

        As `to_context_fn`, for plans that recompute whole modules (with `menus=False`, too). Each recomputed module
        becomes a checkpoint region, in which random numbers are drawn again. Its output has to be a tensor, or a tuple
        or list of tensors, which nothing may write to in place. A region runs to its end in backward, which can take
        more memory than planned.

            for name, wrap in plan.save_regions().items():
                module = model.get_submodule(name)
                module.forward = wrap(module.forward)

        Returns
        -------
        dict
            Name of a module -> a function from its forward to the checkpointed one.

        Raises
        ------
        InvalidInputError
            If the plan does what `torch_remat` can't, with the first such stage and the option that leaves it out; if
            `torch_remat` can't be imported.
        """
        return late("runtime.recompute.contexts", "save_regions")(self)  # type: ignore[no-any-return]

    def within(self, budget_bytes: int, bound_s: float, space: str | None = None) -> Plan:
        """Return the plan for another budget, which it keeps, and within which no plan of `space` beats `bound_s`."""
        bound_s = min(bound_s, self.step_s)
        status = status_of(self.step_s, bound_s)
        return replace(self, budget_bytes=budget_bytes, lower_bound_s=bound_s, status=status, space=space or self.space)

    def require_profile(self, profile: Profile) -> Profile:
        """Return the profile, with the options that the plan has; raise unless it was made for the profile.

        Raises
        ------
        PlanMismatchError
        InvalidInputError
            If it isn't a profile.
        """
        check_kind(Profile, profile=profile)
        self.fingerprint.require(profile.fingerprint)
        profile = profile.offloading(self.offload, self.between)
        check_stages(self.stages, tuple(stage.name for stage in profile.stages))
        return profile

    def __post_init__(self) -> None:
        check_fields("plan", self)
        check_between(self.between)
        if not len(self.stages) == len(self.choices) == len(self.inputs):
            raise InvalidInputError(
                f"{len(self.choices)} decisions and {len(self.inputs)} lists of inputs for {len(self.stages)} stages"
            )
        if self.saved_bytes and len(self.saved_bytes) != len(self.stages):
            raise InvalidInputError(f"{len(self.saved_bytes)} lists of saved bytes for {len(self.stages)} stages")
        if self.kept_bytes and len(self.kept_bytes) != len(self.stages):
            raise InvalidInputError(f"{len(self.kept_bytes)} numbers of kept bytes for {len(self.stages)} stages")
        if len(set(self.stages)) != len(self.stages):
            twice = next(name for name in self.stages if self.stages.count(name) > 1)
            raise InvalidInputError(f"stage name {twice!r} is used twice")
        for name, choice in zip(self.stages, self.choices, strict=True):
            for point in (point for t in choice.transfers for point in (t.release, t.prefetch)):
                if point >= len(self.stages):
                    raise InvalidInputError(f"stage {name!r}: no stage has index {point}; there are {len(self.stages)}")
        check_segments(self.segments, self.choices, self.stages)
        if self.budget_share is not None:
            check_number("plan", 0, 1, budget_share=self.budget_share)

    def __repr__(self) -> str:
        return (
            f"<Plan for {len(self.stages)} stages: peak {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.budget_bytes)}, {self.overhead:+.1%}, gap {self.gap:.2%}>"
        )

    def __str__(self) -> str:
        """Return the verdict, the totals, a table of runs of equal decisions, and what was proven over which plans."""
        rows = [("stages", "decision", "release after", "prefetch before")]
        around = {i: s for s in self.segments for i in range(s.first, s.last + 1)}
        start = 0
        for i, choice in enumerate(self.choices):
            after = self.choices[i + 1] if i + 1 < len(self.choices) else None
            plain = after is not None and not choice.transfers and not after.transfers
            if plain and (after.option, around.get(i + 1)) == (choice.option, around.get(i)):  # type: ignore[union-attr]
                continue
            names = self.stages[start] if start == i else f"{self.stages[start]} .. {self.stages[i]} ({i - start + 1})"
            disk = " to disk" if choice.tier == "disk" else ""
            what = choice.option + disk + _together(around.get(i))
            points = [(self.stages[t.release], self.stages[t.prefetch]) for t in choice.transfers]
            for release, prefetch in points or [("", "")]:
                rows.append((names, what, release, prefetch))
                names = what = ""
            start = i + 1
        counts = {action: sum(choice.action == action for choice in self.choices) for action in ACTIONS}
        head = [
            self.verdict,
            f"peak    {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}; "
            f"swapped {format_bytes(self.host_bytes)}"
            + (f" to the host and {format_bytes(self.disk_bytes)} to the disk" if self.disk_bytes else "")
            + ("" if self.reserved_bytes is None else f"; reserved {format_bytes(self.reserved_bytes)}"),
            f"step    {format_seconds(self.step_s)}, {self.overhead:+.1%} over keeping everything "
            f"({format_seconds(self.baseline_step_s)})",
            "stages  "
            + ", ".join(f"{n} {action}" for action, n in counts.items())
            + (f"; {len(self.segments)} segments" if self.segments else ""),
        ]
        if self.launch_s >= self.step_s * (1 - OPTIMAL_GAP) > 0:
            head.insert(3, "        the time in which the host launches it: compute and copies take less")
        if self.least_peak_bytes is not None and self.most_peak_bytes is not None:
            gain = "" if counts["keep"] < len(self.choices) else "; this plan keeps everything: nothing to gain"
            head.insert(
                2,
                f"        budgets from {format_bytes(self.least_peak_bytes)}, the smallest peak found, to "
                f"{format_bytes(self.most_peak_bytes)}, everything kept, make a difference{gain}",
            )
        if self.peak_bound_bytes is not None:
            head.insert(2, f"        no plan this fast has a peak below {format_bytes(self.peak_bound_bytes)}")
        head += [f"note    {note}" for note in self.notes]
        proof = f"plan by {self.planner}: {self.status}, gap {self.gap:.2%} over {self.space}"
        return "\n".join([*head, "", *format_table(rows), "", proof])


def _together(segment: Segment | None) -> str:
    if segment is None:
        return ""
    runs = 1 + max(segment.depth(i) for i in range(segment.first, segment.last + 1))
    return f" together, up to {runs} runs" if runs > 2 else " together"


def status_of(step_s: float, lower_bound_s: float) -> Status:
    """`Plan.status` of a plan that takes `step_s` where no plan of its space takes less than `lower_bound_s`."""
    return "optimal" if step_s <= lower_bound_s * (1 + OPTIMAL_GAP) else "feasible"


def plan_of(
    profile: Profile,
    choices: tuple[Decision, ...],
    segments: tuple[Segment, ...],
    *,
    step_s: float,
    lower_bound_s: float,
    **fields: Any,
) -> Plan:
    """The plan of these decisions for `profile`; `fields` are those that neither it nor the decisions give."""
    return Plan(
        stages=tuple(stage.name for stage in profile.stages),
        choices=choices,
        segments=segments,
        status=status_of(step_s, lower_bound_s),
        step_s=step_s,
        baseline_step_s=profile.baseline_step_s,
        lower_bound_s=lower_bound_s,
        fingerprint=profile.fingerprint,
        inputs=tuple(stage.inputs for stage in profile.stages),
        saved_bytes=saved_bytes(profile, choices),
        kept_bytes=kept_bytes(profile),
        launch_s=launch_s(profile, choices, segments),
        baseline_launch_s=profile.baseline_launch_s,
        outside=profile.outside,
        uncalled=profile.uncalled,
        differentiated=profile.differentiated,
        foreign=profile.foreign,
        notes=profile.notes,
        offload=profile.offload,
        residents=profile.moving,
        between=profile.between,
        **fields,
    )


def kept_bytes(profile: Profile) -> tuple[int, ...]:
    """Return `Plan.kept_bytes` for any decisions."""
    storages, end = profile.storages, profile.first_moving
    return tuple(sum(storages[s].nbytes for s in stage.keep.saved if s < end) for stage in profile.stages)


def saved_bytes(profile: Profile, choices: Sequence[Decision]) -> tuple[tuple[int, ...], ...]:
    """Return `Plan.saved_bytes` for these decisions."""
    options = (stage.find(choice.option) for stage, choice in zip(profile.stages, choices, strict=True))
    storages, end = profile.storages, profile.first_moving
    return tuple(() if o is None else tuple(storages[s].nbytes for s in o.saved if s < end) for o in options)


def launch_s(profile: Profile, choices: Sequence[Decision], segments: Sequence[Segment] = ()) -> float:
    """Return `Plan.launch_s` for these decisions."""
    options = [stage.option(choice.option) for stage, choice in zip(profile.stages, choices, strict=True)]
    sweeps = rules.sweeps_of(profile, segments)
    last_run = rules.last_runs(options, sweeps)
    return rules.launch_s(profile, last_run, sweeps, rules.moving_s(profile, options, last_run))


def require_plan(plan: object) -> None:
    """Raise `InvalidInputError` unless `plan` is a Plan."""
    if not isinstance(plan, Plan):
        raise InvalidInputError(f"plan is a {type(plan).__name__}; pass a Plan from ckptplan.solve or Plan.load")


def check_stages(planned: tuple[str, ...], found: tuple[str, ...]) -> None:
    """Raise `PlanMismatchError`, with the first difference, unless the two lists of stage names are equal."""
    if planned == found:
        return
    i = next((i for i, (a, b) in enumerate(zip(planned, found, strict=False)) if a != b), min(len(planned), len(found)))
    want = planned[i] if i < len(planned) else "no further stage"
    have = found[i] if i < len(found) else "no further stage"
    raise PlanMismatchError(f"stage {i} of the plan is {want!r}, here it is {have!r}; solve again for this model")


def check_segments(segments: Sequence[Segment], choices: Sequence[Decision], stages: Sequence[str]) -> None:
    """Raise `InvalidInputError` unless segments are in order, disjoint, and consist of recomputed stages and glue."""
    at = 0
    for segment in segments:
        where = f"segment {segment.first}..{segment.last}"
        if segment.first < at or segment.last >= len(choices) or segment.first == segment.last:
            raise InvalidInputError(f"{where} of {len(choices)} stages: out of order, past the end, or a single stage")
        at = segment.last + 1
        for i in range(segment.first, segment.last + 1):
            if choices[i].ops:
                raise InvalidInputError(
                    f"{where}: stage {i} has ops={choices[i].ops}; stages of a segment can't save operations' outputs"
                )
            wanted = "keep" if stages[i].startswith("(") else "recompute"
            if choices[i].action != wanted:
                raise InvalidInputError(
                    f"{where}: stage {stages[i]!r} has action {choices[i].action!r}; it must be {wanted!r}"
                )
