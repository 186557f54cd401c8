"""TLS contexts of a link, and the check of its peer's identity.

OpenSSL verifies that a trusted node signed the peer's leaf certificate. `peer` then checks its run and
worker. TLS 1.3 only, mutual authentication, no session resumption.
"""

from __future__ import annotations

import functools
import os
import ssl
import tempfile
from collections.abc import Iterable
from pathlib import Path

from barnraise.core.errors import HandshakeError, IdentityError
from barnraise.core.files import discard, write_atomically
from barnraise.identity import NodeId, WorkerCredentials, WorkerIdentity, anchor, read_worker

# X509_V_FLAG_NO_CHECK_TIME: for us dates authorise nothing, and home machines have wrong clocks.
_NO_CHECK_TIME = 0x200000
# One core encrypts about a third more bytes with AES-128 than with AES-256.
CIPHERS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_OPENSSL_CONF = f"""\
# Python before 3.15 cannot choose TLS 1.3 cipher suites; OpenSSL reads them from here.
openssl_conf = barnraise
[barnraise]
ssl_conf = sections
[sections]
system_default = tls
[tls]
MinProtocol = TLSv1.3
Ciphersuites = {":".join(CIPHERS)}
"""


def server_context(credentials: WorkerCredentials, trusted: Iterable[NodeId]) -> ssl.SSLContext:
    """Return the context of the side that was dialled."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials, trusted)
    context.num_tickets = 0
    return context


def client_context(credentials: WorkerCredentials, trusted: Iterable[NodeId]) -> ssl.SSLContext:
    """Return the context of the side that dials."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials, trusted)


def peer(
    connection: ssl.SSLSocket | ssl.SSLObject,
    *,
    run: str,
    expect_worker: bytes | None = None,
    expect_node: NodeId | None = None,
) -> WorkerIdentity:
    """Return the worker at the other end of a finished handshake.

    Raise HandshakeError if it is not the expected one. A worker id alone is only as good as the trusted
    nodes: pass the node, too, whenever it is known.
    """
    if connection.version() != "TLSv1.3":
        raise HandshakeError(f"the link uses {connection.version()} instead of TLS 1.3")
    certificate = connection.getpeercert(binary_form=True)
    if certificate is None:
        raise HandshakeError("the other side showed no certificate")
    try:
        identity = read_worker(certificate)
    except IdentityError as error:
        raise HandshakeError(f"the certificate of the other side is not valid: {error.message}") from error
    if identity.run != run:
        raise HandshakeError(
            f"the other side is {identity}, not of run {run!r}",
            hint="Start the workers of one run with one and the same run name.",
        )
    if expect_node is not None and identity.node != expect_node:
        raise HandshakeError(
            f"the other side is {identity}, expected was machine {expect_node.short}", hint=_STALE
        )
    if expect_worker is not None and identity.worker != expect_worker:
        raise HandshakeError(
            f"the other side is {identity}, expected was worker {expect_worker.hex()[:8]}", hint=_STALE
        )
    return identity


def write_openssl_conf(directory: Path) -> Path:
    """Write the file for the OPENSSL_CONF of a communication process, in place of the system's."""
    path = directory / "openssl.cnf"
    write_atomically(path, _OPENSSL_CONF.encode("ascii"), shared=True)
    return path


@functools.lru_cache(maxsize=1024)
def _anchor(node: NodeId) -> bytes:
    # An agent makes new contexts whenever trust changes, and most nodes stay.
    return anchor(node)


def _context(protocol: int, credentials: WorkerCredentials, trusted: Iterable[NodeId]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # peers are known by key; names and addresses prove nothing
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    choose = getattr(context, "set_ciphersuites", None)
    if choose is not None:
        choose(":".join(CIPHERS))
    anchors = b"".join(_anchor(node) for node in dict.fromkeys(trusted))
    if not anchors:
        raise IdentityError(
            "no machine is trusted, so none could connect", hint="Name at least the id of this machine."
        )
    context.load_verify_locations(cadata=anchors)
    _load_own(context, credentials)
    return context


def _load_own(context: ssl.SSLContext, credentials: WorkerCredentials) -> None:
    # Python hands a key to OpenSSL only by file name; mkstemp makes the file for us alone (0600).
    descriptor, path = tempfile.mkstemp(prefix="barnraise-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(credentials.key_pem + credentials.certificate_pem)
        context.load_cert_chain(path)
    except ssl.SSLError as error:
        raise IdentityError("the worker's own key and certificate do not belong together") from error
    finally:
        discard(Path(path))


_STALE = "The other worker was probably restarted: exchange worker ids again and connect again."
