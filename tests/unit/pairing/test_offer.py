"""Pairing offers: time limit, one guess, and the outcome."""

from __future__ import annotations

import pytest

from barnraise.core.errors import PairingError
from barnraise.pairing import LIFETIME_S, Offerer, PairingOffer, grant_text, new_psk, offer_tag
from tests.unit.pairing.protocol_pair import CODE, OwnerNode, joiner, sent, taken, to_proof

OWNER = OwnerNode()


def test_offer_expires_after_its_time() -> None:
    offer = OWNER.offer(now=1000.0)
    assert offer.tag == offer_tag(7)
    assert offer.open_at(1000.0)
    assert offer.seconds_left(1000.0) == LIFETIME_S == 600.0
    assert offer.open_at(1599.9)
    assert isinstance(offer.take(1599.9), Offerer)
    assert not offer.open_at(1600.0)
    assert offer.seconds_left(1600.0) == 0.0
    assert offer.state(1600.0) == "expired"
    reason = offer.take(1600.0)
    assert isinstance(reason, str)
    assert "expired after 600 s" in reason


def test_used_code_does_not_expire_afterwards() -> None:
    offer = OWNER.offer()
    to_proof(joiner(), taken(offer))
    assert offer.state(1e6) == "used"
    assert offer.take(1e6) == "The code was used by pc."


def test_offer_sentence_names_outcome() -> None:
    offer = OWNER.offer()
    assert offer.sentence(0.0) == "The code is open."
    offerer = taken(offer)
    offerer.receive(sent(joiner().begin().send))
    assert offer.sentence(0.0) == "A machine is using the code now."
    offer.withdraw()
    assert offer.state(0.0) == "answered", "what was answered cannot be taken back"
    offerer.lost()
    assert offer.sentence(0.0).startswith("The code is used up: the other machine left")


def test_offer_can_be_withdrawn() -> None:
    offer = OWNER.offer()
    offerer = taken(offer)
    offer.withdraw()
    assert not offer.open_at(0.0)
    assert offer.take(0.0) == "The code was withdrawn."
    with pytest.raises(PairingError, match="used up"):
        offerer.receive(sent(joiner().begin().send))


def test_garbage_is_not_a_guess_but_limited() -> None:
    """Each message costs some milliseconds, which an attacker could exploit."""
    offer = OWNER.offer()
    for _ in range(31):
        with pytest.raises(PairingError):
            taken(offer).receive(b"garbage")
    assert offer.open_at(0.0)
    with pytest.raises(PairingError):
        taken(offer).receive(b"garbage")
    assert offer.state(0.0) == "burned"
    assert "do not belong to a pairing" in offer.sentence(0.0)


def test_garbage_after_a_good_guess_changes_nothing() -> None:
    offer = OWNER.offer()
    late = [taken(offer) for _ in range(40)]
    to_proof(joiner(), taken(offer))
    for offerer in late:
        with pytest.raises(PairingError, match="one guess"):
            offerer.receive(b"garbage")
    assert offer.state(0.0) == "used"


def test_offer_of_psk_stays_open() -> None:
    offer = OWNER.offer(new_psk("owner"))
    assert offer.open_at(1e9)
    for _ in range(40):
        with pytest.raises(PairingError):
            taken(offer).receive(b"garbage")
    assert offer.open_at(1e9)
    assert offer.sentence(0.0) == "The pre-shared key is open."
    offer.withdraw()
    assert offer.take(0.0) == "The pre-shared key was withdrawn."


def test_offer_repr_hides_words() -> None:
    assert (
        repr(PairingOffer(CODE, "guest", key=OWNER.key, name="mac", now=0.0)) == "Offer(Code(7), guest, open)"
    )


def test_grant_text_of_owner_names_rights_for_both_sides() -> None:
    here = grant_text("owner", "joiner", "mac")
    there = grant_text("owner", "offerer", "pc")
    assert here.startswith("Joined the cluster of mac, as an owner.\n")
    assert there.startswith("pc joined, as an owner.\n")
    for text in (here, there):
        assert "can now run code on each other" in text
        assert max(map(len, text.splitlines())) <= 80
    assert here.endswith("Undo: barnraise leave")
    assert "Undo: barnraise unpair pc" in there


def test_grant_text_of_guest_names_limits_for_both_sides() -> None:
    here, there = grant_text("guest", "joiner", "mac"), grant_text("guest", "offerer", "pc")
    assert "cannot run code on the cluster's machines" in here
    assert "cannot run code on this machine" in there
    for text in (here, there):
        assert "only to runs that it accepts" in text or "contributes to runs that it accepts" in text
        assert "add machines" in text


def test_grant_text_tells_about_machines_with_the_same_name() -> None:
    text = grant_text("owner", "offerer", "pc-6c8x", clash="2 machines are called pc: pc and pc-6c8x.")
    assert "\n2 machines are called pc: pc and pc-6c8x.\nUndo: barnraise unpair pc-6c8x" in text
