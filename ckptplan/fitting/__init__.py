"""The largest batch that fits, on one device and on many."""
