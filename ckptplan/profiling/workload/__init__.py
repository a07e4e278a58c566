"""The step that is profiled: inputs, optimizer, stages."""
