"""The lab itself: hosts on a switch, rates, paths, cuts and NAT routers."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from lab import cuts, janitor, units
from lab.forwarding import Conditions, Forwarder
from lab.hosts import Host
from lab.namespaces import LabError, allow_cubic, configure, ip, limit, nft, why_unavailable
from lab.systems.system import LINUX, System

_MAX_HOSTS = 250
_HOST_SETTINGS = {"ipv4/tcp_congestion_control": "cubic"}
_SWITCH_SETTINGS = {"ipv6/conf/all/disable_ipv6": "1", "ipv6/conf/default/disable_ipv6": "1"}
# Without snooping, multicast reaches every port at once, as on a plain switch.
_BRIDGE = ("link add br0 type bridge mcast_snooping 0", "link set br0 up")


@dataclass(frozen=True)
class Nat:
    """A router that masquerades, with hosts behind it. `router` stands on the public switch."""

    router: Host
    hosts: tuple[Host, ...]

    @property
    def address(self) -> str:
        """Return the address that the public side sees."""
        return self.router.address


@dataclass
class _Segment:
    """A namespace that switches, and how many ports and addresses of it are taken."""

    namespace: str
    network: str
    router: Host | None = None
    taken: int = 0


@dataclass(frozen=True)
class _Place:
    segment: _Segment
    port: int


@dataclass
class _State:
    """Parts that exist while the lab is open."""

    directory: Path
    janitor: subprocess.Popen[bytes]
    public: _Segment
    forwarder: Forwarder | None = None
    places: dict[Host, _Place] = field(default_factory=dict)


class Lab:
    """Hosts in network namespaces on one switch, which has a namespace of its own.

    - hosts: their number, or the system of each: ``[LINUX, WINDOWS, ARM64]``.
    - rate: of each host's line, both directions; None for no limit.
    - delay: one way between any two hosts, so that a round trip takes twice as long.
    - jitter: each frame's delay is uniform within plus or minus this; frames of a path keep their order.
    - loss: share of packets lost one way, 0.05 or "5%".
    - nat: for each number, a NAT router with that number of hosts behind it.
    - shaped: True sends all traffic through the forwarder, so that set_path can be used later.
    """

    def __init__(
        self,
        hosts: int | Sequence[System] = 2,
        rate: str | None = "1gbit",
        delay: str = "0ms",
        loss: float | str = 0,
        jitter: str = "0ms",
        nat: Sequence[int] = (),
        shaped: bool = False,
    ) -> None:
        self.id = secrets.token_hex(4)
        self.hosts: list[Host] = []
        self.nats: list[Nat] = []
        self._systems = (LINUX,) * hosts if isinstance(hosts, int) else tuple(hosts)
        self._nats = tuple(nat)
        self._rate = None if rate is None else units.bits_per_second(rate)
        self._conditions = Conditions(units.seconds(delay), units.seconds(jitter), units.share(loss))
        self._shaped = shaped or self._conditions != Conditions()
        self._cuts = cuts.Cuts()
        self._state: _State | None = None

    def open(self) -> Self:
        if (reason := why_unavailable()) is not None:
            raise LabError(f"No lab here: {reason}.")
        for system in self._systems:
            if (reason := system.why_unavailable()) is not None:
                raise LabError(reason)
        for lab in janitor.known_labs():
            if janitor.is_orphan(lab):
                janitor.remove(lab)
        directory = Path(tempfile.gettempdir(), f"{janitor.PREFIX}{self.id}")
        public = _Segment(self._name("sw"), "10.80.0")
        self._state = _State(directory, _start_janitor(self.id, directory), public)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Kill every process of the lab and remove the lab. Safe to repeat."""
        state, self._state = self._state, None
        if state is None:
            return
        processes = [process for host in state.places for process in host.processes]
        for process in processes:
            process.signal(signal.SIGKILL, group=True)
        state.janitor.communicate(b"close\n")
        for process in processes:
            process.wait()
        if state.forwarder is not None:
            state.forwarder.wait()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set_rate(self, host: Host, rate: str | None, down: str | None = None) -> None:
        """Set the host's rate from now on; `down`: another rate for receiving. None: no limit."""
        up_bits = None if rate is None else units.bits_per_second(rate)
        self._limit(host, up_bits, up_bits if down is None else units.bits_per_second(down))

    def set_path(
        self, a: Host, b: Host, delay: str = "0ms", jitter: str = "0ms", loss: float | str = 0
    ) -> None:
        """Delay, jitter and loss between these two from now on, each way. Needs a shaped lab."""
        state = self._open_state()
        if state.forwarder is None:
            raise LabError("This lab has no forwarder. Make it with delay, jitter or loss, or shaped=True.")
        conditions = Conditions(units.seconds(delay), units.seconds(jitter), units.share(loss))
        places = [state.places[host] for host in (a, b)]
        if any(place.segment is not state.public for place in places):
            raise LabError("A path is between hosts of the public switch. Give the NAT's router instead.")
        state.forwarder.set_path(places[0].port, places[1].port, conditions)

    def set_trunk(self, near: Sequence[Host], far: Sequence[Host], rate: str, delay: str = "0ms") -> None:
        """Route all traffic between two sites through one line with this rate each way. For a shaped lab."""
        state = self._open_state()
        if state.forwarder is None:
            raise LabError("This lab has no forwarder. Make it with shaped=True.")
        here, there = ([state.places[host].port for host in side] for side in (near, far))
        conditions = Conditions(units.seconds(delay))
        state.forwarder.set_trunk(here, there, units.bits_per_second(rate), conditions)

    def trunk_bytes(self) -> int:
        """Return the bytes that the trunks have carried until now, both ways."""
        forwarder = self._open_state().forwarder
        return 0 if forwarder is None else forwarder.carried()

    def cut(self, a: Host, b: Host) -> None:
        """Drop everything between the two silently, both ways."""
        self.cut_one_way(a, b)
        self.cut_one_way(b, a)

    def cut_one_way(self, src: Host, dst: Host) -> None:
        """Drop everything that src sends to dst silently."""
        places = self._open_state().places
        self._cuts.add(src, places[src].segment.router, dst, places[dst].segment.router)

    def heal(self, a: Host, b: Host) -> None:
        """Remove any cut between the two, in either direction."""
        self._open_state()
        self._cuts.remove(a, b)
        self._cuts.remove(b, a)

    def heal_all(self) -> None:
        self._open_state()
        self._cuts.clear()

    def add_nat(self, hosts: int = 1) -> Nat:
        """Add a NAT router with this number of hosts behind it."""
        index = len(self.nats)
        state = self._open_state()
        (router,) = self._add_hosts(state.public, [f"r{index}"])
        inner = _Segment(router.namespace, f"192.168.{index + 1}", router, taken=1)
        configure(
            router.namespace,
            {"ipv4/ip_forward": "1"},
            [*_BRIDGE, f"addr add {inner.network}.1/24 dev br0"],
        )
        nft(router.namespace, _MASQUERADE)
        behind = self._add_hosts(inner, [f"r{index}h{number}" for number in range(hosts)])
        self.nats.append(Nat(router, tuple(behind)))
        return self.nats[-1]

    def _build(self) -> None:
        state = self._open_state()
        switch = state.public.namespace
        allow_cubic()
        ip([f"netns add {switch}"])
        configure(switch, _SWITCH_SETTINGS, [] if self._shaped else _BRIDGE)
        if self._shaped:
            state.forwarder = Forwarder(switch, self._conditions)
        names = [f"h{number}" for number in range(len(self._systems))]
        self.hosts.extend(self._add_hosts(state.public, names, self._systems))
        for behind in self._nats:
            self.add_nat(behind)

    def _add_hosts(
        self, segment: _Segment, names: Sequence[str], systems: Sequence[System] = ()
    ) -> list[Host]:
        state = self._open_state()
        if segment.taken + len(names) > _MAX_HOSTS:
            raise LabError(f"A switch of the lab has {_MAX_HOSTS} ports. Ask for fewer hosts.")
        added = []
        for name, system in zip(names, systems or (LINUX,) * len(names), strict=True):
            port, segment.taken = segment.taken, segment.taken + 1
            third = segment.network.rpartition(".")[2]
            mac = f"02:00:00:00:{int(third):02x}:{port + 1:02x}"
            address = f"{segment.network}.{port + 1}"
            host = Host(name, self._name(name), address, mac, state.directory, system)
            state.places[host] = _Place(segment, port)
            added.append(host)
        ip([f"netns add {host.namespace}" for host in added])
        self._plug_in(segment, added)
        for host in added:
            links = ["link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up"]
            links.append("route add 224.0.0.0/4 dev eth0")
            if segment.router is not None:
                links.append(f"route add default via {segment.network}.1")
            configure(host.namespace, _HOST_SETTINGS, links)
            if self._rate is not None:
                self._limit(host, self._rate, self._rate)
        return added

    def _plug_in(self, segment: _Segment, hosts: Sequence[Host]) -> None:
        """Connect each host to the switch, or to the forwarder's TAP in a shaped lab."""
        state = self._open_state()
        forwarder = state.forwarder if segment is state.public else None
        lines = []
        for host in hosts:
            port = state.places[host].port
            cable = f"link add p{port} type veth peer name eth0 address {host.mac} netns {host.namespace}"
            bridge = "br0"
            lines.append(cable)
            if forwarder is not None:
                forwarder.add_port(port)
                bridge = f"b{port}"
                lines.append(f"link add {bridge} type bridge mcast_snooping 0")
                lines.append(f"link set t{port} txqueuelen 10000 master {bridge} up")
                lines.append(f"link set {bridge} up")
            lines.append(f"link set p{port} master {bridge} up")
        ip(lines, segment.namespace)

    def _limit(self, host: Host, up: int | None, down: int | None) -> None:
        place = self._open_state().places[host]
        limit(host.namespace, "eth0", up)
        limit(place.segment.namespace, f"p{place.port}", down)

    def _name(self, part: str) -> str:
        return f"{janitor.PREFIX}{self.id}-{part}"

    def _open_state(self) -> _State:
        if self._state is None:
            raise LabError("The lab is closed. Use it inside `with Lab(...) as lab:`.")
        return self._state


# As a home router: what was not asked for from inside is dropped without a word.
_MASQUERADE = [
    "table ip home {",
    "  chain out { type nat hook postrouting priority srcnat; oifname eth0 masquerade; }",
    "  chain through { type filter hook forward priority filter; iifname eth0 ct state new,invalid drop; }",
    "  chain self { type filter hook input priority filter;",
    "    iifname eth0 ct state new,invalid meta l4proto != icmp drop; }",
    "}",
]


def _start_janitor(lab: str, directory: Path) -> subprocess.Popen[bytes]:
    owner = os.getpid()
    argv = [sys.executable, "-S", "-E", janitor.__file__, lab, str(owner), str(janitor.started_at(owner))]
    # Its own session, so that Ctrl-C and a group's death do not reach it.
    process = subprocess.Popen(
        [*argv, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise LabError("The lab's janitor did not start. See what it printed above.")
    return process
