"""Rules for the redirects that a member follows. Pure.

A hub may redirect a request for a blob to the origin that was accepted when the member joined. The link must
name that blob. It must not lead into the member's own network, unless the hub is there itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Literal

import httpx

STORE_HEADER = "barnraise-store"  # of a request: the origin that its sender would follow a redirect to
_MOST_LINK = 8192
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Where = Literal["machine", "network", "internet", "nowhere"]


def origin_of(url: str) -> str | None:
    """Return scheme, host and port of a URL, without the default port; None if it has no such origin."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        return None
    if parsed.scheme not in _PORTS or not parsed.host or parsed.userinfo:
        return None
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    port = "" if parsed.port in (None, _PORTS[parsed.scheme]) else f":{parsed.port}"
    return f"{parsed.scheme}://{host}{port}"


def refusal_reason(link: str, accepted: str, sha256: str) -> str:
    """Return why a redirect is not followed; empty if it is acceptable."""
    if len(link) > _MOST_LINK or not link.isascii() or not link.isprintable():
        return "the hub's redirect cannot be read"
    if origin_of(link) != accepted:
        return "the hub leads to another place than the one that was accepted"
    if not httpx.URL(link).path.endswith(f"/{sha256}"):
        return "the hub's redirect is for something else than the blob"
    return ""


def network_of(address: str) -> Where:
    """Return the network that an address belongs to, also if it is embedded in an IPv6 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "nowhere"
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip.sixtofour or _behind_nat64(ip) or ip
    if ip.is_loopback:
        return "machine"
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved:
        return "nowhere"
    return "internet" if ip.is_global else "network"


def allowed_addresses(addresses: Iterable[str], hub: Where, scheme: str) -> tuple[str, ...]:
    """Return the addresses of a store that a hub in the network ``hub`` may redirect to, in their order."""
    return tuple(address for address in addresses if _may_lead(hub, network_of(address), scheme))


def _may_lead(hub: Where, store: Where, scheme: str) -> bool:
    if scheme != "https" and store != "machine":
        return False
    allowed: dict[Where, tuple[Where, ...]] = {
        "machine": ("machine", "network", "internet"),
        "network": ("network", "internet"),
        "internet": ("internet",),
        "nowhere": ("internet",),
    }
    return store in allowed[hub]


def _behind_nat64(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
