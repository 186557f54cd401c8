"""macOS: an agent of launchd in the user's session."""

from __future__ import annotations

import plistlib
from pathlib import Path

from barnraise.cli.services.base import GOODBYE_S, ServiceLaunch, ServiceStatus
from barnraise.cli.services.transaction import InstallTransaction, installed_already, not_installed
from barnraise.core.command import Run
from barnraise.core.errors import AgentError

LABEL = "barnraise.agent"
_RESTART_S = 10
_PRIVATE = 0o077


def render(launch: ServiceLaunch) -> bytes:
    """Render the property list of the service. Pure.

    launchd restarts after any failure with a fixed pause. A stop by `barnraise down` has the code 0 and is
    left alone. The type is not a background process: those get slow cores, and heartbeats would be late.
    """
    facts = {
        "Label": LABEL,
        "ProgramArguments": [launch.python, "-P", "-m", "barnraise.agent"],
        "EnvironmentVariables": dict(launch.environment),
        "WorkingDirectory": launch.directory,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _RESTART_S,
        "ExitTimeOut": GOODBYE_S,
        "ProcessType": "Interactive",
        "StandardOutPath": launch.log,
        "StandardErrorPath": launch.log,
        "Umask": _PRIVATE,
    }
    return plistlib.dumps(facts, sort_keys=False)


class Launchd:
    """The user's session, which needs no root."""

    def __init__(self, run: Run, home: Path, user_id: int) -> None:
        self._run = run
        self._file = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self._domain = f"gui/{user_id}"
        self._target = f"{self._domain}/{LABEL}"

    def install(self, launch: ServiceLaunch) -> ServiceStatus:
        if self._file.exists():
            raise installed_already(self._file)
        work = InstallTransaction(self._run)
        work.write(self._file, render(launch))
        try:
            work.may("launchctl", "enable", self._target)  # in case it was disabled by hand once
            work.must("launchctl", "bootstrap", self._domain, str(self._file), hint=_NO_SESSION)
        except AgentError:
            self._file.unlink(missing_ok=True)  # half a service would only confuse the next attempt
            raise
        return ServiceStatus(
            system="launchd",
            installed=True,
            running=True,
            file=str(self._file),
            sentence="the agent runs now, and starts whenever you log in",
            wrote=tuple(work.wrote),
            ran=tuple(work.ran),
            undo="barnraise service remove",
            hints=(_LOCAL_NETWORK, f"Its log: {launch.log}"),
        )

    def remove(self) -> ServiceStatus:
        if not self._file.exists():
            raise not_installed(self._file)
        work = InstallTransaction(self._run)
        work.may("launchctl", "bootout", self._target)
        work.delete(self._file)
        return ServiceStatus(
            system="launchd",
            installed=False,
            running=False,
            file=str(self._file),
            sentence="the agent has ended and does not start by itself any more; its key and cluster stay",
            deleted=tuple(work.deleted),
            ran=tuple(work.ran),
            undo="barnraise service install",
        )

    def status(self) -> ServiceStatus:
        installed = self._file.exists()
        found = InstallTransaction(self._run).ask("launchctl", "print", self._target) if installed else None
        loaded = found is not None and found.returncode == 0
        running = found is not None and loaded and is_running(found.stdout)
        if not installed:
            sentence = "the service is not installed"
        elif running:
            sentence = "the service is installed and the agent runs"
        elif loaded:
            sentence = "the service is installed, but the agent does not run"
        else:
            sentence = "the service is installed, but launchd has not loaded it"
        hints = (f"Load it: launchctl bootstrap {self._domain} {self._file}",) if installed else ()
        return ServiceStatus(
            system="launchd",
            installed=installed,
            running=running,
            file=str(self._file),
            sentence=sentence,
            hints=() if loaded else hints,
        )


def is_running(printed: str) -> bool:
    """Read what `launchctl print` says of the job itself; nested parts are indented further. Pure."""
    return any(line.strip() == "state = running" for line in printed.splitlines()[:40])


_NO_SESSION = (
    "launchd takes it only while you are logged in at the screen (not by ssh alone). "
    "Without that: barnraise up --detach"
)
_LOCAL_NETWORK = (
    "macOS may ask whether Python may find devices on the local network: allow it. See it again in System "
    "Settings, Privacy & Security, Local Network; `barnraise doctor` tells whether it works."
)
