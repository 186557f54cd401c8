"""How an operating system starts the agent by itself: systemd, launchd, or the Task Scheduler of Windows.

One file for each, behind one port. May import ``core`` and ``agent.running``; what they do to the system
goes through one callable that runs commands.
"""

from barnraise.cli.services.base import ServiceLaunch, ServiceManager, ServiceStatus
from barnraise.cli.services.transaction import InstallTransaction

__all__ = ["InstallTransaction", "ServiceLaunch", "ServiceManager", "ServiceStatus"]
