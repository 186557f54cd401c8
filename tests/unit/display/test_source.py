"""Logs that are read again and again: only new bytes are read, also if a log was replaced or has no end."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from barnraise.agent_client.cluster_requests import decode_request, encode
from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartRequest,
    HistoryPartResponse,
)
from barnraise.agent_client.run_requests import RunRow, WatchRequest, WatchResponse
from barnraise.core.errors import RunError
from barnraise.display import source
from barnraise.display.row_view import NO_END
from barnraise.display.source import HistorySource
from barnraise.history.entries import Entry, LogHead, NoteEntry
from barnraise.history.log_file import RecordPart, RunLogWriter, log_path, read_part
from barnraise.history.logs.record_reader import EntryLists, RecordReader
from benchmarks.invented_run import DESK, MAC, RUN, example_run
from benchmarks.page.invented import invented_rows


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return offset and length of each part that is read of a log, below a state directory of its own."""
    monkeypatch.setenv("BARNRAISE_STATE_DIRECTORY", str(tmp_path))
    read: list[tuple[int, int]] = []

    def spy(path: Path, identity: bytes, offset: int) -> RecordPart:
        part = read_part(path, identity, offset)
        read.append((part.offset, len(part.data)))
        return part

    monkeypatch.setattr(source, "read_part", spy)
    return read


def writer(state: Path, node: bytes, max_bytes: int = 1 << 20) -> RunLogWriter:
    return RunLogWriter(log_path(state, RUN, node), LogHead(RUN, node, "agent", bytes(16), 1.0), max_bytes)


def notes(count: int) -> list[NoteEntry]:
    return [NoteEntry(float(number), f"note {number}") for number in range(count)]


def read(reader: RecordReader[EntryLists]) -> list[list[Entry]]:
    """Read what is new, with a source of its own, and return the entries of each log."""
    HistorySource().read(reader)
    return reader.history.logs


def fresh() -> list[list[Entry]]:
    return read(RecordReader(RUN, EntryLists()))


def test_only_new_bytes_are_read(tmp_path: Path, parts: list[tuple[int, int]]) -> None:
    log = writer(tmp_path, DESK)
    log.append(notes(100))
    reader = RecordReader(RUN, EntryLists())
    read(reader)
    size = log.size
    log.append(notes(3))
    parts.clear()
    assert read(reader) == fresh()
    assert parts[0] == (size, log.size - size)


@pytest.mark.usefixtures("parts")
def test_log_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    log, other = writer(tmp_path, DESK, max_bytes=6000), writer(tmp_path, MAC)
    other.append(notes(5))
    reader = RecordReader(RUN, EntryLists())
    identities = set()
    for _ in range(12):
        log.append(notes(40))
        assert sorted(read(reader), key=len) == sorted(fresh(), key=len)
        identities.add(read_part(log_path(tmp_path, RUN, DESK), b"", 0).identity)
    assert len(identities) > 1, "the log was never replaced"


def test_log_that_appears_later_is_read(tmp_path: Path, parts: list[tuple[int, int]]) -> None:
    writer(tmp_path, DESK).append(notes(5))
    reader = RecordReader(RUN, EntryLists())
    assert len(read(reader)) == 1
    writer(tmp_path, MAC).append(notes(7))
    assert sorted(map(len, read(reader))) == [6, 8]
    assert len(parts) == 2


class KnowingAgent:
    """Agent that keeps the logs of a directory, and knows the runs of these rows."""

    def __init__(self, state: Path, *rows: RunRow) -> None:
        self._state, self._rows = state, rows

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """Answer as an agent does."""
        request = decode_request(question)
        if isinstance(request, HistoryListRequest):
            return encode(HistoryListResponse(tuple(source._listed(self._state))))
        if isinstance(request, HistoryPartRequest):
            path = log_path(self._state, request.run, request.node)
            return encode(HistoryPartResponse(*read_part(path, request.identity, request.offset)))
        assert isinstance(request, WatchRequest)
        for row in self._rows:
            if row.run.startswith(request.run):
                return encode(WatchResponse(row=row, parts=(), workers=()))
        raise RunError("this machine knows no run")


@pytest.mark.usefixtures("parts")
def test_killed_script_without_an_agent_has_ended(tmp_path: Path) -> None:
    writer(tmp_path, b"").append(example_run(300)[1:])
    view = HistorySource().view(RUN)
    assert (view.state, view.headline, view.ended_at) == ("stopped", NO_END, view.newest_at)
    writer(tmp_path, DESK).append(example_run(0)[1:])
    assert HistorySource().view(RUN).state == "running", "it may go on elsewhere"


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(("name", "state"), [(RUN, "running"), (f"{RUN}-2", "stopped"), ("other", "stopped")])
def test_silent_run_goes_on_if_the_agent_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str
) -> None:
    writer(tmp_path, DESK).append(example_run(300)[1:])
    agent = KnowingAgent(tmp_path, replace(invented_rows(2)[-1], run=name))
    monkeypatch.setattr(source.ListenerClient, "connect", lambda state: agent)
    assert HistorySource().view(RUN).state == state
