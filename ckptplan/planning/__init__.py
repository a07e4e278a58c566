"""From a profile or a model to a plan that the referee and a replay have checked."""
