"""Benchmarks of the hub: load, crashes, hostile members, and friends behind routers."""
