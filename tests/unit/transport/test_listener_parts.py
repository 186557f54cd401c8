"""The small pure parts of the listener: messages, addresses, the waiting room, the lock."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import IdentityError, ListenerError, ProtocolError
from barnraise.core.file_lock import FileLock
from barnraise.identity import NodeKey, delegate
from barnraise.identity.private_file import create_private
from barnraise.identity.secret import load_or_create_secret, load_secret, read_secret
from barnraise.transport.addresses import (
    InterfaceAddress,
    candidates,
    own_addresses,
    show_address,
    source_of,
)
from barnraise.transport.ipc.fd_passing import LARGEST_MESSAGE
from barnraise.transport.ipc.local_socket import LocalListener, dial_local
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
from barnraise.transport.listener.pending_connections import PendingConnections

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
def test_requests_round_trip(message: Request) -> None:
    assert decode_request(encode_message(message)) == message
    with pytest.raises(ProtocolError):
        decode_reply(encode_message(message))


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_replies_round_trip(message: Reply) -> None:
    assert decode_reply(encode_message(message)) == message
    with pytest.raises(ProtocolError):
        decode_request(encode_message(message))


@given(st.binary(max_size=100))
def test_any_bytes_give_a_protocol_error(data: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with pytest.raises(ProtocolError):
            decode(data)


@given(st.sampled_from(REPLIES + REQUESTS), st.data())
def test_any_changed_byte_gives_a_message_or_a_protocol_error(
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


def test_the_largest_answer_fits_into_a_message() -> None:
    for message in (ListenerRequest(bytes(LARGEST_BODY), token="t" * 64), ListenerReply(bytes(LARGEST_BODY))):
        assert len(encode_message(message)) <= LARGEST_MESSAGE
    with pytest.raises(ProtocolError):
        decode_request(encode_message(ListenerRequest(bytes(LARGEST_BODY + 1))))
    assert "hidden" not in repr(ListenerRequest(b"hidden", token="hidden"))


def test_a_ticket_shows_no_secret() -> None:
    for shown in (repr(TICKET), str(TICKET), str(TICKET.__rich_repr__())):
        assert "secret" not in shown
        assert "PRIVATE" not in shown
    assert "hidden" not in repr(RegisterEndpoint(run="mnist", generation=0, pid=1, token="hidden"))


def _up(*pairs: tuple[str, str]) -> list[InterfaceAddress]:
    return [InterfaceAddress(interface, address, True) for interface, address in pairs]


def test_addresses_are_ordered_by_use_to_others() -> None:
    found = _up(
        ("lo", "127.0.0.1"),
        ("lo", "::1"),
        ("docker0", "172.17.0.1"),
        ("wlan0", "fe80::1%wlan0"),
        ("wlan0", "2001:db8::7"),
        ("wlan0", "192.168.1.7"),
        ("tailscale0", "100.100.1.2"),
        ("eth1", "169.254.7.7"),
        ("wlan0", "192.168.1.7"),
        ("broken", "no address"),
    )
    found.append(InterfaceAddress("eth9", "10.9.9.9", False))
    assert candidates(found) == [
        "192.168.1.7",
        "100.100.1.2",
        "2001:db8::7",
        "169.254.7.7",
        "172.17.0.1",
    ]


def test_loopback_serves_a_machine_with_nothing_else() -> None:
    assert candidates(_up(("lo", "127.0.0.1"), ("lo", "127.0.1.1"), ("eth0", "fe80::1%eth0"))) == [
        "127.0.0.1"
    ]
    assert candidates([]) == ["127.0.0.1"]


def test_this_machine_has_an_address() -> None:
    assert own_addresses()
    assert "127.0.1.1" not in own_addresses()


def test_sources_are_hosts() -> None:
    assert source_of("::ffff:192.0.2.1") == source_of("192.0.2.1") == "192.0.2.1"
    assert source_of("2001:db8::1") == source_of("2001:db8::2:3") != source_of("2001:db8:0:1::1")
    assert source_of("fe80::1%eth0") == "fe80::/64"
    assert source_of("?") == "?"


def test_addresses_are_shown_plainly() -> None:
    assert show_address("::ffff:192.0.2.1", 5) == "192.0.2.1:5"
    assert show_address("2001:db8::1", 5) == "[2001:db8::1]:5"


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=200))
def test_the_waiting_room_never_overflows(events: list[tuple[int, bool]]) -> None:
    room: PendingConnections[int] = PendingConnections(total=8, per_source=3)
    present: list[tuple[int, str]] = []
    for guest, (number, enters) in enumerate(events):
        source = str(number)
        if enters:
            while (oldest := room.oldest_in_the_way(source)) is not None:
                of_source = [entry for entry in present if entry[1] == source]
                assert oldest == (of_source if len(of_source) >= 3 else present)[0][0]
                room.leave(oldest)
                present = [entry for entry in present if entry[0] != oldest]
            room.enter(guest, source)
            present.append((guest, source))
        elif present:
            gone = present.pop(number % len(present))[0]
            room.leave(gone)
            room.leave(gone)
        assert room.everyone() == [entry[0] for entry in present]
        assert len(room) <= 8
    for leaving in room.everyone():
        room.leave(leaving)
    assert not room._guests


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.try_acquire()
    assert not second.try_acquire()
    assert not second.acquire(0.05)
    first.release()
    assert second.acquire(0.05)
    second.release()
    second.release()


def test_a_secret_is_made_once(tmp_path: Path) -> None:
    secret = load_or_create_secret(tmp_path / "secret")
    assert len(secret) == 32
    assert load_or_create_secret(tmp_path / "secret") == load_secret(tmp_path / "secret") == secret


def test_secrets_are_read_in_hexadecimal_or_raw() -> None:
    path, raw = Path("secret"), bytes(range(32))
    assert read_secret(raw.hex().encode() + b"\r\n", path) == raw
    assert read_secret(raw, path) == raw
    assert read_secret(bytes(31) + b"\n", path) == bytes(31) + b"\n"
    assert read_secret(b"g" * 40 + b"\n", path) == b"g" * 40


def test_a_wrong_secret_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no discovery secret"):
        load_secret(tmp_path / "absent")
    create_private(tmp_path / "short", b"short")
    with pytest.raises(IdentityError, match="fewer than 32"):
        load_secret(tmp_path / "short")


@pytest.mark.skipif(sys.platform == "win32", reason="Unix sockets")
def test_a_long_path_is_explained(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    for act in (lambda: dial_local(deep, 1), lambda: LocalListener(deep)):
        with pytest.raises(ListenerError, match="may have") as caught:
            act()
        assert "shorter" in caught.value.hint


@pytest.mark.skipif(sys.platform == "win32", reason="Unix sockets")
def test_another_users_listener_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = LocalListener(tmp_path)
    assert (tmp_path / "listener.sock").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr("barnraise.transport.ipc.local_socket._peer_user", lambda _: 12345)
    with pytest.raises(ListenerError, match="another user"):
        dial_local(tmp_path, 1)
    monkeypatch.undo()
    dial_local(tmp_path, 1)[0].close()
    door.close()
    assert not (tmp_path / "listener.sock").exists()
