"""Comparisons with other systems, each in an environment of its own: Flower and torchft."""
