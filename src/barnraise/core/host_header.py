"""``Host`` headers of requests to this machine. Pure.

A web page may let its own name lead to this machine (DNS rebinding). Then ``Host`` names the page's host.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def host_name(value: str) -> str:
    """Return the host of a ``Host`` header in small letters, without the port; empty if it has none."""
    try:
        name = urlsplit(f"//{value}").hostname or ""
    except ValueError:
        return ""
    return name.rstrip(".").lower()


def is_loopback(host: str) -> bool:
    """Tell whether a host is a name or an address of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
