"""Reader of a record: it reads only what is new, and bears damaged, replaced and endless logs."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import pytest

from barnraise.agent_client.cluster_requests import AgentResponse
from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartResponse,
    KeptLog,
)
from barnraise.core.errors import AgentError, ProtocolError
from barnraise.history.entries import NoteEntry
from barnraise.history.log_format import encode_frames
from barnraise.history.logs.record_reader import EntryLists, ReaderRequest, RecordReader, read_all
from barnraise.history.view_builder import RunHistory
from benchmarks.invented_run import DESK, MAC, RUN, START, example_run

Answer = Callable[[ReaderRequest], AgentResponse]


class Keeper:
    """Machine with logs in memory; it counts the parts that it sends."""

    def __init__(self) -> None:
        self.logs: dict[bytes, tuple[bytes, bytes]] = {}  # identity and bytes, by machine
        self.parts = 0

    def answer(self, request: ReaderRequest) -> AgentResponse:
        """Answer as an agent does."""
        if isinstance(request, HistoryListRequest):
            kept = (KeptLog(RUN, node, len(data), 1.0) for node, (_, data) in self.logs.items())
            return HistoryListResponse((*kept, KeptLog(f"{RUN}-2", DESK, 1, 1.0)))
        self.parts += 1
        identity, data = self.logs[request.node]
        start = request.offset if request.identity == identity else 0
        return HistoryPartResponse(identity, start, data[start:], len(data))


def _read(reader: RecordReader[RunHistory], answer: Answer) -> None:
    read_all(reader.update(), answer)


def test_log_that_has_not_grown_is_not_asked_for() -> None:
    keeper, reader = Keeper(), RecordReader(RUN, RunHistory(RUN))
    keeper.logs[DESK] = b"1" * 16, encode_frames(example_run(20))
    _read(reader, keeper.answer)
    assert (keeper.parts, reader.has_news, reader.history.view().step) == (1, True, 20)
    _read(reader, keeper.answer)
    assert (keeper.parts, reader.has_news) == (1, False)
    identity, data = keeper.logs[DESK]
    keeper.logs[DESK] = identity, data + encode_frames([NoteEntry(START, "news")])
    _read(reader, keeper.answer)
    assert (keeper.parts, reader.has_news) == (2, True)
    assert "news" in [event.text for event in reader.history.view().events]


def test_growing_log_is_another_object_for_a_feeder() -> None:
    keeper = Keeper()
    reader = RecordReader(RUN, EntryLists())
    keeper.logs[DESK] = b"1" * 16, encode_frames(example_run(20))
    read_all(reader.update(), keeper.answer)
    [first] = reader.history.logs
    read_all(reader.update(), keeper.answer)
    assert reader.history.logs[0] is first
    identity, data = keeper.logs[DESK]
    keeper.logs[DESK] = identity, data + encode_frames([NoteEntry(START, "news")])
    read_all(reader.update(), keeper.answer)
    [grown] = reader.history.logs
    assert grown is not first
    assert len(grown) == len(first) + 1


def test_reading_that_was_cut_is_taken_up_again() -> None:
    keeper, reader = Keeper(), RecordReader(RUN, RunHistory(RUN))
    data = encode_frames(example_run(20)[:5]) + encode_frames(example_run(20)[5:])
    keeper.logs[DESK] = b"1" * 16, data
    first = len(encode_frames(example_run(20)[:5]))

    def answer(request: ReaderRequest) -> AgentResponse:
        response = keeper.answer(request)
        if not isinstance(response, HistoryPartResponse):
            return response
        if response.offset:
            raise AgentError("the agent stopped")
        return HistoryPartResponse(response.identity, 0, data[:first], len(data))

    _read(reader, answer)
    assert reader.problem is not None
    _read(reader, keeper.answer)
    assert reader.problem is None
    assert reader.history.view().step == 20


def test_damaged_log_is_read_as_far_as_it_can_be_beside_others() -> None:
    keeper, reader = Keeper(), RecordReader(RUN, RunHistory(RUN))
    keeper.logs[DESK] = b"1" * 16, encode_frames(example_run(20))
    keeper.logs[MAC] = b"2" * 16, _frame(b"\xc1")
    _read(reader, keeper.answer)
    assert isinstance(reader.problem, ProtocolError)
    assert reader.history.view().step == 20


def test_machine_that_always_sends_another_log_does_not_keep_the_reader() -> None:
    keeper, reader = Keeper(), RecordReader(RUN, RunHistory(RUN))
    keeper.logs[DESK] = b"1" * 16, encode_frames(example_run(5))

    def answer(request: ReaderRequest) -> AgentResponse:
        response = keeper.answer(request)
        if isinstance(response, HistoryPartResponse):
            return HistoryPartResponse(keeper.parts.to_bytes(16, "big"), 0, response.data, 1 << 40)
        return response

    _read(reader, answer)
    assert keeper.parts == 256


def test_part_that_was_not_asked_for_is_a_problem() -> None:
    keeper, reader = Keeper(), RecordReader(RUN, RunHistory(RUN))
    keeper.logs[DESK] = b"1" * 16, encode_frames(example_run(5))

    def answer(request: ReaderRequest) -> AgentResponse:
        response = keeper.answer(request)
        is_part = isinstance(response, HistoryPartResponse)
        return HistoryPartResponse(b"x" * 16, 77, b"", 100) if is_part else response

    _read(reader, answer)
    assert reader.problem is not None
    assert reader.history.is_empty


def test_agent_that_does_not_answer_is_an_error() -> None:
    def answer(request: ReaderRequest) -> AgentResponse:
        raise AgentError("no agent runs on this machine")

    with pytest.raises(AgentError):
        _read(RecordReader(RUN, RunHistory(RUN)), answer)


def _frame(body: bytes) -> bytes:
    """Return a frame with a right checksum."""
    return struct.pack("<II", len(body), zlib.crc32(body)) + body
