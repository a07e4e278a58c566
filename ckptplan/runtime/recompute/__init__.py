"""Recompute: calls that can be made again, segments, selected operations."""
