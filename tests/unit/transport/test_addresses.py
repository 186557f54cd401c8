"""Order and format of addresses."""

from __future__ import annotations

import psutil
import pytest

from barnraise.transport.addresses import (
    InterfaceAddress,
    candidates,
    interface_states,
    own_addresses,
    show_address,
    source_of,
)


def _up(*pairs: tuple[str, str]) -> list[InterfaceAddress]:
    return [InterfaceAddress(interface, address, True) for interface, address in pairs]


def test_candidates_are_ordered_by_use_to_others() -> None:
    interfaces = _up(
        ("lo", "127.0.0.1"),
        ("lo", "::1"),
        ("docker0", "172.17.0.1"),
        ("wlan0", "fe80::1%wlan0"),
        ("wlan0", "2001:db8::7"),
        ("wlan0", "192.168.1.7"),
        ("tailscale0", "100.100.1.2"),
        ("eth1", "169.254.7.7"),
        ("wlan0", "192.168.1.7"),
        ("broken", "no address"),
    )
    interfaces.append(InterfaceAddress("eth9", "10.9.9.9", False))
    assert candidates(interfaces) == [
        "192.168.1.7",
        "100.100.1.2",
        "2001:db8::7",
        "169.254.7.7",
        "172.17.0.1",
    ]


def test_candidates_of_machine_without_network_are_loopback() -> None:
    assert candidates(_up(("lo", "127.0.0.1"), ("lo", "127.0.1.1"), ("eth0", "fe80::1%eth0"))) == [
        "127.0.0.1"
    ]
    assert candidates([]) == ["127.0.0.1"]


def test_own_addresses_of_this_machine_exist() -> None:
    assert own_addresses()
    assert "127.0.1.1" not in own_addresses()


def test_source_of_groups_by_host() -> None:
    assert source_of("::ffff:192.0.2.1") == source_of("192.0.2.1") == "192.0.2.1"
    assert source_of("2001:db8::1") == source_of("2001:db8::2:3") != source_of("2001:db8:0:1::1")
    assert source_of("fe80::1%eth0") == "fe80::/64"
    assert source_of("?") == "?"


def test_show_address_formats_ipv4_and_ipv6() -> None:
    assert show_address("::ffff:192.0.2.1", 5) == "192.0.2.1:5"
    assert show_address("2001:db8::1", 5) == "[2001:db8::1]:5"


def test_all_interfaces_count_as_up_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under qemu, and in containers that forbid the question."""

    def refuse() -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(psutil, "net_if_stats", refuse)
    assert interface_states()("eth0")
    assert own_addresses()
