"""Services of the operating system that start the agent: systemd, launchd, or the Windows Task Scheduler.

There is one module for each, with one base class. May import ``core``. All changes to the system go through
one callable that runs commands.
"""

from barnraise.cli.services.base import ServiceLaunch, ServiceManager, ServiceStatus
from barnraise.cli.services.transaction import InstallTransaction

__all__ = ["InstallTransaction", "ServiceLaunch", "ServiceManager", "ServiceStatus"]
