"""TODO: plan."""
