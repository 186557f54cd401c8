"""Where other machines may dial this one: what its interfaces say, never what its host name resolves to."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Literal, NamedTuple

import psutil

LOOPBACK = "127.0.0.1"
Reach = Literal["machine", "network", "internet"]
_PRIVATE_NAMES = (".local", ".lan", ".home", ".internal", ".home.arpa")
_INNER = (
    "docker",
    "br-",
    "veth",
    "virbr",
    "vmnet",
    "vboxnet",
    "lxc",
    "lxd",
    "cni",
    "podman",
    "utun",
    "vEthernet",
)


class InterfaceAddress(NamedTuple):
    """One address of one interface."""

    interface: str
    address: str
    is_up: bool


def reach_of(host: str) -> Reach:
    """From where machines reach an address or name, as far as it says so itself. Pure."""
    plain = host.strip("[]").partition("%")[0].lower().rstrip(".")
    try:
        address = ipaddress.ip_address(plain.removeprefix("::ffff:"))
    except ValueError:
        if plain == "localhost":
            return "machine"
        return "network" if "." not in plain or plain.endswith(_PRIVATE_NAMES) else "internet"
    if address.is_loopback or address.is_unspecified:
        return "machine"
    return "internet" if address.is_global else "network"


def own_addresses() -> list[str]:
    """This machine's addresses, likeliest first."""
    up = {name: facts.isup for name, facts in psutil.net_if_stats().items()}
    found = [
        InterfaceAddress(name, entry.address, up.get(name, False))
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return candidates(found)


def candidates(found: Iterable[InterfaceAddress]) -> list[str]:
    """Dialable addresses in the order in which others should try them. Pure.

    LAN before the rest, IPv4 before IPv6, bridges of containers and virtual machines last. Link-local IPv6
    needs an interface name that means nothing elsewhere. Loopback serves only a machine with nothing else.
    """
    ranked = []
    for interface, text, is_up in found:
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            continue
        if not is_up or address.is_loopback or address.is_unspecified or address.is_multicast:
            continue
        if address.version == 6 and address.is_link_local:
            continue
        rank = (interface.startswith(_INNER), address.is_link_local, address.version, not address.is_private)
        ranked.append((rank, str(address)))
    ranked.sort(key=lambda entry: entry[0])
    return list(dict.fromkeys(address for _, address in ranked)) or [LOOPBACK]


def source_of(address: str) -> str:
    """The unit by which strangers are counted: an IPv4 address, or the /64 that one IPv6 host commands."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def show_address(host: str, port: int) -> str:
    """``host:port`` for people, with IPv4 shown as IPv4."""
    plain = host.removeprefix("::ffff:")
    return f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}"
