"""TODO: shm."""
