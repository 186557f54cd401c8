"""TODO: containers."""
