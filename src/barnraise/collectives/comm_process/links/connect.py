"""Handshakes under way: drives their generators, staggers addresses, retries, gives up in words."""

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
    LinkRequest,
    Steps,
    accept,
    dial,
)
from barnraise.collectives.messages import GroupMember
from barnraise.core.errors import BarnraiseError
from barnraise.transport.ipc.messages import IncomingConnection

log = logging.getLogger("barnraise.mover")

_STAGGER_S = 0.25  # the next address is tried beside the first after this
_RETRY_S = 0.2
_MAX_ACCEPTING = 256


class DialSettings(Protocol):
    @property
    def connect_timeout_s(self) -> float: ...
    @property
    def retries(self) -> int: ...


@dataclass(eq=False)
class _Attempt:
    """One handshake; ``call`` is the dial it belongs to, None when we were dialled."""

    steps: Steps
    deadline: float
    call: _Dial | None
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

    def lead(self, where: str) -> bool:
        """Only one address goes on to the handshake, or the other side would see two links."""
        if self.leader is None:
            self.leader = where
        return self.leader == where


class Connections:
    """Every connection that is not a link yet."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        security: HandshakeSecurity,
        network: DialSettings,
        made: Callable[[EstablishedLink], None],
        gave_up: Callable[[bytes, str], None],
    ) -> None:
        self._selector = selector
        self._security = security
        self._network = network
        self._made = made
        self._gave_up = gave_up
        self._calls: dict[tuple[bytes, int], _Dial] = {}
        self._accepting: set[_Attempt] = set()

    def dial(self, member: GroupMember, stream: int = 0) -> None:
        """Reach this worker, or open a further stream to it; a call already under way goes on."""
        if (member.worker, stream) not in self._calls:
            call = _Dial(member, stream, list(member.addresses), time.monotonic())
            self._calls[(member.worker, stream)] = call
            self._next_address(call)

    def accept(self, sock: socket.socket, incoming: IncomingConnection) -> None:
        if len(self._accepting) >= _MAX_ACCEPTING:
            sock.close()
            return
        attempt = _Attempt(
            accept(sock, incoming, self._security), self._deadline(), None, incoming.peer_address
        )
        self._accepting.add(attempt)
        self._resume(attempt)

    def tick(self, now: float) -> None:
        for attempt in list(self._accepting):
            if now >= attempt.deadline:
                self._end(attempt, "it did not finish the handshake in time")
        for call in list(self._calls.values()):
            for attempt in list(call.attempts):
                if now >= attempt.deadline:
                    self._end(attempt, "no answer in time")
            if self._calls.get(call.key) is call and now >= call.next_at:
                self._next_address(call)

    def _deadline(self) -> float:
        return time.monotonic() + self._network.connect_timeout_s

    def _next_address(self, call: _Dial) -> None:
        if call.waiting:
            address = call.waiting.pop(0)
            call.next_at = time.monotonic() + _STAGGER_S
            where = f"{address}:{call.member.port}"
            member = call.member
            steps = dial(
                address, member.port, member.worker, call.stream, self._security, lambda: call.lead(where)
            )
            attempt = _Attempt(steps, self._deadline(), call, where)
            call.attempts.add(attempt)
            self._resume(attempt)
        elif not call.attempts:
            self._next_round(call)

    def _next_round(self, call: _Dial) -> None:
        call.round += 1
        if call.round <= self._network.retries:
            call.waiting = list(call.member.addresses)
            call.next_at = time.monotonic() + _RETRY_S * call.round
            return
        del self._calls[call.key]
        problems = "; ".join(dict.fromkeys(call.problems)) or "it has no address"
        if call.stream == 0:
            self._gave_up(call.member.worker, f"it cannot be reached: {problems}")

    def _resume(self, attempt: _Attempt) -> None:
        self._forget(attempt)
        try:
            sock, want = next(attempt.steps)
        except StopIteration as finished:
            self._finish(attempt, finished.value)
        except BarnraiseError as error:
            self._end(attempt, error.message)
        except OSError as error:
            self._end(attempt, str(error))
        else:
            attempt.descriptor = sock.fileno()
            events = selectors.EVENT_READ if want is LinkRequest.READ else selectors.EVENT_WRITE
            self._selector.register(attempt.descriptor, events, lambda: self._ready(attempt))

    def _ready(self, attempt: _Attempt) -> None:
        """Unless the end of its call, in the same batch of events, has ended it as well."""
        if attempt.descriptor >= 0:
            self._resume(attempt)

    def _finish(self, attempt: _Attempt, connected: EstablishedLink) -> None:
        call = attempt.call
        if call is None:
            self._accepting.discard(attempt)
        else:
            self._calls.pop(call.key, None)
            for other in call.attempts - {attempt}:
                self._forget(other)
                other.steps.close()
        self._made(connected)

    def _end(self, attempt: _Attempt, why: str) -> None:
        self._forget(attempt)
        attempt.steps.close()
        call = attempt.call
        if call is None:
            self._accepting.discard(attempt)
            log.info("refused %s: %s", attempt.where, why)
            return
        call.attempts.discard(attempt)
        if call.leader == attempt.where:
            call.leader = None
        call.problems.append(f"{attempt.where}: {why}")
        if not call.waiting and not call.attempts and self._calls.get(call.key) is call:
            self._next_round(call)

    def _forget(self, attempt: _Attempt) -> None:
        if attempt.descriptor >= 0:
            self._selector.unregister(attempt.descriptor)
            attempt.descriptor = -1


_FAST_SECONDS_PER_BYTE = 1 / 250e6  # above 2 Gbit/s one core's TLS begins to be the limit
_MOST_AUTOMATIC_LANES = 3


def lanes_for(setting: int, cores: int, seconds_per_byte: float | None) -> int:
    """How many lanes a link gets beside its first stream; ``setting`` 0 decides by what was measured."""
    if setting:
        return setting - 1
    if seconds_per_byte is None or seconds_per_byte > _FAST_SECONDS_PER_BYTE:
        return 0
    return max(0, min(_MOST_AUTOMATIC_LANES, cores // 2 - 1))
