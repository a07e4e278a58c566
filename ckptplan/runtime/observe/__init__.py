"""What a running step takes: bytes, times, traces."""
