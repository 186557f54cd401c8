"""TODO: inputs."""
