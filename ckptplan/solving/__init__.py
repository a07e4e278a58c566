"""Profile to plan: searches, bounds and the planner. Imports core alone; OR-Tools lazily."""

from ckptplan.solving.planner import MinPeak, plan_space, smallest_peak, solve_profile

__all__ = ["MinPeak", "plan_space", "smallest_peak", "solve_profile"]
