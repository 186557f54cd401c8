"""Windows: a task that starts when the user logs on."""

from __future__ import annotations

import codecs
import subprocess
from pathlib import Path, PureWindowsPath
from xml.sax.saxutils import escape

from barnraise.cli.services.base import ServiceLaunch, ServiceManager, ServiceState
from barnraise.cli.services.transaction import InstallTransaction
from barnraise.core.command import Run

TASK = "Barnraise agent"
FILE = "barnraise-task.xml"
_RUNNING = "4"
_STATE = f"(Get-ScheduledTask -TaskName '{TASK}').State.value__"


def render(launch: ServiceLaunch, user: str) -> str:
    """Render the task of the service. Pure.

    A logon trigger without a user name would be for all users, which needs an administrator. The time limit
    is off (the default is three days). The priority is normal (the default is lower).
    """
    python = PureWindowsPath(launch.python)
    arguments = ["-P", "-m", "barnraise.cli.services.restart_loop", "--log", launch.log]
    for name, text in launch.environment:
        arguments += ["--set", f"{name}={text}"]
    return f"""\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo>
    <Description>Made by `barnraise service install`; undone by `barnraise service remove`.</Description>
  </RegistrationInfo>
  <Triggers>
    <LogonTrigger>
      <Enabled>true</Enabled>
      <UserId>{escape(user)}</UserId>
    </LogonTrigger>
  </Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>{escape(user)}</UserId>
      <LogonType>InteractiveToken</LogonType>
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <StartWhenAvailable>true</StartWhenAvailable>
    <IdleSettings>
      <StopOnIdleEnd>false</StopOnIdleEnd>
      <RestartOnIdle>false</RestartOnIdle>
    </IdleSettings>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Priority>5</Priority>
    <RestartOnFailure>
      <Interval>PT1M</Interval>
      <Count>255</Count>
    </RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{escape(str(python.with_name("pythonw.exe")))}</Command>
      <Arguments>{escape(subprocess.list2cmdline(arguments))}</Arguments>
      <WorkingDirectory>{escape(launch.directory)}</WorkingDirectory>
    </Exec>
  </Actions>
</Task>
"""


class LogonTask(ServiceManager):
    """Task of the user, which needs no administrator."""

    system = "Task Scheduler"
    login_verb = "log on"

    def __init__(self, run: Run, state: Path, user: str, python: str) -> None:
        super().__init__(run, state / FILE)
        self._user = user
        self._python = python

    def _render(self, launch: ServiceLaunch) -> bytes:
        text = render(launch, self._user).replace("\n", "\r\n")
        return codecs.BOM_UTF16_LE + text.encode("utf-16-le")

    def _register(self, work: InstallTransaction) -> None:
        work.must("schtasks", "/Create", "/TN", TASK, "/XML", str(self._file), hint=_DENIED)
        work.must("schtasks", "/Run", "/TN", TASK, hint=_DENIED)

    def _roll_back(self, work: InstallTransaction) -> None:
        work.ask("schtasks", "/Delete", "/TN", TASK, "/F")

    def _unregister(self, work: InstallTransaction) -> None:
        # The scheduler ends a task by force, so the agent is asked to stop first.
        work.may(self._python, "-P", "-m", "barnraise.cli.main", "down")
        work.may("schtasks", "/End", "/TN", TASK)
        if self._is_registered(work):
            work.must("schtasks", "/Delete", "/TN", TASK, "/F", hint=_DENIED)
        work.delete(self._file)

    def _state(self, work: InstallTransaction) -> ServiceState:
        # The number of the state: schtasks itself would say it in the user's language.
        state = work.ask("powershell", "-NoProfile", "-Command", _STATE).stdout.strip()
        if state != _RUNNING:
            return ServiceState(
                False,
                "the service is installed, but the agent does not run",
                (f'Start it: schtasks /Run /TN "{TASK}"',),
            )
        return ServiceState(True, "the service is installed and the agent runs")

    def _install_hints(self, work: InstallTransaction, launch: ServiceLaunch) -> tuple[str, ...]:
        return ("Windows may ask whether Python may be reached: allow private networks.",)

    def _is_registered(self, work: InstallTransaction) -> bool:
        return work.ask("schtasks", "/Query", "/TN", TASK).returncode == 0


_DENIED = (
    "If access is denied, do it once in a terminal that was opened as administrator. "
    "Without a service: barnraise up --detach"
)
