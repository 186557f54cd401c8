"""Conclusions of the doctor from made-up facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from barnraise.agent.diagnostics import checks
from barnraise.agent.diagnostics.checks import DialPath, LocalFacts, PeerFacts
from barnraise.agent.diagnostics.interfaces import Interface
from barnraise.agent.diagnostics.reachability import (
    DialResult,
)
from barnraise.agent_client.cluster_requests import CheckRow

HERE = LocalFacts("here", 52416, "linux", "0.1.0", "2.13.0")


ETHERNET = Interface("eth0", "192.168.1.2", 24, "ethernet")


WIFI = Interface("wlan0", "192.168.2.2", 24, "wifi")


VPN = Interface("wg0", "10.8.0.2", 24, "vpn")


GOOD = DialResult("192.168.1.7", "answered", rtt_ms=0.4)


SILENT = DialResult("192.168.1.7", "silent", "192.168.1.7:52416 does not answer")


REFUSED = DialResult("192.168.1.7", "refused", "192.168.1.7:52416 refuses")


FORBIDDEN = DialResult("192.168.1.7", "forbidden", "not permitted")


STRANGE = DialResult("192.168.1.7", "other", "its key is not trusted here")


def peer(*there: DialResult, **facts: Any) -> PeerFacts:
    paths = tuple(DialPath(dial, ETHERNET, direct=True) for dial in there)
    return PeerFacts("pc", **{"os": "windows", "paths": paths, **facts})


@pytest.mark.parametrize(
    ("facts", "state", "words", "fix"),
    [
        (peer(GOOD, dial_backs=(GOOD,)), "ok", "both directions, 0.4 ms", ""),
        (peer(SILENT, GOOD, dial_backs=(SILENT, GOOD)), "ok", "both directions", ""),
        (peer(GOOD, link_inbound=True), "ok", "both directions", ""),
        (peer(GOOD, dial_back_failure="asked again too soon"), "ok", "not known: asked again too soon", ""),
        (peer(GOOD, dial_backs=(SILENT,)), "fail", "firewall of this machine (here)", "Here: sudo ufw"),
        (peer(GOOD, dial_backs=(FORBIDDEN,)), "fail", "firewall on pc forbids its outgoing", "On pc: allow"),
        (
            peer(SILENT, dial_backs=(GOOD,)),
            "fail",
            "the firewall of pc blocks",
            "On pc: as administrator: netsh",
        ),
        (peer(SILENT, link_inbound=True), "fail", "the firewall of pc blocks", "On pc: "),
        (
            peer(FORBIDDEN, dial_backs=(GOOD,)),
            "fail",
            "this machine forbids outgoing",
            "Here: allow outgoing",
        ),
        (peer(SILENT, dial_backs=(SILENT,)), "warn", "a new connection failed", "Try again"),
        (peer(SILENT, linked=False), "warn", "off, asleep, on another network", "Wake it"),
        (peer(linked=False), "warn", "no address of it is known", "Wake it"),
        (peer(REFUSED, linked=False), "warn", "no agent listens there", "On pc: barnraise up"),
        (peer(STRANGE, linked=False), "warn", "is another one, or does not know", "barnraise pair"),
        (peer(GOOD, linked=False), "warn", "there is no connection to it yet", "barnraise status"),
        (peer(SILENT, linked=False, heard_by=("mac",)), "fail", "mac can reach pc, this machine", "On pc: "),
    ],
)
def test_reach_names_direction_cause_and_fix(facts: PeerFacts, state: str, words: str, fix: str) -> None:
    row = checks.reach(facts, HERE)
    assert row.state == state
    assert words in row.sentence
    assert fix in row.fix
    assert bool(row.fix) == (state != "ok")
    assert row.peer == "pc"


def test_reach_row_includes_error_of_each_dial() -> None:
    assert SILENT.words in checks.reach(peer(SILENT, dial_backs=(GOOD,)), HERE).sentence
    assert SILENT.words in checks.reach(peer(GOOD, dial_backs=(SILENT,)), HERE).sentence


def test_interface_warns_if_cable_is_unused() -> None:
    on_wifi = DialPath(DialResult("192.168.2.7", "answered", rtt_ms=3.0), WIFI, direct=True)
    on_vpn = DialPath(DialResult("10.8.0.7", "answered", rtt_ms=1.0), VPN, direct=True)
    on_cable = DialPath(GOOD, ETHERNET, direct=True)
    far = DialPath(GOOD, ETHERNET, direct=False)

    def judge(used: DialPath, *paths: DialPath, linked: bool = True) -> CheckRow | None:
        return checks.interface(
            PeerFacts("pc", linked=linked, link_address=used.dial.address, paths=(used, *paths))
        )

    for fine in (judge(on_cable, on_wifi), judge(on_wifi), judge(on_wifi, on_vpn), judge(on_wifi, far)):
        assert fine is not None
        assert fine.state == "ok"
    assert judge(on_wifi, on_cable, linked=False) is None
    slow = judge(on_wifi, on_cable)
    assert slow is not None
    assert slow.state == "warn"
    assert "uses WiFi (wlan0, 192.168.2.7), although Ethernet (eth0, 192.168.1.7) answers" in slow.sentence
    broken = judge(on_vpn, DialPath(SILENT, ETHERNET, direct=True))
    assert broken is not None
    assert broken.state == "warn"
    assert "does not work: 192.168.1.7:52416 does not answer" in broken.sentence


@pytest.mark.parametrize(
    ("check", "state", "words"),
    [
        (lambda: checks.versions(peer(version="0.1.7", torch="2.13.1"), HERE), "ok", "0.1.7"),
        (lambda: checks.versions(peer(version="0.2.0"), HERE), "warn", "0.2.0 there, 0.1.0 here"),
        (lambda: checks.versions(peer(version="0.1.0", torch="2.14.0+cpu"), HERE), "warn", "torch 2.14.0"),
        (lambda: checks.clock(peer(clock_ahead_s=3.0)), "ok", "two minutes"),
        (lambda: checks.clock(peer(clock_ahead_s=3600.0)), "warn", "60 min ahead of"),
        (lambda: checks.clock(peer(clock_ahead_s=-1.5e8)), "warn", "1736 days behind"),
        (lambda: checks.fork(peer(fork="trust log")), "fail", "pc has another trust log"),
        (lambda: checks.quorum(True, 3, 3, ()), "ok", "3 of 3"),
        (lambda: checks.quorum(False, 1, 2, ("mac",)), "fail", "mac is missing"),
        (lambda: checks.quorum(False, 1, 4, ("mac", "pc")), "fail", "one of mac, pc is missing"),
        (lambda: checks.stalls((), 7200.0), "ok", "2 h"),
        (lambda: checks.stalls((3.0,), 7200.0), "warn", "once in 2 h, at most for 3 s"),
        (lambda: checks.stalls((3.0, 500.0), 7200.0), "warn", "2 times in 2 h, at most for 8 min"),
        (lambda: checks.local_network("macos", False, peer(GOOD).paths), "ok", "allows the agent"),
        (lambda: checks.local_network("macos", True, ()), "fail", "no mDNS packet"),
        (lambda: checks.local_network("macos", True, peer(GOOD).paths), "ok", "allows the agent"),
        (
            lambda: checks.local_network(
                "macos", False, peer(DialResult("192.168.1.7", "unreachable")).paths
            ),
            "fail",
            "no route to 192.168.1.7",
        ),
    ],
)
def test_checks_ok_and_failing_cases(check: Callable[[], CheckRow | None], state: str, words: str) -> None:
    row = check()
    assert row is not None
    assert row.state == state
    assert words in row.sentence
    assert bool(row.fix) == (state != "ok")
    assert row.name in checks.CHECKS


def test_checks_without_facts_return_none() -> None:
    assert checks.versions(peer(), HERE) is None
    assert checks.clock(peer()) is None
    assert checks.fork(peer()) is None
    assert checks.local_network("linux", True, ()) is None


def test_quorum_fix_names_missing_machines() -> None:
    assert "--without mac --without pc" in checks.quorum(False, 1, 4, ("mac", "pc")).fix
    assert checks.quorum(False, 1, 2, ("mac",)).peer == "mac"


def test_discovery_fails_only_when_no_method_works() -> None:
    fine = {"mdns": None, "broadcast": None, "static": None}
    assert {row.state for row in checks.discovery(fine)} == {"ok"}
    rows = checks.discovery({**fine, "mdns": "no packet arrives"})
    assert [row.state for row in rows] == ["warn", "ok", "ok"]
    assert "mdns: no packet arrives" in rows[0].sentence
    assert "5353" in rows[0].fix
    lost = checks.discovery({"mdns": "deaf", "broadcast": "taken", "static": "x does not resolve"})
    assert [row.state for row in lost] == ["fail", "fail", "warn"]


def test_cloned_key_on_two_machines_fails() -> None:
    me, other = bytes(32), bytes([1]) * 32
    names = {me: "here", other: "pc"}

    def answer(address: str, node: bytes, incarnation: bytes) -> DialResult:
        return DialResult(address, "answered", node=node, incarnation=incarnation)

    def judge(*dials: DialResult) -> CheckRow:
        return checks.cloned_key(me, b"mine", dials, names)

    assert judge().state == "ok"
    assert judge(SILENT, answer("a", other, b"1"), answer("b", other, b"1")).state == "ok"
    assert judge(answer("a", me, b"mine")).state == "ok", "that is this very agent"
    own_clone = judge(answer("192.168.1.9", me, b"another"))
    assert own_clone.state == "fail"
    assert "the node key of here (here and 192.168.1.9)" in own_clone.sentence
    other_clone = judge(answer("a", other, b"1"), answer("b", other, b"2"))
    assert other_clone.state == "fail"
    assert other_clone.peer == "pc"
    assert "(a and b)" in other_clone.sentence
    assert "node.key" in other_clone.fix


def test_outbox_that_is_not_saved_is_a_warning() -> None:
    row = checks.notifications("notifications.db cannot be written: disk full", has_targets=True)
    assert row is not None
    assert (row.name, row.state) == ("notifications", "warn")
    assert row.fix
    saved = checks.notifications("", has_targets=True)
    assert saved is not None
    assert saved.state == "ok"
    assert checks.notifications("", has_targets=False) is None
