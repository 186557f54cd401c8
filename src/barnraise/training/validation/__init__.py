"""TODO: validation."""
