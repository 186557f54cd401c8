"""Base class of the service managers: the steps of install, remove and status that all systems share.

A subclass gives the file, the commands and the hints of one operating system.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from barnraise.cli.services.transaction import InstallTransaction, installed_already, not_installed
from barnraise.core.command import Run
from barnraise.core.errors import AgentError

# Seconds from the request to stop until the system kills the agent, which leaves its cluster in this time.
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


@dataclass(frozen=True)
class ServiceState:
    """State of an installed service, as its system reports it."""

    running: bool
    sentence: str
    hints: tuple[str, ...] = ()


class ServiceManager(ABC):
    """Installer of the agent's service on one operating system. It raises AgentError with what to do."""

    system: ClassVar[str]
    login_verb: ClassVar[str] = "log in"

    def __init__(self, run: Run, file: Path) -> None:
        self._run = run
        self._file = file

    def install(self, launch: ServiceLaunch) -> ServiceStatus:
        """Write the service's file and start the service. A failure leaves nothing behind."""
        work = InstallTransaction(self._run)
        if self._exists(work):
            raise installed_already(self._file)
        self._check_available(work)
        work.write(self._file, self._render(launch))
        try:
            self._register(work)
        except AgentError:
            self._file.unlink(missing_ok=True)  # half a service would only confuse the next attempt
            self._roll_back(work)
            raise
        return ServiceStatus(
            system=self.system,
            installed=True,
            running=True,
            file=str(self._file),
            sentence=f"the agent runs now, and starts whenever you {self.login_verb}",
            wrote=tuple(work.wrote),
            ran=tuple(work.ran),
            undo="barnraise service remove",
            hints=self._install_hints(work, launch),
        )

    def remove(self) -> ServiceStatus:
        """Stop the agent and undo the installation."""
        work = InstallTransaction(self._run)
        if not self._exists(work):
            raise not_installed(self._file)
        self._unregister(work)
        return ServiceStatus(
            system=self.system,
            installed=False,
            running=False,
            file=str(self._file),
            sentence="the agent has stopped and does not start at login any more; its key and cluster stay",
            deleted=tuple(work.deleted),
            ran=tuple(work.ran),
            undo="barnraise service install",
        )

    def status(self) -> ServiceStatus:
        """Return whether the service is installed and runs. Nothing is changed."""
        work = InstallTransaction(self._run)
        installed = self._is_registered(work)
        state = self._state(work) if installed else ServiceState(False, "the service is not installed")
        return ServiceStatus(
            system=self.system,
            installed=installed,
            running=state.running,
            file=str(self._file),
            sentence=state.sentence,
            hints=state.hints,
        )

    def _exists(self, work: InstallTransaction) -> bool:
        return self._file.exists() or self._is_registered(work)

    def _is_registered(self, work: InstallTransaction) -> bool:
        """Tell whether the system knows the service; for most systems the file is the registration."""
        return self._file.exists()

    def _check_available(self, work: InstallTransaction) -> None:
        """Raise AgentError if the system's service manager is not there."""
        return

    def _roll_back(self, work: InstallTransaction) -> None:
        """Undo a registration that failed half-way, after the file was deleted."""
        return

    @abstractmethod
    def _render(self, launch: ServiceLaunch) -> bytes:
        """Return the content of the service's file."""

    @abstractmethod
    def _register(self, work: InstallTransaction) -> None:
        """Register the written file with the system and start the service."""

    @abstractmethod
    def _unregister(self, work: InstallTransaction) -> None:
        """Stop the service and delete its file, in the order that the system needs."""

    @abstractmethod
    def _state(self, work: InstallTransaction) -> ServiceState:
        """Ask the system for the state of the installed service."""

    @abstractmethod
    def _install_hints(self, work: InstallTransaction, launch: ServiceLaunch) -> tuple[str, ...]:
        """Return what the user may still have to do after the installation."""
