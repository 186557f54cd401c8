"""Limits of this machine: when its user lets runs use it, and how much of it."""
