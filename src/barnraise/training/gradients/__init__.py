"""Gradients of a step: accumulation over micro-batches, all-reduce over workers, compression and scaling.

When a step counts, and what happens when a group fails, belong to `steps`.
"""
