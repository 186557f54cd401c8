"""Namespace tag, by which the machines of one cluster recognize each other. It reveals nothing else. Pure."""

from __future__ import annotations

import hashlib
import re

TAG_BYTES = 16
_PURPOSE = b"barnraise discovery namespace 1\0"
_TAG = re.compile(r"[0-9a-f]{32}")


def namespace_tag(secret: bytes) -> str:
    """Return the cluster's public tag, a one-way hash of its secret."""
    return hashlib.sha3_256(_PURPOSE + secret).digest()[:TAG_BYTES].hex()


def is_tag(text: str) -> bool:
    """Return True if the text has the form of a tag."""
    return _TAG.fullmatch(text) is not None
