"""What becomes of random odd models and loops, under every kind of decision and mixtures of them?

    python experiments/odd_random.py --out experiments/results

Each seed makes a model of two to six calls of stages with state, arguments and hooks of odd kinds, and a training
loop of three steps (`tests/odd/generated`). It is trained plainly, plainly behind `profile`, and under plans, and
compared bit for bit, as in `odd_models.py`; where steps take what the profiled one does, the measured peak is held
against a budget that is no more than the plan expects. DIFFERENT, over and raw error break a promise. `--seed` shows
one in full; `--shrink` looks for a smaller one with the same outcome.
"""

from __future__ import annotations

import collections
import itertools
import re
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import documents
import torch
from odd.generated import Spec, case, draw, features, smaller
from odd.harness import BROKEN, DECISIONS, MIXED, Outcome, Trial

ALL = (*DECISIONS, MIXED)
LONGEST = 240  # characters of a message in the file


def outcomes(seed: int) -> dict[str, Outcome]:
    """What becomes of a seed under every decision."""
    torch.set_num_threads(1)
    trial = Trial(case(seed))
    return {decision: trial.outcome(decision) for decision in ALL}


def reason(o: Outcome) -> str:
    """The kind of an error or of notes: the message without names, numbers and what is said of other stages."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "...", o.detail.split("; ")[0])
    text = re.sub(r"[\w.]*\.[\w.#]* and its like", "stages", text)
    text = re.sub(r"\[[^\]]*\]|\b[\w.]*\d[\w.]*\b", "N", text)
    text = re.sub(r"\b(a|of an?) (Stage|OwnStage|[A-Z]\w+[a-z][A-Z]\w*)\b", r"\1 module", text)
    return text[:LONGEST]


def shrunk(seed: int, decision: str) -> tuple[Spec, Outcome]:
    """A smaller spec than a seed's with the same outcome under a decision."""
    spec = draw(seed)
    wanted = found = Trial(case(seed)).outcome(decision)
    changed = True
    while changed:
        changed = False
        for less in smaller(spec):
            try:
                found = Trial(case(seed, less)).outcome(decision)
            except Exception:  # an illegal one
                continue
            if found.kind == wanted.kind and reason(found) == reason(wanted):
                spec, changed = less, True
                break
    return spec, Trial(case(seed, spec)).outcome(decision)


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, action="append", help="this one alone, in full")
    parser.add_argument("--shrink", choices=ALL, help="the decision under which a smaller model is to end alike")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in given.seed or ():
        show(seed, given.shrink)
    if not given.seed:
        run(range(given.first, given.first + given.seeds), given.processes, given.out)


def show(seed: int, shrink: str | None) -> None:
    """Print a seed in full."""
    print(f"{draw(seed)}\n{', '.join(features(draw(seed)))}")
    if shrink is not None:
        spec, o = shrunk(seed, shrink)
        print(f"smaller: {spec}\n    {shrink}: {o.kind}. {o.detail}")
        return
    for decision, o in outcomes(seed).items():
        print(f"    {decision}: {o.kind}{f', {o.stages} stages' if o.stages else ''}. {o.detail}", flush=True)


def run(seeds: range, processes: int, out: Path | None) -> None:
    """Try seeds; print what breaks a promise as it is found, and the counts."""
    counts: dict[str, collections.Counter[str]] = {decision: collections.Counter() for decision in ALL}
    reasons: collections.Counter[str] = collections.Counter()
    used: collections.Counter[str] = collections.Counter()
    pairs: collections.Counter[tuple[str, str]] = collections.Counter()
    broken: list[dict[str, Any]] = []
    measured = 0
    begun = time.perf_counter()
    for seed, found in zip(seeds, ProcessPoolExecutor(processes).map(outcomes, seeds), strict=True):
        named = features(draw(seed))
        used.update(named)
        pairs.update(itertools.combinations(named, 2))
        for decision, o in found.items():
            counts[decision][o.kind] += 1
            measured += "bytes measured" in o.detail
            if o.kind not in ("equal", *BROKEN):
                reasons[f"{o.kind}: {reason(o)}"] += 1
            if o.broken:
                print(f"seed {seed}, {decision}: {o.kind}. {o.detail[:LONGEST]}\n    {', '.join(named)}", flush=True)
                broken.append({"seed": seed, "decision": decision, "kind": o.kind, "detail": o.detail[:LONGEST]})
    seconds = time.perf_counter() - begun
    kinds = ("equal", "refused", "not possible", "error", *BROKEN)
    print(f"{'':<10}" + "".join(f"{kind:>14}" for kind in kinds))
    for decision, of in counts.items():
        print(f"{decision:<10}" + "".join(f"{of[kind]:>14}" for kind in kinds))
    for text, count in reasons.most_common():
        print(f"{count:>6}  {text}")
    print(f"{len(seeds)} models, {measured} peaks measured, {len(broken)} promises broken, {seconds:.0f} s")
    possible = len(used) * (len(used) - 1) // 2
    document = {
        "seeds": [seeds.start, seeds.stop], "seconds": round(seconds),
        "counts": {decision: {kind: of[kind] for kind in kinds} for decision, of in counts.items()},
        "peaks_measured": measured, "broken": broken, "reasons": dict(reasons.most_common()),
        "features": dict(sorted(used.items())),
        "pairs_of_features": {"possible": possible, "seen": len(pairs), "seen_once": list(pairs.values()).count(1)},
    }  # fmt: skip
    documents.save(out, "odd_random.json", document)


if __name__ == "__main__":
    main()
