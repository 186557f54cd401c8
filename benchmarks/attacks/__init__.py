"""Attacks on running agents, runs, checkpoints and parsers; lab tests use them."""
