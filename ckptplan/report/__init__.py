"""Tables and plots of plans, for people."""
