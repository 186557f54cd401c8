"""Preface: golden vectors, and rejection of anything else."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import ProtocolError
from barnraise.identity import NodeId
from barnraise.transport.listener import preface as module
from barnraise.transport.listener.preface import (
    PAIRING_KEY,
    ROUTE_AGENT,
    ROUTE_AGENT_BULK,
    ROUTE_PAIRING,
    ROUTE_WORKER,
    KeyFor,
    Preface,
    PrefaceAnswer,
    encode,
    negotiate,
    parse,
    parse_answer,
    target_of,
)
from tests.repository import ROOT

VECTORS = json.loads((ROOT / "tests" / "vectors" / "preface.json").read_text())
SECRET = bytes(range(32))
GOOD = encode(Preface(target=bytes(16), nonce=bytes(16)), SECRET)
identifiers = st.binary(min_size=16, max_size=16)


def only(secret: bytes) -> KeyFor:
    """Return a function that gives one secret for every route and target."""
    return lambda route, target: secret


@pytest.mark.parametrize("vector", VECTORS["prefaces"], ids=lambda vector: vector["name"])
def test_prefaces_match_golden_vectors(vector: dict[str, object]) -> None:
    fields = dict(vector["fields"])  # type: ignore[call-overload]
    preface = Preface(**fields | {key: bytes.fromhex(fields[key]) for key in ("target", "nonce")})
    secret, wire = bytes.fromhex(str(vector["secret"])), bytes.fromhex(str(vector["bytes"]))
    assert encode(preface, secret) == wire
    assert parse(wire, only(secret)) == preface


@pytest.mark.parametrize("vector", VECTORS["answers"], ids=lambda vector: vector["name"])
def test_answers_match_golden_vectors(vector: dict[str, object]) -> None:
    wire = bytes.fromhex(str(vector["bytes"]))
    assert dataclasses.asdict(parse_answer(wire)) == vector["fields"]


def test_encoded_answers_match_golden_vectors() -> None:
    written = [
        module.encode_answer(1),
        module.encode_answer(1, plaintext=True),
        module.refuse_route(),
        module.refuse_version(),
    ]
    assert [answer.hex() for answer in written] == [vector["bytes"] for vector in VECTORS["answers"]]


@given(identifiers, identifiers, st.booleans(), st.integers(0, 255), st.binary(min_size=32, max_size=64))
def test_preface_round_trip(target: bytes, nonce: bytes, plaintext: bool, route: int, secret: bytes) -> None:
    preface = Preface(target, nonce, route, plaintext)
    assert parse(encode(preface, secret), only(secret)) == preface


@given(st.integers(0, module.PREFACE_BYTES - 1), st.integers(1, 255))
def test_parse_finds_changed_byte(place: int, change: int) -> None:
    changed = bytearray(GOOD)
    changed[place] ^= change
    with pytest.raises(ProtocolError):
        parse(bytes(changed), only(SECRET))


@given(st.binary(max_size=200))
def test_parse_of_any_bytes_raises_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse(data, only(SECRET))
    with pytest.raises(ProtocolError):
        parse(data[: module.PREFACE_BYTES].ljust(module.PREFACE_BYTES, b"\0"), only(SECRET))


@given(st.binary(min_size=48, max_size=48))
def test_right_mac_of_wrong_fields_raises_protocol_error(fields: bytes) -> None:
    try:
        parse(fields + module._mac(fields, SECRET), only(SECRET))
    except ProtocolError:
        pass


@given(st.binary(max_size=12))
def test_parse_answer_of_any_bytes_gives_answer_or_protocol_error(data: bytes) -> None:
    for candidate in (data, b"BYOK" + data[:4]):
        try:
            assert isinstance(parse_answer(candidate), PrefaceAnswer)
        except ProtocolError:
            pass


def test_preface_with_other_secret_is_rejected() -> None:
    with pytest.raises(ProtocolError, match="secret"):
        parse(GOOD, only(bytes(32)))
    with pytest.raises(ProtocolError, match="at least 32"):
        parse(GOOD, only(b"short"))


def test_route_and_target_select_secret() -> None:
    secrets = {(ROUTE_WORKER, b"w" * 16): b"1" * 32, (ROUTE_AGENT, b"a" * 16): b"2" * 32}
    for (route, target), secret in secrets.items():
        knock = Preface(target, bytes(16), route)
        assert parse(encode(knock, secret), lambda *at: secrets.get(at)) == knock
        for wrong in (Preface(target, bytes(16), ROUTE_AGENT_BULK), Preface(bytes(16), bytes(16), route)):
            with pytest.raises(ProtocolError, match="does not exist"):
                parse(encode(wrong, secret), lambda *at: secrets.get(at))
    with pytest.raises(ProtocolError, match="secret"):
        parse(encode(Preface(b"w" * 16, bytes(16)), b"2" * 32), lambda *at: secrets.get(at))


def test_other_bytes_do_not_request_secret() -> None:
    def never(route: int, target: bytes) -> bytes:
        raise AssertionError("asked")

    for data in (b"GET / HTTP/1.1".ljust(module.PREFACE_BYTES), b"BARNRAIS" + b"\xff" * 72):
        with pytest.raises(ProtocolError):
            parse(data, never)


def test_pairing_key_is_public_and_fixed() -> None:
    vector = next(vector for vector in VECTORS["prefaces"] if vector["fields"]["route"] == ROUTE_PAIRING)
    assert bytes.fromhex(vector["secret"]) == PAIRING_KEY


def test_target_of_agent_is_start_of_node_id() -> None:
    assert target_of(NodeId(bytes(range(32)))) == bytes(range(16))


def test_negotiate_returns_newest_common_version() -> None:
    assert negotiate(1, 1) == 1
    assert negotiate(1, 9) == 1
    assert negotiate(2, 9) is None
