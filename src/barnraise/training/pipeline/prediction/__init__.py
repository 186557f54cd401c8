"""Prediction of the steps of a split model: what machines and links need is measured before the first one.

The arithmetic is pure (``planning.split.stage_time``).
"""
