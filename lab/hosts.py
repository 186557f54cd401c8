"""A host of the lab and the processes in it."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from lab import janitor
from lab.namespaces import inside
from lab.systems.system import LINUX, Launch, System

_SHOWN = 4000


class CommandFailed(subprocess.CalledProcessError):
    """A command in a host failed; the message shows the end of its output."""

    def __str__(self) -> str:
        printed = "".join(part or "" for part in (self.stdout, self.stderr))
        return f"{super().__str__()}\n{printed[-_SHOWN:]}"


class LabProcess:
    """A process in a host, leading its own session and process group. Reads nothing from stdin."""

    def __init__(self, popen: subprocess.Popen[bytes], argv: Sequence[str], log: Path | None) -> None:
        self._popen = popen
        self._log = log
        self.argv = list(argv)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Return None while the process runs; negative if a signal stopped it."""
        return self._popen.poll()

    def poll(self) -> int | None:
        return self._popen.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its code. Raise subprocess.TimeoutExpired and leave it running if
        late.
        """
        return self._popen.wait(timeout)

    def signal(self, sig: int, group: bool = False) -> None:
        """Send a signal to this process, or with group=True its children too. Ignore a stopped one."""
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(self.pid, sig)
            elif self._popen.poll() is None:
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL to the whole process group, then wait for the process itself."""
        self.signal(signal.SIGKILL, group=True)
        self._popen.wait()

    def output(self) -> str:
        """Return the output so far, stdout and stderr in one."""
        return "" if self._log is None else self._log.read_text(errors="replace")

    def __repr__(self) -> str:
        return f"LabProcess(pid={self.pid}, argv={self.argv!r}, returncode={self.returncode})"


class Host:
    """One host: a network namespace with its own address, loopback and, if asked, rate."""

    def __init__(
        self, name: str, namespace: str, address: str, mac: str, directory: Path, system: System = LINUX
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.address = address
        self.mac = mac
        self.host_name: str | None = None  # what the computer is called in processes that start from now on
        self.groups: Sequence[Path] = ()  # control groups that processes enter that start from now on
        self.processes: list[LabProcess] = []
        self.system = system
        self._directory = directory

    @property
    def python(self) -> str:
        """Return the Python interpreter of this host's system."""
        return self.system.python

    def _launch(self, argv: Sequence[str], env: Mapping[str, str] | None, cwd: str | Path | None) -> Launch:
        """Return what starts a command of this host's system in its namespace."""
        room = self._directory / self.name
        room.mkdir(exist_ok=True)
        launch = self.system.launch(argv, Path(cwd or Path.cwd()), room)
        environment = {**os.environ, **launch.environment, **(env or {})}
        return Launch(inside(self.namespace, launch.argv, self.host_name, self.groups), environment)

    def start(
        self,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        cwd: str | Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> LabProcess:
        """Start a process and return at once. `env` is added to this process's environment.

        Output is kept for `.output()`, unless stdout is given: then both stdout and stderr go there.
        """
        words = [str(word) for word in argv]
        log: Path | None = None
        with contextlib.ExitStack() as stack:
            target: int | IO[bytes]
            if stdout is None:
                handle, path = tempfile.mkstemp(prefix=f"{self.name}-", suffix=".log", dir=self._directory)
                log, target = Path(path), handle
                stack.callback(os.close, handle)
            else:
                target = stdout
            launch = self._launch(words, env, cwd)
            popen = subprocess.Popen(
                launch.argv,
                env=launch.environment,
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        process = LabProcess(popen, words, log)
        self.processes.append(process)
        return process

    def run(
        self,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        timeout: float | None = 60.0,
        check: bool = True,
        cwd: str | Path | None = None,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Raise CommandFailed on a bad code, TimeoutExpired (and kill) if late."""
        words = [str(word) for word in argv]
        launch = self._launch(words, env, cwd)
        with subprocess.Popen(
            launch.argv,
            env=launch.environment,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            start_new_session=True,
        ) as popen:
            try:
                out, err = popen.communicate(input, timeout)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(popen.pid, signal.SIGKILL)
                raise
        if check and popen.returncode != 0:
            raise CommandFailed(popen.returncode, words, out, err)
        return subprocess.CompletedProcess(words, popen.returncode, out, err)

    def pids(self) -> list[int]:
        """Return every process in this host, with children and grandchildren."""
        return janitor.pids_in(self._marks())

    def kill_all(self) -> None:
        """Kill every process in this host at once, as if the power failed."""
        for process in self.processes:
            process.signal(signal.SIGKILL, group=True)
        janitor.kill_all_in(self._marks())
        for process in self.processes:
            process.wait()

    def _marks(self) -> set[janitor.Mark]:
        return janitor.marks_of([janitor.NETNS / self.namespace])

    def __repr__(self) -> str:
        return f"Host({self.name}, {self.address})"
