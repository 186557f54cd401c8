"""Interface of every finder, and the sightings that a finder reports. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# An address from the settings or from memory: no tag was seen there yet.
UNTAGGED = ""


@dataclass(frozen=True)
class Sighting:
    """Address of a machine that shows a tag. It proves nothing: only the handshake does."""

    address: str
    port: int
    tag: str
    source: str


OnSighting = Callable[[Sighting], None]


class Finder(Protocol):
    """One way to find machines and to be found. All methods run on the event loop's thread."""

    @property
    def name(self) -> str:
        """Return a short name for logs and ``Sighting.source``."""

    @property
    def finds_strangers(self) -> bool:
        """Return True if it finds machines of which nothing is known yet."""

    async def start(self, on_sighting: OnSighting) -> None:
        """Start without raising any error. ``health`` reports what does not work; the finder retries it."""

    def advertise(self, tags: frozenset[str], port: int) -> None:
        """Set the tags under which this machine can be found, at this port."""

    def watch(self, tags: frozenset[str]) -> None:
        """Set the tags to search for."""

    def refresh(self) -> None:
        """Search again at once."""

    def seen(self, tag: str) -> None:
        """Note that some finder saw a machine with this tag, so that a last resort may pause."""

    async def stop(self) -> None:
        """Withdraw the adverts and stop; safe to call again."""

    def health(self) -> str | None:
        """Return None if it works, else a sentence with the reason."""


def is_dialable(address: str, *, loopback: bool = False) -> bool:
    """Return True if an address from the network may be dialled.

    Loopback counts only on a machine that has no other address. A link-local IPv6 address needs an interface
    name that only its sender knows.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if parsed.is_loopback:
        return loopback
    if parsed.is_unspecified or parsed.is_multicast or (parsed.version == 4 and parsed.is_reserved):
        return False
    return not (isinstance(parsed, ipaddress.IPv6Address) and (parsed.is_link_local or parsed.ipv4_mapped))


def only_loopback(addresses: list[str]) -> bool:
    """Return True if no other machine could dial any of these addresses."""
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)
