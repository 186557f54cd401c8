"""Checkpoints between machines: signatures, search, fetching, replication and read grants.

How a checkpoint is written and read by a worker belongs to `barnraise.checkpoint`.
"""
