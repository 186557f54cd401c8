"""TODO: ops."""
