"""TODO: data."""
