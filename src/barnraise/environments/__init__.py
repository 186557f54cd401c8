"""TODO: environments."""
