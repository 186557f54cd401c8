"""The state of a training as bytes: taken apart, hashed, sent, saved and put together again.

May import ``collectives``, ``runs`` and what is below them, and torch; never pickles.
"""

from barnraise.checkpoint.files import CheckpointInfo, Checkpoints
from barnraise.checkpoint.serialization import FlatState, assemble, digest, dismantle
from barnraise.checkpoint.signer import AgentCheckpointSigner, CheckpointSigner

__all__ = [
    "AgentCheckpointSigner",
    "CheckpointInfo",
    "CheckpointSigner",
    "Checkpoints",
    "FlatState",
    "assemble",
    "digest",
    "dismantle",
]
