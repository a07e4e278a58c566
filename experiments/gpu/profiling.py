"""`profile`: a Profile of each case, from the device itself."""

from __future__ import annotations

import gc
import time
from functools import cached_property
from typing import Any

import torch

import ckptplan
from experiments.gpu.cases import Case
from experiments.gpu.results import Results
from experiments.gpu.subject import Subject, set_up
from experiments.gpu.work import Options


class Bench:
    """A case on its device; the model is built when something is to be measured."""

    def __init__(self, case: Case, options: Options) -> None:
        self.case, self.options = case, options
        self.results: Results = options.results
        self.device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
        set_up(case, self.device)
        gc.collect()
        gc.freeze()  # what the imports made is not searched for garbage before every step

    @cached_property
    def subject(self) -> Subject:
        return Subject(self.case, self.device, self.options.small)

    def run(self, key: str, measure: Any) -> dict[str, Any] | None:
        found = self.results.run(key, measure)
        if "subject" in self.__dict__:
            self.subject.clear()
            self.subject.clear_host()
        return found


def run(case: Case, options: Options) -> None:
    bench = Bench(case, options)

    def measure() -> dict[str, Any]:
        subject = bench.subject
        if subject.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        profile = ckptplan.profile(subject.copy(), subject.inputs, optimizer=subject.optimizer, amp=case.amp)
        took_s = time.perf_counter() - began
        profile.save(bench.results.file("profile", case.name))
        return {
            "what": case.what, "profiling_s": took_s,
            "profiling_peak_bytes": torch.cuda.max_memory_allocated() if subject.device.type == "cuda" else None,
            "parameters": sum(p.numel() for p in subject.model.parameters()), "stages": len(profile.stages),
            "kinds": len({stage.kind for stage in profile.stages}),
            "options": sorted({option.name for stage in profile.stages for option in stage.options}),
            "predicted_plain_step_s": profile.baseline_step_s, "plain_launch_s": profile.baseline_launch_s,
            "out_bytes_per_s": profile.link.out_bytes_per_s, "in_bytes_per_s": profile.link.in_bytes_per_s,
            "notes": list(profile.notes),
        }  # fmt: skip

    bench.run(f"profile/{case.name}", measure)
