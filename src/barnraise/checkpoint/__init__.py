"""Checkpoints: the training state as bytes, hashed, signed, saved to files and restored.

It may import ``collectives``, ``runs``, what is below them, and torch. It never pickles. When to save is
decided in `training.state`.
"""

from barnraise.checkpoint.files import CheckpointInfo, Checkpoints
from barnraise.checkpoint.serialization import FlatState, digest, flatten, unflatten
from barnraise.checkpoint.signer import AgentCheckpointSigner, CheckpointSigner

__all__ = [
    "AgentCheckpointSigner",
    "CheckpointInfo",
    "CheckpointSigner",
    "Checkpoints",
    "FlatState",
    "digest",
    "flatten",
    "unflatten",
]
