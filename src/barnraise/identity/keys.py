"""Node key: the private key of a machine, kept in one file and never shown."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from barnraise.core.errors import IdentityError
from barnraise.identity.node_id import NodeId
from barnraise.identity.private_file import load_or_create_private


class NodeKey:
    """Private key of one machine, which signs for it."""

    __slots__ = ("_private", "id")

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.id = NodeId(private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> NodeKey:
        """Create a key in memory only."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> NodeKey:
        """Load the key in this file, or create it. Two processes that create it at once get the same key."""
        content = load_or_create_private(path, private_pem(Ed25519PrivateKey.generate()))
        try:
            private = load_pem_private_key(content, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise IdentityError(f"{path} does not hold a readable private key", hint=_REPLACE) from error
        if not isinstance(private, Ed25519PrivateKey):
            raise IdentityError(f"{path} holds a key that is not Ed25519", hint=_REPLACE)
        return cls(private)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message."""
        return self._private.sign(message)

    @property
    def signer(self) -> Ed25519PrivateKey:
        """Return the private key for the certificate builder, which signs by itself."""
        return self._private

    def __repr__(self) -> str:
        return f"NodeKey({self.id.short})"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a node key never leaves its process")


def verify_signature(node: NodeId, signature: bytes, message: bytes) -> bool:
    """Return True if this node signed the message."""
    try:
        Ed25519PublicKey.from_public_bytes(node.raw).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def private_pem(private: Ed25519PrivateKey) -> bytes:
    """Encode a private key as PKCS 8 PEM, as OpenSSL reads it."""
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


_REPLACE = "Restore it from a backup, or move the whole directory away: this machine then is a new one."
