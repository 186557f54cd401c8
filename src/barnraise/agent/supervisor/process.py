"""A worker as a process, with all that it starts: made, asked to end, killed, awaited."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from barnraise.agent.supervisor import limits as limiting
from barnraise.agent.supervisor.messages import WorkerLaunch, WorkerLimits

if TYPE_CHECKING:
    from barnraise.agent.supervisor.windows_job import Job

_PIPE_BYTES = 256 << 10
_KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)


class ExitOutcome(msgspec.Struct, frozen=True):
    """How a process ended: by itself with a code, or by a signal."""

    code: int | None
    signal: int | None


class WorkerProcess:
    """Safe to use from several threads; :meth:`start` only while there is one (see ``child_setup``)."""

    def __init__(self, process: subprocess.Popen[bytes], job: Job | None) -> None:
        self.pid = process.pid
        self.killed_by_us = False
        self._process = process
        self._job = job
        self._lock = threading.Lock()
        self._gone = False

    @property
    def output(self) -> io.FileIO:
        assert isinstance(self._process.stdout, io.FileIO)
        return self._process.stdout

    def terminate(self) -> None:
        """Windows has a key press for it, which only processes of the same console hear."""
        if sys.platform == "win32":
            self._signal(signal.CTRL_BREAK_EVENT)
        else:
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self.killed_by_us = True
        if self._job is not None:
            self._job.kill()
        else:
            self._signal(_KILL)

    def wait_exit(self) -> bool:
        """Blocks; whether it ended well. Where the system can, its number stays taken until :meth:`reap`."""
        if not hasattr(os, "waitid"):
            return self._process.wait() == 0
        seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return seen is not None and seen.si_code == os.CLD_EXITED and seen.si_status == 0

    def reap(self) -> ExitOutcome:
        """Kill what is left of its group and free its number."""
        with self._lock:
            if self._job is not None:
                self._job.kill()
                self._job.close()
            else:
                _signal_group(self.pid, _KILL)
            code = self._process.wait()
            self._gone = True
        return ExitOutcome(code, None) if code >= 0 else ExitOutcome(None, -code)

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._gone:
                return
            _signal_group(self.pid, number)


def _signal_group(group: int, number: int) -> None:
    try:
        if sys.platform == "win32":
            os.kill(group, number)
        else:
            os.killpg(group, number)
    except OSError:
        pass  # all gone, or on Windows no console: then it is killed after the grace


def start(order: WorkerLaunch, limits: WorkerLimits, marks: Mapping[str, str]) -> WorkerProcess:
    """OSError or ValueError where it cannot be started (see :func:`explain_start_failure`)."""
    environment = {**order.environment, **marks}
    if not os.path.isdir(order.directory):  # else the system blames the program
        raise NotADirectoryError(errno.ENOTDIR, "no such directory", order.directory)
    process = _spawn(order, limits, environment)
    job = None
    if sys.platform == "win32":
        job = _job_of(process, limits)
    try:
        limiting.apply_to_process(process.pid, limits)
    except Exception:  # noqa: BLE001  # psutil's own errors; a limit that cannot be set is no reason not to train
        pass
    return WorkerProcess(process, job)


if sys.platform == "win32":
    from barnraise.agent.supervisor.windows_job import Job, kernel32

    def _spawn(
        order: WorkerLaunch, limits: WorkerLimits, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        flags = subprocess.CREATE_NEW_PROCESS_GROUP  # so that it alone hears the key press
        if limits.nice:
            idle = limits.nice >= 15
            flags |= subprocess.IDLE_PRIORITY_CLASS if idle else subprocess.BELOW_NORMAL_PRIORITY_CLASS
        return subprocess.Popen(
            order.command,
            cwd=order.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            creationflags=flags,
        )

    def _job_of(process: subprocess.Popen[bytes], limits: WorkerLimits) -> Job:
        job = Job(kernel32(), limits.memory_bytes)
        job.take(int(process._handle))
        return job

else:
    import fcntl

    def _spawn(
        order: WorkerLaunch, limits: WorkerLimits, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            order.command,
            cwd=order.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
            preexec_fn=limiting.child_setup(limits),
        )
        if sys.platform == "linux" and process.stdout is not None:
            try:
                # Fewer, larger reads of a worker that says much.
                fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            except OSError:
                pass  # the user's share of pipe memory is used up
        return process


def explain_start_failure(order: WorkerLaunch, error: Exception) -> str:
    """A sentence about what to do."""
    program = order.command[0]
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, OSError) and error.filename == order.directory:
        return (
            f"rank {order.rank} was not started: its directory {order.directory} is missing or closed to us; "
            "start the run again, so that it is sent once more"
        )
    if code == errno.ENOENT:
        return (
            f"rank {order.rank} was not started: there is no program {program} on this machine; "
            "install it, or name another interpreter"
        )
    if code == errno.E2BIG or getattr(error, "winerror", None) == 206:
        return (
            f"rank {order.rank} was not started: its arguments and environment are longer than this system "
            "takes; pass fewer of them, or put them into a file"
        )
    if code in (errno.EACCES, errno.ENOEXEC):
        return (
            f"rank {order.rank} was not started: {program} is not a program that may be run here; "
            "name the interpreter itself, and see that its file may be executed"
        )
    if code in (errno.EAGAIN, errno.ENOMEM):
        return (
            f"rank {order.rank} was not started: this machine has no room for another process; "
            "close other programs, then start the run again"
        )
    return f"rank {order.rank} was not started: {error}; correct its command, then start the run again"
