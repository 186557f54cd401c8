"""The tag by which the machines of one cluster know each other, and which says nothing else. Pure."""

from __future__ import annotations

import hashlib
import re

TAG_BYTES = 16
_PURPOSE = b"barnraise discovery namespace 1\0"
_TAG = re.compile(r"[0-9a-f]{32}")


def namespace_tag(secret: bytes) -> str:
    """The cluster's public tag: whoever knows the secret can compute it, nobody can go back from it."""
    return hashlib.sha3_256(_PURPOSE + secret).digest()[:TAG_BYTES].hex()


def is_tag(text: str) -> bool:
    """Whether this has the form of a tag; what comes from the network is compared only if it does."""
    return _TAG.fullmatch(text) is not None
