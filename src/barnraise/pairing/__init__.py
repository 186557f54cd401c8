"""How two machines come to trust each other: codes, pre-shared keys, and the exchange between them.

Sans-IO: the agent moves the bytes and tells the time. May import ``identity``, the pure parts of
``transport``, and ``core``.
"""

from barnraise.pairing.code import Code, new_code, offer_tag, parse_code
from barnraise.pairing.messages import Peer
from barnraise.pairing.offer import LIFETIME_S, Offer, OfferState, grant_text
from barnraise.pairing.protocol import (
    Confirmed,
    Introduction,
    Joined,
    Joiner,
    Offerer,
    Proven,
    Step,
    Unspoken,
)
from barnraise.pairing.psk import Psk, new_psk, parse_psk, psk_preface_key, psk_tag

__all__ = [
    "LIFETIME_S",
    "Code",
    "Confirmed",
    "Introduction",
    "Joined",
    "Joiner",
    "Offer",
    "OfferState",
    "Offerer",
    "Peer",
    "Proven",
    "Psk",
    "Step",
    "Unspoken",
    "grant_text",
    "new_code",
    "new_psk",
    "offer_tag",
    "parse_code",
    "parse_psk",
    "psk_preface_key",
    "psk_tag",
]
