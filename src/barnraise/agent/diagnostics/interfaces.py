"""Kinds of network interfaces (WiFi, cable, VPN), and which interface leads to an address. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["thunderbolt", "ethernet", "wifi", "mobile", "vpn", "container", "loopback", "unknown"]

CABLE = frozenset({"thunderbolt", "ethernet"})
WORSE = frozenset({"wifi", "mobile", "vpn", "container"})
NAMES: dict[Kind, str] = {
    "thunderbolt": "Thunderbolt",
    "ethernet": "Ethernet",
    "wifi": "WiFi",
    "mobile": "a mobile network",
    "vpn": "a VPN",
    "container": "a bridge of containers or virtual machines",
    "loopback": "loopback",
    "unknown": "an interface of unknown kind",
}
_BY_NAME: tuple[tuple[Kind, str], ...] = (
    ("loopback", r"lo\d*$|loopback"),
    (
        "container",
        r"docker|br-|veth|virbr|vmnet|vboxnet|lxc|lxd|cni|podman|vethernet|virtualbox|vmware|hyper-v",
    ),
    ("vpn", r"tun|tap|wg|utun|tailscale|zt|ppp|ipsec|nordlynx|proton|wireguard|zerotier|openvpn"),
    ("thunderbolt", r"thunderbolt|tb\d"),
    ("wifi", r"wl|wi-?fi|ath\d|wireless"),
    ("mobile", r"ww|rmnet|cellular|mobile"),
    ("ethernet", r"eth|en[dopsx]|em\d|usb .*lan|.*ethernet|lan"),
)


@dataclass(frozen=True)
class Interface:
    """One address of one interface that is up; ``prefix``: prefix length of its network."""

    name: str
    address: str
    prefix: int
    kind: Kind


def kind_of(name: str, port: str = "", *, wireless: bool = False) -> Kind:
    """Return the kind of an interface by its name; ``port``: macOS's name of the hardware."""
    if wireless:
        return "wifi"
    for text in (port, name):
        for kind, pattern in _BY_NAME:
            if text and re.match(pattern, text, re.IGNORECASE):
                return kind
    return "unknown"


def hardware_ports(listed: str) -> dict[str, str]:
    """Parse `networksetup -listallhardwareports`: the name of the hardware by device."""
    pairs = re.findall(r"^Hardware Port: (.+)\nDevice: (\S+)", listed, re.MULTILINE)
    return {device: port for port, device in pairs}


def leading_to(address: str, interfaces: Iterable[Interface]) -> Interface | None:
    """Return the interface whose own network has this address, or None."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    matching = []
    for interface in interfaces:
        try:
            network = ipaddress.ip_network(f"{interface.address}/{interface.prefix}", strict=False)
        except ValueError:
            continue
        if wanted.version == network.version and wanted in network:
            matching.append(interface)
    return max(matching, key=lambda interface: interface.prefix, default=None)


def by_address(interfaces: Iterable[Interface]) -> Mapping[str, Interface]:
    """Return the interfaces by their addresses."""
    return {interface.address: interface for interface in interfaces}
