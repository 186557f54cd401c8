"""The session that a script trains in: exact steps on whatever machines are there.

May import ``checkpoint``, ``compression``, ``collectives``, ``runs``, ``local`` and what is below, and torch.
"""

from barnraise.training.session import Session

__all__ = ["Session"]
