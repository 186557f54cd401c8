"""TODO: transfer."""
