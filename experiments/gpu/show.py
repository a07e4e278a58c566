"""`table`: everything in a folder of results as text, and one JSON document. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ckptplan.core.units import format_bytes, format_seconds
from experiments.gpu.cases import Case, find
from experiments.gpu.results import OURS, Results, slug

LEAST_STEPS = 3  # of fewer no time is shown: rivals may be run for their peaks alone
RESAMPLES = 10_000
SCHEMA = "ckptplan.gpu/1"
Row = Sequence[str]


def document(results: Results, cases: Sequence[str], environment: dict[str, Any]) -> dict[str, Any]:
    """All results in one dictionary, without what is long: operations, steps' single times, tracebacks."""
    found: dict[str, Any] = {"schema": SCHEMA, **environment, "probe": dict(results.under("probe")), "cases": {}}
    for name in cases:
        parts = {
            "profile": results.read(f"profile/{name}"), "solve": results.read(f"solve/{name}"),
            "plans": dict(results.under(f"plans/{name}")), "measure": dict(results.under(f"measure/{name}")),
        }  # fmt: skip
        found["cases"][name] = {key: value for key, value in parts.items() if value}
    found["cells"] = list(cells(results, cases))
    return _short(found)  # type: ignore[no-any-return]


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items() if k not in ("traceback", "operations")}
    return value


def cells(results: Results, cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Our plans for a rival's peak beside the rival: both peaks, and the ratio of steps measured in turn."""
    for case in map(find, cases):
        for label, data in _groups(results, case):
            contenders = data.get("contenders", {})
            rival = label if label in contenders else f"{label}.{slug(label)}"
            for name, ours in contenders.items():
                theirs = contenders.get(rival)
                if not name.startswith(f"{OURS}.") or theirs is None or not ("times" in ours and "times" in theirs):
                    continue
                yield {
                    "case": case.name, "rival": label, "plan": name,
                    "rival_peak_bytes": theirs["peaks"]["judged_bytes"], "peak_bytes": ours["peaks"]["judged_bytes"],
                    "predicted_bytes": ours["predicted"]["reserved_bytes"] or ours["predicted"]["peak_bytes"],
                    "target_bytes": ours["target_bytes"], "predicted_step_s": ours["predicted"]["step_s"],
                    "step_s": ours["times"]["median_step_s"],
                    **ratio(ours["times"]["step_s"], theirs["times"]["step_s"]),
                }  # fmt: skip


def ratio(found: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Median of the ratios of steps that were measured side by side, and its 95 % interval by bootstrap."""
    ratios = np.array(found) / np.array(other)
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return {"ratio": float(np.median(ratios)), "interval": [float(low), float(high)], "pairs": len(ratios)}


def _cells(results: Results, cases: Sequence[str]) -> str:
    found = list(cells(results, cases))
    rows = [
        (
            cell["case"],
            cell["plan"],
            format_bytes(cell["rival_peak_bytes"]),
            format_bytes(cell["peak_bytes"]),
            f"{cell['predicted_bytes'] / cell['peak_bytes'] - 1:+.2%}",
            f"{cell['predicted_step_s'] / cell['step_s'] - 1:+.1%}",
            f"{cell['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*cell["interval"]),
            str(cell["pairs"]),
        )
        for cell in found
    ]
    head = ("case", "plan", "rival's peak", "ours", "predicted", "step predicted", "x rival", "95 %", "pairs")
    at_peak = [cell["ratio"] for cell in found if not cell["plan"].endswith("-tighter")]
    if not at_peak:
        return ""
    worst = (
        f"median {statistics.median(at_peak):.3f}, worst {max(at_peak):.3f} of {len(at_peak)} cells at a rival's peak"
    )
    return f"{_table('ours beside each rival', head, rows)}\n{worst}"


def text(results: Results, cases: Sequence[str]) -> str:
    """The tables."""
    out = [_table("probe", ("line", "status", "seconds", "found"), list(_probe_rows(results)))]
    for name in cases:
        case = find(name)
        rows = list(_case_rows(results, case))
        if rows:
            head = ("budget", "contender", "target", "requested", "allocated", "reserved", "of it planned",
                    "step", "planned", "x keep", "update", "CPU", "remark")  # fmt: skip
            out.append(_table(f"{name}: {case.what}", head, rows))
        out += _lines(results, case)
    out.append(_cells(results, cases))
    problems = list(complaints(results, cases))
    out.append("\n".join([f"{len(problems)} complaints", *problems]))
    return "\n\n".join(part for part in out if part)


def _table(title: str, head: Row, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    widths = [max(len(row[c]) for row in (head, *rows)) for c in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    return "\n".join([title, lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _probe_rows(results: Results) -> Iterator[Row]:
    for name, data in results.under("probe"):
        seconds = format_seconds(data["seconds"]) if "seconds" in data else ""
        yield name, data["status"], seconds, _said(name, data)[:150]


def _said(name: str, data: dict[str, Any]) -> str:
    if data["status"] != "ok":
        return str(data.get("error", "")).partition("\n")[0]
    if name == "versions":
        packages = data["packages"]
        return (
            f"{data.get('device', 'cpu')}, torch {packages.get('torch')}, transformers {packages.get('transformers')}"
        )
    if name in ("attention", "batch-norm"):
        alike = sum(row["alike"] for row in data["rows"])
        return f"{data.get('kernels', '')} real and fake alike in {alike} of {len(data['rows'])}"
    if name == "gradient-sums":
        sums = [f"{operation} by {thread}" for operation, thread in data["operations"] if "add" in operation]
        return f"{', '.join(sums)}; peak {data['peak_bytes']} of {data['tensor_bytes']}-byte tensors"
    if name == "end-to-end":
        return ", ".join(f"{k} {'equal' if v else 'DIFFERS'}" for k, v in _equal(data).items())
    return ", ".join(f"{k} {v}" for k, v in data.items() if isinstance(v, (int, float)) and k != "seconds")


def _equal(data: dict[str, Any]) -> dict[str, bool]:
    return {k: v["equal"] for k, v in data.items() if isinstance(v, dict) and "equal" in v}


def _groups(results: Results, case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, data in results.under(f"measure/{case.name}"):
        kind, _, label = name.partition(".")
        if kind in ("rival", "plans"):
            yield data.get("label", "") if kind == "plans" else "", {**data, "file": label}


def _case_rows(results: Results, case: Case) -> Iterator[Row]:
    for label, data in sorted(_groups(results, case), key=lambda item: item[0]):
        if data["status"] != "ok":
            yield (
                label, data["file"], *[""] * 10, f"{data['status']}: {data.get('error', '')}".partition("\n")[0][:80],
            )  # fmt: skip
            continue
        contenders = data["contenders"]
        keep = contenders.get("keep", {}).get("times")
        for name, found in contenders.items():
            if not label and name == "keep" and data["file"] != "keep":
                continue  # beside each rival; once is enough
            target = format_bytes(found["target_bytes"]) if "target_bytes" in found else ""
            if "error" in found:
                yield (label, name, target, *[""] * 9, found["error"].partition("\n")[0][:80])
                continue
            yield label, name, target, *_figures(name, found, keep)


def _figures(name: str, found: dict[str, Any], keep: dict[str, Any] | None) -> Row:
    peaks, times, planned = found["peaks"], found["times"], found.get("predicted")
    judged = peaks["judged_bytes"]
    expected = None if planned is None else planned["reserved_bytes"] or planned["peak_bytes"]
    sizes = [
        format_bytes(peaks[k]) if peaks[k] is not None else ""
        for k in ("requested_bytes", "allocated_bytes", "reserved_bytes")
    ]
    over = judged - found["target_bytes"] if name.startswith(f"{OURS}.") else 0
    remark = f"OVER by {format_bytes(over)}" if over > 0 else ""
    size = "" if expected is None else f"{expected / judged:.1%}"
    if len(times["step_s"]) < LEAST_STEPS:
        return (*sizes, size, *[""] * 5, remark)
    step_s = times["median_step_s"]
    return (
        *sizes, size, format_seconds(step_s), "" if planned is None else format_seconds(planned["step_s"]),
        f"{step_s / keep['median_step_s']:.3f}" if keep else "", format_seconds(times["median_update_s"]),
        format_seconds(times["median_cpu_s"]), remark,
    )  # fmt: skip


def _lines(results: Results, case: Case) -> list[str]:
    out = []
    bits = results.ok(f"measure/{case.name}/bitwise")
    if bits is not None:
        out.append(f"{case.name}: plain against plain {_bits(bits['plain_again'])}")
        for name, found in bits["plans"].items():
            out.append(f"{case.name}: {name} {_bits(found['steps'])}")
    drawn = results.ok(f"measure/{case.name}/profiler")
    if drawn is not None:
        for way in ("out", "in"):
            copies, beside = drawn[f"copies_{way}_s"], drawn[f"copies_{way}_beside_kernels_s"]
            share = f"{beside / copies:.1%} beside kernels" if copies else "no copies in the trace"
            out.append(f"{case.name}: {drawn['plan']} copies {way} {format_seconds(copies)}, {share}")
    for kind in ("plain", "plan"):
        found = results.ok(f"measure/{case.name}/memory.{kind}")
        if found is not None:
            measured = found["measured"]["judged_bytes"]
            guessed = found["estimate"]["reserved_bytes" if found["measured"]["reserved_bytes"] else "allocated_bytes"]
            replay = found.get("replayed_reserved_bytes")
            out.append(
                f"{case.name}: {found['plan'] or 'plain'} needs {format_bytes(measured)}, "
                f"estimated {guessed / measured - 1:+.2%}"
                + (f", replayed {replay / found['recorded_reserved_bytes'] - 1:+.3%}" if replay else "")
                + (f", not replayed: {found['replay_error']}" if "replay_error" in found else "")
            )
    return out


def _bits(steps: list[dict[str, Any]]) -> str:
    """Steps against a plain one."""
    if all(found["equal"] for found in steps):
        return f"equal in {len(steps)} steps"
    differing = max(len(found["differing"]) for found in steps)
    distances = sorted(found.get("distance", math.inf) for found in steps)
    return (
        f"differs in {differing} of {steps[0]['tensors']} tensors, by {statistics.median(distances):.2e} in the median "
        f"of {len(steps)} steps, {distances[-1]:.2e} at most"
    )


def further(found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> bool:
    """Whether steps are further from a plain one, in the median, than any other plain step is from it."""
    if all(step["equal"] for step in plain):
        return not all(step["equal"] for step in found)
    distances = [[step.get("distance", math.inf) for step in steps] for steps in (found, plain)]
    return statistics.median(distances[0]) > max(distances[1])


def complaints(results: Results, cases: Sequence[str]) -> Iterator[str]:
    """What must not be: failures, plans over their budget, other bits than the plain step repeats."""
    for part in ("probe", "profile", "solve", *(f"{kind}/{name}" for name in cases for kind in ("plans", "measure"))):
        for name, data in results.under(part):
            if data["status"] in ("failed", "running"):
                yield f"{part}/{name}: {data.get('error', '')}".partition("\n")[0]
    equal = _equal(results.ok("probe/end-to-end") or {})
    if equal.get("plain_again"):
        yield from (f"probe: {name} has other bits than the plain step" for name in equal if not equal[name])
    for case in map(find, cases):
        for label, data in _groups(results, case):
            for name, found in data.get("contenders", {}).items():
                if "error" in found:
                    yield f"{case.name} {label} {name}: {found['error']}".partition("\n")[0]
                elif name.startswith(f"{OURS}.") and found["peaks"]["judged_bytes"] > found["target_bytes"]:
                    yield f"{case.name}: {name} takes {found['peaks']['judged_bytes']} of {found['target_bytes']} bytes"
                if (other := found.get("stats", {}).get("other_paths")) is not None and other > 0:
                    yield f"{case.name}: {name} has {other} runs that saved something else than profiled"
        bits = results.ok(f"measure/{case.name}/bitwise")
        if bits is not None:
            if bits["deterministic"] and not all(found["equal"] for found in bits["plain_again"]):
                yield f"{case.name}: plain steps with deterministic kernels differ"
            for name, found in bits["plans"].items():
                if further(found["steps"], bits["plain_again"]):
                    yield f"{case.name}: {name} {_bits(found['steps'])}; plain {_bits(bits['plain_again'])}"
