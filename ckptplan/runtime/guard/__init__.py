"""What ends or warns of a step that isn't the planned one: shapes, gradients, memory that runs out, checks."""
