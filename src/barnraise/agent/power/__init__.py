"""TODO: power."""
