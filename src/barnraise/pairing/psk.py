"""Pre-shared key for machines without a keyboard: 256 random bits and a role, in one line of text.

People never choose it. The checksum at the end finds a damaged copy and a role that was changed by hand.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from barnraise.core.errors import PairingError
from barnraise.identity.trust import Role
from barnraise.pairing.code import TAG_BYTES

PSK_BYTES = 32
_CHECK_DIGITS = 8
_LONGEST_INPUT = 400
_FORM = re.compile(r"(barnraise-psk-1 (owner|guest) ([0-9a-f]{64})) ([0-9a-f]{8})", re.ASCII)
_HINT = "Make one with `barnraise psk new` and copy its file unchanged; do not invent a key."


@dataclass(frozen=True, repr=False)
class Psk:
    """Pre-shared key and its role. ``str`` is the line for the file; ``repr`` hides the key."""

    role: Role
    key: bytes

    def __post_init__(self) -> None:
        if len(self.key) != PSK_BYTES or self.role not in ("owner", "guest"):
            raise PairingError("this is not a pre-shared key", hint=_HINT)

    def __str__(self) -> str:
        line = f"barnraise-psk-1 {self.role} {self.key.hex()}"
        return f"{line} {_check(line)}"

    def __repr__(self) -> str:
        return f"Psk({self.role})"

    @property
    def tag(self) -> bytes:
        return psk_tag(self)

    @property
    def password(self) -> bytes:
        return _derived(self, b"barnraise psk password 1\0")


def new_psk(role: Role) -> Psk:
    """Return a new random key for this role."""
    return Psk(role, secrets.token_bytes(PSK_BYTES))


def parse_psk(text: str) -> Psk:
    """Parse the one line of a key file; raise PairingError for anything that `new_psk` did not write."""
    if len(text) > _LONGEST_INPUT:
        raise PairingError("this is too long for a pre-shared key", hint=_HINT)
    match = _FORM.fullmatch(text.strip(" \t\r\n"))
    if match is None:
        raise PairingError("this is not a pre-shared key", hint=_HINT)
    line, role, key, check = match.groups()
    if check != _check(line):
        raise PairingError("the checksum at the end of the pre-shared key is wrong", hint=_HINT)
    return Psk("owner" if role == "owner" else "guest", bytes.fromhex(key))


def psk_tag(psk: Psk) -> bytes:
    """Return the tag by which machines with this key find each other; it reveals nothing of the key."""
    return _derived(psk, b"barnraise psk tag 1\0")[:TAG_BYTES]


def psk_preface_key(psk: Psk) -> bytes:
    """Return the key of the preface's MAC, so that other machines cannot even make this one compute."""
    return _derived(psk, b"barnraise psk preface 1\0")


def _derived(psk: Psk, purpose: bytes) -> bytes:
    # The role is part of it: the same key under another role is another key.
    return hmac.digest(psk.key, purpose + psk.role.encode("ascii"), hashlib.sha3_256)


def _check(line: str) -> str:
    return hashlib.sha3_256(line.encode("ascii")).hexdigest()[:_CHECK_DIGITS]
