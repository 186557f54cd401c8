"""TODO: region."""
