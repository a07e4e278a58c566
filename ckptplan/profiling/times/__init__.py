"""Times of stages and links, measured here or told from a description of the device."""
