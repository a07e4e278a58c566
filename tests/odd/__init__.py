"""Odd but legal models and training loops, and what becomes of each under every kind of decision (see `harness`)."""
