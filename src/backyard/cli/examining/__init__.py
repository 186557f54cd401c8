"""What the doctor can see of this machine without its agent: facts, and checks that judge them.

``gathering`` looks at the system with deadlines, ``reading`` makes facts of what its commands print, and
``machine`` and ``network`` judge; only the first is not pure. May import ``agent``, ``local`` and below.
"""

from backyard.cli.examining.facts import CHECKS

__all__ = ["CHECKS"]
