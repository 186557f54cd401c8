"""Metrics of this machine: those of the agent, its devices and all workers, for people and for Prometheus."""
