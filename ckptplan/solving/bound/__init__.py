"""Lower bounds: the relaxation, its linear program and its prices."""
