"""The session that a script trains in: exact steps on a changing set of machines.

It may import ``checkpoint``, ``compression``, ``collectives``, ``runs``, ``agent_client``, what is below
them, and torch. What starts workers or stores files belongs elsewhere.
"""

from barnraise.training.session import Session

__all__ = ["Session"]
