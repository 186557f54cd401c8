"""TLS between a hub and its members: the hub's own certificate, and certificate pinning on the client.

A hub that serves TLS itself presents a self-signed certificate of its own key. Its invites say so and name
that key. The client then compares the key and ignores names, dates and authorities. No other certificate is
accepted, not even one that an authority issued.

The invites of a hub behind a proxy or tunnel that ends TLS say that, too. There, another key is accepted if
its certificate is valid for the name. Either way the hub itself must sign every response (see `signatures`).
"""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path
from typing import Any
from urllib.request import getproxies

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from barnraise.core.errors import HandshakeError, HubAway, TransportError
from barnraise.identity.keys import NodeKey
from barnraise.identity.node_id import NodeId
from barnraise.transport.ipc.dial_request import open_connection

KEY_FILE = "hub.key"
_FILE = "hub.crt"
# The key authorizes, not the dates. A clock that was never set must not prevent connections.
_FIRST = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_LAST = datetime.datetime(2200, 1, 1, tzinfo=datetime.UTC)
NEW_INVITE = "Ask the sender of the invite for a new one; do not use this address."


def server_context(directory: Path, key: NodeKey) -> ssl.SSLContext:
    """Return a TLS 1.3 context with a certificate that the hub's key signed for itself."""
    path = directory / _FILE
    path.write_bytes(_certificate(key).public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(path, directory / KEY_FILE)
    return context


def _certificate(key: NodeKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"barnraise hub {key.id.short}")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.signer.public_key())
        .serial_number(int.from_bytes(key.id.raw[:8], "big") >> 1 | 1)
        .not_valid_before(_FIRST)
        .not_valid_after(_LAST)
        .sign(key.signer, None)
    )


class PinnedContext(ssl.SSLContext):
    """TLS 1.3 client context that accepts only the hub's key."""

    hub: NodeId

    @classmethod
    def of(cls, hub: NodeId) -> PinnedContext:
        """Return a context that is pinned to this hub."""
        context = cls(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the key is compared below, on every connection
        context.hub = hub
        return context

    def wrap_socket(self, *arguments: Any, **named: Any) -> ssl.SSLSocket:
        """Perform the handshake, then compare the key of the server's certificate.

        Raise HandshakeError if it is not the hub's.
        """
        made = super().wrap_socket(*arguments, **named)
        if _key_of(made.getpeercert(binary_form=True)) != self.hub.raw:
            made.close()
            raise HandshakeError("the server does not have the hub's key", hint=NEW_INVITE)
        return made

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Raise HandshakeError, because the key cannot be compared before a deferred handshake."""
        raise HandshakeError(
            "the hub's key cannot be checked through a proxy that is itself reached by TLS",
            hint="Unset HTTPS_PROXY for the hub's address, or use an http:// proxy.",
        )


def context_for(
    host: str, port: int, hub: NodeId, timeout_s: float, *, pinned: bool, at: str | None = None
) -> ssl.SSLContext:
    """Return a context for the hub at this address; a pinned one accepts the hub's key only.

    If the invite does not pin the key, ask the server for its key first. A server with another key is a proxy
    and needs an ordinary certificate. Raise HubAway if the server is too slow to show its key. ``at``: the
    address that the host's name was resolved to already.
    """
    context = PinnedContext.of(hub)
    if pinned:
        return context
    try:
        # With its name, by which a proxy that only passes TLS on finds the hub.
        with (
            open_connection(at or host, port, timeout_s) as link,
            context.wrap_socket(link, server_hostname=host),
        ):
            return context
    except TimeoutError as error:
        if not getproxies():
            raise HubAway(f"{host}:{port} does not answer in time") from error
        return ssl.create_default_context()
    except (TransportError, OSError, ValueError):
        return ssl.create_default_context()


def _key_of(certificate: bytes | None) -> bytes | None:
    if certificate is None:
        return None
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm):
        return None
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else None
