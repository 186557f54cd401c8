"""Node key: created once, private and never shown."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from barnraise.core.errors import IdentityError
from barnraise.identity import NodeKey
from barnraise.identity.private_file import create_private, read_private

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="file modes")


def test_node_key_is_created_once_and_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "state" / "node.key"
    first = NodeKey.load_or_create(path)
    assert NodeKey.load_or_create(path).id == first.id
    assert [entry.name for entry in path.parent.iterdir()] == ["node.key"]


@posix_only
def test_key_file_and_directory_are_private_to_owner(tmp_path: Path) -> None:
    path = tmp_path / "state" / "node.key"
    before = os.umask(0)
    try:
        NodeKey.load_or_create(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@posix_only
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_key_file_that_others_can_access_is_rejected(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    NodeKey.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match=f"{mode:04o}") as caught:
        NodeKey.load_or_create(path)
    assert "chmod 600" in caught.value.hint


def test_signatures_verify_under_the_node_id(tmp_path: Path) -> None:
    key = NodeKey.load_or_create(tmp_path / "node.key")
    Ed25519PublicKey.from_public_bytes(key.id.raw).verify(key.sign(b"message"), b"message")


def test_node_key_hides_private_part() -> None:
    key = NodeKey.generate()
    assert repr(key) == str(key) == f"NodeKey({key.id.short})"
    with pytest.raises(TypeError, match="never leaves"):
        pickle.dumps(key)


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 50, b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_unreadable_key_raises_identity_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.key"
    create_private(path, content)
    with pytest.raises(IdentityError, match="readable"):
        NodeKey.load_or_create(path)


def test_key_of_other_algorithm_is_rejected(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    create_private(
        tmp_path / "node.key", other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    with pytest.raises(IdentityError, match="not Ed25519"):
        NodeKey.load_or_create(tmp_path / "node.key")


def test_key_path_that_is_not_a_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(IdentityError):
        read_private(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo", 0o600)
        with pytest.raises(IdentityError, match="not a file"):
            read_private(tmp_path / "fifo")


def test_create_private_never_overwrites(tmp_path: Path) -> None:
    assert create_private(tmp_path / "secret", b"first")
    assert not create_private(tmp_path / "secret", b"second")
    assert read_private(tmp_path / "secret") == b"first"


def test_racing_processes_agree_on_one_key(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from barnraise.identity import NodeKey; "
        "sys.stdin.read(1); print(NodeKey.load_or_create(Path(sys.argv[1])).id)"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "node.key")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(4)
    ]
    printed = {racer.communicate(b"g")[0] for racer in racers}
    assert len(printed) == 1
    assert NodeKey.load_or_create(tmp_path / "node.key").id is not None
