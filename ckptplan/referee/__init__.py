"""Replays and checks plans; imports only core."""

from ckptplan.referee.simulate import Event, StepBytes, Timeline, simulate
from ckptplan.referee.validate import Violation, validate

__all__ = ["Event", "StepBytes", "Timeline", "Violation", "simulate", "validate"]
