"""Addresses of this machine for other machines: from its interfaces, never from its host name."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import psutil

LOOPBACK = "127.0.0.1"
Reach = Literal["machine", "network", "internet"]
Where = Literal["machine", "network", "internet", "nowhere"]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
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
    """Address of one network interface."""

    interface: str
    address: str
    is_up: bool


def reach_of(host: str) -> Reach:
    """Return from where machines can reach an address or name, as far as it shows. Pure."""
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


def _behind_nat64(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None


def own_addresses() -> list[str]:
    """Return this machine's addresses, likeliest first."""
    is_up = interface_states()
    addresses = [
        InterfaceAddress(name, entry.address, is_up(name))
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return candidates(addresses)


def interface_states() -> Callable[[str], bool]:
    """Return a function that tells whether an interface is up.

    Some containers and emulators do not tell. Then all interfaces count as up.
    """
    try:
        states = {name: facts.isup for name, facts in psutil.net_if_stats().items()}
    except OSError:
        return lambda name: True
    return lambda name: states.get(name, False)


def candidates(addresses: Iterable[InterfaceAddress]) -> list[str]:
    """Return dialable addresses in the order in which others should try them. Pure.

    LAN comes before the rest, IPv4 before IPv6, bridges of containers and virtual machines last. Link-local
    IPv6 is left out: it needs an interface name that means nothing elsewhere. Loopback is only for a machine
    without any other address.
    """
    ranked = []
    for interface, text, is_up in addresses:
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
    """Return the unit of rate limits: an IPv4 address, or the /64 network of an IPv6 host."""
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
    """Format ``host:port`` for people, with mapped IPv4 addresses as IPv4."""
    plain = host.removeprefix("::ffff:")
    return f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}"
