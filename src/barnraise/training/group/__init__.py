"""TODO: group."""
