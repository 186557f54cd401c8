"""Benchmarks of dead and silent ranks in the collectives."""
