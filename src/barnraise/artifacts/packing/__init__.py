"""TODO: packing."""
