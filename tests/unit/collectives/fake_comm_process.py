"""A communication process in this process: keeps what it is told, answers when the test says so."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from barnraise.collectives.client import CommProcessClient
from barnraise.collectives.messages import Command, Failure, OperationFailed, OperationFinished
from barnraise.collectives.shm.segment import SharedSegment
from barnraise.core.config import Settings
from barnraise.core.errors import CommProcessLost


class FakeCommProcess(CommProcessClient):
    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.inherited = False
        self.encryption = "tls"
        self._lost = None
        self._groups_to_close: deque[int] = deque()
        self._numbers = itertools.count(1)
        self.mapped: dict[int, int] = {}
        self.sent: list[Command] = []
        self.pending: list[tuple[Command, int, Callable[[OperationFinished | OperationFailed], None]]] = []
        self.on_submit: Callable[[Command], None] = lambda command: None

    def lose(self) -> None:
        self._lost = CommProcessLost("killed")

    def submit(
        self, command: Command, operation: int, done: Callable[[OperationFinished | OperationFailed], None]
    ) -> None:
        if self._lost is not None:
            done(OperationFailed(operation, Failure(self._lost.code, self._lost.message)))
            return
        self.pending.append((command, operation, done))
        self.on_submit(command)

    def finish(self, at_ns: int = 1, peer: int = -1) -> Command:
        """Complete the oldest pending operation."""
        command, operation, done = self.pending.pop(0)
        done(OperationFinished(operation, at_ns, peer))
        return command

    def fail(self, failure: Failure) -> Command:
        command, operation, done = self.pending.pop(0)
        done(OperationFailed(operation, failure))
        return command

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def map_segment(self, segment: int, shared: SharedSegment) -> None:
        self.mapped[segment] = shared.size
        shared.close_descriptor()

    def unmap_segment(self, segment: int) -> None:
        del self.mapped[segment]
