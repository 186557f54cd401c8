"""TODO: recovery."""
