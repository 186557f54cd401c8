"""TODO: launch."""
