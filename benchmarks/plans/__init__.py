"""Benchmark of the planner: its predictions against measured steps."""
