"""The port behind which each system's way to start the agent stands. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

# From the request to end until the system kills: the agent says goodbye and hands over in this time.
GOODBYE_S = 10


@dataclass(frozen=True)
class ServiceLaunch:
    """Command, directory, settings and log file with which a service starts the agent."""

    python: str
    directory: str
    log: str
    environment: tuple[tuple[str, str], ...] = ()


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Record of everything that was done or found; ``wrote``, ``deleted`` and ``ran`` are complete."""

    system: str
    installed: bool
    running: bool
    file: str
    sentence: str
    wrote: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()
    undo: str = ""
    hints: tuple[str, ...] = ()


class ServiceManager(Protocol):
    """Interface to the service manager of one operating system. It raises AgentError with what to do."""

    def install(self, launch: ServiceLaunch) -> ServiceStatus: ...

    def remove(self) -> ServiceStatus: ...

    def status(self) -> ServiceStatus: ...
