"""The worker's side of its mover: sends commands, hands replies to whoever waits. Torch-free."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from barnraise.collectives import completion_thread
from barnraise.collectives.algorithms.cost_model import CostTable
from barnraise.collectives.failures import error_of, refusal_of
from barnraise.collectives.messages import (
    AbortGroup,
    Alive,
    AskStatistics,
    CloseGroup,
    Command,
    CommandRefused,
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
    Statistics,
    UnmapSegment,
    WaitingFor,
    encode,
)
from barnraise.collectives.shm.segment import SharedSegment
from barnraise.collectives.spawn import start_mover
from barnraise.core import errors, metrics
from barnraise.core.config import Settings, load_settings

log = logging.getLogger("barnraise.collectives")

_START_S = 60.0  # eight movers starting at once on two cores need their time
_ANSWER_S = 5.0
_CLOSE_S = 2.0
_LAST_CALLBACKS_S = 2.0
_CHUNK = 256 << 10
_QUIET_TURNS = 5  # so many reads in a row without a word are a silence; time alone lies after a stop
Done = Callable[[OperationFinished | OperationFailed], None]


class CommProcessClient:
    """One mover process and the channel to it. Thread-safe."""

    def __init__(self, run: str, generation: int, settings: Settings) -> None:
        self.settings = settings
        self.inherited = False  # True in a process that was forked from the mover's owner
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._operations: dict[int, Done] = {}
        self._requests: dict[
            int, tuple[threading.Event, list[GroupOpened | GroupNotOpened | Statistics]]
        ] = {}
        self._groups: set[int] = set()
        self._forgotten: deque[int] = deque()
        self._lost: errors.MoverLost | None = None
        self._closing = False
        self._inbox = Inbox(commands=False)
        self._direct_inbox = Inbox(commands=False)
        self._direct_user = threading.Lock()  # held from the start of a direct operation to its reply
        self._process, self._channel, self._direct = start_mover(run, generation, settings)
        try:
            ready = self._await_ready()
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
        # also the bound of a write that waits for the mover; the reader alone decides on silence
        self._channel.settimeout(settings.link.silence_s / _QUIET_TURNS)
        self._direct.settimeout(settings.link.silence_s / _QUIET_TURNS)
        self._thread = threading.Thread(target=self._read, name="barnraise-mover", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> errors.MoverLost | None:
        return self._lost

    # commands

    def number(self) -> int:
        return next(self._numbers)

    def submit(self, command: Command, operation: int, done: Done) -> None:
        """Start an operation; ``done`` is called once, from the reader thread or from here."""
        with self._lock:
            lost = self._lost
            if lost is None:
                self._operations[operation] = done
        if lost is not None:
            done(OperationFailed(operation, Failure(lost.code, lost.message)))
        else:
            self.send(command)

    def reserve_direct(self) -> bool:
        """May the caller's next operation be direct? Then it must call ``await_direct`` until that has ended.

        The caller reads its own reply: no other thread has to wake first, which halves a small latency.
        """
        return self._direct_user.acquire(blocking=False)

    def release_direct(self) -> None:
        """The operation never reached the mover."""
        self._direct_user.release()

    def await_direct(self, ended: Callable[[], bool], timeout_s: float | None) -> None:
        """Read the reply of the direct operation, until it has ended, the time is up or the mover is lost."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not ended() and self.lost is None:
            if deadline is not None:
                left = max(0.0, deadline - time.monotonic())
                if not select.select([self._direct], [], [], left)[0]:
                    return
            try:
                data = self._direct.recv(_CHUNK)
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
        """Tell the mover something that has no answer; a mover that is gone is reported to those who wait."""
        self._send(encode(command))

    def map(self, segment: int, shared: SharedSegment) -> None:
        if sys.platform != "win32":
            try:
                socket.send_fds(self._direct, [b"!"], [shared.descriptor])
            except OSError as error:
                self._end(f"its channel broke ({error})")
        self._send(encode(MapSegment(segment, shared.size, shared.name)))
        shared.close_descriptor()

    def unmap(self, segment: int) -> None:
        self.send(UnmapSegment(segment))

    def abort_group(self, group: int, why: str) -> None:
        self.send(AbortGroup(group, why))

    def close_group(self, group: int) -> None:
        """Safe to call twice."""
        with self._lock:
            known = group in self._groups
            self._groups.discard(group)
        if known:
            metrics.groups_open.dec()
            self.send(CloseGroup(group))

    def forget_group(self, group: int) -> None:
        """Close it soon. For destructors, which may run anywhere: takes no lock and says nothing."""
        self._forgotten.append(group)

    def open_group(
        self,
        name: str,
        rank: int,
        members: tuple[GroupMember, ...],
        timeout_s: float,
        table: CostTable | None,
        generation: int,
    ) -> GroupOpened:
        request = self.number()
        command = OpenGroup(request, generation, name, rank, members, timeout_s, table)
        answer = self._ask(request, command, timeout_s + _ANSWER_S)
        if isinstance(answer, GroupNotOpened):
            raise error_of(answer.failure)
        assert isinstance(answer, GroupOpened)
        with self._lock:
            self._groups.add(answer.group)
        metrics.groups_open.inc()
        return answer

    def statistics(self) -> Statistics:
        request = self.number()
        answer = self._ask(request, AskStatistics(request), _ANSWER_S)
        assert isinstance(answer, Statistics)
        return answer

    def close(self) -> None:
        """End the mover; safe to call twice and at exit.

        A program that ends without destroying its groups leaves them all the same: others may still be in the
        last operation, for which it has done its part.
        """
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            self.close_group(group)
        self._closing = True
        try:
            self._channel.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is gone already
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
        self._end("it was closed")
        self._channel.close()
        self._direct.close()

    def leave_to_parent(self) -> None:
        """In a forked child: the mover is the parent's. Takes no lock, for one may be held for ever."""
        self.inherited = True
        self._closing = True
        self._lost = errors.MoverLost(
            "this process was forked from the one that owns the mover",
            hint="Use the group in the parent only, or start the child by spawn with a group of its own.",
        )
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._direct.close()
        self._channel.close()  # or the mover would not notice the parent's end

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
                        continue  # the mover is slow to read; whether it hangs, the reader decides
                    left = left[sent:]
        except OSError as error:
            self._end(f"its channel broke ({error})")

    def _ask(
        self, request: int, command: Command, timeout_s: float
    ) -> GroupOpened | GroupNotOpened | Statistics:
        event = threading.Event()
        answer: list[GroupOpened | GroupNotOpened | Statistics] = []
        with self._lock:
            if self.lost is not None:
                raise self.lost.with_traceback(None)
            self._requests[request] = (event, answer)
        try:
            self.send(command)
            event.wait(timeout_s)
        finally:
            with self._lock:
                self._requests.pop(request, None)
        if answer:
            return answer[0]
        raise self._lost_after(timeout_s)

    def _lost_after(self, timeout_s: float) -> errors.MoverLost:
        return self.lost or errors.MoverLost(f"it did not answer within {timeout_s:g} s")

    # replies

    def _await_ready(self) -> CommProcessReady:
        self._channel.settimeout(_START_S)
        messages: list[Command | Reply] = []
        while not messages:
            try:
                data = self._channel.recv(_CHUNK)
            except TimeoutError:
                raise errors.MoverLost(f"it was not ready within {_START_S:g} s") from None
            except OSError:
                data = b""
            if not data:
                code = self._process.wait()
                raise errors.MoverLost(f"it ended with code {code} while starting; its message is above")
            messages = self._inbox.feed(data)
        first = messages[0]
        if isinstance(first, CommandRefused):
            raise refusal_of(first.failure)
        assert isinstance(first, CommProcessReady)
        return first

    def _read(self) -> None:
        """Reader thread: dispatch replies until the channel ends or falls silent."""
        try:
            why = self._read_to_the_end()
        except Exception as error:
            log.exception("the mover's replies could not be handled")
            why = f"its replies could not be handled ({error!r})"
        self._end(why)

    def _read_to_the_end(self) -> str:
        quiet = 0
        while not self._closing:
            try:
                data = self._channel.recv(_CHUNK)
            except TimeoutError:
                quiet += 1
                if quiet >= _QUIET_TURNS:
                    return f"it has been silent for {self.settings.link.silence_s:g} s"
                continue
            except OSError as error:
                return f"its channel broke ({error})"
            if not data:
                return self._last_words()
            quiet = 0
            for message in self._inbox.feed(data):
                self._dispatch(message)
            while self._forgotten:
                self.close_group(self._forgotten.popleft())
        return "it was closed"

    def _last_words(self) -> str:
        try:
            return f"it ended with code {self._process.wait(_CLOSE_S)}"
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
                self.send(CloseGroup(message.group))  # whoever asked was interrupted
        elif isinstance(message, WaitingFor):
            log.warning("waiting for %.0f s: %s", message.seconds, message.message)
        else:
            assert isinstance(message, Alive)

    def _end(self, why: str) -> None:
        """The mover is gone: nobody may wait for it, neither here nor, if it only hangs, elsewhere."""
        lost = errors.MoverLost(f"the mover of this worker is lost: {why}")
        with self._lock:
            if self._lost is not None:
                return
            self._lost = lost
            operations, self._operations = self._operations, {}
            requests = list(self._requests.values())
            groups, self._groups = self._groups, set()
        if not self._closing:
            self._process.kill()
        metrics.groups_open.dec(len(groups))
        for event, _ in requests:
            event.set()
        for operation, done in operations.items():
            done(OperationFailed(operation, Failure(lost.code, lost.message)))


_current: CommProcessClient | None = None
_current_lock = threading.Lock()


def current_mover() -> CommProcessClient:
    """This process's mover, started at the first need and again after a loss."""
    global _current
    with _current_lock:
        if _current is None or _current.lost is not None:
            if _current is not None:
                _current.close()
            run = os.environ.get("BARNRAISE_RUN", "default")
            _current = CommProcessClient(run, _generation(), load_settings())
            metrics.links_open.set_function(_links_open)
        return _current


def statistics() -> dict[str, Any]:
    """What this process's mover has counted; ``pid`` is None while there is none. Starts nothing."""
    mover = _current
    if mover is None or mover.lost is not None:
        return {"pid": None, "encryption": None, "links": [], "counters": {}}
    answer = mover.statistics()
    return {
        "pid": mover.pid,
        "encryption": mover.encryption,
        "links": list(answer.links),
        "counters": dict(answer.values),
    }


def _links_open() -> float:
    try:
        return float(statistics()["counters"].get("links", 0.0))
    except errors.MoverLost:
        return 0.0


def _generation() -> int:
    text = os.environ.get("BARNRAISE_GENERATION", "0")
    try:
        return int(text)
    except ValueError:
        raise errors.ConfigError(
            f"BARNRAISE_GENERATION is {text!r}, which is no number", hint="Set it to a whole number."
        ) from None


def _close_at_exit() -> None:
    if _current is not None:
        _current.close()
    completion_thread.settler.drain(_LAST_CALLBACKS_S)


def _leave_to_parent() -> None:
    global _current, _current_lock
    _current_lock = threading.Lock()
    if _current is not None:
        _current.leave_to_parent()
        _current = None


atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
