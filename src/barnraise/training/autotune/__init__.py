"""Autotuning: profiles the first steps, and chooses the synchronization that the planner predicts to be best.

The planner itself is in `barnraise.planning`.
"""
