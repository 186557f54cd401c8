"""Pairing of two machines: codes, pre-shared keys, and the protocol between the two sides.

The protocol is sans-IO: the agent moves the bytes and passes the time. Sockets belong in ``agent`` and
``transport``.
"""

from barnraise.pairing.code import PairingCode, new_code, offer_tag, parse_code
from barnraise.pairing.messages import PairingPeer
from barnraise.pairing.offer import LIFETIME_S, OfferState, PairingOffer, grant_text
from barnraise.pairing.protocol import (
    Joiner,
    Offerer,
    PairingAborted,
    PairingConfirmed,
    PairingJoined,
    PairingProven,
    PairingStep,
    PeerIntroduction,
)
from barnraise.pairing.psk import Psk, new_psk, parse_psk, psk_preface_key, psk_tag

__all__ = [
    "LIFETIME_S",
    "Joiner",
    "OfferState",
    "Offerer",
    "PairingAborted",
    "PairingCode",
    "PairingConfirmed",
    "PairingJoined",
    "PairingOffer",
    "PairingPeer",
    "PairingProven",
    "PairingStep",
    "PeerIntroduction",
    "Psk",
    "grant_text",
    "new_code",
    "new_psk",
    "offer_tag",
    "parse_code",
    "parse_psk",
    "psk_preface_key",
    "psk_tag",
]
