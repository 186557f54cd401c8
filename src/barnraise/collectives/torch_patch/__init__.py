"""TODO: torch_patch."""
