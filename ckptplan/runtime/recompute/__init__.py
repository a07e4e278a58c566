"""Recompute: repeatable calls of stages, segments, selected operations."""
