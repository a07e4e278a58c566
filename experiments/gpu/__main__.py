"""The first run on a GPU, in commands that exchange files; docs/gpu.md has the order.

    python -m experiments.gpu probe --out RUN
    python -m experiments.gpu profile --out RUN
    python -m experiments.gpu measure --rivals --out RUN
    python -m experiments.gpu solve --out RUN            (needs OR-Tools and no GPU)
    python -m experiments.gpu measure --plans --out RUN
    python -m experiments.gpu table --out RUN            (needs neither)

`all` runs them one after the other. Each result is written when it exists, and what is there is not measured again.
`--device cpu --small` tries everything in small.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.gpu import show, solving, work
from experiments.gpu.cases import TOY, find
from experiments.gpu.results import Results, sources

COMMANDS = ("probe", "profile", "measure", "solve", "table")
ORDER = ("probe", "profile", "rivals", "solve", "plans", "table")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed(arguments)
    out = args.out.resolve()
    options = work.Options(
        out=out, device=args.device, small=args.small, deadline=time.time() + args.seconds,
        cases=work.case_names(args.cases, args.small), again=args.again, isolated=not args.one_process,
        warm_up=args.warm_up if args.warm_up is not None else (1 if args.small else 4),
        timed=args.timed if args.timed is not None else (3 if args.small else 12),
    )  # fmt: skip
    parts = ORDER if args.command == "all" else (args.command,)
    if args.command == "measure":
        parts = tuple(part for part in ("rivals", "plans") if getattr(args, part)) or ("rivals", "plans")
    in_time = True
    for part in parts:
        began = time.time()
        in_time &= run(part, options, args)
        print(f"{part}: {time.time() - began:.0f} s", flush=True)
    if not in_time:
        print("time is up; the same command goes on where this one stopped")
    return 0 if in_time else work.OUT_OF_TIME


def run(part: str, options: work.Options, args: argparse.Namespace) -> bool:
    """One command; whether there was time for all of it."""
    if part == "probe":
        return work.over_cases("experiments.gpu.probe", replace(options, cases=(TOY.name,)))
    if part == "profile":
        return work.over_cases("experiments.gpu.profiling", options)
    if part in ("rivals", "plans"):
        chosen = replace(options, rivals=part == "rivals", plans=part == "plans")
        return work.over_cases("experiments.gpu.measure", chosen)
    if part == "solve":
        choices = solving.Choices(
            time_limit_s=args.time_limit if args.time_limit is not None else (1.0 if args.small else 20.0),
            replay=args.replay, ahead=args.ahead, fractions=args.fractions,
            host_bytes=None if args.host_gb is None else int(args.host_gb * 2**30),
        )  # fmt: skip
        return solving.solve_cases(options.results, [find(name) for name in options.cases], options.small, choices)
    results = Results(options.out)
    shown = show.text(results, options.cases)
    print(shown)
    (options.out / "table.txt").write_text(shown + "\n", encoding="utf-8")
    found = {
        "date": time.strftime("%Y-%m-%d"), "command": " ".join(["python -m experiments.gpu", *sys.argv[1:]]),
        "device": options.device, "small": options.small, "sources": sources(),
    }  # fmt: skip
    results.write("all", show.document(results, options.cases, found))
    if args.json is not None:
        Results(args.json.parent).write(args.json.stem, show.document(results, options.cases, found))
    return True


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=(*COMMANDS, "all"))
    parser.add_argument("--out", type=Path, required=True, help="folder of results, the same for all commands")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the commands")
    parser.add_argument("--cases", help="comma-separated names; default: all, in order of value")
    parser.add_argument("--seconds", type=float, default=86400.0, help="end within this time, and a few seconds")
    parser.add_argument("--again", action="store_true", help="measure once more what failed")
    parser.add_argument("--one-process", action="store_true", help="no process of its own for each case")
    measure = parser.add_argument_group("measure")
    measure.add_argument("--rivals", action="store_true", help="those alone")
    measure.add_argument("--plans", action="store_true", help="those alone")
    measure.add_argument("--warm-up", type=int, help="steps of each contender before the timed ones; default 4")
    measure.add_argument("--timed", type=int, help="timed steps of each contender; default 12")
    solve = parser.add_argument_group("solve")
    solve.add_argument("--time-limit", type=float, help="seconds for each plan; default 20")
    solve.add_argument("--host-gb", type=float, help="most that a plan may swap")
    solve.add_argument("--fractions", action="store_true", help="fixed fractions for budgets, not rivals' peaks")
    solve.add_argument("--replay", metavar="DEVICE", help="predict reserved bytes by replaying the model; takes torch")
    solve.add_argument("--ahead", metavar="DEVICE", help="profile cases that have no profile for a known device")
    show_ = parser.add_argument_group("table")
    show_.add_argument("--json", type=Path, help="also write everything into this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
