"""Validation: rejects models, optimizers and schedulers that cannot be trained exactly.

Errors that appear later in a step belong to `steps` and `recovery`.
"""
