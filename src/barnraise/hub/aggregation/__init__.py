"""TODO: aggregation."""
