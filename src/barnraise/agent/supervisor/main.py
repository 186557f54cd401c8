"""The supervisor's main loop: starts the workers of one launch request, and leaves no process behind."""

from __future__ import annotations

import io
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

from barnraise.agent.supervisor import linux, process
from barnraise.agent.supervisor.log_pump import LogPump, WorkerLog
from barnraise.agent.supervisor.messages import (
    MARK_VARIABLE,
    MAX_TAIL_BYTES,
    AllExited,
    Event,
    LaunchRequest,
    SupervisorNote,
    WorkerExited,
    WorkerLaunch,
    WorkerStarted,
    encode_frame,
    read_stop,
)
from barnraise.agent.supervisor.pidfile import PidRecord, ProcessIdentity, record_path, write_record
from barnraise.agent.supervisor.policy import (
    InputEnded,
    PolicyEvent,
    SendKill,
    SendTerminate,
    Supervision,
    TimePassed,
    decide,
    next_deadline,
)
from barnraise.agent.supervisor.resource_limits import unsupported_limits
from barnraise.core.errors import ProtocolError

_REAP_S = 5.0  # between reaps of adopted orphans
_HELPERS_EXIT_S = 2.0  # helpers of a successful worker get this long to exit
_HELPERS_EXIT_FAILED_S = 0.2  # the same after a failure, which should be reported soon
_DRAIN_S = 0.5
_SWEEP_S = 10.0


class Supervisor:
    """Supervisor of the workers of one launch.

    Single-threaded until all workers are started; then threads only wait and post events.
    """

    def __init__(self, launch: LaunchRequest, mark: str, source: io.FileIO, sink: io.FileIO) -> None:
        self._launch = launch
        self._mark = mark
        self._source = source
        self._sink = sink
        self._agent_listens = True
        self._inbox: queue.SimpleQueue[PolicyEvent] = queue.SimpleQueue()
        self._state = Supervision(frozenset(), launch.grace_s)
        self._workers: dict[int, process.WorkerProcess] = {}
        self._pumps: list[LogPump] = []
        self._memory_kills = linux.memory_kills()
        self._me = ProcessIdentity(os.getpid(), time.time())

    def post(self, event: PolicyEvent) -> None:
        """Queue an event; safe in any thread and in a signal handler."""
        self._inbox.put(event)

    def serve(self) -> None:
        """Start all workers and supervise them until all have exited."""
        if sys.platform == "linux":
            linux.adopt_orphans()
        self._write_record(())  # before the first worker: the mark alone finds all of them
        for text in unsupported_limits(self._launch.limits):
            self.post(SupervisorNote(text))
        logs = self._start_all()
        for rank, log in logs.items():
            pump = LogPump(self._workers[rank].output, log)
            pump.start()
            self._pumps.append(pump)
            threading.Thread(target=self._watch, args=(rank, pump, log), daemon=True).start()
        threading.Thread(target=self._read_stops, daemon=True).start()
        self._drain_inbox()
        while self._state.running:
            self._handle_next()
        self._sweep()

    def _start_all(self) -> dict[int, WorkerLog]:
        logs = {}
        identities = []
        for launch in self._launch.workers:
            log = WorkerLog(launch.rank, Path(launch.log), self._launch.log_bytes, self.post)
            try:
                worker = process.start(launch, self._launch.limits, {MARK_VARIABLE: self._mark})
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._report_not_started(launch, log, error)
                continue
            identities.append(ProcessIdentity(worker.pid, time.time()))
            self._workers[launch.rank] = worker
            logs[launch.rank] = log
            self._handle(WorkerStarted(launch.rank, worker.pid))
        self._write_record(tuple(identities))
        return logs

    def _report_not_started(self, launch: WorkerLaunch, log: WorkerLog, error: Exception) -> None:
        sentence = process.explain_start_failure(launch, error)
        log.write(sentence.encode() + b"\n")
        log.close()
        tail = sentence.encode()[:MAX_TAIL_BYTES]
        self.post(WorkerExited(launch.rank, None, None, time.monotonic(), tail, False))

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            self._handle(self._inbox.get())

    def _handle_next(self) -> None:
        deadline = next_deadline(self._state)
        wait = _REAP_S if deadline is None else min(_REAP_S, max(0.0, deadline - time.monotonic()))
        try:
            self._handle(self._inbox.get(timeout=wait))
        except queue.Empty:
            self._handle(TimePassed())
            if sys.platform == "linux":
                linux.reap_orphans(worker.pid for worker in self._workers.values())

    def _handle(self, event: PolicyEvent) -> None:
        self._state, effects = decide(self._state, event, time.monotonic())
        for effect in effects:
            match effect:
                case SendTerminate(ranks=ranks):
                    for rank in ranks:
                        self._workers[rank].terminate()
                case SendKill(ranks=ranks):
                    for rank in ranks:
                        self._workers[rank].kill()
                case _:
                    self._send(effect)

    def _send(self, event: Event) -> None:
        rest = memoryview(encode_frame(event))
        while rest and self._agent_listens:
            try:
                rest = rest[self._sink.write(rest) :]
            except OSError:
                self._agent_listens = False
                self.post(InputEnded())

    def _read_stops(self) -> None:
        """Read stop requests on a thread; an invalid message stops the run."""
        try:
            while (stop := read_stop(self._source)) is not None:
                self.post(stop)
        except ProtocolError as error:
            self.post(SupervisorNote(f"{error.message}; stopping the workers"))
        except OSError:
            pass  # a broken pipe counts as closed
        self.post(InputEnded())

    def _watch(self, rank: int, pump: LogPump, log: WorkerLog) -> None:
        """Wait on a thread for the exit of one worker, and post it."""
        worker = self._workers[rank]
        well = worker.wait_exit()
        at = time.monotonic()
        pump.join(_HELPERS_EXIT_S if well else _HELPERS_EXIT_FAILED_S)
        outcome = worker.reap()
        pump.join(_DRAIN_S)  # a process that left the group may keep the pipe open
        lost_to_memory = self._was_out_of_memory(outcome, worker)
        self.post(WorkerExited(rank, outcome.code, outcome.signal, at, log.tail, lost_to_memory))

    def _was_out_of_memory(self, outcome: process.ExitOutcome, worker: process.WorkerProcess) -> bool | None:
        """Guess whether the kernel killed a worker for lack of memory.

        True if the worker got SIGKILL from elsewhere and the kernel's counter of such kills has grown.
        """
        if sys.platform == "win32" or outcome.signal != 9 or worker.killed_by_us:
            return False
        now = linux.memory_kills()
        if now is None or self._memory_kills is None:
            return None
        return now > self._memory_kills

    def _write_record(self, workers: tuple[ProcessIdentity, ...]) -> None:
        launch = self._launch
        try:
            record = PidRecord(self._mark, launch.run, launch.generation, self._me, workers)
            write_record(Path(launch.records), record)
        except OSError as error:
            self.post(SupervisorNote(f"cannot write a pid file to {launch.records}: {error.strerror}"))

    def _sweep(self) -> None:
        self._drain_inbox()
        if sys.platform == "linux" and not linux.kill_descendants(_SWEEP_S):
            self._send(
                SupervisorNote("cannot kill some processes that the workers started; restart the machine")
            )
        for pump in self._pumps:
            pump.join(_DRAIN_S)
        record_path(Path(self._launch.records), self._mark).unlink(missing_ok=True)
        self._send(AllExited())
