"""Diagnostics of this machine that work without its agent: facts, and checks that judge them.

``collect`` and ``hub_checks`` look at the system, with deadlines. ``parsers`` turns the output of commands
into facts. ``machine_checks`` and ``network_checks`` judge. The last three are pure. May import ``agent`` and
everything below it.
"""

from barnraise.cli.doctor.facts import CHECKS

__all__ = ["CHECKS"]
