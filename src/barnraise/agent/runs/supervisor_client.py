"""Client of a supervisor process: starts it, receives its events, tells it to stop, and cleans up after it.

It uses pipes and threads instead of asyncio subprocesses. The agent needs a selector loop to pass sockets
between processes, and on Windows that loop has no subprocesses.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from barnraise.agent.supervisor.log_file import LogPart, read_log
from barnraise.agent.supervisor.messages import (
    MARK_VARIABLE,
    MAX_TAIL_BYTES,
    AllExited,
    Event,
    LaunchRequest,
    Stop,
    SupervisorNote,
    WorkerExited,
    encode_frame,
    read_event,
    read_launch,
)
from barnraise.agent.supervisor.orphans import OrphanProcess, kill_orphans, kill_orphans_of
from barnraise.agent.supervisor.pidfile import PidRecord, read_record, record_path
from barnraise.core.errors import ProtocolError, RunError

__all__ = ["LogPart", "OnEvent", "OrphanProcess", "SupervisorClient", "kill_orphans", "read_log"]

_EXIT_S = 5.0
_PATIENCE_S = 30.0  # after the grace; a supervisor needs 20 s to detect a process that cannot be killed

_log = logging.getLogger(__name__)

OnEvent = Callable[[Event], None]


class SupervisorClient:
    """The worker processes of one run on this machine; each exit is reported exactly once."""

    def __init__(
        self, request: LaunchRequest, on_event: OnEvent, process: subprocess.Popen[bytes], mark: str
    ) -> None:
        self._request = request
        self._on_event = on_event
        self._process = process
        self._mark = mark
        self._loop = asyncio.get_running_loop()
        self._running = {worker.rank: worker for worker in request.workers}
        self._all_exited = False
        self._writing = asyncio.Lock()
        self._finished = asyncio.Event()
        self._kill_timer: asyncio.TimerHandle | None = None
        self._cleanup_task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Return the process id of the supervisor."""
        return self._process.pid

    @classmethod
    async def start(
        cls, request: LaunchRequest, on_event: OnEvent, python: str = sys.executable
    ) -> SupervisorClient:
        """Start a supervisor with its workers; raise RunError if that fails.

        Events are delivered on this loop after the return.
        """
        try:
            frame = encode_frame(request)
            read_launch(io.BytesIO(frame))  # checked here, where the error can be explained
        except ProtocolError as error:
            raise RunError(
                f"the worker supervisor rejected the launch request: {error.message}",
                hint="Pass fewer or shorter arguments and variables to the run, and limits within bounds.",
            ) from error
        mark = secrets.token_hex(16)
        try:
            process = await asyncio.to_thread(_spawn, python, mark)
        except OSError as error:
            raise RunError(
                f"cannot start the worker supervisor with {python}: {error.strerror}",
                hint="Check that this interpreter exists and is executable, then start the run again.",
            ) from error
        client = cls(request, on_event, process, mark)
        await client._write(frame)
        threading.Thread(target=client._read_events, daemon=True).start()
        return client

    async def stop(self, hard: bool = False) -> None:
        """Terminate or kill the workers; returns before they have exited (see :meth:`wait`).

        A supervisor that does not react in time is killed.
        """
        if self._finished.is_set():
            return
        if self._kill_timer is None or hard:
            wait = _PATIENCE_S if hard else self._request.grace_s + _PATIENCE_S
            if self._kill_timer is not None:
                self._kill_timer.cancel()
            self._kill_timer = self._loop.call_later(wait, self._process.kill)
        await self._write(encode_frame(Stop(hard)))

    async def kill(self, ranks: tuple[int, ...]) -> None:
        """Kill these workers and keep the others; returns before they have exited."""
        await self._write(encode_frame(Stop(ranks=ranks)))

    async def wait(self) -> None:
        """Wait until no process of the run is left on this machine."""
        await self._finished.wait()

    async def _write(self, frame: bytes) -> None:
        async with self._writing:
            try:
                await asyncio.to_thread(_write_all, self._process, frame)
            except (OSError, ValueError):
                pass  # it is gone; the reader of its events notices

    def _read_events(self) -> None:
        """Read events on a thread, until the supervisor closes its output."""
        stream = self._process.stdout
        assert isinstance(stream, io.FileIO)
        try:
            while (event := read_event(stream)) is not None:
                self._loop.call_soon_threadsafe(self._handle, event)
            self._loop.call_soon_threadsafe(self._on_eof)
        except ProtocolError as error:
            _log.error(
                "invalid message from the supervisor of run %s; killing it: %s",
                self._request.run,
                error.message,
            )
            self._process.kill()
            self._loop.call_soon_threadsafe(self._on_eof)
        except RuntimeError:
            pass  # the loop is closed: the agent stops, and the closed pipe stops the supervisor

    def _handle(self, event: Event) -> None:
        if isinstance(event, WorkerExited) and self._running.pop(event.rank, None) is None:
            return
        self._all_exited = self._all_exited or isinstance(event, AllExited)
        self._notify(event)

    def _notify(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001  # an error of the listener must not leave processes behind
            _log.exception("cannot handle an event of run %s", self._request.run)

    def _on_eof(self) -> None:
        self._cleanup_task = self._loop.create_task(self._clean_up())

    async def _clean_up(self) -> None:
        killed = await asyncio.to_thread(self._kill_leftovers)
        if not self._all_exited:
            self._notify(
                SupervisorNote(
                    f"the supervisor of run {self._request.run} died; {killed} of its processes were killed"
                )
            )
        for rank in sorted(self._running):
            tail = await asyncio.to_thread(_log_tail, Path(self._running[rank].log))
            self._handle(WorkerExited(rank, None, None, time.monotonic(), tail, None))
        if not self._all_exited:
            self._handle(AllExited())
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._finished.set()

    def _kill_leftovers(self) -> int:
        """Kill remaining processes of the run and return how many there were."""
        process = self._process
        if not self._all_exited:
            process.kill()
        try:
            process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        path = record_path(Path(self._request.records), self._mark)
        killed = 0
        # On macOS a supervisor does not see processes that left their group: always look there.
        if not self._all_exited or sys.platform == "darwin":
            killed = kill_orphans_of(_record(path, self._mark))
        path.unlink(missing_ok=True)
        return killed


def _record(path: Path, mark: str) -> PidRecord:
    try:
        return read_record(path)
    except (OSError, ProtocolError):
        return PidRecord(mark)  # the mark alone finds nearly all processes


def _log_tail(log: Path) -> bytes:
    try:
        end = read_log(log, 0, 0).end
        return read_log(log, max(0, end - MAX_TAIL_BYTES), MAX_TAIL_BYTES).data
    except OSError:
        return b""


def _spawn(python: str, mark: str) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    source = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH", "")]))
    environment[MARK_VARIABLE] = mark
    return subprocess.Popen(
        # -P: a file of the user's must not shadow a standard module.
        [python, "-P", "-m", "barnraise.agent.supervisor"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # Ctrl-C at the agent must not reach it
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )


def _write_all(process: subprocess.Popen[bytes], frame: bytes) -> None:
    assert process.stdin is not None
    rest = memoryview(frame)
    while rest:
        rest = rest[process.stdin.write(rest) :]
