"""Things worth saying once in a process, however often their reason comes back."""

from __future__ import annotations

_said: set[object] = set()


def first_time(what: object) -> bool:
    """Whether this is the first time; two threads at once may both hear yes, which harms nobody."""
    if what in _said:
        return False
    _said.add(what)
    return True
