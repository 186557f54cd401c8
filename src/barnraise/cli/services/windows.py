"""Windows: a task that starts when the user logs on."""

from __future__ import annotations

import codecs
import subprocess
from pathlib import Path, PureWindowsPath
from xml.sax.saxutils import escape

from barnraise.cli.services.base import ServiceLaunch, ServiceStatus
from barnraise.cli.services.transaction import InstallTransaction, installed_already, not_installed
from barnraise.core.command import Run
from barnraise.core.errors import AgentError

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


class LogonTask:
    """The user's own task, which needs no administrator."""

    def __init__(self, run: Run, state: Path, user: str, python: str) -> None:
        self._run = run
        self._file = state / FILE
        self._user = user
        self._python = python

    def install(self, launch: ServiceLaunch) -> ServiceStatus:
        work = InstallTransaction(self._run)
        if self._file.exists() or self._is_known(work):
            raise installed_already(self._file)
        text = render(launch, self._user).replace("\n", "\r\n")
        work.write(self._file, codecs.BOM_UTF16_LE + text.encode("utf-16-le"))
        try:
            work.must("schtasks", "/Create", "/TN", TASK, "/XML", str(self._file), hint=_DENIED)
            work.must("schtasks", "/Run", "/TN", TASK, hint=_DENIED)
        except AgentError:
            self._file.unlink(missing_ok=True)  # half a service would only confuse the next attempt
            work.ask("schtasks", "/Delete", "/TN", TASK, "/F")
            raise
        return ServiceStatus(
            system="Task Scheduler",
            installed=True,
            running=True,
            file=str(self._file),
            sentence="the agent runs now, and starts whenever you log on",
            wrote=tuple(work.wrote),
            ran=tuple(work.ran),
            undo="barnraise service remove",
            hints=("Windows may ask whether Python may be reached: allow private networks.",),
        )

    def remove(self) -> ServiceStatus:
        work = InstallTransaction(self._run)
        is_known = self._is_known(work)
        if not is_known and not self._file.exists():
            raise not_installed(self._file)
        # A task is ended by force, so the agent is asked to say goodbye first.
        work.may(self._python, "-P", "-m", "barnraise.cli.main", "down")
        work.may("schtasks", "/End", "/TN", TASK)
        if is_known:
            work.must("schtasks", "/Delete", "/TN", TASK, "/F", hint=_DENIED)
        work.delete(self._file)
        return ServiceStatus(
            system="Task Scheduler",
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
        installed = self._is_known(work)
        # The number of the state: schtasks itself would say it in the user's language.
        state = work.ask("powershell", "-NoProfile", "-Command", _STATE).stdout.strip() if installed else ""
        running = state == _RUNNING
        if not installed:
            sentence = "the service is not installed"
        elif running:
            sentence = "the service is installed and the agent runs"
        else:
            sentence = "the service is installed, but the agent does not run"
        return ServiceStatus(
            system="Task Scheduler",
            installed=installed,
            running=running,
            file=str(self._file),
            sentence=sentence,
            hints=() if running or not installed else (f'Start it: schtasks /Run /TN "{TASK}"',),
        )

    def _is_known(self, work: InstallTransaction) -> bool:
        return work.ask("schtasks", "/Query", "/TN", TASK).returncode == 0


_DENIED = (
    "If access is denied, do it once in a terminal that was opened as administrator. "
    "Without a service: barnraise up --detach"
)
