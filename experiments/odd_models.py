"""What becomes of odd but legal models and training loops, under every kind of decision?

    python experiments/odd_models.py --out experiments/results

Each case of `tests/odd` keeps state, changes its surroundings, parameters or activations, or uses memory in a way that
a swap or a recompute might not notice. It is trained plainly, plainly behind `profile` ("profiled"), and under a plan
that swaps every stage, recomputes each, recomputes all in one segment, or recomputes all but the products
("selective"). Losses, gradients, parameters, buffers, Python's own objects and the next random draws are compared bit
for bit; of the cases about memory, the peak with the plan's budget. DIFFERENT, over and raw error break a promise;
`harness.py` says what each outcome means. `--case` runs some alone and shows their messages in full.
"""

from __future__ import annotations

import collections

import documents
import odd  # noqa: F401 - registers the cases
import torch
from odd.harness import CASES, DECISIONS, ITEMS, outcome


def main() -> None:
    parser = documents.parser(__doc__)
    parser.add_argument("--case", action="append", choices=sorted(CASES), metavar="NAME", help="this one alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = given.case or list(CASES)
    print(f"{'case':<46} {'item':<7}" + "".join(f"{decision:<14}" for decision in DECISIONS))
    rows, counts, broken = [], collections.Counter[str](), 0
    for name in names:
        found = {decision: outcome(name, decision) for decision in DECISIONS}
        counts.update(o.kind for o in found.values())
        broken += sum(o.broken for o in found.values())
        line = "".join(f"{o.kind:<14}" for o in found.values())
        print(f"{name:<46} {CASES[name].item:<7}{line}".rstrip(), flush=True)
        if given.case:
            for decision, o in found.items():
                print(f"    {decision}: {o.kind}{f', {o.stages} stages' if o.stages else ''}. {o.detail}")
        rows.append({
            "case": name, "item": CASES[name].item, "about": CASES[name].about,
            "outcomes": {
                decision: {"kind": o.kind, "stages": o.stages, "detail": o.detail[: documents.LONGEST]}
                for decision, o in found.items()
            },
        })  # fmt: skip
    total = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"{len(names)} cases x {len(DECISIONS)} decisions: {total}; {broken} break a promise")
    document = {"items": ITEMS, "counts": dict(counts), "broken": broken, "cases": rows}
    documents.save(given.out, "odd_models.json", document)


if __name__ == "__main__":
    main()
