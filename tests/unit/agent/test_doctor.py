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

from barnraise.agent import doctor, knocking, symptoms, wire
from barnraise.agent.interfaces import Interface, hardware_ports, kind_of, leading_to
from barnraise.agent.joining import join
from barnraise.agent.knocking import (
    DialBack,
    DialledBack,
    Knock,
    Knocker,
    Turnstile,
    decode_knocking,
    encode_knocking,
    outcome_of,
)
from barnraise.agent.links import Place
from barnraise.agent.node import Agent
from barnraise.agent.symptoms import Here, PeerFacts, Way
from barnraise.core.config import Network, Settings, State
from barnraise.core.errors import ProtocolError, TransportError
from barnraise.discovery import Sighting, namespace_tag
from barnraise.identity import NodeId, NodeKey, delegate
from barnraise.identity.trust import TrustLog
from barnraise.local.questions import CheckRow, JoinAsk
from barnraise.membership.agreement import founded
from barnraise.membership.effects import Note
from barnraise.membership.member import Member
from barnraise.membership.view import Present, first
from barnraise.transport import doorkeeper
from barnraise.transport.control import AGENT_RUN, AgentTls, ControlLink
from tests.unit.changed_bytes import changed, read_or_refused
from tests.unit.transport.machines import Machine, Street

HERE = Here("here", 52416, "linux", "0.1.0", "2.13.0")
ETHERNET = Interface("eth0", "192.168.1.2", 24, "ethernet")
WIFI = Interface("wlan0", "192.168.2.2", 24, "wifi")
VPN = Interface("wg0", "10.8.0.2", 24, "vpn")
GOOD = Knock("192.168.1.7", "answered", rtt_ms=0.4)
SILENT = Knock("192.168.1.7", "silent", "192.168.1.7:52416 does not answer")
REFUSED = Knock("192.168.1.7", "refused", "192.168.1.7:52416 refuses")
FORBIDDEN = Knock("192.168.1.7", "forbidden", "not permitted")
STRANGE = Knock("192.168.1.7", "other", "its key is not trusted here")


def peer(*there: Knock, **facts: Any) -> PeerFacts:
    ways = tuple(Way(knock, ETHERNET, direct=True) for knock in there)
    return PeerFacts("pc", **{"os": "windows", "ways": ways, **facts})


# who can reach whom


@pytest.mark.parametrize(
    ("facts", "state", "words", "mend"),
    [
        (peer(GOOD, back=(GOOD,)), "ok", "both directions, 0.4 ms", ""),
        (peer(SILENT, GOOD, back=(SILENT, GOOD)), "ok", "both directions", ""),
        (peer(GOOD, link_inbound=True), "ok", "both directions", ""),
        (peer(GOOD, no_back="asked again too soon"), "ok", "not known: asked again too soon", ""),
        (peer(GOOD, back=(SILENT,)), "fail", "firewall of this machine (here)", "Here: sudo ufw"),
        (peer(GOOD, back=(FORBIDDEN,)), "fail", "firewall on pc forbids its outgoing", "On pc: allow"),
        (
            peer(SILENT, back=(GOOD,)),
            "fail",
            "the firewall of pc does not let",
            "On pc: as administrator: netsh",
        ),
        (peer(SILENT, link_inbound=True), "fail", "the firewall of pc does not let", "On pc: "),
        (peer(FORBIDDEN, back=(GOOD,)), "fail", "this machine forbids outgoing", "Here: allow outgoing"),
        (peer(SILENT, back=(SILENT,)), "warn", "no new connection", "Try again"),
        (peer(SILENT, linked=False), "warn", "off, asleep, on another network", "Wake it"),
        (peer(linked=False), "warn", "no address of it is known", "Wake it"),
        (peer(REFUSED, linked=False), "warn", "no agent listens there", "On pc: barnraise up"),
        (peer(STRANGE, linked=False), "warn", "is not it, or does not know", "barnraise pair"),
        (peer(GOOD, linked=False), "warn", "there is no link to it yet", "barnraise status"),
        (peer(SILENT, linked=False, heard_by=("mac",)), "fail", "mac can reach pc, this machine", "On pc: "),
    ],
)
def test_reach(facts: PeerFacts, state: str, words: str, mend: str) -> None:
    row = symptoms.reach(facts, HERE)
    assert row.state == state
    assert words in row.sentence
    assert mend in row.mend
    assert bool(row.mend) == (state != "ok")
    assert row.peer == "pc"


def test_the_words_of_each_dial_are_kept() -> None:
    assert SILENT.words in symptoms.reach(peer(SILENT, back=(GOOD,)), HERE).sentence
    assert SILENT.words in symptoms.reach(peer(GOOD, back=(SILENT,)), HERE).sentence


# which way the link takes


def test_the_cable_is_taken_where_there_is_one() -> None:
    on_wifi = Way(Knock("192.168.2.7", "answered", rtt_ms=3.0), WIFI, direct=True)
    on_vpn = Way(Knock("10.8.0.7", "answered", rtt_ms=1.0), VPN, direct=True)
    on_cable = Way(GOOD, ETHERNET, direct=True)
    far = Way(GOOD, ETHERNET, direct=False)

    def judge(used: Way, *ways: Way, linked: bool = True) -> CheckRow | None:
        return symptoms.interface(
            PeerFacts("pc", linked=linked, link_address=used.knock.address, ways=(used, *ways))
        )

    for fine in (judge(on_cable, on_wifi), judge(on_wifi), judge(on_wifi, on_vpn), judge(on_wifi, far)):
        assert fine is not None
        assert fine.state == "ok"
    assert judge(on_wifi, on_cable, linked=False) is None
    slow = judge(on_wifi, on_cable)
    assert slow is not None
    assert slow.state == "warn"
    assert "takes WiFi (wlan0, 192.168.2.7), although Ethernet (eth0, 192.168.1.7) answers" in slow.sentence
    broken = judge(on_vpn, Way(SILENT, ETHERNET, direct=True))
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
    assert doctor.prefix_of("255.255.255.0") == 24
    assert doctor.prefix_of("ffff:ffff:ffff:ffff::") == 64
    assert doctor.prefix_of("nonsense") == 32


def test_this_machine_has_interfaces() -> None:
    found = {interface.address: interface for interface in doctor.own_interfaces()}
    assert found["127.0.0.1"].kind == "loopback"
    assert found["127.0.0.1"].prefix == 8


# the other checks


@pytest.mark.parametrize(
    ("check", "state", "words"),
    [
        (lambda: symptoms.versions(peer(version="0.1.7", torch="2.13.1"), HERE), "ok", "0.1.7"),
        (lambda: symptoms.versions(peer(version="0.2.0"), HERE), "warn", "0.2.0 there, 0.1.0 here"),
        (lambda: symptoms.versions(peer(version="0.1.0", torch="2.14.0+cpu"), HERE), "warn", "torch 2.14.0"),
        (lambda: symptoms.clock(peer(clock_ahead_s=3.0)), "ok", "two minutes"),
        (lambda: symptoms.clock(peer(clock_ahead_s=3600.0)), "warn", "60 min ahead of"),
        (lambda: symptoms.clock(peer(clock_ahead_s=-1.5e8)), "warn", "1736 days behind"),
        (lambda: symptoms.fork(peer(fork="trust log")), "fail", "pc has another trust log"),
        (lambda: symptoms.quorum(True, 3, 3, ()), "ok", "3 of 3"),
        (lambda: symptoms.quorum(False, 1, 2, ("mac",)), "fail", "mac is missing"),
        (lambda: symptoms.quorum(False, 1, 4, ("mac", "pc")), "fail", "one of mac, pc is missing"),
        (lambda: symptoms.stalls((), 7200.0), "ok", "2 h"),
        (lambda: symptoms.stalls((3.0,), 7200.0), "warn", "once in 2 h, at most for 3 s"),
        (lambda: symptoms.stalls((3.0, 500.0), 7200.0), "warn", "2 times in 2 h, at most for 8 min"),
        (lambda: symptoms.local_network("macos", False, peer(GOOD).ways), "ok", "lets the agent"),
        (lambda: symptoms.local_network("macos", True, ()), "fail", "no mDNS packet"),
        (lambda: symptoms.local_network("macos", True, peer(GOOD).ways), "ok", "lets the agent"),
        (
            lambda: symptoms.local_network("macos", False, peer(Knock("192.168.1.7", "unreachable")).ways),
            "fail",
            "no route to 192.168.1.7",
        ),
    ],
)
def test_the_other_checks_both_ways(check: Callable[[], CheckRow | None], state: str, words: str) -> None:
    row = check()
    assert row is not None
    assert row.state == state
    assert words in row.sentence
    assert bool(row.mend) == (state != "ok")
    assert row.name in symptoms.CHECKS


def test_what_is_not_known_is_not_judged() -> None:
    assert symptoms.versions(peer(), HERE) is None
    assert symptoms.clock(peer()) is None
    assert symptoms.fork(peer()) is None
    assert symptoms.local_network("linux", True, ()) is None


def test_the_missing_can_be_gone_on_without() -> None:
    assert "--without mac --without pc" in symptoms.quorum(False, 1, 4, ("mac", "pc")).mend
    assert symptoms.quorum(False, 1, 2, ("mac",)).peer == "mac"


def test_discovery_fails_only_when_no_way_is_left() -> None:
    fine = {"mdns": None, "broadcast": None, "static": None}
    assert {row.state for row in symptoms.discovery(fine)} == {"ok"}
    rows = symptoms.discovery({**fine, "mdns": "no packet arrives"})
    assert [row.state for row in rows] == ["warn", "ok", "ok"]
    assert "mdns: no packet arrives" in rows[0].sentence
    assert "5353" in rows[0].mend
    lost = symptoms.discovery({"mdns": "deaf", "broadcast": "taken", "static": "x does not resolve"})
    assert [row.state for row in lost] == ["fail", "fail", "warn"]


def test_one_key_on_two_machines() -> None:
    me, other = bytes(32), bytes([1]) * 32
    names = {me: "here", other: "pc"}

    def answer(address: str, node: bytes, incarnation: bytes) -> Knock:
        return Knock(address, "answered", node=node, incarnation=incarnation)

    def judge(*knocks: Knock) -> CheckRow:
        return symptoms.cloned_key(me, b"mine", knocks, names)

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
    me = Present(key.id.raw, bytes(16))
    member = Member(me, founded(first(key.id.raw, bytes(16), len(log))), log, random.Random(1), 0.0)
    member.tick(0.1)
    notes = [effect.text for effect in member.tick(9.1) if isinstance(effect, Note)]
    found = [match for note in notes if (match := doctor._ASLEEP.search(note))]
    assert [float(match[1]) for match in found] == [9.0]


# what agents say to each other about it


KNOCKS = (DialBack(7), DialledBack(7, (GOOD, SILENT), 1.8e9), DialledBack(7, (), 0.0, "busy"))


def test_messages_survive_the_wire() -> None:
    for message in KNOCKS:
        data = encode_knocking(message)
        assert data[:1] == wire.SURVEY
        assert decode_knocking(data[1:]) == message


@pytest.mark.parametrize(
    "message",
    [
        DialBack(-1),
        DialBack(2**32),
        DialledBack(0, (GOOD,) * 6, 0.0),
        DialledBack(0, (), -1.0),
        DialledBack(0, (), 0.0, "x" * 201),
        DialledBack(0, (Knock("x" * 65, "answered"),), 0.0),
        DialledBack(0, (Knock("x", "answered", "y" * 301),), 0.0),
        DialledBack(0, (Knock("x", "answered", rtt_ms=-1.0),), 0.0),
        DialledBack(0, (msgspec.structs.replace(GOOD, outcome="stolen"),), 0.0),  # type: ignore[arg-type]
    ],
)
def test_messages_out_of_bounds_are_refused(message: DialBack | DialledBack) -> None:
    with pytest.raises(ProtocolError):
        decode_knocking(encode_knocking(message)[1:])


@given(st.binary(max_size=200) | changed([encode_knocking(one)[1:] for one in KNOCKS]))
def test_knocks_with_changed_bytes_are_read_or_refused(data: bytes) -> None:
    read_or_refused(data, decode_knocking, lambda one: encode_knocking(one)[1:], ProtocolError)


def test_who_may_have_us_knock() -> None:
    nodes = [NodeKey.generate().id for _ in range(30)]
    gate = Turnstile()
    assert gate.enter(nodes[0], 0.0) is None
    gate.leave()
    assert gate.enter(nodes[0], 1.0) == "asked again too soon"
    assert gate.enter(nodes[0], 4.0) is None
    assert [gate.enter(node, 4.0) for node in nodes[1:5]] == [None] * 3 + ["busy with others' questions"]
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
    monkeypatch.setattr(knocking, "KNOCK_S", 30.0)
    monkeypatch.setattr(knocking, "_ANSWER_S", 60.0)
    monkeypatch.setattr(doctor, "_GATHER_S", 60.0)
    monkeypatch.setattr(doorkeeper, "PREFACE_DEADLINE_S", 60.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


class Examined(Machine):
    """A machine with a knocker: it knows where its neighbours are and passes their words on."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self.at: dict[NodeId, Place] = {}
        self.to: dict[NodeId, ControlLink] = {}
        self.knocker = Knocker(self.tls, self.at.get, lambda node, epoch: self.word, self.to.get)

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_message": lambda link, message: self.knocker.received(link, message[1:]),
            "on_closed": lambda link, why: None,
        }

    def knows(self, other: Examined, *addresses: str, port: int | None = None) -> None:
        self.at[other.node] = Place(addresses or ("127.0.0.1",), port or other.listener.port)


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
                await machine.knocker.close()
        finally:
            await street.close()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


@pytest.mark.usefixtures("_patient")
def test_a_knock_proves_the_way_and_leaves_no_link(tmp_path: Path) -> None:
    async def body(one: Examined, two: Examined) -> None:
        (knock,) = await one.knocker.knock_at(two.node)
        assert knock.outcome == "answered"
        assert (knock.node, knock.incarnation) == (two.node.raw, two.incarnation)
        assert knock.rtt_ms > 0
        stranger = await one.knocker.knock("127.0.0.1", two.listener.port, one.word, None)
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
        (knock,) = await one.knocker.knock_at(two.node)
        assert knock.outcome == "refused"
        assert str(port) in knock.words
        wrong = await one.knocker.knock("127.0.0.1", one.listener.port, one.word, two.node)
        assert wrong.outcome == "other"
        assert await one.knocker.knock_at(NodeKey.generate().id) == (), "nowhere to knock"

    on_street(tmp_path, body)


@pytest.mark.usefixtures("_patient")
def test_a_peer_dials_back_where_it_knows_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knocking, "_EACH_S", 60.0)

    async def body(one: Examined, two: Examined) -> None:
        told = await one.knocker.ask(two.node)
        assert isinstance(told, DialledBack)
        assert [knock.outcome for knock in told.knocks] == ["answered"]
        assert told.knocks[0].incarnation == one.incarnation
        assert await one.knocker.ask(two.node) == "asked again too soon"

    on_street(tmp_path, body)


@pytest.mark.usefixtures("_patient")
def test_a_peer_that_cannot_dial_back_says_why(tmp_path: Path) -> None:
    async def body(one: Examined, two: Examined) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        two.knows(one, port=port)
        told = await one.knocker.ask(two.node)
        assert isinstance(told, DialledBack)
        assert told.knocks[0].outcome == "refused"
        del one.at[two.node]
        assert await two.knocker.ask(one.node) == "it knows no address of this machine"
        del two.to[one.node]
        assert await two.knocker.ask(one.node) == "there is no link to ask over"

    on_street(tmp_path, body)


@pytest.mark.usefixtures("_patient")
def test_an_answer_that_nobody_asked_for_is_dropped(tmp_path: Path) -> None:
    async def body(one: Examined, two: Examined) -> None:
        link = two.to[one.node]
        for serial in range(1000, 1050):
            link.send(encode_knocking(DialledBack(serial, (GOOD,), 1.0)))
        told = await one.knocker.ask(two.node)
        assert isinstance(told, DialledBack)
        assert told.knocks[0].incarnation == one.incarnation
        link.send(wire.SURVEY + b"\xff\xff")
        await until(lambda: one.to[two.node].closed is not None)
        assert "cannot be read" in (one.to[two.node].closed or "")

    on_street(tmp_path, body)


# real agents


class Patient(Agent):
    """An agent with its knocker."""

    knocker: Knocker

    async def start(self) -> None:
        await super().start()
        tls = AgentTls(delegate(self.key, run=AGENT_RUN, worker=self.incarnation), lambda: self.log.members)
        self.knocker = Knocker(tls, self.places.place, self.secret_for, self.links.get)

    def received(self, link: ControlLink, message: bytes) -> None:
        if message[:1] == wire.SURVEY:
            self.knocker.received(link, message[1:])
        else:
            super().received(link, message)


def settings(directory: Path) -> Settings:
    # A port of its own for discovery: other tests' agents must not be found.
    network = Network(port=0, discovery_port=52999, addresses=("127.0.0.1",))
    return Settings(state=State(directory=str(directory)), network=network)


async def examine(agent: Patient) -> dict[str, list[CheckRow]]:
    rows: dict[str, list[CheckRow]] = {}
    for row in (await doctor.check(agent, agent.knocker)).rows:
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
            original.search.discovery.places = lambda: (seen,)  # type: ignore[method-assign]
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
            await join(two, JoinAsk(code, at=f"127.0.0.1:{one.listener.port}"))
            await until(
                lambda: one.links.get(two.me) is not None and one.member.view.of(two.me.raw) is not None
            )
            together = await examine(one)
            (reach,) = together["reach"]
            assert (reach.state, reach.peer) == ("ok", "two")
            assert reach.sentence.startswith("both directions")
            assert {row.state for row in together["versions"] + together["clock"]} == {"ok"}
            assert together["cloned-key"][0].state == "ok"
            assert together["quorum"][0].state == "ok"
            # As a process that has ended: nobody is let in any more while it stops.
            two.links.accept = lambda *call: call[0].close()  # type: ignore[method-assign]
            await two.stop()
            await until(lambda: one.links.get(two.me) is None)
            missed = await examine(one)
            assert missed["reach"][0].state == "warn"
            assert "no agent listens there" in missed["reach"][0].sentence
        finally:
            await one.stop()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(asyncio.wait_for(main(), 180))
