"""TODO: ipc."""
