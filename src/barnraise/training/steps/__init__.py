"""TODO: steps."""
