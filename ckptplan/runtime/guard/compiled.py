"""Whether compiled stages go on running what was compiled for the first step.

NOTE [Compiled anew]
The compiler compiles a function again where a guard on its inputs fails, and after some times (`recompile_limit`) it
runs the function as it is, after one warning in a log. The gradients stay right, and neither the bytes nor the times
are the planned ones. So each call of a compiled stage is compared with its first one under the plan: whether the
compiler was at work, and whether compiled code made the output.

Example: a last batch of 384 in place of 512 rows; every stage is compiled again for it, which is told once.
"""

from __future__ import annotations

from typing import Any

from ckptplan.runtime.guard.differences import Differences
from ckptplan.training.compiled import compilations, ran_compiled


class CompiledStages:
    """Watches the calls of compiled stages (NOTE [Compiled anew])."""

    def __init__(self, differences: Differences) -> None:
        self._differences = differences
        self._compiled: dict[int, bool] = {}  # by stage: whether compiled code made the first output with a graph

    def look(self, index: int, name: str, before: int, output: Any) -> None:
        """Look at a call's output; `before` is what `compilations` said when it began."""
        compiled = ran_compiled(output)
        if compiled is None:
            return
        if index not in self._compiled:
            self._compiled[index] = compiled
            return
        if self._compiled[index] and not compiled:
            self._differences.note(
                "compiled",
                f"stage {name!r} was compiled and runs as it is now: the compiler has given it up, at its limit of "
                "recompilations, say (TORCH_LOGS=recompiles tells why)",
            )
        elif compilations() != before:
            self._differences.note(
                "compiled",
                f"stage {name!r} was compiled again, for inputs of another shape or since a value changed that its "
                "code depends on (TORCH_LOGS=recompiles tells which); solve again with such inputs",
            )
