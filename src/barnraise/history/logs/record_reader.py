"""Reader of one run's record that asks only for what is new. The requests are sent by its caller. Pure."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from barnraise.agent_client.cluster_requests import AgentResponse
from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartRequest,
    HistoryPartResponse,
    KeptLog,
)
from barnraise.core.errors import BarnraiseError, ProtocolError
from barnraise.history.entries import MOST_MACHINES, Entry
from barnraise.history.log_format import decode_frames

MAX_LOG = 16 << 20  # of one machine
_MOST_PARTS = 256  # of one log in one update

ReaderRequest = HistoryListRequest | HistoryPartRequest
Reading = Generator[ReaderRequest, AgentResponse, None]


class EntryStore(Protocol):
    """Store of the entries of one run's logs."""

    @property
    def is_empty(self) -> bool:
        """Return True if there is no entry."""

    def add(self, node: bytes, entries: Sequence[Entry]) -> None:
        """Add entries that follow in the log of a machine."""

    def forget(self, node: bytes) -> None:
        """Drop the log of a machine, because it was replaced."""


class EntryLists:
    """Entries as they were written, by machine. A log is another object after it has grown."""

    def __init__(self) -> None:
        self._logs: dict[bytes, list[Entry]] = {}

    @property
    def is_empty(self) -> bool:
        """Return True if there is no entry."""
        return not self._logs

    @property
    def logs(self) -> list[list[Entry]]:
        """Return the entries of each log."""
        return list(self._logs.values())

    def add(self, node: bytes, entries: Sequence[Entry]) -> None:
        """Add entries that follow in the log of a machine."""
        if entries:
            self._logs[node] = [*self._logs.get(node, ()), *entries]

    def forget(self, node: bytes) -> None:
        """Drop the log of a machine, because it was replaced."""
        self._logs.pop(node, None)


Store = TypeVar("Store", bound=EntryStore)


@dataclass
class _ReadLog:
    """Part of one machine's log that was read. ``size``: of the log at that time."""

    identity: bytes = b""
    offset: int = 0
    size: int = -1


class RecordReader(Generic[Store]):
    """Record of one run, read into a store. A log is read as far as it can be.

    ``problem``: why one was not read further. ``has_news``: whether the last update brought something.
    """

    def __init__(self, run: str, history: Store) -> None:
        self.run, self.history = run, history
        self.problem: BarnraiseError | None = None
        self.has_news = False
        self._logs: dict[bytes, _ReadLog] = {}

    def update(self) -> Reading:
        """Yield requests, and take the response or the error of each; see `next_request`."""
        listed = yield HistoryListRequest(run=self.run)
        if not isinstance(listed, HistoryListResponse):
            raise ProtocolError(f"the agent answered {type(listed).__name__} to a request for records")
        self.problem, self.has_news = None, False
        for kept in [kept for kept in listed.logs if kept.run == self.run][:MOST_MACHINES]:
            log = self._logs.setdefault(kept.node, _ReadLog())
            if log.size != kept.size:
                try:
                    yield from self._read(kept, log)
                except BarnraiseError as error:
                    self.problem = self.problem or error

    def _read(self, kept: KeptLog, log: _ReadLog) -> Reading:
        """Read what is new in one log."""
        for _ in range(_MOST_PARTS):
            if log.offset >= MAX_LOG:
                return
            part = yield HistoryPartRequest(kept.run, kept.node, log.identity, log.offset)
            if not isinstance(part, HistoryPartResponse):
                raise ProtocolError(f"the agent answered {type(part).__name__} to a request for a record")
            if (part.identity, part.offset) != (log.identity, log.offset):  # replaced, or the first part
                log.identity, log.offset = part.identity, 0
                self.history.forget(kept.node)
                self.has_news = True
            if part.offset != log.offset:
                raise ProtocolError("the agent sent a part of a record that was not asked for")
            decoded = decode_frames(part.data)
            if decoded.size:
                log.offset += decoded.size
                self.history.add(kept.node, decoded.entries)
                self.has_news = True
            if not decoded.size or log.offset >= part.size:
                log.size = part.size  # only now: a reading that was cut is taken up again
                return


def next_request(reading: Reading, answer: AgentResponse | BarnraiseError | None) -> ReaderRequest | None:
    """Return the next request of a reading; None at its end. ``answer``: None at the beginning."""
    try:
        if answer is None:
            return next(reading)
        return reading.throw(answer) if isinstance(answer, BarnraiseError) else reading.send(answer)
    except StopIteration:
        return None


def read_all(reading: Reading, ask: Callable[[ReaderRequest], AgentResponse]) -> None:
    """Send all requests of a reading; raise BarnraiseError if the logs cannot be listed."""
    request = next_request(reading, None)
    while request is not None:
        answer: AgentResponse | BarnraiseError
        try:
            answer = ask(request)
        except BarnraiseError as error:
            answer = error
        request = next_request(reading, answer)
