"""`measure`: rivals, plans, bits, overlap and memory histories, on the device."""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import ckptplan
import experiments.documents  # noqa: F401  (makes the helpers of tests/ importable)
from ckptplan.core.plan import Plan
from ckptplan.core.profile import Profile
from ckptplan.runtime.guard.check import When
from ckptplan.state.restore import restored
from ckptplan.training.step import TrainingStep
from experiments.gpu.cases import Case
from experiments.gpu.profiling import Bench
from experiments.gpu.results import OURS, Skipped, slug
from experiments.gpu.subject import Enter, as_regime, compared, peaks, plan_by_hand, race, results_of
from experiments.gpu.work import Options
from experiments.rivals import Forward, NotHere, Rival, rivals

MIXES = {
    "swap+recompute+keep": ("swap", "recompute", "keep"),
    "recompute+swap+swap+keep": ("recompute", "swap", "swap", "keep"),
    "keep+recompute+recompute+swap": ("keep", "recompute+swap", "recompute", "swap"),
}
"""Actions that stages take in turn."""
PLAIN_AGAIN = 6  # plain steps beside the first, whose distances from it say how far from itself plain training is
SETTLING = 2  # steps before peaks are read: libraries take their workspaces, the optimizer makes its state
HISTORY = 400_000  # events


def run(case: Case, options: Options) -> None:
    bench = Bench(case, options)
    if "mixes" in case.extra:
        if options.rivals:
            bench.run(f"measure/{case.name}/bitwise", functools.partial(bitwise, bench, by_hand(bench)))
        return
    if options.rivals:
        for name in ("keep", *case.rivals):
            bench.run(f"measure/{case.name}/rival.{slug(name)}", functools.partial(one_rival, bench, name))
    if options.plans:
        plans = dict(planned_files(bench))
        if "bitwise" in case.extra:
            ours = {name: load(bench, name) for name, item in plans.items() if item["planner"] == OURS}
            bench.run(f"measure/{case.name}/bitwise", functools.partial(bitwise, bench, ours))
        groups = {label: {} for label in dict.fromkeys(item["label"] for item in plans.values())}
        for name, item in plans.items():
            groups[item["label"]][name] = item
        for label, group in groups.items():
            bench.run(f"measure/{case.name}/plans.{slug(label)}", functools.partial(one_group, bench, label, group))
        if "profiler" in case.extra:
            bench.run(f"measure/{case.name}/profiler", functools.partial(overlap, bench, plans))
    if "memory" in case.extra:
        if options.rivals:
            bench.run(f"measure/{case.name}/memory.plain", functools.partial(history, bench, None))
        if options.plans:
            bench.run(f"measure/{case.name}/memory.plan", functools.partial(history, bench, plans))


# --- contenders ---


def all_rivals(case: Case) -> dict[str, Rival]:
    ratios = [float(name.partition("/")[2]) for name in case.rivals if name.startswith("compiled/")]
    return rivals(ratios=ratios)


def planned_files(bench: Bench) -> Iterator[tuple[str, dict[str, Any]]]:
    """Solved plans by name, each with what it was solved for."""
    for name, item in bench.results.under(f"plans/{bench.case.name}"):
        if item["status"] == "ok":
            yield name, item


def load(bench: Bench, name: str) -> Plan:
    return Plan.load(bench.results.file(f"plans/{bench.case.name}", name))


def as_plan(bench: Bench, plan: Plan, handles: dict[str, Any], name: str, check: When = "sampled") -> Enter:
    @contextlib.contextmanager
    def enter(step: TrainingStep) -> Iterator[Forward]:
        subject = bench.subject
        # The arguments behind it serve a plan that was made for a device that wasn't there.
        with ckptplan.apply(
            step.model, plan, inputs=subject.inputs, optimizer=subject.optimizer, amp=subject.case.amp, check=check
        ) as handle:
            handles[name] = handle
            yield step.forward

    return enter


def settled(bench: Bench, forward: Forward) -> Forward:
    for _ in range(SETTLING):
        bench.subject.train(forward)
    return forward


def one_rival(bench: Bench, name: str) -> dict[str, Any]:
    """A rival's peaks, and its steps beside those that keep everything."""
    found = all_rivals(bench.case)[name]
    try:
        return {"name": name, "what": found.what, **measured(bench, {name: found}, {})}
    except NotHere as error:
        raise Skipped(str(error)) from error


def one_group(bench: Bench, label: str, group: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """All plans for one budget, the rival whose peak it is, and everything kept, in turn."""
    known = all_rivals(bench.case)
    measured_before = bench.results.ok(f"measure/{bench.case.name}/rival.{slug(label)}")
    beside = {label: known[label]} if label in known and measured_before else {}
    try:
        # Everything kept is beside the first group alone.
        keeps = label == next(item["label"] for _, item in planned_files(bench))
        return {"label": label, **measured(bench, beside, group, keeps=keeps)}
    except NotHere as error:
        raise Skipped(str(error)) from error


def measured(
    bench: Bench, others: Mapping[str, Rival], group: Mapping[str, dict[str, Any]], *, keeps: bool = True
) -> dict[str, Any]:
    """Peaks of each contender alone, then the steps of all of them in turn.

    A contender that fails is left out, unless it is the only one; everything kept is beside them where it fits.
    """
    subject, options = bench.subject, bench.options
    keep = all_rivals(bench.case)["keep"]
    kept_before = bench.results.read(f"measure/{bench.case.name}/rival.keep") or {}
    handles: dict[str, Any] = {}
    contenders: dict[str, dict[str, Any]] = {}
    running: dict[str, Forward] = {}
    with ExitStack() as stack:

        def enter(name: str, how: Enter, *, layers_compiled: bool = True, alone: bool = False) -> None:
            own = ExitStack()
            try:
                forward = own.enter_context(subject.under(how, layers_compiled=layers_compiled))
                settled(bench, forward)
                contenders[name] = {"peaks": peaks(subject, forward)}
            except Exception as error:
                own.close()
                if alone:
                    raise
                contenders[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            else:
                stack.push(own)
                running[name] = forward

        if "keep" in others or (keeps and kept_before.get("status") not in ("oom", "failed")):
            enter("keep", as_regime(keep), alone=[*others, *group] == ["keep"])
            subject.clear()
        for name, rival in others.items():
            if name != "keep":
                enter(name, as_regime(rival), layers_compiled=not rival.compiles, alone=len(others) == 1)
                subject.clear()  # the error is gone by here, and with it what its frames held
        loaded = {name: load(bench, name) for name in group}
        for name, plan in loaded.items():
            enter(name, as_plan(bench, plan, handles, name))
            subject.clear()
        if group and not running.keys() & group.keys():
            raise RuntimeError(f"no plan ran: {[contenders[name]['error'] for name in group]}")
        for name, plan in loaded.items():
            contenders[name] |= {"predicted": predicted(plan), "target_bytes": group[name]["target_bytes"]}
            if name in running:
                contenders[name]["stats"] = counts(handles[name].stats())
                stack.enter_context(handles[name].unmetered())
        for name, times in race(subject, running, warm_up=options.warm_up, timed=options.timed).items():
            contenders[name]["times"] = times
    return {"contenders": contenders}


def predicted(plan: Plan) -> dict[str, Any]:
    return {
        "peak_bytes": plan.peak_bytes, "reserved_bytes": plan.reserved_bytes, "budget_bytes": plan.budget_bytes,
        "step_s": plan.step_s, "plain_step_s": plan.baseline_step_s, "host_bytes": plan.host_bytes, "gap": plan.gap,
        "options": dict(Counter(choice.option for choice in plan.choices)),
    }  # fmt: skip


def counts(stats: Any) -> dict[str, Any]:
    """What the runtime counted since the plan was applied, beside what it planned per step."""
    names = ("forwards", "recomputed_stages", "planned_recomputed_stages", "swapped_out_bytes", "swapped_in_bytes",
             "planned_swapped_bytes", "other_paths")  # fmt: skip
    return {name: getattr(stats, name) for name in names if hasattr(stats, name)}


# --- bits ---


def by_hand(bench: Bench) -> dict[str, Plan]:
    """Plans that mix all actions, each with the smallest peak that its choices can have."""
    path = bench.results.file("profile", bench.case.name)
    if not path.exists():
        return {}
    profile = Profile.load(path)
    return {name: plan_by_hand(profile, actions) for name, actions in MIXES.items()}


def bitwise(bench: Bench, plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Loss, gradients and buffers of steps under each plan, and of further plain steps, against a plain step's."""
    if not plans:
        raise Skipped("there is no plan")
    subject = bench.subject
    found: dict[str, Any] = {"deterministic": bench.case.deterministic, "plans": {}}
    with restored(subject.model) as rewind:
        with subject.under(as_regime(all_rivals(bench.case)["keep"])) as forward:
            wanted = results_of(subject, forward, rewind)
            again = [compared(results_of(subject, forward, rewind), wanted) for _ in range(PLAIN_AGAIN)]
        found["plain_again"] = again
        for name, plan in plans.items():
            handles: dict[str, Any] = {}
            with subject.under(as_plan(bench, plan, handles, name)) as forward:
                # Further steps find their memory used by the first, and their pools warm.
                steps = [compared(results_of(subject, forward, rewind), wanted) for _ in range(PLAIN_AGAIN)]
                found["plans"][name] = {"steps": steps, "stats": counts(handles[name].stats())}
    return found


# --- overlap ---


def overlap(bench: Bench, plans: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """One step under the plan of ours that swaps most, drawn by torch.profiler; what part of its copies is beside
    kernels."""
    ours = {name: load(bench, name) for name, item in plans.items() if item["planner"] == OURS}
    moving = {name: plan for name, plan in ours.items() if plan.host_bytes}
    if not moving:
        raise Skipped("no plan swaps anything")
    name = max(moving, key=lambda n: moving[n].host_bytes)
    subject = bench.subject
    activities = [torch.profiler.ProfilerActivity.CPU]
    if subject.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    handles: dict[str, Any] = {}
    # Checks launch thousands of kernels more, and the runtime's meter has events of its own.
    with subject.under(as_plan(bench, moving[name], handles, name, check="off")) as forward, handles[name].unmetered():
        settled(bench, forward)
        with torch.profiler.profile(activities=activities, acc_events=True) as recorded:
            subject.train(forward)
            if subject.device.type == "cuda":
                torch.cuda.synchronize(subject.device)
    folder = bench.results.folder / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / f"{bench.case.name}.{name}.json"
    recorded.export_chrome_trace(str(raw))
    events = json.loads(raw.read_text(encoding="utf-8"))["traceEvents"]
    with raw.open("rb") as source, gzip.open(f"{raw}.gz", "wb") as packed:
        shutil.copyfileobj(source, packed)
    raw.unlink()
    return {"plan": name, "planned_swapped_bytes": moving[name].host_bytes, "events": len(events), **lanes(events)}


def lanes(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of kernels and of copies each way in a trace, and of the copies beside which a kernel runs."""

    def spans(category: str, word: str = "") -> list[tuple[float, float]]:
        found = [e for e in events if e.get("cat") == category and e.get("ph") == "X" and word in e["name"]]
        return _union((e["ts"], e["ts"] + e["dur"]) for e in found)

    kernels = spans("kernel")
    out = {"kernels_s": _length(kernels) / 1e6}
    for way, word in (("out", "DtoH"), ("in", "HtoD")):
        copies = spans("gpu_memcpy", word)
        out[f"copies_{way}_s"] = _length(copies) / 1e6
        out[f"copies_{way}_beside_kernels_s"] = _length(_both(copies, kernels)) / 1e6
    return out


Spans = list[tuple[float, float]]


def _union(spans: Any) -> Spans:
    out: Spans = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def _both(a: Spans, b: Spans) -> Spans:
    found = ((max(x[0], y[0]), min(x[1], y[1])) for x, y in itertools.product(a, b) if x[0] < y[1] and y[0] < x[1])
    return _union(found)


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


# --- memory truth ---


def history(bench: Bench, plans: Mapping[str, dict[str, Any]] | None) -> dict[str, Any]:
    """Three training steps from an emptied cache on, recorded; the record replayed; both beside the estimate."""
    subject, case = bench.subject, bench.case
    plan, name = None, "plain"
    if plans is not None:
        name = next((n for n, item in plans.items() if item["planner"] == OURS), "")
        if not name:
            raise Skipped("no plan is solved")
        plan = load(bench, name)
    enter = as_regime(all_rivals(case)["keep"]) if plan is None else as_plan(bench, plan, {}, name)
    found: dict[str, Any] = {"plan": None if plan is None else name, "allocator": case.allocator}
    allocator = case.allocator if subject.device.type == "cuda" else None
    subject.begin_training()
    estimate = ckptplan.estimate(
        subject.copy(), subject.inputs, optimizer=subject.optimizer, amp=case.amp, plan=plan, allocator=allocator
    )
    found["estimate"] = {"allocated_bytes": estimate.peak_bytes, "reserved_bytes": estimate.reserved_bytes}
    with subject.under(enter) as forward:
        settled(bench, forward)
        if subject.device.type != "cuda":
            return {**found, "measured": peaks(subject, forward)}
        subject.clear()
        path = bench.results.folder / "histories" / f"{case.name}.{name}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        index = subject.device.index or 0
        before = torch.cuda.memory._snapshot()
        held = torch.cuda.memory_allocated(index)
        torch.cuda.memory._record_memory_history(max_entries=HISTORY, context=None, stacks="python")
        try:
            found["measured"] = peaks(subject, forward)  # which begins to count peaks once the cache is empty
            peak = max(held, torch.cuda.max_memory_allocated(index))
            after = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    found["history"] = str(path.relative_to(bench.results.folder))
    return {**found, **replayed(before, after, index, peak, path)}


def replayed(
    before: Mapping[str, Any], after: Mapping[str, Any], device: int, peak_allocated: int, path: Path
) -> dict[str, Any]:
    """Write the recorded history, and replay it through the allocator's model; a failure is told beside the rest."""
    from histories import Replay, history_from, save_history

    try:
        history = history_from(before, after, device, peak_allocated=peak_allocated)
        save_history(history, path)
        found = Replay(history)
    except Exception as error:
        return {"replay_error": f"{type(error).__name__}: {error}"[:500]}
    return {
        "recorded_reserved_bytes": history["devices"][0]["recorded_peak_reserved"],
        "replayed_reserved_bytes": found.allocator.peak_reserved_bytes,
        "addresses_compared": found.allocations,
        "first_difference": found.first_difference,
    }
