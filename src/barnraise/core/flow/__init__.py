"""TODO: flow."""
