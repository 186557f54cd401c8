"""TODO: client."""
