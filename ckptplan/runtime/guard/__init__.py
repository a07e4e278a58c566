"""Errors and warnings for steps that differ from the planned one: shapes, gradients, memory that runs out, checks."""
