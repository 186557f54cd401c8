"""Rules for the redirects that a member follows. Pure.

A hub may redirect a request for a blob to the origin that was accepted when the member joined. The link must
name that blob. It must not lead into the member's own network, unless the hub is there itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from barnraise.transport.addresses import Where, network_of

STORE_HEADER = "barnraise-store"  # of a request: the origin that its sender would follow a redirect to
_MOST_LINK = 8192
_PORTS = {"http": 80, "https": 443}


def origin_of(url: str) -> str | None:
    """Return scheme, host and port of a URL, without the default port; None if it has no such origin."""
    import httpx  # a hub without a store starts without it

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
    import httpx

    if len(link) > _MOST_LINK or not link.isascii() or not link.isprintable():
        return "the hub's redirect cannot be read"
    if origin_of(link) != accepted:
        return "the hub leads to another place than the one that was accepted"
    if not httpx.URL(link).path.endswith(f"/{sha256}"):
        return "the hub's redirect is for something else than the blob"
    return ""


def allowed_addresses(addresses: Iterable[str], hub: Where, scheme: str) -> tuple[str, ...]:
    """Return the addresses of a store that a hub in the network ``hub`` may redirect to, in their order."""
    networks = allowed_networks(hub, scheme)
    return tuple(address for address in addresses if network_of(address) in networks)


def allowed_networks(hub: Where, scheme: str) -> frozenset[Where]:
    """Return the networks with stores that a hub in the network ``hub`` may redirect to."""
    allowed: dict[Where, tuple[Where, ...]] = {
        "machine": ("machine", "network", "internet"),
        "network": ("network", "internet"),
        "internet": ("internet",),
        "nowhere": ("internet",),
    }
    return frozenset(where for where in allowed[hub] if scheme == "https" or where == "machine")
