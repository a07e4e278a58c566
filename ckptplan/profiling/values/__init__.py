"""Models whose path depends on values, and operations that can't run without memory."""
