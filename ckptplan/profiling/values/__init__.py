"""Steps whose operations depend on values, and operations that don't run on fake tensors."""
