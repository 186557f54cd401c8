"""TODO: diagnostics."""
