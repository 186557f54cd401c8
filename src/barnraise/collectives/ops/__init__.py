"""Torch operations as chunks of bytes: checks of tensors, dtypes, copies in and out.

Shared memory, algorithms and the communication process do not belong here.
"""
