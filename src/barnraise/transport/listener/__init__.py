"""TODO: listener."""
