"""Worker certificates: a node key signs the key of one incarnation of a worker.

A trust anchor is the X.509 form of a NodeId. Each machine makes it from the public key alone, so that OpenSSL
verifies the signatures. A worker's leaf certificate holds a new key, the run and the worker id; it cannot
sign certificates. Dates have no meaning.
"""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID, SignatureAlgorithmOID

from barnraise.core.errors import IdentityError
from barnraise.core.sanitize import is_printable
from barnraise.identity.credentials import WORKER_BYTES, WorkerCredentials
from barnraise.identity.keys import NodeKey, private_pem
from barnraise.identity.node_id import NodeId

LONGEST_RUN = 200
_LARGEST_CERTIFICATE = 8192
_SCHEME = "barnraise:worker?"
_SIGNATURE_HEAD = b"\x03\x41\x00"  # a bit string of 64 whole bytes; the parser would let spare bits pass
_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
# OpenSSL does not check the signature of a trust anchor, so the key that makes it may be known to all.
_ANCHOR_SIGNER = hashlib.sha256(b"barnraise: signs trust anchors, proves nothing").digest()


@dataclass(frozen=True)
class WorkerIdentity:
    """Node, run and worker that a certificate is for."""

    node: NodeId
    run: str
    worker: bytes

    def __str__(self) -> str:
        return f"worker {self.worker.hex()[:8]} of run {self.run!r} on machine {self.node.short}"


def anchor(node: NodeId) -> bytes:
    """Return the trust anchor of a node as DER, with the same bytes on every machine."""
    public = _public_key(node)
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_node_name(node))
        .issuer_name(_node_name(node))
        .public_key(public)
        .serial_number(1)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(constraints, critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(Ed25519PrivateKey.from_private_bytes(_ANCHOR_SIGNER), None)
    )
    return certificate.public_bytes(Encoding.DER)


def delegate(node_key: NodeKey, *, run: str, worker: bytes) -> WorkerCredentials:
    """Create a key for one incarnation of a worker, signed by its node and bound to its run."""
    check_run(run)
    if len(worker) != WORKER_BYTES:
        raise IdentityError(f"a worker id is {WORKER_BYTES} bytes, this has {len(worker)}")
    private = Ed25519PrivateKey.generate()
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, worker.hex())]))
        .issuer_name(_node_name(node_key.id))
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
    )
    for value, critical in _leaf_extensions(node_key.id, run, worker):
        builder = builder.add_extension(value, critical)
    certificate = builder.sign(node_key.signer, None)
    return WorkerCredentials(
        certificate_pem=certificate.public_bytes(Encoding.PEM),
        key_pem=private_pem(private),
        worker=worker,
        run=run,
        node=node_key.id.raw,
    )


def read_worker(der: bytes) -> WorkerIdentity:
    """Return the identity in a leaf certificate.

    Accept exactly what `delegate` writes, and verify the node's signature. Raise IdentityError otherwise.
    """
    if len(der) > _LARGEST_CERTIFICATE:
        raise IdentityError("the certificate is too large to be a worker's")
    try:
        certificate = x509.load_der_x509_certificate(der)
        if not der.endswith(_SIGNATURE_HEAD + certificate.signature):
            raise IdentityError("the certificate's signature has a wrong form")
        identity = _verified(certificate)
    except (ValueError, TypeError, UserWarning, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise IdentityError("the certificate cannot be read") from error
    except (x509.DuplicateExtension, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType) as error:
        raise IdentityError("the certificate's extensions cannot be read") from error
    except InvalidSignature as error:
        raise IdentityError("the certificate is not signed by the machine that it names") from error
    return identity


def check_run(run: str) -> None:
    """Raise IdentityError if a run's name does not fit into a certificate."""
    if not 1 <= len(run) <= LONGEST_RUN or not is_printable(run):
        raise IdentityError(
            f"a run's name has 1 to {LONGEST_RUN} printable characters, this has {len(run)}",
            hint="Choose another name for the run.",
        )


def _verified(certificate: x509.Certificate) -> WorkerIdentity:
    if certificate.version is not x509.Version.v3:
        raise IdentityError("the certificate is not of X.509 version 3")
    if certificate.signature_algorithm_oid != SignatureAlgorithmOID.ED25519:
        raise IdentityError("the certificate is not signed with Ed25519")
    node = _named_node(certificate.issuer)
    _public_key(node).verify(certificate.signature, certificate.tbs_certificate_bytes)
    if not isinstance(certificate.public_key(), Ed25519PublicKey):
        raise IdentityError("the certificate's key is not Ed25519")
    names = certificate.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
    if not isinstance(names, x509.SubjectAlternativeName):
        raise IdentityError("the certificate does not name a worker")
    bound = _read_uri(names.get_values_for_type(x509.UniformResourceIdentifier))
    # A comparison with what we would write excludes extensions that others understand differently.
    extensions = [(extension.value, extension.critical) for extension in certificate.extensions]
    if extensions != _leaf_extensions(node, bound.run, bound.worker):
        raise IdentityError("the certificate is not a worker's certificate")
    return WorkerIdentity(node=node, run=bound.run, worker=bound.worker)


class _Bound(NamedTuple):
    run: str
    worker: bytes


def _write_uri(run: str, worker: bytes) -> str:
    return f"{_SCHEME}id={worker.hex()}&run={quote(run, safe='')}"


def _read_uri(uris: list[str]) -> _Bound:
    if len(uris) != 1 or not uris[0].startswith(_SCHEME):
        raise IdentityError("the certificate does not name a worker")
    fields = dict(part.partition("=")[::2] for part in uris[0].removeprefix(_SCHEME).split("&"))
    bound = _Bound(unquote(fields.get("run", "")), bytes.fromhex(fields.get("id", "")))
    check_run(bound.run)
    if len(bound.worker) != WORKER_BYTES or _write_uri(*bound) != uris[0]:
        raise IdentityError("the certificate names its worker in a wrong form")
    return bound


def _leaf_extensions(node: NodeId, run: str, worker: bytes) -> list[tuple[x509.ExtensionType, bool]]:
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    uri = x509.UniformResourceIdentifier(_write_uri(run, worker))
    return [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(sign_certificates=False), True),
        (x509.ExtendedKeyUsage(usages), False),
        (x509.SubjectAlternativeName([uri]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(_public_key(node)), False),
    ]


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _node_name(node: NodeId) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node.raw.hex())])


def _named_node(name: x509.Name) -> NodeId:
    common = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(common) != 1 or not isinstance(common[0].value, str):
        raise IdentityError("the certificate does not name a machine")
    node = NodeId(bytes.fromhex(common[0].value))
    if name != _node_name(node):
        raise IdentityError("the certificate names its machine in a wrong form")
    return node


def _public_key(node: NodeId) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(node.raw)
