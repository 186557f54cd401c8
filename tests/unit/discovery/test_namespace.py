"""Namespace tags."""

from __future__ import annotations

import hashlib

from barnraise.discovery import namespace_tag
from barnraise.discovery.namespace import is_tag

TAG = namespace_tag(b"s" * 32)


def test_namespace_tag_is_hash_of_purpose_and_secret() -> None:
    whole = hashlib.sha3_256(b"barnraise discovery namespace 1\0" + b"s" * 32).hexdigest()
    assert whole[:32] == TAG
    assert namespace_tag(b"t" * 32) != TAG
    assert is_tag(TAG)
    assert not any(map(is_tag, ("", TAG[:-1], TAG + "0", TAG.upper(), TAG[:-1] + "g", TAG[:-1] + "\n")))
