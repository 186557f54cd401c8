"""TODO: rounds."""
