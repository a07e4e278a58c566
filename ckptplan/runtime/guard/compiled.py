"""Whether compiled stages go on running what was compiled for the first step.

NOTE [Compiled anew]
The compiler compiles a function again where a guard on its inputs fails, and after some times (`recompile_limit`) it
runs the function uncompiled, after one warning in a log. The gradients stay right, but neither the bytes nor the times
are the planned ones. So each call of a compiled stage is checked: whether compiled code made the output, as in the
first call under the plan, with each variant, and with each layer that is compiled for the plan; and, after the first
call, whether the compiler was at work.

Example: a last batch of 384 in place of 512 rows; each stage is compiled again for it, which is reported once. That is
the difference "recompiled", for which no plan is made anew: it would be one for the same code. "compiled" is code that
the compiler has given up, which a new plan counts as uncompiled.
"""

from __future__ import annotations

from typing import Any

from ckptplan.runtime.guard.differences import Differences
from ckptplan.runtime.recompute.call import PlannedStage
from ckptplan.training.compiled import compilations, is_compiled_for_a_plan, ran_compiled


class CompiledStages:
    """Watches the calls of compiled stages (NOTE [Compiled anew])."""

    def __init__(self, differences: Differences) -> None:
        self._differences = differences
        self._compiled: dict[int, bool] = {}  # by stage: whether compiled code made the first output with a graph

    def look(self, stage: PlannedStage, before: int, output: Any) -> None:
        """Look at a call's output; `before` is what `compilations` said when it began."""
        compiled, name = ran_compiled(output), stage.name
        if compiled is None:
            return
        is_first = stage.index not in self._compiled
        if is_first:
            planned = stage.choice.ratio > 0 or is_compiled_for_a_plan(stage.module)
            self._compiled[stage.index] = compiled or planned
        if self._compiled[stage.index] and not compiled:
            self._differences.note(
                "compiled",
                f"stage {name!r} was compiled and runs uncompiled: it has hooks, which compiled code leaves out, or "
                "the compiler has given it up (TORCH_LOGS=recompiles tells why)",
            )
        elif compilations() != before and not is_first:
            self._differences.note(
                "recompiled",
                f"stage {name!r} was compiled again, for inputs of another shape or since a value changed that its "
                "code depends on (TORCH_LOGS=recompiles tells which); solve again with such inputs",
            )
