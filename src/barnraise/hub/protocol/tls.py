"""TLS with the hub's own key: whoever holds an invite knows the key, and needs no authority for it."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from barnraise.hub.storage.create import KEY_FILE
from barnraise.identity.keys import NodeKey

_FILE = "hub.crt"
# Dates authorise nothing: the key does. A clock that was never set must not lock anybody out.
_FIRST = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_LAST = datetime.datetime(2200, 1, 1, tzinfo=datetime.UTC)


def server_context(directory: Path, key: NodeKey) -> ssl.SSLContext:
    """TLS 1.3 only, with a certificate that the hub's key signed for itself."""
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
