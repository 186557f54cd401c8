"""TODO: checkpoints."""
