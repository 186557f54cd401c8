"""Requests about the records of runs, between commands, workers and the agent of a machine."""
