"""What the runtime must get right, what makes it so, which tests say so, and how to take each safeguard out.

`mutations.py` uses the list; docs/guarantees.md is written from it.
"""

from __future__ import annotations

from dataclasses import dataclass

REQUIREMENTS: dict[int, str] = {
    1: "Each copy is ordered after the stream that computes now",
    2: "A whole storage is copied as it lies: no clone that a copy stream could run ahead of",
    3: "Buffers return on the compute stream, sources are held until their copy is done, no `record_stream`",
    4: "Every return waits for its own copy out, on demand too",
    5: "Host space is written again only after the copy that read it",
    6: "A synchronous mode: same results, no overlap",
    7: "Host space: exact sizes, a limit, reserved from the plan, released, with a fallback",
    8: "A saved tensor that is written to is an error, kept or swapped",
    9: "One copy per storage and version, shared by all aliases, each with its exact geometry",
    10: "Nothing of the model's own is swapped, nor what can't be",
    11: "Saved tensors are given any number of times",
    12: "State lives and dies with its graph",
    13: "Without gradients, in evaluation or inference mode, nothing changes",
    14: "A stage's end is met whatever ends it",
    15: "A recompute is known as one",
    16: "Tensors anywhere in a stage's arguments are seen",
    17: "Random states are those of the forward",
    18: "State is updated once; routing in the recompute is the forward's",
    19: "Sharded units gather once, with one precision",
    20: "The actions happen: runs and bytes are counted",
    21: "Generation caches are off; models that checkpoint by themselves are refused",
    22: "Compiled stages are run as one; a region across stages is refused",
    23: "Copies under way and prefetched bytes are in the plan's peak",
    24: "No swap that doesn't lower the peak or can't overlap",
    25: "A plan holds for its shapes and smaller ones",
    26: "Links are measured as they are used: both ways at once",
    27: "Everything is undone, on any error, at any point",
    28: "Keys, names, types, pickles and copies of the model are unchanged",
    29: "What can't be applied is an error that says so",
    30: "What happened is reported beside the plan",
    31: "Gradients are compared bit for bit",
}


@dataclass(frozen=True)
class Safeguard:
    """One thing that keeps a promise.

    Attributes
    ----------
    item : int
        The requirement.
    what : str
        What it does.
    file, old, new : str
        `old`, once in `file`, with `new` in its place leaves the safeguard out.
    tests : tuple of str
        Of which at least one fails then.
    gpu_tests : tuple of str
        Those that say the same of a real device.
    """

    item: int
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    gpu_tests: tuple[str, ...] = ()


SAFEGUARDS: tuple[Safeguard, ...] = (
    Safeguard(
        27,
        "what a failed backward leaves in the engine's queue goes with the next forward",
        "ckptplan/runtime/controller.py",
        "self._old_graph.drop_leftovers()",
        "pass",
        ("tests/test_runtime.py::test_what_a_failed_backward_leaves_in_the_engine_goes",),
    ),
    Safeguard(
        23,
        "compute waits at a stage's release point until the copy out is done",
        "ckptplan/runtime/controller.py",
        """            for stage in self._release_after.get(index, ()):
                current.session.release(stage)
""",
        "",
        (
            "tests/test_runtime.py::test_slow_copies_cost_time_not_memory_or_correctness",
            "tests/test_runtime.py::test_release_and_prefetch_points_are_met",
        ),
        ("tests/test_gpu.py::test_peak_is_within_the_budget",),
    ),
    Safeguard(
        29,
        "a model with a plan on it takes no second one",
        "ckptplan/runtime/controller.py",
        'if isinstance(patch.module.__dict__.get("forward"), PatchedForward):',
        "if False:",
        ("tests/test_runtime.py::test_applying_twice",),
    ),
    Safeguard(
        31,
        "tests compare every bit, so a gradient that is off by the last one is seen",
        "ckptplan/runtime/swap.py",
        "        return self.geometry.on(self.record.whole())",
        "        found = self.geometry.on(self.record.whole())\n"
        "        return found.nextafter(found.new_tensor(9.0)) if found.dtype == torch.float32 else found",
        ("tests/test_runtime.py::test_steps_are_bitwise_those_of_the_plain_model",),
    ),
)
