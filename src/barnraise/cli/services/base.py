"""The port behind which each system's way to start the agent stands. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

# From the request to end until the system kills: the agent says goodbye and hands over in this time.
GOODBYE_S = 10


@dataclass(frozen=True)
class ServiceLaunch:
    """How to start the agent: by which Python, where, with which of our settings, and where its words go."""

    python: str
    directory: str
    log: str
    environment: tuple[tuple[str, str], ...] = ()


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What was done or found. ``wrote``, ``deleted`` and ``ran`` leave nothing out."""

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
    """One system's way. AgentError says what to do when it cannot."""

    def install(self, launch: ServiceLaunch) -> ServiceStatus: ...

    def remove(self) -> ServiceStatus: ...

    def status(self) -> ServiceStatus: ...
