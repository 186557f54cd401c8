"""Benchmark of the page: costs of an update and of the list of runs, with invented runs."""
