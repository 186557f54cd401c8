"""TODO: protocol."""
