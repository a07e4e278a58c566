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

import argparse
import collections
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import documents
import odd  # noqa: F401 - registers the cases
from odd.harness import CASES, DECISIONS, ITEMS, outcome

LONGEST = 300  # characters of a message in the file; some of PyTorch's list all of its kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES), metavar="NAME", help="this one alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for odd_models.json")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
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
        rows.append(
            {
                "case": name,
                "item": CASES[name].item,
                "about": CASES[name].about,
                "outcomes": {
                    decision: {"kind": o.kind, "stages": o.stages, "detail": o.detail[:LONGEST]}
                    for decision, o in found.items()
                },
            }
        )
    total = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"{len(names)} cases x {len(DECISIONS)} decisions: {total}; {broken} break a promise")
    if given.out is not None:
        document = {
            "command": documents.command(),
            "environment": documents.environment(given.threads),
            "items": ITEMS,
            "counts": dict(counts),
            "broken": broken,
            "cases": rows,
        }
        documents.write(document, given.out / "odd_models.json")


if __name__ == "__main__":
    main()
