"""Cost model of the planner: predicted seconds and bytes of a step.

Inputs belong in ``inputs``; ranking and texts belong in ``plan``.
"""
