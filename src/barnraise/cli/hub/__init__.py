"""TODO: hub."""
