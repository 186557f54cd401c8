"""Worker certificates: exactly what `delegate` writes is accepted."""

from __future__ import annotations

import ssl

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from hypothesis import given
from hypothesis import strategies as st

from barnraise.core.errors import IdentityError
from barnraise.identity import NodeId, NodeKey, WorkerCredentials, anchor, delegate, read_worker
from barnraise.identity import delegation as module

NODE = NodeKey.generate()
WORKER = bytes(range(16))


def der(credentials: WorkerCredentials) -> bytes:
    return ssl.PEM_cert_to_DER_cert(credentials.certificate_pem.decode())


LEAF = der(delegate(NODE, run="mnist", worker=WORKER))


@given(st.text(min_size=1, max_size=200), st.binary(min_size=16, max_size=16))
def test_leaf_names_node_run_and_worker(run: str, worker: bytes) -> None:
    if not run.isprintable():
        with pytest.raises(IdentityError, match="printable"):
            delegate(NODE, run=run, worker=worker)
        return
    leaf = read_worker(der(delegate(NODE, run=run, worker=worker)))
    assert (leaf.node, leaf.run, leaf.worker) == (NODE.id, run, worker)


def test_every_delegation_has_a_fresh_key() -> None:
    first, second = (delegate(NODE, run="mnist", worker=WORKER) for _ in range(2))
    assert first.key_pem != second.key_pem
    assert first.node == NODE.id.raw


def test_credentials_repr_hides_private_key() -> None:
    credentials = delegate(NODE, run="mnist", worker=WORKER)
    for shown in (repr(credentials), str(credentials), str(list(credentials.__rich_repr__()))):
        assert "PRIVATE" not in shown
        assert WORKER.hex() in shown


def test_credentials_travel_as_a_message() -> None:
    credentials = delegate(NODE, run="mnist", worker=WORKER)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(credentials), type=WorkerCredentials) == credentials


def test_anchor_is_deterministic_and_signs_leaves_only() -> None:
    assert anchor(NODE.id) == anchor(NodeId(NODE.id.raw))
    certificate = x509.load_der_x509_certificate(anchor(NODE.id))
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)


def test_leaf_cannot_sign_certificates() -> None:
    certificate = x509.load_der_x509_certificate(LEAF)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert not constraints.value.ca
    assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


@pytest.mark.parametrize(
    ("run", "worker"), [("", WORKER), ("x" * 201, WORKER), ("a\nb", WORKER), ("mnist", b"short")]
)
def test_delegate_of_wrong_run_or_worker_raises(run: str, worker: bytes) -> None:
    with pytest.raises(IdentityError):
        delegate(NODE, run=run, worker=worker)


def test_leaf_with_name_of_other_node_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    other = NodeKey.generate()
    true_name = module._node_name
    with monkeypatch.context() as patch:
        patch.setattr(module, "_node_name", lambda _: true_name(NODE.id))
        forged = der(delegate(other, run="mnist", worker=WORKER))
    with pytest.raises(IdentityError, match="not signed by the machine"):
        read_worker(forged)


def test_anchor_is_rejected_as_worker() -> None:
    with pytest.raises(IdentityError):
        read_worker(anchor(NODE.id))


def _reissued(change: str) -> bytes:
    """Return a leaf that the node signed, but in another form than `delegate` writes."""
    builder = x509.CertificateBuilder(
        issuer_name=module._node_name(NODE.id),
        subject_name=module._node_name(NODE.id),
        public_key=NODE.signer.public_key(),
        serial_number=7,
        not_valid_before=module._NOT_BEFORE,
        not_valid_after=module._NOT_AFTER,
    )
    for value, critical in module._leaf_extensions(NODE.id, "mnist", WORKER):
        if change == "authority" and isinstance(value, x509.BasicConstraints):
            value = x509.BasicConstraints(ca=True, path_length=None)
        if isinstance(value, x509.SubjectAlternativeName):
            uri = str(value.get_values_for_type(x509.UniformResourceIdentifier)[0])
            names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
            if change == "two workers":
                names *= 2
            if change == "doubled field":
                names = [x509.UniformResourceIdentifier(uri + "&run=other")]
            if change == "bad hexadecimal":
                names = [x509.UniformResourceIdentifier("barnraise:worker?id=zz&run=mnist")]
            if change == "other scheme":
                names = [x509.UniformResourceIdentifier("http://localhost/")]
            if change == "added name":
                names.append(x509.DNSName("localhost"))
            value = x509.SubjectAlternativeName(names)
            if change == "no names":
                continue
        builder = builder.add_extension(value, critical)
    if change == "added extension":
        builder = builder.add_extension(x509.OCSPNoCheck(), False)
    return builder.sign(NODE.signer, None).public_bytes(Encoding.DER)


def test_reissuing_unchanged_is_accepted() -> None:
    assert read_worker(_reissued("nothing")).worker == WORKER


@pytest.mark.parametrize(
    "change",
    [
        "authority",
        "two workers",
        "doubled field",
        "bad hexadecimal",
        "other scheme",
        "added name",
        "no names",
        "added extension",
    ],
)
def test_read_worker_rejects_other_forms_than_delegate(change: str) -> None:
    with pytest.raises(IdentityError):
        read_worker(_reissued(change))


@given(st.binary(max_size=200))
def test_read_worker_of_any_bytes_raises_identity_error(data: bytes) -> None:
    with pytest.raises(IdentityError):
        read_worker(data)


@given(st.integers(0, len(LEAF) - 1), st.integers(1, 255))
def test_read_worker_of_changed_byte_raises_identity_error(place: int, change: int) -> None:
    changed = bytearray(LEAF)
    changed[place] ^= change
    with pytest.raises(IdentityError):
        read_worker(bytes(changed))


def test_spare_bits_in_the_signature_are_refused() -> None:
    changed = bytearray(LEAF)
    assert changed[-65] == 0
    changed[-65] = 1
    changed[-1] &= 0xFE  # with its spare bit set the parser refuses it first
    with pytest.raises(IdentityError, match="wrong form"):
        read_worker(bytes(changed))


@given(st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=8)), min_size=1, max_size=8))
def test_read_worker_of_spliced_leaf_raises_identity_error(splices: list[tuple[int, bytes]]) -> None:
    changed = LEAF
    for place, piece in splices:
        changed = changed[:place] + piece + changed[place + len(piece) // 2 :]
    if changed == LEAF:
        return
    with pytest.raises(IdentityError):
        read_worker(changed)


def test_read_worker_of_huge_certificate_raises_before_parsing() -> None:
    with pytest.raises(IdentityError, match="too large"):
        read_worker(b"\x30" * 100_000)


def test_key_pem_belongs_to_certificate() -> None:
    credentials = delegate(NODE, run="mnist", worker=WORKER)
    private = load_pem_private_key(credentials.key_pem, None)
    certificate = x509.load_pem_x509_certificate(credentials.certificate_pem)
    assert private.public_key() == certificate.public_key()
