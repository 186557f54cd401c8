"""Handshakes in progress: runs their generators, staggers addresses, retries and times out."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from barnraise.collectives.comm_process.links.handshakes import (
    EstablishedLink,
    HandshakeSecurity,
    SocketWait,
    Steps,
    accept,
    dial,
)
from barnraise.collectives.messages import GroupMember
from barnraise.core.errors import BarnraiseError
from barnraise.transport.ipc.messages import IncomingConnection

log = logging.getLogger("barnraise.comm_process")

_STAGGER_S = 0.25  # delay before the next address is tried in parallel
_RETRY_S = 0.2
_MAX_ACCEPTING = 256


class DialSettings(Protocol):
    @property
    def connect_timeout_s(self) -> float: ...
    @property
    def retries(self) -> int: ...


@dataclass(eq=False)
class _Attempt:
    """One handshake; ``dialled`` is the dial it belongs to, None for an accepted connection."""

    steps: Steps
    deadline: float
    dialled: _Dial | None
    where: str
    descriptor: int = -1


@dataclass(eq=False)
class _Dial:
    """All attempts to reach one worker."""

    member: GroupMember
    stream: int
    waiting: list[str]
    next_at: float
    round: int = 0
    attempts: set[_Attempt] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    leader: str | None = None

    @property
    def key(self) -> tuple[bytes, int]:
        return self.member.worker, self.stream

    def claim_lead(self, where: str) -> bool:
        """Return True if this address may continue to the handshake.

        Only one address may, or the peer would see two links.
        """
        if self.leader is None:
            self.leader = where
        return self.leader == where


class Connections:
    """Every connection that is not an established link."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        security: HandshakeSecurity,
        network: DialSettings,
        on_connected: Callable[[EstablishedLink], None],
        on_unreachable: Callable[[bytes, str], None],
    ) -> None:
        self._selector = selector
        self.security = security  # for new handshakes
        self._network = network
        self._on_connected = on_connected
        self._on_unreachable = on_unreachable
        self._dials: dict[tuple[bytes, int], _Dial] = {}
        self._accepting: set[_Attempt] = set()

    def dial(self, member: GroupMember, stream: int = 0) -> None:
        """Dial this worker, or open a further stream to it, unless such a dial is in progress."""
        if (member.worker, stream) not in self._dials:
            dialled = _Dial(member, stream, list(member.addresses), time.monotonic())
            self._dials[(member.worker, stream)] = dialled
            self._next_address(dialled)

    def accept(self, sock: socket.socket, incoming: IncomingConnection) -> None:
        if len(self._accepting) >= _MAX_ACCEPTING:
            sock.close()
            return
        attempt = _Attempt(
            accept(sock, incoming, self.security), self._deadline(), None, incoming.peer_address
        )
        self._accepting.add(attempt)
        self._resume(attempt)

    def tick(self, now: float) -> None:
        for attempt in list(self._accepting):
            if now >= attempt.deadline:
                self._fail(attempt, "the handshake timed out")
        for dialled in list(self._dials.values()):
            for attempt in list(dialled.attempts):
                if now >= attempt.deadline:
                    self._fail(attempt, "the connection timed out")
            if self._dials.get(dialled.key) is dialled and now >= dialled.next_at:
                self._next_address(dialled)

    def _deadline(self) -> float:
        return time.monotonic() + self._network.connect_timeout_s

    def _next_address(self, dialled: _Dial) -> None:
        if dialled.waiting:
            address = dialled.waiting.pop(0)
            dialled.next_at = time.monotonic() + _STAGGER_S
            where = f"{address}:{dialled.member.port}"
            member = dialled.member
            steps = dial(
                address,
                member.port,
                member.worker,
                dialled.stream,
                self.security,
                lambda: dialled.claim_lead(where),
            )
            attempt = _Attempt(steps, self._deadline(), dialled, where)
            dialled.attempts.add(attempt)
            self._resume(attempt)
        elif not dialled.attempts:
            self._next_round(dialled)

    def _next_round(self, dialled: _Dial) -> None:
        dialled.round += 1
        if dialled.round <= self._network.retries:
            dialled.waiting = list(dialled.member.addresses)
            dialled.next_at = time.monotonic() + _RETRY_S * dialled.round
            return
        del self._dials[dialled.key]
        problems = "; ".join(dict.fromkeys(dialled.problems)) or "it has no address"
        if dialled.stream == 0:
            self._on_unreachable(dialled.member.worker, f"it cannot be reached: {problems}")

    def _resume(self, attempt: _Attempt) -> None:
        self._unregister(attempt)
        try:
            sock, want = next(attempt.steps)
        except StopIteration as finished:
            self._finish(attempt, finished.value)
        except BarnraiseError as error:
            self._fail(attempt, error.message)
        except OSError as error:
            self._fail(attempt, str(error))
        else:
            attempt.descriptor = sock.fileno()
            events = selectors.EVENT_READ if want is SocketWait.READ else selectors.EVENT_WRITE
            self._selector.register(attempt.descriptor, events, lambda: self._ready(attempt))

    def _ready(self, attempt: _Attempt) -> None:
        """Resume an attempt, unless its dial ended in the same batch of events."""
        if attempt.descriptor >= 0:
            self._resume(attempt)

    def _finish(self, attempt: _Attempt, connected: EstablishedLink) -> None:
        dialled = attempt.dialled
        if dialled is None:
            self._accepting.discard(attempt)
        else:
            self._dials.pop(dialled.key, None)
            for other in dialled.attempts - {attempt}:
                self._unregister(other)
                other.steps.close()
        self._on_connected(connected)

    def _fail(self, attempt: _Attempt, reason: str) -> None:
        self._unregister(attempt)
        attempt.steps.close()
        dialled = attempt.dialled
        if dialled is None:
            self._accepting.discard(attempt)
            log.info("refused %s: %s", attempt.where, reason)
            return
        dialled.attempts.discard(attempt)
        if dialled.leader == attempt.where:
            dialled.leader = None
        dialled.problems.append(f"{attempt.where}: {reason}")
        if not dialled.waiting and not dialled.attempts and self._dials.get(dialled.key) is dialled:
            self._next_round(dialled)

    def _unregister(self, attempt: _Attempt) -> None:
        if attempt.descriptor >= 0:
            self._selector.unregister(attempt.descriptor)
            attempt.descriptor = -1


_FAST_SECONDS_PER_BYTE = 1 / 250e6  # above 2 Gbit/s one core's TLS begins to be the limit
_MAX_AUTOMATIC_EXTRA_STREAMS = 3


def extra_stream_count(setting: int, cores: int, seconds_per_byte: float | None) -> int:
    """Return the number of streams of a link beside the first. ``setting`` 0 decides by measurement."""
    if setting:
        return setting - 1
    if seconds_per_byte is None or seconds_per_byte > _FAST_SECONDS_PER_BYTE:
        return 0
    return max(0, min(_MAX_AUTOMATIC_EXTRA_STREAMS, cores // 2 - 1))
