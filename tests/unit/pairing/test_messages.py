"""Pairing messages: strict decoding, and encrypted messages in order."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import PairingError
from barnraise.pairing import messages
from barnraise.pairing.channel import PairingChannel, SpakeExchange
from barnraise.pairing.messages import (
    PairingAnswer,
    PairingDone,
    PairingGrant,
    PairingHello,
    PairingPeer,
    PairingProof,
    PairingRefusal,
    PairingUnable,
)
from tests.unit.pairing.protocol_pair import CODE, WRONG, OwnerNode, joiner, sent, taken

KEY, SIGNATURE, SPAKE = bytes(32), bytes(64), bytes(33)
PROOF = PairingProof(
    node=KEY, name="pc", platform="Linux", addresses=("10.0.0.1", "fd00::1"), port=1, signature=SIGNATURE
)
PEER = PairingPeer(node=KEY, addresses=("10.0.0.1",), port=1)
GRANT = PairingGrant(node=KEY, name="mac", role="guest", log=(b"entry",), peers=(PEER,), signature=SIGNATURE)
EVERY = [
    PairingHello(versions=(1, 2), spake=SPAKE),
    PairingAnswer(version=1, spake=SPAKE),
    PairingUnable(versions=(1,)),
    PROOF,
    GRANT,
    PairingRefusal(reason="no"),
    PairingDone(head=bytes(32)),
]
LIMIT = 1 << 20
KINDS = [type(message) for message in EVERY]


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_message_decodes_as_its_own_kind_only(message: messages.Message) -> None:
    data = messages.encode(message, LIMIT)
    assert messages.decode(data, type(message), limit=LIMIT) == message
    for kind in KINDS:
        if kind is not type(message):
            with pytest.raises(PairingError, match="came too early"):
                messages.decode(data, kind, limit=LIMIT)
    with pytest.raises(PairingError, match="at most"):
        messages.decode(data, type(message), limit=len(data) - 1)
    with pytest.raises(PairingError, match="cannot be read"):
        messages.decode(data + b"\0", type(message), limit=LIMIT)
    more = msgspec.msgpack.encode({**msgspec.msgpack.decode(data), "more": 1})
    with pytest.raises(PairingError, match="cannot be read"):
        messages.decode(more, type(message), limit=LIMIT)


@pytest.mark.parametrize(
    "broken",
    [
        msgspec.structs.replace(PROOF, node=bytes(31)),
        msgspec.structs.replace(PROOF, signature=bytes(63)),
        msgspec.structs.replace(PROOF, name=""),
        msgspec.structs.replace(PROOF, name="x" * 65),
        msgspec.structs.replace(PROOF, name="\x1b[2J"),
        msgspec.structs.replace(PROOF, platform="x" * 201),
        msgspec.structs.replace(PROOF, platform="a\nb"),
        msgspec.structs.replace(PROOF, port=0),
        msgspec.structs.replace(PROOF, port=65536),
        msgspec.structs.replace(PROOF, addresses=("10.0.0.1",) * 17),
        msgspec.structs.replace(PROOF, addresses=("example.com",)),
        msgspec.structs.replace(PROOF, addresses=("fe80::1%eth0",)),
        msgspec.structs.replace(PROOF, addresses=("0.0.0.0",)),
        msgspec.structs.replace(PROOF, addresses=("ff02::1",)),
        msgspec.structs.replace(GRANT, role="king"),
        msgspec.structs.replace(GRANT, log=()),
        msgspec.structs.replace(GRANT, log=(bytes(577),)),
        msgspec.structs.replace(GRANT, log=(b"x",) * 4097),
        msgspec.structs.replace(GRANT, peers=(PEER,) * 257),
        msgspec.structs.replace(GRANT, peers=(msgspec.structs.replace(PEER, addresses=("x.org",)),)),
        msgspec.structs.replace(GRANT, name=" mac"),
        PairingHello(versions=(), spake=SPAKE),
        PairingHello(versions=(0,), spake=SPAKE),
        PairingHello(versions=(1,) * 17, spake=SPAKE),
        PairingHello(versions=(1,), spake=bytes(32)),
        PairingHello(versions=(1,), spake=bytes(34)),
        PairingAnswer(version=0, spake=SPAKE),
        PairingRefusal(reason="\x07"),
        PairingRefusal(reason="x" * 201),
        PairingDone(head=bytes(31)),
    ],
)
def test_message_beyond_limit_is_neither_encoded_nor_decoded(broken: messages.Message) -> None:
    with pytest.raises(PairingError):
        messages.encode(broken, LIMIT)
    with pytest.raises(PairingError):
        messages.decode(msgspec.msgpack.encode(broken), type(broken), limit=LIMIT)


def test_deeply_nested_bytes_raise_pairing_error() -> None:
    """The decoder raises an error of Python's own for them."""
    nested = b"\x82\xa1a" + b"\x91" * 1000
    assert len(nested) <= messages.HELLO_BYTES
    with pytest.raises(PairingError, match="cannot be read"):
        taken(OwnerNode().offer()).receive(nested)
    with pytest.raises(PairingError, match="cannot be read"):
        messages.decode(b"\x82\xa1a" + b"\x91" * 100_000, PairingGrant, limit=LIMIT)


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from(KINDS))
def test_decode_of_any_bytes_gives_message_or_pairing_error(data: bytes, kind: type[PairingProof]) -> None:
    try:
        message = messages.decode(data, kind, limit=LIMIT)
    except PairingError:
        return
    assert isinstance(message, kind)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 70000) | st.text(max_size=8) | st.binary(max_size=65),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.sampled_from(EVERY), st.data())
def test_decode_of_any_field_value_gives_message_or_pairing_error(
    message: messages.Message, data: st.DataObject
) -> None:
    fields = msgspec.msgpack.decode(messages.encode(message, LIMIT))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(values)
    try:
        read = messages.decode(msgspec.msgpack.encode(fields), type(message), limit=LIMIT)
    except PairingError:
        return
    assert messages.encode(read, LIMIT)


def test_grant_repr_hides_trust_log() -> None:
    assert repr(GRANT) == "Grant(0000-0000, guest, 1 entries)"
    assert "entry" not in str(GRANT.__rich_repr__())


def _channels() -> tuple[PairingChannel, PairingChannel]:
    joiner, offerer = (
        SpakeExchange("joiner", CODE.password, CODE.tag),
        SpakeExchange("offerer", CODE.password, CODE.tag),
    )
    key, same = joiner.finish(offerer.message), offerer.finish(joiner.message)
    assert key == same
    transcript = {"tag": CODE.tag, "hello": b"hello", "answer": b"answer"}
    return PairingChannel("joiner", key, **transcript), PairingChannel("offerer", same, **transcript)


def test_sealed_messages_keep_order_and_direction() -> None:
    joins, offers = _channels()
    first, second = joins.seal(b"first"), joins.seal(b"second")
    assert joins.open(first) is None, "what one sends is not taken by itself"
    assert offers.open(first) == b"first"
    assert offers.open(first) is None, "not twice"
    joins, offers = _channels()
    first, second = joins.seal(b"first"), joins.seal(b"second")
    assert offers.open(second) is None, "not out of order"
    assert offers.open(b"") is None
    assert first != offers.seal(b"first")


@pytest.mark.parametrize("part", ["tag", "hello", "answer", "key"])
def test_keys_and_signatures_depend_on_whole_transcript(part: str) -> None:
    transcript = {"key": bytes(32), "tag": CODE.tag, "hello": b"hello", "answer": b"answer"}
    changed = {**transcript, part: transcript[part][:-1] + b"\1"}
    joiner, offerer = PairingChannel("joiner", **transcript), PairingChannel("offerer", **changed)
    assert offerer.open(joiner.seal(b"word")) is None
    assert joiner.to_sign("joiner", b"word") != offerer.to_sign("joiner", b"word")
    assert joiner.to_sign("joiner", b"word") != joiner.to_sign("offerer", b"word")
    assert joiner.to_sign("joiner", b"wo", b"rd") != joiner.to_sign("joiner", b"w", b"ord")


def test_other_code_or_tag_gives_other_key() -> None:
    for password, tag in ((WRONG.password, CODE.tag), (CODE.password, bytes(16))):
        joiner = SpakeExchange("joiner", CODE.password, CODE.tag)
        offerer = SpakeExchange("offerer", password, tag)
        assert joiner.finish(offerer.message) != offerer.finish(joiner.message)


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_with_right_key_is_rejected_and_uses_up_code(data: bytes) -> None:
    """The sender knows the code but breaks the protocol."""
    offer = OWNER.offer()
    offerer = taken(offer)
    end = joiner()
    end.receive(sent(offerer.receive(sent(end.begin().send)).send))
    assert end._channel is not None
    fresh = end._channel
    fresh._sent = 0
    with pytest.raises(PairingError):
        offerer.receive(fresh.seal(data))
    assert offer.state(0.0) == "burned"


OWNER = OwnerNode()
