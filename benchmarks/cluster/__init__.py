"""Benchmarks of the cluster: agents, the start of a run, and the transfer of data sets."""
