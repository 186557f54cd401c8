"""TODO: object_store."""
