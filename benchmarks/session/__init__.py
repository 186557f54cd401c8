"""Benchmarks of the session: cost of a step, equality with one machine, faults, sites."""
