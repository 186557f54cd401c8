"""What an agent's doctor concludes, with made-up facts; knocks and dialling back over real sockets; and real
agents that are examined."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.agent import protocol
from barnraise.agent.cluster.connections import PeerAddress
from barnraise.agent.cluster.join import join
from barnraise.agent.daemon import Agent
from barnraise.agent.diagnostics import checks, collect, reachability
from barnraise.agent.diagnostics.checks import DialPath, LocalFacts, PeerFacts
from barnraise.agent.diagnostics.interfaces import Interface, hardware_ports, kind_of, leading_to
from barnraise.agent.diagnostics.reachability import (
    DialBackLimiter,
    DialBackReply,
    DialBackRequest,
    DialResult,
    ReachabilityProber,
    decode_dial_back,
    encode_dial_back,
    outcome_of,
)
from barnraise.agent_client.cluster_requests import CheckRow, JoinClusterRequest
from barnraise.core.config import NetworkSettings, Settings, StateSettings
from barnraise.core.errors import ProtocolError, TransportError
from barnraise.discovery import Sighting, namespace_tag
from barnraise.identity import NodeId, NodeKey, delegate
from barnraise.identity.trust import TrustLog
from barnraise.membership.consensus.paxos import founded
from barnraise.membership.effects import LogNote
from barnraise.membership.node import MembershipNode
from barnraise.membership.view import PresentMember, first
from barnraise.transport.control.dial import AGENT_RUN, AgentTls, ControlConnection
from barnraise.transport.listener import acceptor
from tests.unit.transport.listening_machines import Machine, Street

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
    paths = tuple(DialPath(knock, ETHERNET, direct=True) for knock in there)
    return PeerFacts("pc", **{"os": "windows", "paths": paths, **facts})


# who can reach whom


@pytest.mark.parametrize(
    ("facts", "state", "words", "mend"),
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
def test_reach(facts: PeerFacts, state: str, words: str, mend: str) -> None:
    row = checks.reach(facts, HERE)
    assert row.state == state
    assert words in row.sentence
    assert mend in row.mend
    assert bool(row.mend) == (state != "ok")
    assert row.peer == "pc"


def test_the_words_of_each_dial_are_kept() -> None:
    assert SILENT.words in checks.reach(peer(SILENT, dial_backs=(GOOD,)), HERE).sentence
    assert SILENT.words in checks.reach(peer(GOOD, dial_backs=(SILENT,)), HERE).sentence


# which way the link takes


def test_the_cable_is_taken_where_there_is_one() -> None:
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
def test_interfaces_are_known_by_their_names(name: str, port: str, kind: str) -> None:
    assert kind_of(name, port) == kind
    assert kind_of(name, port, wireless=True) == "wifi"


def test_hardware_ports_of_macos() -> None:
    listed = "\nHardware Port: Wi-Fi\nDevice: en0\nX: a\n\nHardware Port: Thunderbolt 1\nDevice: en1\n"
    assert hardware_ports(listed) == {"en0": "Wi-Fi", "en1": "Thunderbolt 1"}
    assert hardware_ports("") == {}


def test_the_interface_that_leads_to_a_neighbour() -> None:
    wide = Interface("tun0", "192.168.0.1", 16, "vpn")
    six = Interface("eth0", "fd00::2", 64, "ethernet")
    assert leading_to("192.168.1.9", [wide, ETHERNET, WIFI]) == ETHERNET
    assert leading_to("192.168.9.9", [wide, ETHERNET, WIFI]) == wide
    assert leading_to("fd00::9", [ETHERNET, six]) == six
    assert leading_to("8.8.8.8", [wide, ETHERNET]) is None
    assert leading_to("no address", [ETHERNET]) is None


def test_prefixes_of_masks() -> None:
    assert collect.prefix_of("255.255.255.0") == 24
    assert collect.prefix_of("ffff:ffff:ffff:ffff::") == 64
    assert collect.prefix_of("nonsense") == 32


def test_this_machine_has_interfaces() -> None:
    found = {interface.address: interface for interface in collect.own_interfaces()}
    assert found["127.0.0.1"].kind == "loopback"
    assert found["127.0.0.1"].prefix == 8


# the other checks


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
def test_the_other_checks_both_paths(check: Callable[[], CheckRow | None], state: str, words: str) -> None:
    row = check()
    assert row is not None
    assert row.state == state
    assert words in row.sentence
    assert bool(row.mend) == (state != "ok")
    assert row.name in checks.CHECKS


def test_what_is_not_known_is_not_judged() -> None:
    assert checks.versions(peer(), HERE) is None
    assert checks.clock(peer()) is None
    assert checks.fork(peer()) is None
    assert checks.local_network("linux", True, ()) is None


def test_the_missing_can_be_gone_on_without() -> None:
    assert "--without mac --without pc" in checks.quorum(False, 1, 4, ("mac", "pc")).mend
    assert checks.quorum(False, 1, 2, ("mac",)).peer == "mac"


def test_discovery_fails_only_when_no_way_is_left() -> None:
    fine = {"mdns": None, "broadcast": None, "static": None}
    assert {row.state for row in checks.discovery(fine)} == {"ok"}
    rows = checks.discovery({**fine, "mdns": "no packet arrives"})
    assert [row.state for row in rows] == ["warn", "ok", "ok"]
    assert "mdns: no packet arrives" in rows[0].sentence
    assert "5353" in rows[0].mend
    lost = checks.discovery({"mdns": "deaf", "broadcast": "taken", "static": "x does not resolve"})
    assert [row.state for row in lost] == ["fail", "fail", "warn"]


def test_one_key_on_two_machines() -> None:
    me, other = bytes(32), bytes([1]) * 32
    names = {me: "here", other: "pc"}

    def answer(address: str, node: bytes, incarnation: bytes) -> DialResult:
        return DialResult(address, "answered", node=node, incarnation=incarnation)

    def judge(*knocks: DialResult) -> CheckRow:
        return checks.cloned_key(me, b"mine", knocks, names)

    assert judge().state == "ok"
    assert judge(SILENT, answer("a", other, b"1"), answer("b", other, b"1")).state == "ok"
    assert judge(answer("a", me, b"mine")).state == "ok", "that is this very agent"
    mine = judge(answer("192.168.1.9", me, b"another"))
    assert mine.state == "fail"
    assert "the node key of here (here and 192.168.1.9)" in mine.sentence
    theirs = judge(answer("a", other, b"1"), answer("b", other, b"2"))
    assert theirs.state == "fail"
    assert theirs.peer == "pc"
    assert "(a and b)" in theirs.sentence
    assert "node.key" in theirs.mend


def test_the_words_of_a_stall_are_understood() -> None:
    """The membership notes its own late ticks; the doctor reads them."""
    key = NodeKey.generate()
    log = TrustLog.found(key, "here")
    me = PresentMember(key.id.raw, bytes(16))
    member = MembershipNode(me, founded(first(key.id.raw, bytes(16), len(log))), log, random.Random(1), 0.0)
    member.tick(0.1)
    notes = [effect.text for effect in member.tick(9.1) if isinstance(effect, LogNote)]
    found = [match for note in notes if (match := collect._ASLEEP.search(note))]
    assert [float(match[1]) for match in found] == [9.0]


# what agents say to each other about it


def test_messages_survive_the_wire() -> None:
    for message in (
        DialBackRequest(7),
        DialBackReply(7, (GOOD, SILENT), 1.8e9),
        DialBackReply(7, (), 0.0, "busy"),
    ):
        data = encode_dial_back(message)
        assert data[:1] == protocol.SURVEY
        assert decode_dial_back(data[1:]) == message


@pytest.mark.parametrize(
    "message",
    [
        DialBackRequest(-1),
        DialBackRequest(2**32),
        DialBackReply(0, (GOOD,) * 6, 0.0),
        DialBackReply(0, (), -1.0),
        DialBackReply(0, (), 0.0, "x" * 201),
        DialBackReply(0, (DialResult("x" * 65, "answered"),), 0.0),
        DialBackReply(0, (DialResult("x", "answered", "y" * 301),), 0.0),
        DialBackReply(0, (DialResult("x", "answered", rtt_ms=-1.0),), 0.0),
        DialBackReply(0, (msgspec.structs.replace(GOOD, outcome="stolen"),), 0.0),  # type: ignore[arg-type]
    ],
)
def test_messages_out_of_bounds_are_refused(message: DialBackRequest | DialBackReply) -> None:
    with pytest.raises(ProtocolError):
        decode_dial_back(encode_dial_back(message)[1:])


@given(st.binary(max_size=200))
def test_no_bytes_can_harm(data: bytes) -> None:
    try:
        decode_dial_back(data)
    except ProtocolError:
        pass


def test_who_may_have_us_knock() -> None:
    nodes = [NodeKey.generate().id for _ in range(30)]
    gate = DialBackLimiter()
    assert gate.enter(nodes[0], 0.0) is None
    gate.leave()
    assert gate.enter(nodes[0], 1.0) == "asked again too soon"
    assert gate.enter(nodes[0], 4.0) is None
    assert [gate.enter(node, 4.0) for node in nodes[1:5]] == [None] * 3 + ["busy with other requests"]
    for _ in range(4):
        gate.leave()
    admitted = 0
    for node in nodes[5:]:
        if gate.enter(node, 5.0) is None:
            gate.leave()
            admitted += 1
    assert admitted == 15, "twenty in ten seconds, whoever asks"
    assert gate.enter(nodes[5], 20.0) is None


@pytest.mark.parametrize(
    ("cause", "outcome"),
    [
        (ConnectionRefusedError(), "refused"),
        (TimeoutError(), "silent"),
        (OSError(errno.EHOSTUNREACH, "no route"), "unreachable"),
        (PermissionError(errno.EPERM, "not permitted"), "forbidden"),
        (OSError(errno.EIO, "x"), "other"),
        (None, "other"),
    ],
)
def test_what_a_failed_dial_says(cause: OSError | None, outcome: str) -> None:
    error = TransportError("x")
    error.__cause__ = cause
    assert outcome_of(error) == outcome


# knocks over real sockets


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Knocks take as long as this machine needs for them at the moment."""
    monkeypatch.setattr(reachability, "DIAL_S", 30.0)
    monkeypatch.setattr(reachability, "_ANSWER_S", 60.0)
    monkeypatch.setattr(collect, "_GATHER_S", 60.0)
    monkeypatch.setattr(acceptor, "PREFACE_DEADLINE_S", 60.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


class Examined(Machine):
    """A machine with a prober: it knows where its neighbours are and passes their words on."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self.at: dict[NodeId, PeerAddress] = {}
        self.to: dict[NodeId, ControlConnection] = {}
        self.prober = ReachabilityProber(self.tls, self.at.get, lambda node, epoch: self.word, self.to.get)

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_message": lambda link, message: self.prober.received(link, message[1:]),
            "on_closed": lambda link, why: None,
        }

    def knows(self, other: Examined, *addresses: str, port: int | None = None) -> None:
        self.at[other.node] = PeerAddress(addresses or ("127.0.0.1",), port or other.listener.port)


def on_street(tmp_path: Path, body: Callable[[Examined, Examined], Coroutine[Any, Any, None]]) -> None:
    """Two machines that trust each other, linked by the first one's call."""

    async def main() -> None:
        street = Street(tmp_path)
        try:
            machines = []
            for name in "ab":
                new = Examined(tmp_path / name)
                await new.listener.start()
                street.machines.append(new)
                machines.append(new)
            one, two = machines
            one.friends.add(two.node)
            two.friends.add(one.node)
            one.knows(two)
            two.knows(one)
            one.to[two.node] = await one.dial(two)
            two.to[one.node] = await asyncio.wait_for(two.links.get(), 60)
            await asyncio.wait_for(body(one, two), 120)
            for machine in machines:
                await machine.prober.close()
        finally:
            await street.close()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


@pytest.mark.usefixtures("_patient")
def test_a_knock_proves_the_way_and_leaves_no_link(tmp_path: Path) -> None:
    async def body(one: Examined, two: Examined) -> None:
        (knock,) = await one.prober.dial_node(two.node)
        assert knock.outcome == "answered"
        assert (knock.node, knock.incarnation) == (two.node.raw, two.incarnation)
        assert knock.rtt_ms > 0
        stranger = await one.prober.dial("127.0.0.1", two.listener.port, one.word, None)
        assert stranger.node == two.node.raw
        await asyncio.wait_for(two.refusals.get(), 60)
        assert two.links.empty(), "it was never opened"

    on_street(tmp_path, body)


@pytest.mark.usefixtures("_patient")
def test_a_knock_at_a_shut_or_wrong_door(tmp_path: Path) -> None:
    async def body(one: Examined, two: Examined) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        one.knows(two, port=port)
        (knock,) = await one.prober.dial_node(two.node)
        assert knock.outcome == "refused"
        assert str(port) in knock.words
        wrong = await one.prober.dial("127.0.0.1", one.listener.port, one.word, two.node)
        assert wrong.outcome == "other"
        assert await one.prober.dial_node(NodeKey.generate().id) == (), "nowhere to knock"

    on_street(tmp_path, body)


@pytest.mark.usefixtures("_patient")
def test_a_peer_dials_back_where_it_knows_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "_EACH_S", 60.0)

    async def body(one: Examined, two: Examined) -> None:
        told = await one.prober.request_dial_back(two.node)
        assert isinstance(told, DialBackReply)
        assert [knock.outcome for knock in told.results] == ["answered"]
        assert told.results[0].incarnation == one.incarnation
        assert await one.prober.request_dial_back(two.node) == "asked again too soon"

    on_street(tmp_path, body)


@pytest.mark.usefixtures("_patient")
def test_a_peer_that_cannot_dial_back_says_why(tmp_path: Path) -> None:
    async def body(one: Examined, two: Examined) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        two.knows(one, port=port)
        told = await one.prober.request_dial_back(two.node)
        assert isinstance(told, DialBackReply)
        assert told.results[0].outcome == "refused"
        del one.at[two.node]
        assert await two.prober.request_dial_back(one.node) == "it knows no address of this machine"
        del two.to[one.node]
        assert await two.prober.request_dial_back(one.node) == "there is no connection to ask over"

    on_street(tmp_path, body)


@pytest.mark.usefixtures("_patient")
def test_an_answer_that_nobody_asked_for_is_dropped(tmp_path: Path) -> None:
    async def body(one: Examined, two: Examined) -> None:
        link = two.to[one.node]
        for serial in range(1000, 1050):
            link.send(encode_dial_back(DialBackReply(serial, (GOOD,), 1.0)))
        told = await one.prober.request_dial_back(two.node)
        assert isinstance(told, DialBackReply)
        assert told.results[0].incarnation == one.incarnation
        link.send(protocol.SURVEY + b"\xff\xff")
        await until(lambda: one.to[two.node].closed is not None)
        assert "cannot be read" in (one.to[two.node].closed or "")

    on_street(tmp_path, body)


# real agents


class Patient(Agent):
    """An agent with its prober."""

    prober: ReachabilityProber

    async def start(self) -> None:
        await super().start()
        tls = AgentTls(delegate(self.key, run=AGENT_RUN, worker=self.incarnation), lambda: self.log.members)
        self.prober = ReachabilityProber(
            tls, self.peer_store.address_of, self.secret_for, self.connections.get
        )

    def received(self, link: ControlConnection, message: bytes) -> None:
        if message[:1] == protocol.SURVEY:
            self.prober.received(link, message[1:])
        else:
            super().received(link, message)


def settings(directory: Path) -> Settings:
    # A port of its own for discovery: other tests' agents must not be found.
    network = NetworkSettings(port=0, discovery_port=52999, addresses=("127.0.0.1",))
    return Settings(state=StateSettings(directory=str(directory)), network=network)


async def examine(agent: Patient) -> dict[str, list[CheckRow]]:
    rows: dict[str, list[CheckRow]] = {}
    for row in (await collect.check(agent, agent.prober)).rows:
        rows.setdefault(row.name, []).append(row)
    return rows


@pytest.mark.slow
@pytest.mark.usefixtures("_patient")
def test_a_copied_machine_is_found(tmp_path: Path) -> None:
    async def main() -> None:
        original = Patient(settings(tmp_path / "1"))
        await original.start()
        await original.stop()
        shutil.copytree(tmp_path / "1", tmp_path / "2", ignore=shutil.ignore_patterns("*.sock"))
        original, copy = Patient(settings(tmp_path / "1")), Patient(settings(tmp_path / "2"))
        await original.start()
        await copy.start()
        try:
            assert (await examine(original))["cloned-key"][0].state == "ok"
            tag = namespace_tag(original.log.secret)
            seen = Sighting("127.0.0.1", copy.listener.port, tag, "mdns")
            original.discovery.discovery.places = lambda: (seen,)  # type: ignore[method-assign]
            (row,) = (await examine(original))["cloned-key"]
            assert row.state == "fail"
            assert "here and 127.0.0.1" in row.sentence
        finally:
            await copy.stop()
            await original.stop()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(asyncio.wait_for(main(), 180))


@pytest.mark.slow
@pytest.mark.usefixtures("_patient")
def test_two_agents_are_examined_and_one_that_has_gone_is_missed(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = Patient(settings(tmp_path / "1")), Patient(settings(tmp_path / "2"))
        await one.start()
        await two.start()
        one.rename("one")
        two.rename("two")
        try:
            alone = await examine(one)
            assert set(alone) == {"discovery", "cloned-key", "quorum", "stalls"}
            code = str(one.pairing.open_code("owner").secret)
            await join(two, JoinClusterRequest(code, at=f"127.0.0.1:{one.listener.port}"))
            await until(
                lambda: one.connections.get(two.me) is not None and one.member.view.of(two.me.raw) is not None
            )
            together = await examine(one)
            (reach,) = together["reach"]
            assert (reach.state, reach.peer) == ("ok", "two")
            assert reach.sentence.startswith("both directions")
            assert {row.state for row in together["versions"] + together["clock"]} == {"ok"}
            assert together["cloned-key"][0].state == "ok"
            assert together["quorum"][0].state == "ok"
            # As a process that has ended: nobody is let in any more while it stops.
            two.connections.accept = lambda *call: call[0].close()  # type: ignore[method-assign]
            await two.stop()
            await until(lambda: one.connections.get(two.me) is None)
            missed = await examine(one)
            assert missed["reach"][0].state == "warn"
            assert "no agent listens there" in missed["reach"][0].sentence
        finally:
            await one.stop()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(asyncio.wait_for(main(), 180))
