"""Plain data: chain, profile, plan, schedule, units, errors. No torch."""
