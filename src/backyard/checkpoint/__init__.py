"""The state of a training as bytes: taken apart, hashed, sent, saved and put together again.

May import ``collectives``, ``runs`` and what is below them, and torch; never pickles.
"""

from backyard.checkpoint.files import Checkpoints, Facts
from backyard.checkpoint.notary import AgentsNotary, Notary
from backyard.checkpoint.state import Parts, assemble, digest, dismantle

__all__ = ["AgentsNotary", "Checkpoints", "Facts", "Notary", "Parts", "assemble", "digest", "dismantle"]
