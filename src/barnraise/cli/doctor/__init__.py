"""What the doctor can see of this machine without its agent: facts, and checks that judge them.

``gathering`` and ``hubs`` look, with deadlines, ``reading`` makes facts of what commands print,
and ``machine`` and ``network`` judge; the last three are pure. May import ``agent``, ``local`` and below;
``hubs`` also what knows where the hubs of this machine are.
"""

from barnraise.cli.doctor.facts import CHECKS

__all__ = ["CHECKS"]
