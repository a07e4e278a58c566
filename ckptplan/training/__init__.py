"""The training step that is planned: its description, inputs and gradients, what is refused, and measuring it."""
