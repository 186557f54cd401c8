"""Client of the communication process: sends commands and dispatches replies to waiting callers.

Torch-free.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from barnraise.agent_client.metrics.reporter import start_reporter
from barnraise.collectives import completion_thread
from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.failures import to_error, to_start_error
from barnraise.collectives.messages import (
    AbortGroup,
    Alive,
    AskStatistics,
    CloseGroup,
    Command,
    CommProcessReady,
    Failure,
    GroupMember,
    GroupNotOpened,
    GroupOpened,
    Inbox,
    MapSegment,
    OpenGroup,
    OperationFailed,
    OperationFinished,
    Reply,
    StartRefused,
    Statistics,
    UnmapSegment,
    WaitingFor,
    encode,
)
from barnraise.collectives.shm.segment import SharedSegment
from barnraise.collectives.spawn import start_comm_process
from barnraise.core import errors, metrics
from barnraise.core.config import Settings, load_settings
from barnraise.core.metrics import ProcessValues, Sample, catalogue
from barnraise.core.metrics.catalogue import BY_SAMPLE_NAME

log = logging.getLogger("barnraise.collectives")

_START_S = 180.0  # an emulated or very busy machine; a process that ends is noticed at once
_REPLY_S = 5.0
_CLOSE_S = 2.0
_CALLBACK_WAIT_S = 2.0
_READ_BYTES = 256 << 10
_SILENT_READS = 5  # silence is this many reads without data; elapsed time misleads after a SIGSTOP
Done = Callable[[OperationFinished | OperationFailed], None]


class CommProcessClient:
    """One communication process and the channel to it. Thread-safe."""

    def __init__(self, run: str, generation: int, settings: Settings) -> None:
        self.settings = settings
        self.inherited = False  # True in a process forked from the owner
        self.instance = secrets.token_bytes(8)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._operations: dict[int, Done] = {}
        self._requests: dict[
            int, tuple[threading.Event, list[GroupOpened | GroupNotOpened | Statistics]]
        ] = {}
        self._groups: set[int] = set()
        self._groups_to_close: deque[int] = deque()
        self._lost: errors.CommProcessLost | None = None
        self._closing = False
        self._inbox = Inbox(commands=False)
        self._direct_inbox = Inbox(commands=False)
        self._direct_user = threading.Lock()  # held from the start of a direct operation to its reply
        self._process, self._channel, self._direct = start_comm_process(run, generation, settings)
        try:
            ready = self._wait_ready()
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._channel.close()
            self._direct.close()
            raise
        self.member: GroupMember = ready.member
        self.run = ready.run
        self.generation = ready.generation
        self.encryption = ready.encryption
        # This timeout also bounds a blocked write. Only the reader decides on silence.
        self._channel.settimeout(settings.link.silence_s / _SILENT_READS)
        self._direct.settimeout(settings.link.silence_s / _SILENT_READS)
        self._thread = threading.Thread(target=self._read, name="barnraise-comm-process", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> errors.CommProcessLost | None:
        return self._lost

    # commands

    def next_id(self) -> int:
        return next(self._numbers)

    def submit(self, command: Command, operation: int, done: Done) -> None:
        """Send a command that starts an operation.

        ``done`` is called once, on the reader thread or on this one.
        """
        with self._lock:
            lost = self._lost
            if lost is None:
                self._operations[operation] = done
        if lost is not None:
            done(OperationFailed(operation, Failure(lost.code, lost.message)))
        else:
            self.send(command)

    def reserve_direct(self) -> bool:
        """Return True if the caller's next operation may use the direct channel.

        The caller must then call ``wait_direct`` until that operation is complete. It reads its own reply,
        so no other thread has to wake first. That halves the latency of a small operation.
        """
        return self._direct_user.acquire(blocking=False)

    def release_direct(self) -> None:
        """Release the direct channel after an operation that never reached the communication process."""
        self._direct_user.release()

    def wait_direct(self, ended: Callable[[], bool], timeout_s: float | None) -> None:
        """Read the reply of the direct operation.

        Return when the operation is complete, the time is up or the communication process is lost.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not ended() and self.lost is None:
            if deadline is not None:
                left = max(0.0, deadline - time.monotonic())
                with selectors.DefaultSelector() as selector:  # select() refuses descriptors from 1024 on
                    selector.register(self._direct, selectors.EVENT_READ)
                    if not selector.select(left):
                        return
            try:
                data = self._direct.recv(_READ_BYTES)
            except TimeoutError:
                continue
            except OSError:
                return
            if not data:
                return
            for message in self._direct_inbox.feed(data):
                self._direct_user.release()
                self._dispatch(message)

    def send(self, command: Command) -> None:
        """Send a command that has no reply.

        If the communication process is gone, all waiting callers fail.
        """
        self._send(encode(command))

    def map_segment(self, segment: int, shared: SharedSegment) -> None:
        if sys.platform != "win32":
            try:
                socket.send_fds(self._direct, [b"!"], [shared.descriptor])
            except OSError as error:
                self._fail(f"its channel broke ({error})")
        self._send(encode(MapSegment(segment, shared.size, shared.name)))
        shared.close_descriptor()

    def unmap_segment(self, segment: int) -> None:
        self.send(UnmapSegment(segment))

    def abort_group(self, group: int, reason: str) -> None:
        self.send(AbortGroup(group, reason))

    def close_group(self, group: int) -> None:
        """Leave a group of ranks. Calling it twice is safe."""
        with self._lock:
            known = group in self._groups
            self._groups.discard(group)
        if known:
            metrics.gauge(catalogue.GROUPS_OPEN).dec()
            self.send(CloseGroup(group))

    def close_group_later(self, group: int) -> None:
        """Queue a group to be closed by the reader thread.

        Destructors may call it anywhere: it takes no lock and sends nothing.
        """
        self._groups_to_close.append(group)

    def open_group(
        self,
        name: str,
        rank: int,
        members: tuple[GroupMember, ...],
        timeout_s: float,
        table: CostTable | None,
        generation: int,
    ) -> GroupOpened:
        request = self.next_id()
        command = OpenGroup(request, generation, name, rank, members, timeout_s, table)
        reply = self._request(request, command, timeout_s + _REPLY_S)
        if isinstance(reply, GroupNotOpened):
            raise to_error(reply.failure)
        assert isinstance(reply, GroupOpened)
        with self._lock:
            self._groups.add(reply.group)
        metrics.gauge(catalogue.GROUPS_OPEN).inc()
        return reply

    def statistics(self) -> Statistics:
        request = self.next_id()
        reply = self._request(request, AskStatistics(request), _REPLY_S)
        assert isinstance(reply, Statistics)
        return reply

    def close(self) -> None:
        """Stop the communication process. Calling it twice and at exit is safe.

        Groups that the script did not destroy are closed first. Other ranks may still be in the last
        operation, for which this rank has done its part.
        """
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            self.close_group(group)
        self._closing = True
        try:
            self._channel.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the process has exited
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
        self._fail("it was closed")
        self._channel.close()
        self._direct.close()

    def detach_in_child(self) -> None:
        """Mark the communication process as the parent's, in a forked child.

        It takes no lock, because another thread may have held one during the fork.
        """
        self.inherited = True
        self._closing = True
        self._lost = errors.CommProcessLost(
            "this process was forked from the owner of the communication process",
            hint="Use the group in the parent only, or start the child by spawn with a group of its own.",
        )
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._direct.close()
        self._channel.close()  # or the communication process would not notice that the parent exited

    def _send(self, message: bytes) -> None:
        if self.lost is not None:
            return
        try:
            with self._sending:
                left = memoryview(message)
                while left and self.lost is None:
                    try:
                        sent = self._channel.send(left)
                    except TimeoutError:
                        continue  # it is slow to read; the reader decides if it hangs
                    left = left[sent:]
        except OSError as error:
            self._fail(f"its channel broke ({error})")

    def _request(
        self, request: int, command: Command, timeout_s: float
    ) -> GroupOpened | GroupNotOpened | Statistics:
        event = threading.Event()
        reply: list[GroupOpened | GroupNotOpened | Statistics] = []
        with self._lock:
            if self.lost is not None:
                raise self.lost.with_traceback(None)
            self._requests[request] = (event, reply)
        try:
            self.send(command)
            event.wait(timeout_s)
        finally:
            with self._lock:
                self._requests.pop(request, None)
        if reply:
            return reply[0]
        raise self._lost_after(timeout_s)

    def _lost_after(self, timeout_s: float) -> errors.CommProcessLost:
        return self.lost or errors.CommProcessLost(f"it did not answer within {timeout_s:g} s")

    # replies

    def _wait_ready(self) -> CommProcessReady:
        self._channel.settimeout(_START_S)
        messages: list[Command | Reply] = []
        while not messages:
            try:
                data = self._channel.recv(_READ_BYTES)
            except TimeoutError:
                raise errors.CommProcessLost(f"it was not ready within {_START_S:g} s") from None
            except OSError:
                data = b""
            if not data:
                code = self._process.wait()
                raise errors.CommProcessLost(f"it exited with code {code} at start; see its message above")
            messages = self._inbox.feed(data)
        first = messages[0]
        if isinstance(first, StartRefused):
            raise to_start_error(first.failure)
        assert isinstance(first, CommProcessReady)
        return first

    def _read(self) -> None:
        """Dispatch replies on the reader thread until the channel closes or falls silent."""
        try:
            reason = self._read_replies()
        except Exception as error:
            log.exception("the communication process's replies could not be handled")
            reason = f"its replies could not be handled ({error!r})"
        self._fail(reason)

    def _read_replies(self) -> str:
        silent_reads = 0
        while not self._closing:
            try:
                data = self._channel.recv(_READ_BYTES)
            except TimeoutError:
                silent_reads += 1
                if silent_reads >= _SILENT_READS:
                    return f"it has been silent for {self.settings.link.silence_s:g} s"
                continue
            except OSError as error:
                return f"its channel broke ({error})"
            if not data:
                return self._exit_reason()
            silent_reads = 0
            for message in self._inbox.feed(data):
                self._dispatch(message)
            while self._groups_to_close:
                self.close_group(self._groups_to_close.popleft())
        return "it was closed"

    def _exit_reason(self) -> str:
        try:
            return f"it exited with code {self._process.wait(_CLOSE_S)}"
        except subprocess.TimeoutExpired:
            return "it closed its channel"

    def _dispatch(self, message: Command | Reply) -> None:
        if isinstance(message, OperationFinished | OperationFailed):
            with self._lock:
                done = self._operations.pop(message.operation, None)
            if done is not None:
                done(message)
        elif isinstance(message, GroupOpened | GroupNotOpened | Statistics):
            with self._lock:
                waiting = self._requests.get(message.request)
                if waiting is not None:
                    waiting[1].append(message)
                    waiting[0].set()
            if waiting is None and isinstance(message, GroupOpened):
                self.send(CloseGroup(message.group))  # the caller was interrupted
        elif isinstance(message, WaitingFor):
            log.warning("waiting for %.0f s: %s", message.seconds, message.message)
        else:
            assert isinstance(message, Alive)

    def _fail(self, reason: str) -> None:
        """Record that the communication process is lost, and fail everything that waits for it.

        A process that only hangs is killed, so that other ranks do not wait for it either.
        """
        lost = errors.CommProcessLost(f"the communication process of this worker is lost: {reason}")
        with self._lock:
            if self._lost is not None:
                return
            self._lost = lost
            operations, self._operations = self._operations, {}
            requests = list(self._requests.values())
            groups, self._groups = self._groups, set()
        if not self._closing:
            self._process.kill()
        metrics.gauge(catalogue.GROUPS_OPEN).dec(len(groups))
        for event, _ in requests:
            event.set()
        for operation, done in operations.items():
            done(OperationFailed(operation, Failure(lost.code, lost.message)))


_current: CommProcessClient | None = None
_current_lock = threading.Lock()


def current_comm_process() -> CommProcessClient:
    """Return the communication process of this process. Start it if there is none or it was lost."""
    global _current
    with _current_lock:
        if _current is None or _current.lost is not None:
            if _current is not None:
                _current.close()
            run = os.environ.get("BARNRAISE_RUN", "default")
            _current = CommProcessClient(run, _generation(), load_settings())
            start_reporter(reported_values)
        return _current


def statistics() -> dict[str, Any]:
    """Return the counters of the communication process.

    It starts no process; ``pid`` is None if none runs.
    """
    comm_process = _current
    if comm_process is None or comm_process.lost is not None:
        return {"pid": None, "encryption": None, "links": [], "counters": {}}
    reply = comm_process.statistics()
    return {
        "pid": comm_process.pid,
        "encryption": comm_process.encryption,
        "links": list(reply.links),
        "counters": dict(reply.values),
    }


def reported_values() -> ProcessValues | None:
    """Return the metrics of the communication process; None if none runs or it does not answer."""
    comm_process = _current
    if comm_process is None or comm_process.lost is not None:
        return None
    try:
        values = comm_process.statistics().values
    except errors.CommProcessLost:
        return None
    samples = (Sample(name, (), value) for name, value in values.items() if name in BY_SAMPLE_NAME)
    return ProcessValues("communication", comm_process.instance, tuple(samples))


def _generation() -> int:
    text = os.environ.get("BARNRAISE_GENERATION", "0")
    try:
        return int(text)
    except ValueError:
        raise errors.ConfigError(
            f"BARNRAISE_GENERATION is {text!r}, which is not a number", hint="Set it to a whole number."
        ) from None


def _close_at_exit() -> None:
    if _current is not None:
        _current.close()
    completion_thread.completion_threads.wait_idle(_CALLBACK_WAIT_S)


def _detach_in_child() -> None:
    global _current, _current_lock
    _current_lock = threading.Lock()
    if _current is not None:
        _current.detach_in_child()
        _current = None


atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_in_child)
