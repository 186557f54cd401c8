"""Linux: a unit of the user's own systemd."""

from __future__ import annotations

import getpass
from pathlib import Path

from barnraise.cli.services.base import GOODBYE_S, ServiceLaunch, ServiceStatus
from barnraise.cli.services.transaction import InstallTransaction, installed_already, not_installed
from barnraise.core.command import NOT_FOUND, Run
from barnraise.core.errors import AgentError

UNIT = "barnraise.service"
_SYSTEMCTL = ("systemctl", "--user")
_ALIVE = frozenset({"running", "degraded", "starting", "initializing", "maintenance"})


def render(launch: ServiceLaunch) -> str:
    """Render the unit file of the service. Pure.

    A stop by `barnraise down` has the code 0 and is left alone. systemd before 254 does not know the two
    settings that stretch the pause between restarts. It then keeps the first pause.
    """
    environment = "".join(f'Environment="{_quoted(f"{name}={text}")}"\n' for name, text in launch.environment)
    return f"""\
# Made by `barnraise service install`; undone by `barnraise service remove`.
[Unit]
Description=Barnraise agent
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart="{_quoted(launch.python).replace("$", "$$")}" -P -m barnraise.agent
WorkingDirectory={launch.directory.replace("%", "%%")}
{environment}Restart=on-failure
RestartSec=2
RestartSteps=6
RestartMaxDelaySec=60
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={GOODBYE_S}

[Install]
WantedBy=default.target
"""


class Systemd:
    """The user's manager, which needs no root."""

    def __init__(self, run: Run, config_home: Path, user: str | None = None) -> None:
        self._run = run
        self._file = config_home / "systemd" / "user" / UNIT
        self._user = user

    def install(self, launch: ServiceLaunch) -> ServiceStatus:
        if self._file.exists():
            raise installed_already(self._file)
        work = InstallTransaction(self._run)
        self._check_manager(work)
        work.write(self._file, render(launch).encode())
        try:
            work.must(*_SYSTEMCTL, "daemon-reload", hint=_SEE_LOG)
            work.must(*_SYSTEMCTL, "enable", "--now", UNIT, hint=_SEE_LOG)
        except AgentError:
            self._file.unlink(missing_ok=True)  # half a service would only confuse the next attempt
            work.ask(*_SYSTEMCTL, "daemon-reload")
            raise
        return ServiceStatus(
            system="systemd",
            installed=True,
            running=True,
            file=str(self._file),
            sentence="the agent runs now, and starts whenever you log in",
            wrote=tuple(work.wrote),
            ran=tuple(work.ran),
            undo="barnraise service remove",
            hints=self._hints(work),
        )

    def remove(self) -> ServiceStatus:
        if not self._file.exists():
            raise not_installed(self._file)
        work = InstallTransaction(self._run)
        work.may(*_SYSTEMCTL, "disable", "--now", UNIT)
        work.delete(self._file)
        work.may(*_SYSTEMCTL, "daemon-reload")
        return ServiceStatus(
            system="systemd",
            installed=False,
            running=False,
            file=str(self._file),
            sentence="the agent has ended and does not start by itself any more; its key and cluster stay",
            deleted=tuple(work.deleted),
            ran=tuple(work.ran),
            undo="barnraise service install",
        )

    def status(self) -> ServiceStatus:
        work = InstallTransaction(self._run)
        installed = self._file.exists()
        active = work.ask(*_SYSTEMCTL, "is-active", UNIT).stdout.strip() if installed else ""
        enabled = work.ask(*_SYSTEMCTL, "is-enabled", UNIT).stdout.strip() if installed else ""
        running = active == "active"
        if not installed:
            sentence = "the service is not installed"
        elif running:
            sentence = f"the service is installed ({enabled or 'unknown'}) and the agent runs"
        else:
            sentence = f"the service is installed ({enabled or 'unknown'}), but systemd says: {active or '?'}"
        return ServiceStatus(
            system="systemd",
            installed=installed,
            running=running,
            file=str(self._file),
            sentence=sentence,
            hints=() if not installed else self._hints(work) if running else (_LOG,),
        )

    def _check_manager(self, work: InstallTransaction) -> None:
        """Check that the user's systemd is there: it is absent in most containers and in WSL1, and not ours
        under sudo.
        """
        done = work.ask(*_SYSTEMCTL, "is-system-running")
        if done.stdout.strip() in _ALIVE:
            return
        words = (
            "systemd is not on this machine"
            if done.returncode == NOT_FOUND
            else f"your own systemd does not answer ({_first_line(done.stderr or done.stdout) or 'no word'})"
        )
        raise AgentError(
            f"{words}, so that nothing can start the agent by itself",
            hint="Start it in the background instead: barnraise up --detach. (Under sudo there is no user's "
            "systemd: run this as yourself, without sudo.)",
        )

    def _hints(self, work: InstallTransaction) -> tuple[str, ...]:
        user = self._user or getpass.getuser()
        done = work.ask("loginctl", "show-user", user, "--property=Linger")
        if done.stdout.strip() == "Linger=yes":
            return ()
        hint = "It ends when you log out, and after a restart of the machine it waits for your login."
        return (f"{hint} To have it run always: loginctl enable-linger {user}",)


_LOG = f"Its log: journalctl --user -u {UNIT}"
_SEE_LOG = f"{_LOG}. Or start it in the background: barnraise up --detach"


def _quoted(text: str) -> str:
    """Wrap text in quotes for a unit file; a percent sign would be a specifier."""
    replaced = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return replaced.replace("\n", "\\n")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
