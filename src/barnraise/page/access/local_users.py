"""User of the program at the other end of a loopback connection, as far as the system tells.

Linux lists all TCP connections with their users. Elsewhere nothing is known, and the cookie alone decides.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path

# A program may connect to an IPv4 address by a socket of IPv6: only the second table has its end.
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_MAPPED = bytes(10) + b"\xff\xff"  # the beginning of an IPv4 address in a socket of IPv6
_READS = 3  # a line can be left out of one reading, while others come and go
_NO_INODE = "0"


def is_of_other_user(source: tuple[str, int], target: tuple[str, int]) -> bool:
    """Tell whether the end ``source`` of a connection belongs to another user, except root.

    An end that is in no table counts as one of another user. Its program may have closed it meanwhile.
    """
    if sys.platform != "linux":
        return False
    for _ in range(_READS):
        can_read = False
        for path in _TABLES:
            with suppress(OSError), path.open(encoding="ascii", errors="replace") as table:
                user = find_user(table, source, target)
                if user is not None:
                    return user not in (os.geteuid(), 0)
                can_read = True
        if not can_read:
            return False
    return not _may_come_from_windows()


def find_user(table: Iterable[str], source: tuple[str, int], target: tuple[str, int]) -> int | None:
    """Return the user id of the end ``source`` of a connection in a table of Linux; None if it is not there.

    Linux shows an end that its program has closed as one of root without an inode, which does not count.
    """
    end = _shown(source)
    wanted = {(end, _shown(target)), (_shown(source, _MAPPED), _shown(target, _MAPPED))}
    for line in table:
        words = line.split() if end in line else []
        if len(words) > 9 and (words[1], words[2]) in wanted and words[9] != _NO_INODE:
            return int(words[7]) if words[7].isdecimal() else None
    return None


def _may_come_from_windows() -> bool:
    """Tell whether this is WSL: connections of programs of Windows may have no end in it."""
    return "microsoft" in platform.release().lower()


def _shown(place: tuple[str, int], beginning: bytes = b"") -> str:
    """Return an address as the tables have it: words of four bytes as numbers of this machine."""
    address = beginning + IPv4Address(place[0]).packed
    words = (address[start : start + 4] for start in range(0, len(address), 4))
    shown = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{shown}:{place[1]:04X}"
