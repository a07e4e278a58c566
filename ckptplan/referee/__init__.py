"""Replays and checks of plans, on purpose independent of core's rules and of every planner."""

from ckptplan.referee.simulate import Event, Stay, StepBytes, Timeline, simulate
from ckptplan.referee.validate import Violation, validate

__all__ = ["Event", "Stay", "StepBytes", "Timeline", "Violation", "simulate", "validate"]
