"""Codes that this machine has tried to join with. Pure.

A code allows one guess at each end. A false offerer learns from our proof whether its guess was right. The
true offer is then still open, and a second try with the same code would be a second guess. So each code is
refused here after its first try, for as long as an offer lives.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from barnraise.pairing.code import PairingCode
from barnraise.pairing.offer import LIFETIME_S

MOST_SPENT = 64
_DIGEST_BYTES = 32


class SpentCode(msgspec.Struct, frozen=True, array_like=True):
    """Hash of a code, and the wall clock of its try."""

    digest: Annotated[bytes, Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]
    at: float


SpentCodes = tuple[SpentCode, ...]
_decoder = msgspec.msgpack.Decoder(SpentCodes)


def is_spent(spent: SpentCodes, code: PairingCode, now: float) -> bool:
    """Return True if this code was tried here within its lifetime, also if the clock was set back."""
    digest = _digest(code)
    return any(tried.digest == digest and abs(now - tried.at) < LIFETIME_S for tried in spent)


def with_spent(spent: SpentCodes, code: PairingCode, now: float) -> SpentCodes:
    """Return the codes with one more, without those that cannot be open any more."""
    live = tuple(tried for tried in spent if abs(now - tried.at) < LIFETIME_S)
    return (*live, SpentCode(_digest(code), now))[-MOST_SPENT:]


def encode_spent(spent: SpentCodes) -> bytes:
    return msgspec.msgpack.encode(spent)


def decode_spent(data: bytes | None) -> SpentCodes:
    """Return the codes that were stored; none if there are none or they cannot be read."""
    try:
        return _decoder.decode(data) if data else ()
    except (msgspec.DecodeError, ValueError):
        return ()


def _digest(code: PairingCode) -> bytes:
    return hashlib.sha3_256(code.password).digest()
