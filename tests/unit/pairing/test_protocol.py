"""Pairing protocol: guessing, replay, man in the middle and false claims fail."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.core.errors import PairingError, TrustError
from barnraise.identity import NodeId, NodeKey, Role, TrustLog, encode_entry
from barnraise.pairing import (
    Joiner,
    Offerer,
    PairingAborted,
    PairingConfirmed,
    PairingJoined,
    PairingOffer,
    PairingPeer,
    PairingProven,
    PeerIntroduction,
    Psk,
    messages,
    new_psk,
    protocol,
)
from barnraise.pairing.channel import PairingChannel, SpakeExchange
from barnraise.pairing.messages import PairingAnswer, PairingDone, PairingGrant, PairingHello, PairingProof
from tests.unit.pairing.protocol_pair import CODE, PC, WRONG, OwnerNode, joiner, proven, sent, taken, to_proof


@pytest.mark.parametrize("role", ["owner", "guest"])
def test_pairing_with_code_completes(role: Role) -> None:
    owner, key = OwnerNode(), NodeKey.generate()
    offer = owner.offer(role=role)
    offerer, end = taken(offer), joiner(key=key)
    assert offerer.begin().send is None
    seen = to_proof(end, offerer)
    assert seen == PairingProven(key.id, "pc", "Windows 11", ("192.168.1.20", "fd00::20"), 52416, role)
    assert offer.state(0.0) == "used"

    step = end.receive(owner.grant(offerer, seen))
    joined = step.done
    assert isinstance(joined, PairingJoined)
    assert (joined.log, joined.role, joined.offerer) == (owner.log, role, owner.key.id)
    assert joined.log.role(key.id) == role
    assert joined.log.secret == owner.log.secret
    assert joined.offerer_name == "mac"
    assert [(peer.id, peer.addresses, peer.port) for peer in joined.peers] == [
        (owner.key.id, ("192.168.1.10",), 52416)
    ]
    assert offerer.receive(sent(step.send)).done == PairingConfirmed(key.id)
    for over in (end, offerer):
        with pytest.raises(PairingError, match="after the end"):
            over.receive(b"more")


@pytest.mark.parametrize("role", ["owner", "guest"])
def test_psk_pairs_many_machines_in_its_role(role: Role) -> None:
    owner, psk = OwnerNode(), new_psk(role)
    offer = owner.offer(psk, role)
    for _ in range(2):
        offerer, end = taken(offer, now=1e9), joiner(psk)
        step = end.receive(owner.grant(offerer, to_proof(end, offerer)))
        assert isinstance(step.done, PairingJoined)
        assert step.done.role == role
    assert offer.open_at(1e9)
    with pytest.raises(PairingError, match="for the role"):
        owner.offer(psk, "guest" if role == "owner" else "owner")


def test_wrong_code_is_used_up_after_one_guess() -> None:
    owner = OwnerNode()
    offer = owner.offer()
    offerer, end = taken(offer), joiner(WRONG)
    answer = sent(offerer.receive(sent(end.begin().send)).send)
    proof = sent(end.receive(answer).send)
    with pytest.raises(PairingError, match="tried a wrong code"):
        offerer.receive(proof)
    assert offer.state(0.0) == "burned"
    assert "wrong code" in offer.sentence(0.0)
    assert "barnraise pair" in offer.sentence(0.0)
    assert isinstance(offer.take(0.0), str), "the right code comes too late"
    with pytest.raises(PairingError, match="after the end"):
        offerer.receive(proof)
    assert "the code was wrong" in end.lost().message


def test_one_of_two_connections_gets_the_guess() -> None:
    """Both connections start before either sends a guess."""
    offer = OwnerNode().offer()
    first, second = taken(offer), taken(offer)
    sent(first.receive(sent(joiner(WRONG).begin().send)).send)
    with pytest.raises(PairingError, match="one guess"):
        second.receive(sent(joiner().begin().send))
    assert offer.state(0.0) == "answered", "the second did no harm to the first"
    assert isinstance(offer.take(0.0), str)


def test_silence_after_answer_uses_up_code() -> None:
    """A joiner with the answer can test one guess without sending more."""
    offer = OwnerNode().offer()
    offerer = taken(offer)
    offerer.receive(sent(joiner(WRONG).begin().send))
    assert not offer.open_at(0.0)
    assert "left before" in offerer.lost().message
    assert offer.state(0.0) == "burned"


def test_wrong_psk_is_rejected_and_uses_up_nothing() -> None:
    owner, psk = OwnerNode(), new_psk("owner")
    offer = owner.offer(psk)
    other = Psk("owner", bytes(32))
    offerer, end = taken(offer), joiner(other)
    proof = sent(end.receive(sent(offerer.receive(sent(end.begin().send)).send)).send)
    with pytest.raises(PairingError, match="another pre-shared key"):
        offerer.receive(proof)
    assert offer.open_at(0.0)
    assert "pre-shared key differs" in end.lost().message


def test_recorded_session_cannot_be_replayed() -> None:
    owner = OwnerNode()
    end, offerer = joiner(), owner.taken()
    hello = sent(end.begin().send)
    answer = sent(offerer.receive(hello).send)
    proof = sent(end.receive(answer).send)
    seen = proven(offerer.receive(proof).done)
    grant = owner.grant(offerer, seen)
    done = sent(end.receive(grant).send)

    offer = owner.offer()  # even the very same code
    again = taken(offer)
    assert sent(again.receive(hello).send) != answer
    with pytest.raises(PairingError, match="wrong code"):
        again.receive(proof)
    assert offer.state(0.0) == "burned"

    victim = joiner()
    victim.begin()
    victim.receive(answer)
    with pytest.raises(PairingError, match="does not know the code"):
        victim.receive(grant)

    late = owner.taken()
    late.receive(hello)
    with pytest.raises(PairingError, match="wrong code"):
        late.receive(done)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_mitm_cannot_change_any_byte(data: st.DataObject) -> None:
    owner, changed = OwnerNode(), data.draw(st.integers(0, 4))
    offerer, end = owner.taken(), joiner()

    def passes(number: int, message: bytes | None) -> bytes:
        if number != changed:
            return sent(message)
        copy = bytearray(sent(message))
        copy[data.draw(st.integers(0, len(copy) - 1))] ^= data.draw(st.integers(1, 255))
        return bytes(copy)

    def session() -> None:
        answer = offerer.receive(passes(0, end.begin().send)).send
        proof = end.receive(passes(1, answer)).send
        step = offerer.receive(passes(2, proof))
        last = end.receive(passes(3, owner.grant(offerer, proven(step.done)))).send
        offerer.receive(passes(4, last))

    with pytest.raises(PairingError):
        session()


class Insider:
    """Man in the middle with the code, which decrypts everything."""

    def __init__(self, owner: OwnerNode, end: Joiner) -> None:
        self.offerer = owner.taken()
        hello = sent(end.begin().send)
        seen = messages.decode(hello, PairingHello, limit=1024)
        to_joiner = SpakeExchange("offerer", CODE.password, CODE.tag)
        answer = messages.encode(PairingAnswer(version=1, spake=to_joiner.message), 1024)
        key = to_joiner.finish(seen.spake)
        self.with_joiner = PairingChannel("offerer", key, tag=CODE.tag, hello=hello, answer=answer)

        to_offerer = SpakeExchange("joiner", CODE.password, CODE.tag)
        own = messages.encode(PairingHello(versions=(1,), spake=to_offerer.message), 1024)
        theirs = sent(self.offerer.receive(own).send)
        key = to_offerer.finish(messages.decode(theirs, PairingAnswer, limit=1024).spake)
        self.with_offerer = PairingChannel("joiner", key, tag=CODE.tag, hello=own, answer=theirs)

        opened = self.with_joiner.open(sent(end.receive(answer).send))
        self.proof = messages.decode(sent(opened), PairingProof, limit=8192)

    def proves(self, proof: PairingProof) -> PairingProven:
        return proven(self.offerer.receive(self.with_offerer.seal(messages.encode(proof, 8192))).done)


def test_mitm_with_code_cannot_relay_other_node() -> None:
    """The proof names the machine and the exchange, so it is not valid in another exchange."""
    between = Insider(OwnerNode(), joiner())
    with pytest.raises(PairingError, match="does not hold the node key"):
        between.proves(between.proof)


def test_mitm_cannot_replace_node_id_in_proof() -> None:
    own = NodeKey.generate()
    between = Insider(OwnerNode(), joiner())
    with pytest.raises(PairingError, match="does not hold the node key"):
        between.proves(msgspec.structs.replace(between.proof, node=own.id.raw))


def test_mitm_cannot_relay_grant() -> None:
    """The attacker knows the code and is admitted itself; its grant is not valid for the joiner."""
    owner, own, key = OwnerNode(), NodeKey.generate(), NodeKey.generate()
    end = joiner(key=key)
    between = Insider(owner, end)
    unsigned = msgspec.structs.replace(between.proof, node=own.id.raw, signature=messages.NO_SIGNATURE)
    transcript = between.with_offerer.to_sign("joiner", messages.encode(unsigned, 8192))
    seen = between.proves(msgspec.structs.replace(unsigned, signature=own.sign(transcript)))
    assert seen.node == own.id
    plain = sent(between.with_offerer.open(owner.grant(between.offerer, seen)))
    with pytest.raises(PairingError, match="does not hold the node key"):
        end.receive(between.with_joiner.seal(plain))


def _granting(key: NodeKey, log: TrustLog, role: Role, by: NodeKey, end: Joiner) -> bytes:
    """Return a grant of an offerer that breaks the rules but has the code."""
    hello = sent(end.begin().send)
    exchange = SpakeExchange("offerer", CODE.password, CODE.tag)
    answer = messages.encode(PairingAnswer(version=1, spake=exchange.message), 1024)
    secret = exchange.finish(messages.decode(hello, PairingHello, limit=1024).spake)
    channel = PairingChannel("offerer", secret, tag=CODE.tag, hello=hello, answer=answer)
    channel.open(sent(end.receive(answer).send))
    grant = PairingGrant(
        node=by.id.raw,
        name="mac",
        role=role,
        log=tuple(map(encode_entry, log.entries)),
        peers=(),
        signature=messages.NO_SIGNATURE,
    )
    transcript = channel.to_sign("offerer", messages.encode(grant, messages.GRANT_BYTES), key.id.raw)
    signed = msgspec.structs.replace(grant, signature=by.sign(transcript))
    return channel.seal(messages.encode(signed, messages.GRANT_BYTES))


def _admitted(owner: OwnerNode, key: NodeKey, role: Role) -> TrustLog:
    return owner.log.extended(owner.log.admit(owner.key, key.id, role, "pc"))


def test_joiner_rejects_log_without_its_admission() -> None:
    owner, key, guest = OwnerNode(), NodeKey.generate(), NodeKey.generate()
    good = _admitted(owner, key, "owner")
    end = joiner(key=key)
    assert isinstance(end.receive(_granting(key, good, "owner", owner.key, end)).done, PairingJoined)

    out = good.extended(good.revoke(owner.key, key.id))
    with_guest = good.extended(good.admit(owner.key, guest.id, "guest", "visitor"))
    for log, role, by, problem in (
        (owner.log, "owner", owner.key, "does not admit this machine"),
        (out, "owner", owner.key, "does not admit this machine"),
        (good, "guest", owner.key, "does not admit this machine in the role"),
        (good, "owner", NodeKey.generate(), "not an owner of the cluster"),
        (with_guest, "owner", guest, "not an owner of the cluster"),
    ):
        end = joiner(key=key)
        with pytest.raises(PairingError, match=problem):
            end.receive(_granting(key, log, role, by, end))  # type: ignore[arg-type]


def test_joiner_rejects_log_that_is_cut_or_forged() -> None:
    owner, key = OwnerNode(), NodeKey.generate()
    log = _admitted(owner, key, "owner")
    forged = msgspec.structs.replace(log.entries[1], signature=bytes(64))
    for entries in (log.entries[1:], (*log.entries, log.entries[1]), (log.entries[0], forged)):
        odd = TrustLog(entries, (), (), {}, {})
        end = joiner(key=key)
        with pytest.raises(PairingError, match="trust log is not valid"):
            end.receive(_granting(key, odd, "owner", owner.key, end))


def test_joiner_rejects_other_role_than_agreed() -> None:
    owner, key = OwnerNode(), NodeKey.generate()
    end = joiner(key=key, role="guest")
    with pytest.raises(PairingError, match="grants the role owner, not guest"):
        end.receive(_granting(key, _admitted(owner, key, "owner"), "owner", owner.key, end))


def test_cloned_node_key_is_named_in_error() -> None:
    owner = OwnerNode()
    with pytest.raises(PairingError, match="same node key") as caught:
        to_proof(joiner(key=owner.key), owner.taken())
    assert "cloned" in caught.value.hint


def test_member_that_pairs_again_keeps_its_role() -> None:
    """The machine was admitted but never learned of it; a new code helps."""
    owner, key = OwnerNode(), NodeKey.generate()
    owner.log = _admitted(owner, key, "guest")
    offerer, end = owner.taken(role="guest"), joiner(key=key)
    to_proof(end, offerer)
    assert isinstance(end.receive(offerer.grant(owner.log, None, [])).done, PairingJoined)
    offerer, end = owner.taken(role="owner"), joiner(key=key)
    to_proof(end, offerer)
    with pytest.raises(PairingError, match="in this cluster already, as guest"):
        offerer.grant(owner.log, None, [])
    with pytest.raises(PairingError, match=r"refused: A role is for good\."):
        end.receive(offerer.refuse("A role is for good."))


def test_grant_without_admission_raises() -> None:
    owner = OwnerNode()
    offerer = owner.taken()
    seen = to_proof(joiner(), offerer)
    with pytest.raises(PairingError, match="does not admit"):
        offerer.grant(owner.log, None, [])
    entry = owner.log.admit(owner.key, seen.node, "owner", "pc")
    with pytest.raises(TrustError):
        offerer.grant(owner.log, msgspec.structs.replace(entry, signature=bytes(64)), [])
    with pytest.raises(PairingError, match="not an owner of the cluster any more"):
        offerer.grant(TrustLog.found(NodeKey.generate(), "other"), None, [])
    assert offerer.grant(owner.log, entry, [])
    with pytest.raises(AssertionError):
        offerer.refuse("too late")
    with pytest.raises(AssertionError):
        owner.taken().grant(owner.log, None, [])


def test_refusal_text_is_printable() -> None:
    offerer, end = OwnerNode().taken(), joiner()
    to_proof(end, offerer)
    with pytest.raises(PairingError, match="refused: nothing   is decided xxx") as caught:
        end.receive(offerer.refuse("nothing \x1b is decided\n" + "x" * 5000))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300


def test_grant_drops_peers_that_are_not_members_and_limits_their_number() -> None:
    owner = OwnerNode()
    offerer, end = owner.taken(), joiner()
    seen = to_proof(end, offerer)
    entry = owner.log.admit(owner.key, seen.node, "owner", "pc")
    peers = [PairingPeer.of(owner.key.id, [f"10.0.0.{n}" for n in range(1, 99)], 1)]
    peers += [PairingPeer.of(NodeId(bytes([n]) * 32), ["10.0.0.1"], 1) for n in range(256)]
    joined = end.receive(offerer.grant(owner.log, entry, peers)).done
    assert isinstance(joined, PairingJoined)
    assert [peer.id for peer in joined.peers] == [owner.key.id]
    assert len(joined.peers[0].addresses) == 16


def test_addresses_that_cannot_be_dialled_are_not_sent() -> None:
    addresses = ("10.0.0.1", "10.0.0.1", "fe80::1%eth0", "0.0.0.0", "224.0.0.1", "::", "mac.local", "")
    owner = OwnerNode()
    end = Joiner(CODE, NodeKey.generate(), PeerIntroduction("pc", "Linux", (*addresses, "fe80::1"), 1))
    assert to_proof(end, owner.taken()).addresses == ("10.0.0.1", "fe80::1")


def test_versions_are_negotiated_and_mismatch_uses_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = OwnerNode().offer()
    end = joiner()
    with monkeypatch.context() as newer:
        newer.setattr(messages, "VERSIONS", (2, 3))
        hello = sent(end.begin().send)
        step = taken(offer).receive(hello)
        assert step.done is None, "the two agree"
    offer = OwnerNode().offer()
    step = taken(offer).receive(hello)
    assert isinstance(step.done, PairingAborted)
    assert "there is no common pairing version: here 1, there 2, 3" in step.done.reason
    assert offer.open_at(0.0)
    with monkeypatch.context() as newer:
        newer.setattr(messages, "VERSIONS", (2, 3))
        with pytest.raises(PairingError, match="here 2, 3, there 1") as caught:
            end.receive(sent(step.send))
    assert "still good" in caught.value.hint


def test_mitm_cannot_downgrade_version(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, end = OwnerNode(), joiner()
    offerer = owner.taken()
    with monkeypatch.context() as both:
        both.setattr(messages, "VERSIONS", (1, 2))
        hello = sent(end.begin().send)
        spake = messages.decode(hello, PairingHello, limit=1024).spake
        lowered = messages.encode(PairingHello(versions=(1,), spake=spake), 1024)
        proof = sent(end.receive(sent(offerer.receive(lowered).send)).send)
        with pytest.raises(PairingError):
            offerer.receive(proof)


def test_version_that_was_not_offered_is_rejected() -> None:
    end = joiner()
    end.begin()
    spake = SpakeExchange("offerer", CODE.password, CODE.tag).message
    with pytest.raises(PairingError, match="version 9, which was not offered"):
        end.receive(messages.encode(PairingAnswer(version=9, spake=spake), 1024))


def test_message_larger_than_limit_is_rejected() -> None:
    owner = OwnerNode()
    offerer, end = owner.taken(), joiner()
    assert (offerer.limit, end.limit) == (1024, 1024)
    seen = to_proof(end, offerer)
    assert (offerer.limit, end.limit) == (256, 2 << 20)
    with pytest.raises(PairingError, match="at most 2097152"):
        end.receive(bytes((2 << 20) + 1))
    owner.grant(offerer, seen)
    with pytest.raises(PairingError, match="at most 256"):
        offerer.receive(bytes(257))
    offerer = owner.taken()
    with pytest.raises(PairingError, match="at most 1024"):
        offerer.receive(bytes(1025))
    offer = owner.offer()
    offerer = taken(offer)
    offerer.receive(sent(joiner().begin().send))
    assert offerer.limit == 8192
    with pytest.raises(PairingError, match="at most 8192"):
        offerer.receive(bytes(8193))
    assert offer.state(0.0) == "burned"


def test_message_during_decision_ends_pairing() -> None:
    owner = OwnerNode()
    offer = owner.offer()
    offerer = taken(offer)
    to_proof(joiner(), offerer)
    with pytest.raises(PairingError, match="sent a message before the answer"):
        offerer.receive(b"x")
    assert offer.state(0.0) == "used"


def test_lost_connection_is_explained() -> None:
    owner = OwnerNode()
    end, offerer = joiner(), owner.taken()
    end.begin()
    assert "did not answer" in end.lost().message
    assert "left before" in offerer.lost().message
    offerer = owner.taken()
    seen = to_proof(joiner(), offerer)
    assert "pc left before the cluster had decided" in offerer.lost().message
    offerer = owner.taken()
    seen = to_proof(joiner(), offerer)
    owner.grant(offerer, seen)
    assert "pc is admitted" in offerer.lost().message


def test_bad_name_is_rejected_before_code_is_used_up() -> None:
    with pytest.raises(PairingError, match="a machine's name"):
        Joiner(CODE, NodeKey.generate(), PeerIntroduction("p\nc", "Linux", (), 1))
    with pytest.raises(PairingError):
        Joiner(CODE, NodeKey.generate(), PeerIntroduction("pc", "Linux", (), 0))
    with pytest.raises(TrustError, match="a machine's name"):
        PairingOffer(CODE, "owner", key=NodeKey.generate(), name="", now=0.0)


def test_done_for_other_log_is_rejected() -> None:
    owner = OwnerNode()
    offerer, end = owner.taken(), joiner()
    grant = owner.grant(offerer, to_proof(end, offerer))
    done = bytearray(sent(end.receive(grant).send))
    done[-1] ^= 1
    with pytest.raises(PairingError, match="cannot be decrypted"):
        offerer.receive(bytes(done))

    offerer, end = owner.taken(), joiner()
    owner.grant(offerer, to_proof(end, offerer))
    assert end._channel is not None
    other = end._channel.seal(messages.encode(PairingDone(head=bytes(32)), 256))
    with pytest.raises(PairingError, match="another trust log"):
        offerer.receive(other)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=1100))
def test_any_first_bytes_raise_pairing_error(data: bytes) -> None:
    offer = OWNER.offer()
    with pytest.raises(PairingError):
        taken(offer).receive(data)
    assert offer.open_at(0.0), "garbage is no guess"
    end = BEGUN
    with pytest.raises(PairingError):
        end._prove(data)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.sampled_from([b"A", b"B", b"S", b"\0"]))
def test_any_group_element_is_accepted_or_rejected(element: bytes, side: bytes) -> None:
    """Points off the curve, of small order, or in a second form raise our own error."""
    offer = OWNER.offer()
    hello = messages.encode(PairingHello(versions=(1,), spake=side + element), 1024)
    try:
        step = taken(offer).receive(hello)
    except PairingError:
        assert offer.open_at(0.0)
    else:
        assert side == b"A"
        assert step.send is not None
        assert not offer.open_at(0.0)


FIELD_PRIME = 2**255 - 19
ODD_POINTS = {
    "zero": 1,
    "zero in a second form": FIELD_PRIME + 1,
    "of order two": FIELD_PRIME - 1,
    "of order four": 0,
    "of order four in a second form": FIELD_PRIME,
    "off the curve": 2,
    "zero with a sign": 1 | 1 << 255,
}


@pytest.mark.parametrize("name", ODD_POINTS)
def test_odd_group_elements_are_rejected(name: str) -> None:
    offer = OWNER.offer()
    spake = b"A" + ODD_POINTS[name].to_bytes(32, "little")
    with pytest.raises(PairingError, match="half of the key exchange"):
        taken(offer).receive(messages.encode(PairingHello(versions=(1,), spake=spake), 1024))


@pytest.mark.parametrize("letter", [b"A", b"B"])
def test_answer_that_reflects_hello_is_rejected(letter: bytes) -> None:
    end = joiner()
    spake = messages.decode(sent(end.begin().send), PairingHello, limit=1024).spake
    with pytest.raises(PairingError, match="half of the key exchange"):
        end.receive(messages.encode(PairingAnswer(version=1, spake=letter + spake[1:]), 1024))


def test_repr_of_protocol_hides_secrets() -> None:
    owner = OwnerNode()
    offer = owner.offer()
    offerer, end = taken(offer), joiner()
    grant = owner.grant(offerer, to_proof(end, offerer))
    step = end.receive(grant)
    shown = "".join(map(repr, (offer, offerer, end, step, step.done, offerer._channel, end._exchange)))
    assert "crossover" not in shown
    assert "clockwork" not in shown
    for secret in (owner.log.secret, grant):
        assert repr(secret)[2:20] not in shown


OWNER = OwnerNode()
BEGUN = joiner()
BEGUN.begin()


def test_protocol_uses_no_socket_and_no_clock() -> None:
    for name in ("socket", "asyncio", "time", "os"):
        assert not hasattr(protocol, name)
    assert isinstance(OWNER.taken(), Offerer)
    assert PC.port == 52416
