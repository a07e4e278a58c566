"""Three walks through the code: which functions are passed, from where to where (docs/architecture.md).

python experiments/walks.py

A walk is the call stacks at a few functions, in the order in which a run first reaches them; each function counts once.

1. A budget, from `solve` to the comparison of each candidate's bytes with it.
2. A saved tensor, from forward to its release and back.
3. A stage's bytes, from an operation of the trace to the profile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptplan

PACKAGE = Path(ckptplan.__file__).parent
BUDGET = {"Evaluator._lazy"}
TENSOR = {
    "Packing.pack", "start_leaving", "SwapSession.release", "finish_leaving", "Record.drop", "start_returning",
    "Record.tensor", "Record.finish_returning",
}  # fmt: skip
BYTES = {
    "Tracker.operation", "trace_chain", "_Tracing._storages", "_Tracing._bases", "_Tracing.trace", "_with_times",
    "Profile.__post_init__",
}  # fmt: skip

Function = tuple[str, str]
"""A file of the package, and a qualified name in it."""


def walk(reached: set[str], run: Callable[[], Any]) -> list[Function]:
    """The package's functions on the stacks at the first call of each of `reached`, in order."""
    passed: dict[Function, None] = {}
    waiting = set(reached)

    def on_call(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_qualname
        if event != "call" or name not in waiting or PACKAGE not in Path(frame.f_code.co_filename).parents:
            return
        waiting.discard(name)
        stack = []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if PACKAGE in path.parents and not frame.f_code.co_name.startswith("<"):
                stack.append((str(path.relative_to(PACKAGE)), frame.f_code.co_qualname.replace(".<locals>", "")))
            frame = frame.f_back
        passed.update(dict.fromkeys(reversed(stack)))

    sys.setprofile(on_call)
    try:
        run()
    finally:
        sys.setprofile(None)
    if waiting:
        raise SystemExit(f"not reached: {', '.join(sorted(waiting))}")
    return list(passed)


def main() -> None:
    """Print the walks."""
    block = [10e-3] * 6, [20e-3] * 6, [1 << 20] * 6, [4 << 20] * 6
    chain = ckptplan.Profile.from_chain(*block, input_bytes=1 << 20)
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    model, x = nn.Sequential(*layers), torch.randn(64, 64)
    found = {"3. a stage's bytes": walk(BYTES, lambda: ckptplan.profile(model, x, menus=False))}
    profile = ckptplan.profile(model, x, menus=False)
    plans = ckptplan.frontier(profile, points=2, actions=("keep", "swap"), time_limit_s=2)

    def step() -> None:
        with ckptplan.apply(model, plans[0]):
            model(x).sum().backward()

    found["2. a saved tensor"] = walk(TENSOR, step)
    found["1. a budget"] = walk(BUDGET, lambda: ckptplan.solve(chain, 0.015, time_limit_s=1))
    for title in sorted(found):
        functions = found[title]
        print(f"{title}: {len(functions)} functions in {len({file for file, _ in functions})} files")
        for file, name in functions:
            print(f"    {file:<34} {name}")


if __name__ == "__main__":
    main()
