"""TLS handshakes over real sockets: the right peer passes, every other is rejected."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from barnraise.core.errors import HandshakeError, IdentityError
from barnraise.identity import NodeId, NodeKey, WorkerCredentials, anchor, delegate
from barnraise.identity import delegation as delegation_module
from barnraise.identity.keys import private_pem
from barnraise.transport.links.tls import CIPHERS, client_context, peer, server_context, write_openssl_conf

ALPHA, BETA, STRANGER = (NodeKey.generate() for _ in range(3))
TRUSTED = [ALPHA.id, BETA.id]
SERVER, CLIENT = b"S" * 16, b"C" * 16


def meet(
    server: ssl.SSLContext, client: ssl.SSLContext, check: Callable[[ssl.SSLSocket, ssl.SSLSocket], None]
) -> None:
    """Do a handshake over loopback and check the peer; raise the server's error, else the client's."""
    faults: list[Exception] = []
    accepted: list[ssl.SSLSocket] = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            raw, _ = door.accept()
            raw.settimeout(60)
            try:
                accepted.append(server.wrap_socket(raw, server_side=True))
                accepted[0].sendall(b"!")
            except OSError as error:
                faults.append(error)
                raw.close()

        thread = threading.Thread(target=serve)
        thread.start()
        raw = socket.create_connection(door.getsockname(), timeout=60)
        try:
            with client.wrap_socket(raw) as dialled:
                # A client learns that it was turned away only when it reads: TLS 1.3 lets it finish first.
                dialled.recv(1)
                thread.join()
                if not faults:
                    check(dialled, accepted[0])
        except OSError as error:
            thread.join()
            faults.append(error)
        finally:
            raw.close()
            thread.join()
            for connection in accepted:
                connection.close()
    if faults:
        raise faults[0]


def credentials(node: NodeKey, worker: bytes, run: str = "mnist") -> WorkerCredentials:
    return delegate(node, run=run, worker=worker)


def shake(server: WorkerCredentials, client: WorkerCredentials, trusted: list[NodeId] = TRUSTED) -> None:
    def check(dialled: ssl.SSLSocket, accepted: ssl.SSLSocket) -> None:
        identity = peer(dialled, run="mnist", expect_worker=SERVER, expect_node=ALPHA.id)
        assert (identity.node, identity.worker) == (ALPHA.id, SERVER)
        identity = peer(accepted, run="mnist", expect_worker=CLIENT, expect_node=BETA.id)
        assert (identity.node, identity.worker) == (BETA.id, CLIENT)
        assert dialled.version() == accepted.version() == "TLSv1.3"
        assert not dialled.session_reused

    meet(server_context(server, trusted), client_context(client, trusted), check)


def test_expected_peers_connect() -> None:
    shake(credentials(ALPHA, SERVER), credentials(BETA, CLIENT))


def test_dates_of_certificates_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delegation_module, "_NOT_BEFORE", datetime(2001, 1, 1, tzinfo=UTC))
    monkeypatch.setattr(delegation_module, "_NOT_AFTER", datetime(2001, 1, 2, tzinfo=UTC))
    shake(credentials(ALPHA, SERVER), credentials(BETA, CLIENT))


def test_untrusted_client_is_rejected() -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(credentials(ALPHA, SERVER), credentials(STRANGER, CLIENT))


def test_untrusted_server_is_rejected() -> None:
    with pytest.raises(ssl.SSLError):
        shake(credentials(STRANGER, SERVER), credentials(BETA, CLIENT))


def test_client_without_certificate_is_rejected() -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    with pytest.raises(ssl.SSLError):
        meet(server_context(credentials(ALPHA, SERVER), TRUSTED), bare, lambda *_: None)


def test_tls_1_2_is_refused() -> None:
    old = client_context(credentials(BETA, CLIENT), TRUSTED)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        meet(server_context(credentials(ALPHA, SERVER), TRUSTED), old, lambda *_: None)


def test_worker_of_other_run_is_rejected() -> None:
    with pytest.raises(HandshakeError, match="not of run 'mnist'"):
        shake(credentials(ALPHA, SERVER), credentials(BETA, CLIENT, run="other"))


def test_other_worker_of_run_is_rejected() -> None:
    with pytest.raises(HandshakeError, match="expected was worker"):
        shake(credentials(ALPHA, SERVER), credentials(BETA, b"X" * 16))


def test_trusted_node_cannot_act_as_worker_of_other_node() -> None:
    with pytest.raises(HandshakeError, match="expected was machine"):
        shake(credentials(ALPHA, SERVER), credentials(ALPHA, CLIENT))


def _forged_by(signer: WorkerCredentials, *, as_node: NodeKey) -> WorkerCredentials:
    """Return a certificate in the node's name, signed by a worker's key, with the worker's leaf behind it."""
    private = Ed25519PrivateKey.generate()
    issuer = load_pem_private_key(signer.key_pem, None)
    assert isinstance(issuer, Ed25519PrivateKey)
    leaf = x509.load_pem_x509_certificate(signer.certificate_pem)
    builder = x509.CertificateBuilder(
        issuer_name=leaf.subject,
        subject_name=leaf.subject,
        public_key=private.public_key(),
        serial_number=9,
        not_valid_before=delegation_module._NOT_BEFORE,
        not_valid_after=delegation_module._NOT_AFTER,
    )
    for value, critical in delegation_module._leaf_extensions(as_node.id, "mnist", CLIENT)[:4]:
        builder = builder.add_extension(value, critical)
    forged = builder.sign(issuer, None).public_bytes(Encoding.PEM)
    return WorkerCredentials(
        forged + signer.certificate_pem, private_pem(private), CLIENT, "mnist", as_node.id.raw
    )


def test_worker_cannot_sign_for_other_worker() -> None:
    forged = _forged_by(credentials(BETA, CLIENT), as_node=BETA)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(credentials(ALPHA, SERVER), forged)


def test_anchor_in_chain_of_peer_is_not_trusted() -> None:
    own = credentials(STRANGER, CLIENT)
    chain = own.certificate_pem + ssl.DER_cert_to_PEM_cert(anchor(STRANGER.id)).encode()
    with_anchor = WorkerCredentials(chain, own.key_pem, CLIENT, "mnist", STRANGER.id.raw)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(credentials(ALPHA, SERVER), with_anchor)


def test_self_made_authority_with_trusted_name_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    true_name = delegation_module._node_name
    with monkeypatch.context() as patch:
        patch.setattr(delegation_module, "_node_name", lambda _: true_name(BETA.id))
        own = credentials(STRANGER, CLIENT)
        chain = own.certificate_pem + ssl.DER_cert_to_PEM_cert(anchor(STRANGER.id)).encode()
    forged = WorkerCredentials(chain, own.key_pem, CLIENT, "mnist", BETA.id.raw)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(credentials(ALPHA, SERVER), forged)


def test_context_without_trusted_nodes_raises() -> None:
    with pytest.raises(IdentityError, match="no machine is trusted"):
        server_context(credentials(ALPHA, SERVER), [])


def test_key_of_other_certificate_raises() -> None:
    first, second = credentials(ALPHA, SERVER), credentials(ALPHA, SERVER)
    mixed = WorkerCredentials(first.certificate_pem, second.key_pem, SERVER, "mnist", ALPHA.id.raw)
    with pytest.raises(IdentityError, match="do not belong"):
        server_context(mixed, TRUSTED)


def test_no_key_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client_context(credentials(BETA, CLIENT), TRUSTED)
    assert list(tmp_path.iterdir()) == []


def test_openssl_conf_prefers_aes_128(tmp_path: Path) -> None:
    path = write_openssl_conf(tmp_path)
    assert write_openssl_conf(tmp_path) == path
    program = (
        "import ssl; c = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); "
        "print(*[x['name'] for x in c.get_ciphers() if x['protocol'] == 'TLSv1.3'])"
    )
    for place in (tmp_path, tmp_path / "absent"):
        environment = os.environ | {"OPENSSL_CONF": str(place / "openssl.cnf")}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        if place == tmp_path:
            assert tuple(done.stdout.split()) == CIPHERS
