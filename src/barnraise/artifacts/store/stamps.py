"""Stamps: modification times that show whether a file was written since it was stored.

The fraction of a second of a stamp follows from the content's name. Any write replaces it by another one. A
stamp is no proof against a program that forges times; it saves hashing unchanged files.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_SECOND = 10**9
_STEP = 100  # Windows keeps times in units of 100 ns


def stamp(path: Path | str, name: bytes) -> None:
    """Mark a file as having the content ``name``, used now."""
    at = int(time.time()) * _SECOND + _fraction(name)
    os.utime(path, ns=(at, at))


def is_stamped(facts: os.stat_result, name: bytes) -> bool:
    """Tell whether a file was not written since `stamp`."""
    return facts.st_mtime_ns % _SECOND == _fraction(name)


def _fraction(name: bytes) -> int:
    return int.from_bytes(name[:4], "big") % (_SECOND // _STEP) * _STEP
