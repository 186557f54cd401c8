"""User of the program at the other end of a loopback connection, as far as the system tells.

Linux lists all TCP connections with their users. Elsewhere nothing is known, and the cookie alone decides.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from ipaddress import IPv4Address

_TABLE = "/proc/net/tcp"
_ESTABLISHED = "01"


def is_of_other_user(source: tuple[str, int], target: tuple[str, int]) -> bool:
    """Tell whether the end ``source`` of a connection belongs to another user, except root."""
    if sys.platform != "linux":
        return False
    try:
        with open(_TABLE, encoding="ascii", errors="replace") as table:
            user = find_user(table, source, target)
    except OSError:
        return False
    return user is not None and user not in (os.geteuid(), 0)


def find_user(table: Iterable[str], source: tuple[str, int], target: tuple[str, int]) -> int | None:
    """Return the user id of the end ``source`` of a connection in Linux's table; None if it is not there."""
    wanted = (_shown(source), _shown(target))
    for line in table:
        words = line.split()
        if len(words) > 7 and (words[1], words[2]) == wanted and words[3] == _ESTABLISHED:
            return int(words[7]) if words[7].isdecimal() else None
    return None


def _shown(place: tuple[str, int]) -> str:
    address = int.from_bytes(IPv4Address(place[0]).packed, sys.byteorder)
    return f"{address:08X}:{place[1]:04X}"
