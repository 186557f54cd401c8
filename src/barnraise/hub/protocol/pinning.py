"""How a member knows the server that it connects to, before it says anything.

A hub that serves TLS itself shows a certificate of its own key, which the invite names: then nothing else
counts, neither names nor dates nor who signed it. A server with another key may be a proxy or tunnel in front
of the hub; its certificate must be an ordinary one, valid for its name. Either way every answer must be
signed by the hub itself (see `signing`).
"""

from __future__ import annotations

import socket
import ssl
from typing import Any
from urllib.request import getproxies

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from barnraise.core.errors import HandshakeError, HubAway
from barnraise.identity.node_id import NodeId


class PinnedContext(ssl.SSLContext):
    """TLS 1.3 with whoever holds the hub's key, and nobody else."""

    hub: NodeId

    @classmethod
    def of(cls, hub: NodeId) -> PinnedContext:
        context = cls(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the key is compared below, on every connection
        context.hub = hub
        return context

    def wrap_socket(self, *arguments: Any, **named: Any) -> ssl.SSLSocket:
        """The handshake proves that the server holds the key of its certificate; is it the hub's?"""
        made = super().wrap_socket(*arguments, **named)
        if _key_of(made.getpeercert(binary_form=True)) != self.hub.raw:
            made.close()
            raise HandshakeError("the server does not have the hub's key", hint=NEW_INVITE)
        return made

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Where the handshake is not done at once, nobody would compare the key."""
        raise HandshakeError(
            "the hub's key cannot be checked through a proxy that is itself reached by TLS",
            hint="Unset HTTPS_PROXY for the hub's address, or use an http:// proxy.",
        )


def context_for(host: str, port: int, hub: NodeId, timeout_s: float) -> ssl.SSLContext:
    """By what the server shows. If it cannot be asked, or through a proxy, ordinary verification it is.

    HubAway if it is too slow: the next time it may show the hub's key.
    """
    pinned = PinnedContext.of(hub)
    try:
        # With its name, by which a proxy that only passes TLS on finds the hub.
        with (
            socket.create_connection((host, port), timeout_s) as link,
            pinned.wrap_socket(link, server_hostname=host),
        ):
            return pinned
    except TimeoutError as error:
        if not getproxies():
            raise HubAway(f"{host}:{port} does not answer in time") from error
        return ssl.create_default_context()
    except (HandshakeError, OSError, ValueError):
        return ssl.create_default_context()


def _key_of(certificate: bytes | None) -> bytes | None:
    if certificate is None:
        return None
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except ValueError:
        return None
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else None


NEW_INVITE = "Ask the person who sent the invite for a new one; do not go on with this address."
