"""Reader of one run's record that asks the agent only for what is new."""

from __future__ import annotations

from dataclasses import dataclass, field

from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartRequest,
    HistoryPartResponse,
)
from barnraise.cli.agent_call import ask
from barnraise.core.errors import ProtocolError
from barnraise.history.entries import Entry
from barnraise.history.log_format import decode_frames
from barnraise.history.merge import merge


@dataclass
class _Log:
    """Entries of one machine's log that are here. ``size``: of the log at the last look."""

    identity: bytes = b""
    offset: int = 0
    size: int = -1
    entries: list[Entry] = field(default_factory=list)


class RecordReader:
    """Record of one run, merged of the logs that this machine keeps. A damaged log is left out."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._logs: dict[bytes, _Log] = {}
        self._damaged: set[bytes] = set()

    def update(self) -> bool:
        """Read what is new; return True if there is something new."""
        listed = ask(HistoryListRequest(run=self._run), HistoryListResponse, offer_start=False)
        is_new = False
        for kept in listed.logs:
            if kept.run != self._run or kept.node in self._damaged:
                continue
            log = self._logs.setdefault(kept.node, _Log())
            if log.size != kept.size:
                is_new |= self._read(kept.node, log)
        return is_new

    def entries(self) -> tuple[Entry, ...]:
        """Return the history of the run so far."""
        return merge([log.entries for log in self._logs.values()])

    def _read(self, node: bytes, log: _Log) -> bool:
        is_new = False
        while True:
            request = HistoryPartRequest(self._run, node, log.identity, log.offset)
            part = ask(request, HistoryPartResponse, offer_start=False)
            if part.identity != log.identity or part.offset < log.offset:  # the log was replaced
                log.identity, log.offset, log.entries = part.identity, 0, []
                if part.offset:
                    continue
            try:
                decoded = decode_frames(part.data)
            except ProtocolError:
                self._damaged.add(node)
                del self._logs[node]
                return is_new
            log.entries.extend(decoded.entries)
            log.offset, log.size = part.offset + decoded.size, part.size
            is_new |= bool(decoded.entries)
            if not decoded.size or log.offset >= part.size:
                return is_new
