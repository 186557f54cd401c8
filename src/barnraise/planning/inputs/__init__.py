"""Inputs of the planner: machines, links, model, codecs and the user's limits.

Predictions belong in ``cost``.
"""
