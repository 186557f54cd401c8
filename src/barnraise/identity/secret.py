"""Discovery secret, which the machines of a cluster share so that others get no answer."""

from __future__ import annotations

import secrets
import string
from pathlib import Path

from barnraise.core.errors import IdentityError
from barnraise.identity.private_file import load_or_create_private, read_private

SECRET_BYTES_MIN = 32
_HEXADECIMAL = frozenset(string.hexdigits.encode())
_PRINTABLE = frozenset(string.printable.encode())


def load_or_create_secret(path: Path) -> bytes:
    """Load this machine's own secret, or create a random one."""
    fresh = secrets.token_bytes(SECRET_BYTES_MIN).hex().encode() + b"\n"
    return read_secret(load_or_create_private(path, fresh), path)


def load_secret(path: Path) -> bytes:
    """Load a secret that the user has put there."""
    content = read_private(path)
    if content is None:
        raise IdentityError(
            f"there is no discovery secret at {path}",
            hint="Copy the file from a machine that has it (mode 0600), or correct the secret_file setting.",
        )
    return read_secret(content, path)


def read_secret(content: bytes, path: Path) -> bytes:
    """Parse hexadecimal text or raw bytes; the line end that an editor adds to text is ignored."""
    text = content.strip() if _PRINTABLE.issuperset(content) else content
    if len(text) >= 2 * SECRET_BYTES_MIN and len(text) % 2 == 0 and _HEXADECIMAL.issuperset(text):
        return bytes.fromhex(text.decode("ascii"))
    if len(text) < SECRET_BYTES_MIN:
        raise IdentityError(
            f"the discovery secret at {path} has {len(text)} bytes, fewer than {SECRET_BYTES_MIN}",
            hint=f"Write {SECRET_BYTES_MIN} random bytes, raw or hexadecimal, alike on every machine.",
        )
    return text
