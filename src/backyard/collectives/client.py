"""The worker's side of its mover: starts it, sends commands, hands replies to whoever waits. Torch-free."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from backyard.collectives.costs import CostTable
from backyard.collectives.messages import (
    Alive,
    AskStatistics,
    Command,
    Failed,
    Failure,
    Finished,
    Inbox,
    Member,
    MapSegment,
    NotOpened,
    OpenGroup,
    Opened,
    Ready,
    Refused,
    Reply,
    Statistics,
    UnmapSegment,
    Waiting,
    encode,
)
from backyard.collectives.segments import SharedSegment
from backyard.core import errors
from backyard.core.config import Settings, load_settings, state_directory
from backyard.transport.tls import write_openssl_conf

log = logging.getLogger("backyard.collectives")

_START_S = 60.0  # eight movers starting at once on two cores need their time
_CHUNK = 256 << 10
Done = Callable[[Finished | Failed], None]


def error_of(failure: Failure) -> errors.CollectiveError:
    """The exception that stands for a failure."""
    if failure.code == errors.PeerLost.code:
        return errors.PeerLost(failure.peer, failure.message)
    if failure.code == errors.OperationTimeout.code:
        return errors.OperationTimeout(failure.message, late=failure.late)
    kinds: tuple[type[errors.CollectiveError], ...] = (
        errors.OperationMismatch,
        errors.OperationAborted,
        errors.UnsupportedOperation,
        errors.MoverLost,
    )
    for kind in kinds:
        if failure.code == kind.code:
            return kind(failure.message)
    return errors.CollectiveError(failure.message)


class MoverClient:
    """One mover process and the channel to it. Thread-safe."""

    def __init__(self, run: str, generation: int, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._operations: dict[int, Done] = {}
        self._requests: dict[int, tuple[threading.Event, list[Opened | NotOpened | Statistics]]] = {}
        self._lost: errors.MoverLost | None = None
        self._closing = False
        self._process, self._channel = _start(run, generation, settings)
        ready = self._await_ready()
        self.member: Member = ready.member
        self.run = ready.run
        self.generation = ready.generation
        self.encryption = ready.encryption
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._read, name="backyard-mover", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, command: Command, operation: int, done: Done) -> None:
        """Start an operation; ``done`` is called once, from the reader thread or from here."""
        with self._lock:
            lost = self._lost
            if lost is None:
                self._operations[operation] = done
        if lost is not None:
            done(Failed(operation, Failure(lost.code, lost.message)))
        else:
            self.send(command)

    def number(self) -> int:
        return next(self._numbers)

    def send(self, command: Command) -> None:
        """Tell the mover something that has no answer; a mover that is gone is reported to those who wait."""
        try:
            with self._sending:
                self._channel.sendall(encode(command))
        except OSError as error:
            self._end(f"its channel broke ({error})")

    def map(self, segment: int, shared: SharedSegment) -> None:
        message = encode(MapSegment(segment, shared.size, shared.name))
        try:
            with self._sending:
                if sys.platform == "win32":
                    self._channel.sendall(message)
                else:
                    sent = socket.send_fds(self._channel, [message], [shared.descriptor])
                    self._channel.sendall(message[sent:])
        except OSError as error:
            self._end(f"its channel broke ({error})")
        shared.close_descriptor()

    def unmap(self, segment: int) -> None:
        self.send(UnmapSegment(segment))

    def open_group(
        self,
        name: str,
        rank: int,
        members: tuple[Member, ...],
        timeout_s: float,
        table: CostTable | None,
        generation: int,
    ) -> Opened:
        request = self.number()
        command = OpenGroup(request, generation, name, rank, members, timeout_s, table)
        answer = self._ask(request, command, timeout_s + 5.0)
        if isinstance(answer, NotOpened):
            raise error_of(answer.failure)
        assert isinstance(answer, Opened)
        return answer

    def statistics(self) -> Statistics:
        request = self.number()
        answer = self._ask(request, AskStatistics(request), 5.0)
        assert isinstance(answer, Statistics)
        return answer

    def close(self) -> None:
        """End the mover; safe to call twice and at exit."""
        self._closing = True
        try:
            self._channel.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        self._channel.close()

    def _ask(self, request: int, command: Command, timeout_s: float) -> Opened | NotOpened | Statistics:
        event: threading.Event = threading.Event()
        answer: list[Opened | NotOpened | Statistics] = []
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._requests[request] = (event, answer)
        self.send(command)
        event.wait(timeout_s)
        with self._lock:
            self._requests.pop(request, None)
            if not answer:
                raise self._lost or errors.MoverLost(f"it did not answer within {timeout_s:g} s")
        return answer[0]

    def _await_ready(self) -> Ready:
        inbox = Inbox(commands=False)
        self._channel.settimeout(_START_S)
        messages: list[Command | Reply] = []
        while not messages:
            try:
                data = self._channel.recv(_CHUNK)
            except TimeoutError:
                self._process.kill()
                raise errors.MoverLost(f"it was not ready within {_START_S:g} s") from None
            if not data:
                code = self._process.wait()
                raise errors.MoverLost(f"it ended with code {code} while starting; its message is above")
            messages = inbox.feed(data)
        first = messages[0]
        if isinstance(first, Refused):
            self._process.wait()
            raise errors.CollectiveError(f"the mover cannot serve: {first.failure.message}")
        assert isinstance(first, Ready)
        self._inbox = inbox
        self._channel.settimeout(None)
        return first

    def _read(self) -> None:
        """Reader thread: dispatch replies until the channel ends or falls silent."""
        silence = self.settings.link.silence_s
        self._channel.settimeout(silence / 5)
        while not self._closing:
            try:
                data = self._channel.recv(_CHUNK)
            except TimeoutError:
                if time.monotonic() - self._heard_at >= silence:
                    self._end(f"it has been silent for {silence:g} s")
                    return
                continue
            except OSError as error:
                self._end(f"its channel broke ({error})")
                return
            if not data:
                code = self._process.poll()
                self._end("it ended" if code is None else f"it ended with code {code}")
                return
            self._heard_at = time.monotonic()
            for message in self._inbox.feed(data):
                self._dispatch(message)

    def _dispatch(self, message: Command | Reply) -> None:
        if isinstance(message, Finished | Failed):
            with self._lock:
                done = self._operations.pop(message.operation, None)
            if done is not None:
                done(message)
        elif isinstance(message, Opened | NotOpened | Statistics):
            with self._lock:
                waiting = self._requests.get(message.request)
                if waiting is not None:
                    waiting[1].append(message)
                    waiting[0].set()
        elif isinstance(message, Waiting):
            log.warning("waiting for %.0f s: %s", message.seconds, message.message)
        else:
            assert isinstance(message, Alive)

    def _end(self, why: str) -> None:
        """The mover is gone: nobody may wait for it."""
        lost = errors.MoverLost(f"the mover of this worker is lost: {why}")
        with self._lock:
            if self._lost is not None:
                return
            self._lost = lost
            operations, self._operations = self._operations, {}
            requests = list(self._requests.values())
        for event, _ in requests:
            event.set()
        for operation, done in operations.items():
            done(Failed(operation, Failure(lost.code, lost.message)))


def _start(run: str, generation: int, settings: Settings) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process with one end of a private channel."""
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    directory = state_directory(settings)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    environment["OPENSSL_CONF"] = str(write_openssl_conf(directory))
    source = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH", "")]))
    command = [
        sys.executable,
        *(["/tmp/p/dbg.py"] if os.environ.get("DBG") else ["-m", "backyard.collectives.mover"]),
        str(theirs.fileno()),
        run,
        str(generation),
    ]
    if sys.platform == "win32":
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(theirs.share(process.pid).hex().encode() + b"\n")
        process.stdin.close()
    else:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
        )
    theirs.close()
    return process, ours


_current: MoverClient | None = None
_current_pid = 0
_current_lock = threading.Lock()


def current_mover() -> MoverClient:
    """This process's mover, started at the first need and again after a loss."""
    global _current, _current_pid
    with _current_lock:
        if _current is None or _current._lost is not None or _current_pid != os.getpid():
            if _current is not None and _current_pid == os.getpid():
                _current.close()
            run = os.environ.get("BACKYARD_RUN", "default")
            generation = int(os.environ.get("BACKYARD_GENERATION", "0"))
            _current, _current_pid = MoverClient(run, generation, load_settings()), os.getpid()
        return _current


def _close_at_exit() -> None:
    if _current is not None and _current_pid == os.getpid():
        _current.close()


atexit.register(_close_at_exit)
