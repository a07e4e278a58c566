"""Tables, explanations and pages of plans, for people."""
