"""Copies a worker's output from its pipe to its log; a full disk never blocks the worker."""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable
from pathlib import Path

from barnraise.agent.supervisor.log_file import LogWriter
from barnraise.agent.supervisor.messages import MAX_TAIL_BYTES, SupervisorNote

_CHUNK_BYTES = 256 << 10
_FULL = {errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC}


class WorkerLog:
    """The log of one worker and the end of its output; a failing disk is reported once."""

    def __init__(
        self, rank: int, path: Path, most_bytes: int, report: Callable[[SupervisorNote], None]
    ) -> None:
        self._rank = rank
        self._report = report
        self._reported = False
        self._log: LogWriter | None = None
        self.tail = b""
        try:
            self._log = LogWriter(path, most_bytes)
        except OSError as error:
            self._report_failure(error)

    def write(self, data: bytes | memoryview) -> None:
        """Append output; a failure is reported, not raised."""
        self.tail = (self.tail + bytes(data[-MAX_TAIL_BYTES:]))[-MAX_TAIL_BYTES:]
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:
            self._report_failure(error)

    def close(self) -> None:
        """Close the log file."""
        if self._log is not None:
            self._log.close()

    def _report_failure(self, error: OSError) -> None:
        if self._reported:
            return
        self._reported = True
        if error.errno in _FULL:
            self._report(
                SupervisorNote(f"the disk of this machine is full: output of rank {self._rank} is lost")
            )
        else:
            why = error.strerror or str(error)
            self._report(
                SupervisorNote(f"cannot write the log of rank {self._rank} ({why}): its output is lost")
            )


class LogPump(threading.Thread):
    """Thread that reads a worker's pipe until no process holds the other end."""

    def __init__(self, stream: io.FileIO, log: WorkerLog) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self._log = log

    def run(self) -> None:
        """Copy output until the pipe is closed."""
        buffer = bytearray(_CHUNK_BYTES)
        view = memoryview(buffer)
        try:
            while got := self._stream.readinto(buffer):
                self._log.write(view[:got])
        except OSError:
            pass  # Windows, where a pipe may break instead of ending
        self._log.close()
