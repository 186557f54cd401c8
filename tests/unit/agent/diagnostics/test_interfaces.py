"""Kinds of network interfaces, and the one that leads to an address."""

from __future__ import annotations

import pytest

from barnraise.agent.diagnostics.interfaces import Interface, hardware_ports, kind_of, leading_to

ETHERNET = Interface("eth0", "192.168.1.2", 24, "ethernet")
WIFI = Interface("wlan0", "192.168.2.2", 24, "wifi")


@pytest.mark.parametrize(
    ("name", "port", "kind"),
    [
        ("lo", "", "loopback"),
        ("eth0", "", "ethernet"),
        ("enp3s0", "", "ethernet"),
        ("end0", "", "ethernet"),
        ("Ethernet 2", "", "ethernet"),
        ("wlp2s0", "", "wifi"),
        ("Wi-Fi", "", "wifi"),
        ("en0", "Wi-Fi", "wifi"),
        ("en5", "USB 10/100/1000 LAN", "ethernet"),
        ("en7", "", "unknown"),
        ("bridge0", "Thunderbolt Bridge", "thunderbolt"),
        ("thunderbolt0", "", "thunderbolt"),
        ("docker0", "", "container"),
        ("vEthernet (WSL)", "", "container"),
        ("tailscale0", "", "vpn"),
        ("utun3", "", "vpn"),
        ("wwan0", "", "mobile"),
    ],
)
def test_kind_of_interface_by_name(name: str, port: str, kind: str) -> None:
    assert kind_of(name, port) == kind
    assert kind_of(name, port, wireless=True) == "wifi"


def test_hardware_ports_parses_macos_output() -> None:
    listed = "\nHardware Port: Wi-Fi\nDevice: en0\nX: a\n\nHardware Port: Thunderbolt 1\nDevice: en1\n"
    assert hardware_ports(listed) == {"en0": "Wi-Fi", "en1": "Thunderbolt 1"}
    assert hardware_ports("") == {}


def test_leading_to_returns_narrowest_network() -> None:
    wide = Interface("tun0", "192.168.0.1", 16, "vpn")
    six = Interface("eth0", "fd00::2", 64, "ethernet")
    assert leading_to("192.168.1.9", [wide, ETHERNET, WIFI]) == ETHERNET
    assert leading_to("192.168.9.9", [wide, ETHERNET, WIFI]) == wide
    assert leading_to("fd00::9", [ETHERNET, six]) == six
    assert leading_to("8.8.8.8", [wide, ETHERNET]) is None
    assert leading_to("no address", [ETHERNET]) is None
