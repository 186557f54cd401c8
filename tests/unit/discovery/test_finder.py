"""Addresses that a finder may report."""

from __future__ import annotations

import pytest

from barnraise.discovery.finder import is_dialable, only_loopback


@pytest.mark.parametrize(
    ("address", "fine"),
    [
        ("192.168.1.7", True),
        ("100.64.1.2", True),
        ("169.254.3.4", True),
        ("2001:db8::7", True),
        ("fd00::7", True),
        ("127.0.0.1", False),
        ("127.0.1.1", False),
        ("::1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("224.0.0.251", False),
        ("255.255.255.255", False),
        ("fe80::1", False),
        ("::ffff:127.0.0.1", False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_is_dialable_accepts_addresses_of_other_machines(address: str, fine: bool) -> None:
    assert is_dialable(address) is fine


def test_loopback_counts_where_there_is_nothing_else() -> None:
    assert only_loopback(["127.0.0.1"])
    assert not only_loopback(["127.0.0.1", "192.0.2.1"])
    assert is_dialable("127.0.0.1", loopback=True)
