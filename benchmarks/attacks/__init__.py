"""Attacks on real processes, each with the proof that it had no effect."""
