"""Messages between an agent and a supervisor are complete and bounded."""

from __future__ import annotations

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.agent.supervisor.messages import (
    QUIET,
    AllExited,
    LaunchRequest,
    Stop,
    SupervisorNote,
    WorkerExited,
    WorkerLaunch,
    WorkerStarted,
    encode_frame,
    read_event,
    read_launch,
    read_stop,
)
from barnraise.core.config import load_settings
from barnraise.core.errors import ProtocolError

_WORKER = WorkerLaunch(0, 0, ("python", "train.py"), "/tmp", {"A": "b"}, "/tmp/log")
_LAUNCH = LaunchRequest("run-1", 1, (_WORKER,), "/tmp/records", QUIET)


def test_messages_round_trip_in_order() -> None:
    assert read_launch(io.BytesIO(encode_frame(_LAUNCH))) == _LAUNCH
    for stop in (Stop(True), Stop(ranks=(3, 4))):
        assert read_stop(io.BytesIO(encode_frame(stop))) == stop
    events = [
        WorkerStarted(0, 1),
        WorkerExited(0, None, 9, 1.5, b"\xff", True),
        SupervisorNote("x"),
        AllExited(),
    ]
    stream = io.BytesIO(b"".join(map(encode_frame, events)))
    assert [read_event(stream) for _ in range(5)] == [*events, None]


@given(st.binary(max_size=200))
def test_read_any_bytes_only_protocol_error(data: bytes) -> None:
    for read in (read_launch, read_stop, read_event):
        for stream in (io.BytesIO(data), io.BytesIO(len(data).to_bytes(4, "little") + data)):
            try:
                read(stream)
            except ProtocolError:
                pass


@pytest.mark.parametrize(
    "event",
    [
        ["started", 0, 1],
        {"type": "started", "rank": -1, "pid": 5},
        {"type": "ended", "rank": 0, "code": 0, "signal": None, "at": 0.0, "tail": b"x" * 8193},
        {"type": "note", "text": "x" * 4001},
    ],
)
def test_read_event_out_of_bounds_raises(event: object) -> None:
    body = msgspec.msgpack.encode(event)
    with pytest.raises(ProtocolError):
        read_event(io.BytesIO(len(body).to_bytes(4, "little") + body))
    with pytest.raises(ProtocolError, match="at most"):
        read_event(io.BytesIO(b"\xff\xff\xff\xff"))


def test_mark_variable_is_not_read_as_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker has it in its environment, where settings are read from too."""
    monkeypatch.setenv("BARNRAISE_SUPERVISOR", "0" * 32)
    load_settings()
