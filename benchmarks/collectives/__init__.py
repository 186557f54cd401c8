"""Benchmarks of the collectives against Gloo, of algorithms and of codecs."""
