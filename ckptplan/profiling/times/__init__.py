"""Times of stages and links, measured, or computed from a description of the device."""
