"""macOS: an agent of launchd in the user's session."""

from __future__ import annotations

import plistlib
from pathlib import Path

from barnraise.cli.services.base import GOODBYE_S, ServiceLaunch, ServiceManager, ServiceState
from barnraise.cli.services.transaction import InstallTransaction
from barnraise.core.command import Run

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


class Launchd(ServiceManager):
    """Service in the user's session, which needs no root."""

    system = "launchd"

    def __init__(self, run: Run, home: Path, user_id: int) -> None:
        super().__init__(run, home / "Library" / "LaunchAgents" / f"{LABEL}.plist")
        self._domain = f"gui/{user_id}"
        self._target = f"{self._domain}/{LABEL}"

    def _render(self, launch: ServiceLaunch) -> bytes:
        return render(launch)

    def _register(self, work: InstallTransaction) -> None:
        work.may("launchctl", "enable", self._target)  # in case it was disabled by hand once
        work.must("launchctl", "bootstrap", self._domain, str(self._file), hint=_NO_SESSION)

    def _unregister(self, work: InstallTransaction) -> None:
        work.may("launchctl", "bootout", self._target)
        work.delete(self._file)

    def _state(self, work: InstallTransaction) -> ServiceState:
        job = work.ask("launchctl", "print", self._target)
        if job.returncode != 0:
            return ServiceState(
                False,
                "the service is installed, but launchd has not loaded it",
                (f"Load it: launchctl bootstrap {self._domain} {self._file}",),
            )
        if not is_running(job.stdout):
            return ServiceState(False, "the service is installed, but the agent does not run")
        return ServiceState(True, "the service is installed and the agent runs")

    def _install_hints(self, work: InstallTransaction, launch: ServiceLaunch) -> tuple[str, ...]:
        return (_LOCAL_NETWORK, f"Its log: {launch.log}")


def is_running(printed: str) -> bool:
    """Tell whether the output of `launchctl print` says that the job itself runs. Pure.

    The state of the job stands before its nested parts, which have states, too.
    """
    return any(line.strip() == "state = running" for line in printed.splitlines()[:40])


_NO_SESSION = (
    "launchd takes it only while you are logged in at the screen (not by ssh alone). "
    "Without that: barnraise up --detach"
)
_LOCAL_NETWORK = (
    "macOS may ask whether Python may find devices on the local network: allow it. See it again in System "
    "Settings, Privacy & Security, Local Network; `barnraise doctor` tells whether it works."
)
