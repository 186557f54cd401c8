"""Encrypted channel from a shared password: SPAKE2, then HKDF, then ChaCha20-Poly1305. Pure.

The joiner is side A of SPAKE2 and the offerer side B. The keys are derived from SPAKE2's key and from the
hash of all messages in clear, so that a changed byte gives other keys.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError  # type: ignore[import-untyped]
from spake2.ed25519_basic import NotOnCurve  # type: ignore[import-untyped]

from barnraise.core.errors import PairingError
from barnraise.pairing.messages import SPAKE_BYTES

Side = Literal["joiner", "offerer"]

TAG_OVERHEAD = 16  # what sealing adds
_PROTOCOL = b"barnraise pairing 1"
_FIELD_PRIME = 2**255 - 19
_SIGN_BIT = 1 << 255
_LETTER: dict[Side, bytes] = {"joiner": b"A", "offerer": b"B"}
_OTHER: dict[Side, Side] = {"joiner": "offerer", "offerer": "joiner"}


class SpakeExchange:
    """One side of one SPAKE2 run, for a single use."""

    def __init__(self, side: Side, password: bytes, tag: bytes) -> None:
        self.side: Side = side
        self._tag = tag
        kind = SPAKE2_A if side == "joiner" else SPAKE2_B
        self._spake = kind(password, idA=_identity("joiner", tag), idB=_identity("offerer", tag))
        self.message: bytes = self._spake.start()

    def finish(self, message: bytes) -> bytes:
        """Return the key, which the other side has too if it used the same password."""
        _check_element(message, _OTHER[self.side])
        try:
            key: bytes = self._spake.finish(message)
        except (SPAKEError, NotOnCurve, ValueError) as error:
            raise PairingError("the other machine's half of the key exchange is not valid") from error
        return key

    def __repr__(self) -> str:
        return f"Exchange({self.side})"


class PairingChannel:
    """Encrypts what this side sends and decrypts what the other side sent, each in order."""

    def __init__(self, side: Side, key: bytes, *, tag: bytes, hello: bytes, answer: bytes) -> None:
        self.side: Side = side
        self._transcript = _transcript(tag, hello, answer)
        self._binding = self._derive(key, b"binding")
        self._sends = ChaCha20Poly1305(self._derive(key, f"from {side}".encode()))
        self._hears = ChaCha20Poly1305(self._derive(key, f"from {_OTHER[side]}".encode()))
        self._sent = 0
        self._heard = 0

    def seal(self, plain: bytes) -> bytes:
        self._sent += 1
        return self._sends.encrypt(_nonce(self._sent), plain, None)

    def open(self, sealed: bytes) -> bytes | None:
        """Decrypt a message; return None if the key differs or a byte was changed."""
        self._heard += 1
        try:
            return self._hears.decrypt(_nonce(self._heard), sealed, None)
        except (InvalidTag, ValueError):
            return None

    def to_sign(self, by: Side, *parts: bytes) -> bytes:
        """Return the bytes that a node key signs to prove that it took part in this exchange."""
        head = _joined(_PROTOCOL, b"signature of", by.encode(), self._transcript, self._binding)
        return head + _joined(*parts)

    def __repr__(self) -> str:
        return f"Channel({self.side})"

    def _derive(self, key: bytes, purpose: bytes) -> bytes:
        info = _joined(_PROTOCOL, purpose)
        return HKDF(algorithm=SHA256(), length=32, salt=self._transcript, info=info).derive(key)


def _identity(side: Side, tag: bytes) -> bytes:
    return _joined(_PROTOCOL, side.encode(), tag)


def _transcript(tag: bytes, hello: bytes, answer: bytes) -> bytes:
    content = _joined(_PROTOCOL, b"offer", tag, b"joiner", hello, b"offerer", answer)
    return hashlib.sha3_256(content).digest()


def _joined(*parts: bytes) -> bytes:
    """Join the parts, each with its length before it, so that no two lists give the same bytes."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _nonce(count: int) -> bytes:
    return count.to_bytes(12, "little")


def _check_element(message: bytes, side: Side) -> None:
    """Check what the library leaves open: the length, one form per group element, and zero with a sign."""
    height = int.from_bytes(message[1:], "little") & (_SIGN_BIT - 1)
    if len(message) != SPAKE_BYTES or message[:1] != _LETTER[side] or not 1 < height < _FIELD_PRIME:
        raise PairingError("the other machine's half of the key exchange has a wrong form")
