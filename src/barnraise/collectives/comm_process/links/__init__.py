"""TODO: links."""
