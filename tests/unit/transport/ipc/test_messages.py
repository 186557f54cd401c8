"""Messages between local processes and the listener."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.identity import NodeKey, delegate
from barnraise.transport.ipc.fd_passing import LARGEST_MESSAGE
from barnraise.transport.ipc.messages import (
    LARGEST_BODY,
    DialTicket,
    IncomingConnection,
    ListenerReply,
    ListenerRequest,
    ListenerStanding,
    ListenerStatus,
    RegisterEndpoint,
    RegistrationRefused,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode_message,
)

CREDENTIALS = delegate(NodeKey.generate(), run="mnist", worker=b"W" * 16)


TICKET = DialTicket(
    credentials=CREDENTIALS,
    trusted=[CREDENTIALS.node],
    secret=b"secret" * 8,
    run="mnist",
    generation=3,
    worker=b"W" * 16,
    port=52416,
    addresses=["192.0.2.1"],
    encryption="tls",
    listener_version="0",
)


REQUESTS: list[Request] = [
    RegisterEndpoint(run="mnist", generation=0, pid=1),
    ListenerStatus(),
    ListenerRequest(b"how many?"),
]


REPLIES: list[Reply] = [
    TICKET,
    ListenerStanding(CREDENTIALS.node, 1, [], "tls", 0, 1, "0", agent=True),
    ListenerReply(b"three"),
    IncomingConnection(b"W" * 16, "192.0.2.1:5", 1, 1, False),
    RegistrationRefused("no", "ask again"),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_ipc_requests_encode_and_decode(message: Request) -> None:
    assert decode_request(encode_message(message)) == message
    with pytest.raises(ProtocolError):
        decode_reply(encode_message(message))


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_ipc_replies_encode_and_decode(message: Reply) -> None:
    assert decode_reply(encode_message(message)) == message
    with pytest.raises(ProtocolError):
        decode_request(encode_message(message))


@given(st.binary(max_size=100))
def test_decode_of_any_bytes_raises_protocol_error(data: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with pytest.raises(ProtocolError):
            decode(data)


@given(st.sampled_from(REPLIES + REQUESTS), st.data())
def test_decode_of_changed_byte_gives_message_or_protocol_error(
    message: Reply | Request, data: st.DataObject
) -> None:
    wire = bytearray(encode_message(message))
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_request, decode_reply):
        try:
            decode(bytes(wire))
        except ProtocolError:
            pass


def test_nested_messages_do_not_exhaust_the_stack() -> None:
    with pytest.raises(ProtocolError):
        decode_request(b"\x91" * 60_000)


def test_largest_answer_fits_into_message() -> None:
    for message in (ListenerRequest(bytes(LARGEST_BODY), token="t" * 64), ListenerReply(bytes(LARGEST_BODY))):
        assert len(encode_message(message)) <= LARGEST_MESSAGE
    with pytest.raises(ProtocolError):
        decode_request(encode_message(ListenerRequest(bytes(LARGEST_BODY + 1))))
    assert "hidden" not in repr(ListenerRequest(b"hidden", token="hidden"))


def test_ticket_repr_hides_secret() -> None:
    for shown in (repr(TICKET), str(TICKET), str(TICKET.__rich_repr__())):
        assert "secret" not in shown
        assert "PRIVATE" not in shown
    assert "hidden" not in repr(RegisterEndpoint(run="mnist", generation=0, pid=1, token="hidden"))
