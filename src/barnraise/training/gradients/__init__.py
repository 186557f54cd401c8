"""TODO: gradients."""
