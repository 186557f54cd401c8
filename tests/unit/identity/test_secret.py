"""Discovery secret in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from barnraise.core.errors import IdentityError
from barnraise.identity.private_file import create_private
from barnraise.identity.secret import load_or_create_secret, load_secret, read_secret


def test_secret_is_created_once(tmp_path: Path) -> None:
    secret = load_or_create_secret(tmp_path / "secret")
    assert len(secret) == 32
    assert load_or_create_secret(tmp_path / "secret") == load_secret(tmp_path / "secret") == secret


def test_secret_is_read_as_hexadecimal_or_raw() -> None:
    path, raw = Path("secret"), bytes(range(32))
    assert read_secret(raw.hex().encode() + b"\r\n", path) == raw
    assert read_secret(raw, path) == raw
    assert read_secret(bytes(31) + b"\n", path) == bytes(31) + b"\n"
    assert read_secret(b"g" * 40 + b"\n", path) == b"g" * 40


def test_wrong_secret_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no discovery secret"):
        load_secret(tmp_path / "absent")
    create_private(tmp_path / "short", b"short")
    with pytest.raises(IdentityError, match="fewer than 32"):
        load_secret(tmp_path / "short")
