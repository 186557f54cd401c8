"""Checks and merging of updates: update checks, held-out validation, means and the outer step.

The decision when a round closes is in ``rounds``.
"""
