"""Machines find each other on a real network without any address, and tell strangers nothing."""

import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from barnraise.discovery import namespace_tag
from lab import Host, Lab, LabProcess, janitor
from lab.namespaces import nft

_ROOT = Path(janitor.__file__).parents[1]
_ENVIRONMENT = {"PYTHONPATH": str(_ROOT / "src")}
OUR_SECRET, THEIR_SECRET = b"a" * 32, b"b" * 32

# Looks for its own namespace and can be found under it; prints each sighting and when it came.
_AGENT = """
import asyncio, json, sys, time
from barnraise.discovery import Discovery, namespace_tag
from barnraise.discovery.broadcast import BroadcastFinder
from barnraise.discovery.mdns import MdnsFinder

async def main():
    secret, patience = bytes.fromhex(sys.argv[1]), float(sys.argv[2])
    discovery = Discovery([MdnsFinder(), BroadcastFinder(52415, patience_s=patience)])
    began = time.monotonic()
    def sighted(sighting):
        after = time.monotonic() - began
        print(json.dumps([sighting.address, sighting.port, sighting.source, after]), flush=True)
    await discovery.start(sighted)
    tags = frozenset({namespace_tag(secret)})
    discovery.advertise(tags, 52416)
    discovery.watch(tags)
    print("up", flush=True)
    while True:
        await asyncio.sleep(7)
        print(json.dumps(discovery.health()), flush=True)

asyncio.run(main())
"""
# A stranger that records all multicast DNS datagrams, and sends the queries that any host may send.
_STRANGER = """
import json, socket, struct, sys, time
from zeroconf import ServiceBrowser, Zeroconf
ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
ear.bind(("224.0.0.251", 5353))
group = socket.inet_aton("224.0.0.251") + socket.inet_aton(sys.argv[1])
ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
ear.settimeout(0.2)
names = set()
class Listener:
    def add_service(self, zc, kind, name): names.add(name)
    update_service = remove_service = add_service
zeroconf = Zeroconf(interfaces=[sys.argv[1]])
browser = ServiceBrowser(zeroconf, "_barnraise._tcp.local.", listener=Listener())
print("up", flush=True)
heard, begin = [], time.monotonic()
while time.monotonic() < begin + (4 if len(names) > 1 else 90):
    try: heard.append(ear.recv(9000).hex())
    except TimeoutError: pass
found = []
for name in names:
    info = zeroconf.get_service_info("_barnraise._tcp.local.", name, 30_000)
    found.append({
        "name": info.name, "server": info.server, "port": info.port, "addresses": info.parsed_addresses(),
        "properties": {key.decode(): value.decode() for key, value in info.properties.items()},
    })
print(json.dumps({"heard": heard, "found": found}), flush=True)
zeroconf.close()
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=3, rate=None) as made:
        yield made


def _until(condition: Callable[[], bool], patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def _agent(host: Host, secret: bytes = OUR_SECRET, patience: float = 5.0) -> LabProcess:
    process = host.start([sys.executable, "-c", _AGENT, secret.hex(), str(patience)], env=_ENVIRONMENT)
    _until(lambda: "up" in process.output())
    return process


def _lines(process: LabProcess) -> list[object]:
    return [json.loads(line) for line in process.output().splitlines() if line[:1] in "[{"]


def _sighted(process: LabProcess, source: str | None = None) -> set[tuple[str, int]]:
    rows = [line for line in _lines(process) if isinstance(line, list)]
    return {(row[0], row[1]) for row in rows if source in (None, row[2])}


def _health(process: LabProcess) -> dict[str, str | None]:
    _until(lambda: any(isinstance(line, dict) for line in _lines(process)))
    last = [line for line in _lines(process) if isinstance(line, dict)][-1]
    return last


def test_machines_of_one_cluster_find_each_other_and_no_others(lab: Lab) -> None:
    first, second, stranger = lab.hosts
    # Broadcast, the fallback, is not needed: it would start only after a minute.
    ours = [_agent(first, patience=60), _agent(second, patience=60)]
    other = _agent(stranger, THEIR_SECRET, patience=60)
    _until(lambda: _sighted(ours[0], "mdns") == {(second.address, 52416)})
    _until(lambda: _sighted(ours[1], "mdns") == {(first.address, 52416)})
    assert _health(ours[1]) == {"mdns": None, "broadcast": None}
    assert _sighted(ours[0]) == {(second.address, 52416)}
    assert _sighted(ours[1]) == {(first.address, 52416)}
    assert _sighted(other) == set()


def test_broadcast_helps_where_multicast_dns_is_blocked(lab: Lab) -> None:
    first, second, stranger = lab.hosts
    for host in lab.hosts:
        nft(
            host.namespace,
            [
                "add table inet wall",
                "add chain inet wall arriving { type filter hook input priority 0; }",
                "add rule inet wall arriving udp dport 5353 drop",
            ],
        )
    ours = [_agent(first, patience=1), _agent(second, patience=1)]
    other = _agent(stranger, THEIR_SECRET, patience=1)
    _until(lambda: _sighted(ours[0]) == {(second.address, 52416)})
    _until(lambda: _sighted(ours[1]) == {(first.address, 52416)})
    _until(lambda: "5353" in (_health(ours[0])["mdns"] or ""))
    assert _health(ours[0])["broadcast"] is None
    assert _sighted(ours[0], "mdns") == _sighted(ours[1], "mdns") == _sighted(other) == set()


def test_machines_find_each_other_again_after_their_address_changed(lab: Lab) -> None:
    first, second, _ = lab.hosts
    ours = [_agent(first, patience=60), _agent(second, patience=60)]
    _until(lambda: bool(_sighted(ours[0])))
    second.run(["ip", "addr", "flush", "dev", "eth0"])
    second.run(["ip", "addr", "add", "10.80.0.77/24", "dev", "eth0"])
    second.run(["ip", "route", "replace", "224.0.0.0/4", "dev", "eth0"])
    _until(lambda: ("10.80.0.77", 52416) in _sighted(ours[0]), patience=90)


def test_advert_reveals_tag_and_port_only(lab: Lab) -> None:
    first, second, stranger = lab.hosts
    ear = stranger.start([sys.executable, "-c", _STRANGER, stranger.address])
    _until(lambda: "up" in ear.output())
    ours = [_agent(first), _agent(second)]
    ear.wait(180)
    report = json.loads(ear.output().splitlines()[-1])
    tag = namespace_tag(OUR_SECRET)
    assert len(report["found"]) == 2, report["found"]
    for info, host in zip(
        sorted(report["found"], key=lambda info: info["addresses"]), (first, second), strict=True
    ):
        assert info["properties"] == {"t": tag}
        assert (info["addresses"], info["port"]) == ([host.address], 52416)
        name, server = info["name"].partition(".")[0], info["server"].removesuffix(".local.")
        assert re.fullmatch("[0-9a-f]{32}", name)
        assert re.fullmatch("[0-9a-f]{16}", server)
    words = b"".join(bytes.fromhex(datagram) for datagram in report["heard"]).lower()
    assert tag.encode() in words, "the ear heard nothing"
    for private in (socket.gethostname(), OUR_SECRET.decode(), "python", "linux", sys.version.split()[0]):
        assert private.encode().lower() not in words
    assert all(process.poll() is None for process in ours)
