"""Runs as the page of an agent shows them: a record without an end."""

from __future__ import annotations

import asyncio

import pytest

from barnraise.agent.page.service import MachineSource
from barnraise.agent_client.cluster_requests import decode_request, encode
from barnraise.agent_client.history.requests import (
    HistoryListRequest,
    HistoryListResponse,
    HistoryPartRequest,
    HistoryPartResponse,
    KeptLog,
)
from barnraise.agent_client.run_requests import RunRow, WatchRequest, WatchResponse
from barnraise.core.errors import RunError
from barnraise.display.row_view import NO_END
from barnraise.history.log_format import encode_frames
from barnraise.identity import NodeId
from benchmarks.invented_run import DESK, RUN, example_run
from benchmarks.page.invented import invented_rows

LOG = encode_frames(example_run(300))


class Context:
    """Agent with the record of one run, which it may know."""

    me = NodeId(DESK)

    def __init__(self, row: RunRow | None) -> None:
        self._row = row

    async def answer(self, request: bytes, run: str) -> bytes:
        """Answer as an agent does."""
        question = decode_request(request)
        if isinstance(question, HistoryListRequest):
            return encode(HistoryListResponse((KeptLog(RUN, DESK, len(LOG), 1.0),)))
        if isinstance(question, HistoryPartRequest):
            return encode(HistoryPartResponse(b"1" * 16, question.offset, LOG[question.offset :], len(LOG)))
        assert isinstance(question, WatchRequest)
        if self._row is None:
            raise RunError("this machine knows no run")
        return encode(WatchResponse(row=self._row, parts=(), workers=()))


@pytest.mark.parametrize(
    ("row", "state"), [(None, "stopped"), (invented_rows(2)[-1], "running"), (invented_rows(2)[0], "failed")]
)
def test_run_that_the_agent_does_not_know_has_ended_with_its_record(row: RunRow | None, state: str) -> None:
    context, requests = (Context(row), None)
    source = MachineSource(context, requests, NodeId(DESK))  # type: ignore[arg-type]
    view = asyncio.run(source.view(RUN))
    assert view.state == state
    assert (view.headline == NO_END) == (row is None)
    assert (view.ended_at is None) == (state == "running")
