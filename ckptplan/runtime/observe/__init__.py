"""Measurements of running steps: bytes, times, traces."""
