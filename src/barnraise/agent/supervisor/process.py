"""A worker process with its descendants: start, terminate, kill and wait."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from barnraise.agent.supervisor import resource_limits
from barnraise.agent.supervisor.messages import WorkerLaunch, WorkerLimits
from barnraise.core.flow.termination import WINDOWS_KILL_CODE

if TYPE_CHECKING:
    from barnraise.agent.supervisor.windows_job import Job

_PIPE_BYTES = 256 << 10
_KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)
_CONTROL_BREAK = 0xC000013A  # exit code of Windows


class ExitOutcome(msgspec.Struct, frozen=True):
    """Exit code of a process, or the signal that killed it."""

    code: int | None
    signal: int | None


class WorkerProcess:
    """One worker process; thread-safe, except that :func:`start` needs a single thread."""

    def __init__(self, process: subprocess.Popen[bytes], job: Job | None) -> None:
        self.pid = process.pid
        self.killed_by_us = False
        self._process = process
        self._job = job
        self._lock = threading.Lock()
        self._gone = False

    @property
    def output(self) -> io.FileIO:
        """Return the pipe of the worker's output."""
        assert isinstance(self._process.stdout, io.FileIO)
        return self._process.stdout

    def terminate(self) -> None:
        """Ask the worker to exit: SIGTERM, or CTRL_BREAK on Windows."""
        if sys.platform == "win32":
            self._signal(signal.CTRL_BREAK_EVENT)
        else:
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the worker and its process group."""
        self.killed_by_us = True
        if self._job is not None:
            self._job.kill()
        else:
            self._signal(_KILL)

    def wait_exit(self) -> bool:
        """Wait for the exit and return True if it was successful.

        On Linux the process id stays in use until :meth:`reap`.
        """
        if sys.platform != "linux":
            return self._process.wait() == 0
        seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return seen is not None and seen.si_code == os.CLD_EXITED and seen.si_status == 0

    def reap(self) -> ExitOutcome:
        """Kill the rest of its process group, free the process id and return the outcome."""
        with self._lock:
            if self._job is not None:
                self._job.kill()
                self._job.close()
            else:
                _signal_group(self.pid, _KILL)
            code = self._process.wait()
            self._gone = True
        if sys.platform == "win32":
            return windows_outcome(code)
        return ExitOutcome(code, None) if code >= 0 else ExitOutcome(None, -code)

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._gone:
                return
            _signal_group(self.pid, number)


def windows_outcome(code: int) -> ExitOutcome:
    """Return how a process of Windows ended. It has no signals, so a kill is told by its exit code."""
    is_killed = code in (WINDOWS_KILL_CODE, _CONTROL_BREAK)
    return ExitOutcome(None, 9) if is_killed else ExitOutcome(code, None)


def _signal_group(group: int, number: int) -> None:
    try:
        if sys.platform == "win32":
            os.kill(group, number)
        else:
            os.killpg(group, number)
    except OSError:
        pass  # all gone; on Windows perhaps no console: killed after the grace


def start(launch: WorkerLaunch, limits: WorkerLimits, marks: Mapping[str, str]) -> WorkerProcess:
    """Start a worker; raise OSError or ValueError if that fails (see :func:`explain_start_failure`)."""
    environment = {**launch.environment, **marks}
    if not os.path.isdir(launch.directory):  # otherwise the system blames the program
        raise NotADirectoryError(errno.ENOTDIR, "no such directory", launch.directory)
    process = _spawn(launch, limits, environment)
    job = None
    try:
        if sys.platform == "win32":
            job = _job_of(process, limits)
        _limit(process.pid, limits)
        if sys.platform == "win32":
            resume_process(_handle_of(process))
    except BaseException:
        process.kill()  # on Windows it would stay suspended
        raise
    return WorkerProcess(process, job)


def _limit(pid: int, limits: WorkerLimits) -> None:
    try:
        resource_limits.apply_to_process(pid, limits)
    except Exception:  # noqa: BLE001  # psutil's own errors; training works without the limit
        pass


def _popen(launch: WorkerLaunch, environment: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        launch.command,
        cwd=launch.directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        **options,
    )


if sys.platform == "win32":
    from barnraise.agent.supervisor.windows_job import CREATE_SUSPENDED, Job, kernel32, resume_process

    def _spawn(
        launch: WorkerLaunch, limits: WorkerLimits, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        # A group of its own, so that it alone gets CTRL_BREAK. It runs only when it is in its job: the
        # python.exe of a virtual environment starts another process at once, which would be outside.
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | CREATE_SUSPENDED
        if limits.nice:
            idle = limits.nice >= 15
            flags |= subprocess.IDLE_PRIORITY_CLASS if idle else subprocess.BELOW_NORMAL_PRIORITY_CLASS
        return _popen(launch, environment, creationflags=flags)

    def _job_of(process: subprocess.Popen[bytes], limits: WorkerLimits) -> Job:
        job = Job(kernel32(), limits.memory_bytes)
        job.take(_handle_of(process))
        return job

    def _handle_of(process: subprocess.Popen[bytes]) -> int:
        return int(process._handle)  # type: ignore[attr-defined]  # nothing else has these rights

else:
    import fcntl

    def _spawn(
        launch: WorkerLaunch, limits: WorkerLimits, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        setup = resource_limits.child_setup(limits)
        process = _popen(launch, environment, start_new_session=True, preexec_fn=setup)
        if sys.platform == "linux" and process.stdout is not None:
            try:
                # Fewer, larger reads of a worker with much output.
                fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            except OSError:
                pass  # the user's pipe memory is exhausted
        return process


def explain_start_failure(launch: WorkerLaunch, error: Exception) -> str:
    """Return a sentence for the user: why a worker did not start, and what to do."""
    program = launch.command[0]
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, OSError) and error.filename == launch.directory:
        return (
            f"rank {launch.rank} was not started: its directory {launch.directory} is missing or not "
            "accessible; start the run again, so that it is sent again"
        )
    if code == errno.ENOENT:
        return (
            f"rank {launch.rank} was not started: there is no program {program} on this machine; "
            "install it, or name another interpreter"
        )
    if code == errno.E2BIG or getattr(error, "winerror", None) == 206:
        return (
            f"rank {launch.rank} was not started: its arguments and environment are longer than this system "
            "allows; pass fewer of them, or put them into a file"
        )
    if code in (errno.EACCES, errno.ENOEXEC):
        return (
            f"rank {launch.rank} was not started: {program} is not executable here; "
            "name the interpreter itself, and make its file executable"
        )
    if code in (errno.EAGAIN, errno.ENOMEM):
        return (
            f"rank {launch.rank} was not started: this machine cannot start another process; "
            "close other programs, then start the run again"
        )
    return f"rank {launch.rank} was not started: {error}; correct its command, then start the run again"
