"""Independent of core's rules and of every planner on purpose: replays and checks plans from plain data."""

from ckptplan.referee.simulate import Event, Stay, StepBytes, Timeline, simulate
from ckptplan.referee.validate import Violation, validate

__all__ = ["Event", "Stay", "StepBytes", "Timeline", "Violation", "simulate", "validate"]
