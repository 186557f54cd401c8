"""The state of a training as bytes: taken apart, hashed, sent, saved and put together again.

May import ``collectives``, ``runs`` and what is below them, and torch; never pickles.
"""

from barnraise.checkpoint.files import Checkpoints, Facts
from barnraise.checkpoint.serialization import Parts, assemble, digest, dismantle
from barnraise.checkpoint.signer import AgentsNotary, Notary

__all__ = ["AgentsNotary", "Checkpoints", "Facts", "Notary", "Parts", "assemble", "digest", "dismantle"]
