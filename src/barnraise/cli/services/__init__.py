"""How an operating system starts the agent by itself: systemd, launchd, or the Task Scheduler of Windows.

One file for each, behind one port. May import ``core`` and ``agent.running``; what they do to the system
goes through one callable that runs commands.
"""

from barnraise.cli.services.base import Launch, Manager, ServiceTold
from barnraise.cli.services.transaction import Work

__all__ = ["Launch", "Manager", "ServiceTold", "Work"]
