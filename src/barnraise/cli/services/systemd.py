"""Linux: a unit of the user's own systemd."""

from __future__ import annotations

import getpass
from pathlib import Path

from barnraise.cli.services.base import GOODBYE_S, ServiceLaunch, ServiceManager, ServiceState
from barnraise.cli.services.transaction import InstallTransaction
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


class Systemd(ServiceManager):
    """Unit of the user's own manager, which needs no root."""

    system = "systemd"

    def __init__(self, run: Run, config_home: Path, user: str | None = None) -> None:
        super().__init__(run, config_home / "systemd" / "user" / UNIT)
        self._user = user

    def _render(self, launch: ServiceLaunch) -> bytes:
        return render(launch).encode()

    def _register(self, work: InstallTransaction) -> None:
        work.must(*_SYSTEMCTL, "daemon-reload", hint=_SEE_LOG)
        work.must(*_SYSTEMCTL, "enable", "--now", UNIT, hint=_SEE_LOG)

    def _roll_back(self, work: InstallTransaction) -> None:
        work.ask(*_SYSTEMCTL, "daemon-reload")

    def _unregister(self, work: InstallTransaction) -> None:
        work.may(*_SYSTEMCTL, "disable", "--now", UNIT)
        work.delete(self._file)
        work.may(*_SYSTEMCTL, "daemon-reload")

    def _state(self, work: InstallTransaction) -> ServiceState:
        active = work.ask(*_SYSTEMCTL, "is-active", UNIT).stdout.strip() or "?"
        enabled = work.ask(*_SYSTEMCTL, "is-enabled", UNIT).stdout.strip() or "unknown"
        if active != "active":
            sentence = f"the service is installed ({enabled}), but systemd says: {active}"
            return ServiceState(False, sentence, (_LOG,))
        sentence = f"the service is installed ({enabled}) and the agent runs"
        return ServiceState(True, sentence, self._linger_hint(work))

    def _install_hints(self, work: InstallTransaction, launch: ServiceLaunch) -> tuple[str, ...]:
        return self._linger_hint(work)

    def _check_available(self, work: InstallTransaction) -> None:
        """Raise AgentError if the user's systemd does not answer.

        It is absent in most containers and in WSL1, and belongs to another user under sudo.
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
            f"{words}, so the agent cannot start automatically",
            hint="Start it in the background instead: barnraise up --detach. (Under sudo there is no user's "
            "systemd: run this as yourself, without sudo.)",
        )

    def _linger_hint(self, work: InstallTransaction) -> tuple[str, ...]:
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
