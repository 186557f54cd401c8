"""Messages that a process logs only once."""

from __future__ import annotations

_seen: set[object] = set()


def first_time(key: object) -> bool:
    """Return True for the first call with this key. Two threads at once may both get True."""
    if key in _seen:
        return False
    _seen.add(key)
    return True
