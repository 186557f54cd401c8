"""A cluster at work, and somebody in the house who is not of it: every attack is refused and disturbs nobody."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil
import pytest

from backyard.discovery import namespace_tag
from backyard.identity.trust import TrustLog, decode_entry
from backyard.local.questions import OfferAsk, OfferTold, PairAsk
from benchmarks.attacks import LIMIT_S, READY
from benchmarks.machines import REPOSITORY, Machines
from lab import Host, Lab, LabProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

OWNERS = range(3)
PORT = 52416
MOST_LINES = 20
MOST_GROWTH = 8 << 20


class Reading(NamedTuple):
    """What an attack could change in an agent."""

    branch: int
    view: int
    members: tuple[str, ...]
    rss: int
    descriptors: int
    words: int


class House:
    """Three owners' agents, and two hosts that nobody has paired."""

    def __init__(self, lab: Lab, machines: Machines) -> None:
        self.machines = machines
        self.stranger, self.friend = lab.hosts[3], lab.hosts[4]
        self.room = machines.state(0).parent
        self.addresses = [host.address for host in lab.hosts[:3]]
        self._rooms = 0

    @property
    def doors(self) -> list[tuple[str, int]]:
        return [(address, PORT) for address in self.addresses]

    @property
    def agents(self) -> list[tuple[str, int, str]]:
        nodes = list(self.log().members)
        return [(address, PORT, nodes[place].raw.hex()) for place, address in enumerate(self.addresses)]

    def log(self, place: int = 0) -> TrustLog:
        """As a member has it on its disk: secrets included, which a stranger is given only where it is said."""
        base = sqlite3.connect(f"file:{self.machines.state(place) / 'cluster.db'}?mode=ro", uri=True)
        with contextlib.closing(base):
            rows = base.execute("SELECT entry FROM trust ORDER BY place").fetchall()
        return TrustLog.read(decode_entry(row[0]) for row in rows)

    def code(self, role: Any = "owner") -> str:
        return self.machines.ask(0, PairAsk(role), OfferTold).code

    def offer(self) -> str:
        return self.machines.ask(0, OfferAsk(), OfferTold).state

    def keep(self) -> str:
        self._rooms += 1
        return str(self.room / f"kept{self._rooms}")

    def start(self, source: Host, name: str, /, **arguments: Any) -> LabProcess:
        command = [sys.executable, "-P", "-m", "benchmarks.attacks", name, json.dumps(arguments)]
        return source.start(command, env=self.machines.environment(0), cwd=REPOSITORY)

    def end(self, process: LabProcess) -> dict[str, Any]:
        """What came of an attack."""
        code = process.wait(LIMIT_S + 10.0)
        lines = process.output().splitlines()
        assert code == 0, "\n".join(lines[-30:])
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def attack(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        return self.end(self.start(self.stranger, name, **arguments))

    def join(self, code: str, source: Host | None = None, /, **arguments: Any) -> dict[str, Any]:
        place = {"host": self.addresses[0], "port": PORT, **arguments}
        begin = self.start(source or self.friend, "join", code=code, **place)
        return self.end(begin)

    def await_ready(self, process: LabProcess) -> None:
        self.machines.until(lambda: READY in process.output() or process.poll() is not None, 20.0, READY)

    def read(self, place: int) -> Reading:
        told = self.machines.status(place)
        process = psutil.Process(told.pid)
        members = tuple(row.name for row in told.nodes if row.seniority is not None)
        words = len(self.machines.words(place).splitlines())
        return Reading(told.branch, told.view, members, process.memory_info().rss, process.num_fds(), words)

    @contextlib.contextmanager
    def undisturbed(self, *, decisions: int = 0, lines: int = MOST_LINES) -> Iterator[None]:
        """All agents afterwards as before, but for so many views that the test itself asked for."""
        before = [self.read(place) for place in OWNERS]
        yield
        self.machines.until(lambda: self.machines.agree(OWNERS), 15.0, "the owners agree")
        for place in OWNERS:
            old = before[place]
            self.machines.until(
                lambda place=place, old=old: self.read(place).descriptors <= old.descriptors + 3,
                20.0,
                f"the descriptors of agent {place} are {old.descriptors} again",
            )
            new = self.read(place)
            print(place, old, new, (new.rss - old.rss) / 2**20, new.view - old.view)
            said = "\n".join(self.machines.words(place).splitlines()[old.words :])
            print("\n".join(said.splitlines()[:12]))
            assert (new.branch, new.members) == (old.branch, old.members)
            assert new.view == old.view + decisions, said[-1500:]
            assert new.rss - old.rss < MOST_GROWTH
            assert new.words - old.words <= lines + 3 * decisions, said[-1500:]

    def rest(self) -> None:
        """Until the agents idle again."""
        self.machines.until(lambda: all(self._load(place) < 0.5 for place in OWNERS), 20.0, "all is calm")

    def _load(self, place: int) -> float:
        process = psutil.Process(self.machines.process(place).pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(0.5)
        return (sum(process.cpu_times()[:2]) - before) / 0.5


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with Lab(hosts=5) as lab, Machines(lab.hosts[:3]) as machines:
        machines.form()
        yield House(lab, machines)


def test_wrong(house: House) -> None:
    with house.undisturbed():
        code = house.code()
        number, first, second = code.split("-")
        print(house.join(f"{number}-{second}-{first}", house.stranger))
        print(house.offer())
        print(house.join(code, house.stranger))


def test_relay(house: House) -> None:
    record = str(house.room / "record")
    with house.undisturbed(decisions=1):
        code = house.code()
        relay = house.start(
            house.stranger, "relay", listen=7000, host=house.addresses[0], port=PORT, record=record
        )
        house.await_ready(relay)
        print(house.join(code, host=house.stranger.address, port=7000))
        print(house.end(relay))
    with house.undisturbed():
        number = int(house.code().split("-")[0])
        print(house.attack("replay", record=record, number=number, host=house.addresses[0], port=PORT))
        print(house.offer())


def test_advert(house: House) -> None:
    with house.undisturbed():
        print(
            house.attack(
                "steal_advert",
                tag=namespace_tag(house.log().secret),
                listen=7001,
                agents=house.doors,
                seconds=6.0,
            )
        )


def test_self_signed(house: House) -> None:
    log = house.log()
    with house.undisturbed():
        nodes = [node.raw.hex() for node in log.members]
        for claims in ("", nodes[1]):
            print(
                house.attack(
                    "come_as_member",
                    agents=house.doors,
                    secrets=[log.secret.hex()],
                    trusted=nodes,
                    claims=claims,
                    times=5,
                )
            )
        print(house.attack("come_as_member", agents=house.doors, secrets=["00" * 32], trusted=nodes, times=5))


def test_garbage(house: House) -> None:
    with house.undisturbed():
        print(house.attack("garbage", agents=house.doors, secret=house.log().secret.hex(), times=3))


def test_flood(house: House) -> None:
    with house.undisturbed():
        print(house.attack("flood", host=house.addresses[0], port=PORT, silent=2000, half=500, seconds=8))
    house.rest()


def test_pairing_flood(house: House) -> None:
    with house.undisturbed(decisions=1):
        code = house.code()
        f = house.start(
            house.stranger,
            "flood",
            host=house.addresses[0],
            port=PORT,
            pairing=200,
            number=int(code.split("-")[0]),
            seconds=8,
        )
        house.await_ready(f)
        time.sleep(1.0)
        print(house.join(code))
        print(house.offer())
        print(house.end(f))
        if house.offer() == "open":
            print(house.join(code))


def test_hasty(house: House) -> None:
    with house.undisturbed():
        number = int(house.code().split("-")[0])
        print(house.attack("hasty", host=house.addresses[0], port=PORT, number=number, times=300))


def test_drip(house: House) -> None:
    with house.undisturbed():
        number = int(house.code().split("-")[0])
        print(
            house.attack(
                "drip", host=house.addresses[0], port=PORT, number=number, secret=house.log().secret.hex()
            )
        )


def test_udp(house: House) -> None:
    with house.undisturbed():
        print(
            house.attack(
                "datagrams",
                agents=house.addresses,
                own=house.stranger.address,
                port=52415,
                tag=namespace_tag(house.log().secret),
                each=3000,
            )
        )
    house.rest()


def test_udp2(house: House) -> None:
    for n in (0, 2000, 2000, 4000):
        house.attack(
            "datagrams",
            agents=[],
            own=house.stranger.address,
            port=52415,
            tag=namespace_tag(house.log().secret),
            each=n,
        )
        time.sleep(6)
        print(n, [(house.read(p).rss / 2**20, house.read(p).descriptors) for p in OWNERS])
    time.sleep(15)
    print(n, [(house.read(p).rss / 2**20, house.read(p).descriptors) for p in OWNERS])


@pytest.fixture(scope="module")
def guests(house: House):
    keeps = [house.keep(), house.keep(), house.keep()]
    for n, role in enumerate(("owner", "guest", "guest")):
        r = house.join(house.code(role), keep=keeps[n], name=f"g{n}")
        assert r["joined"], r
        if n == 0:
            away = r["node"]
    house.machines.until(lambda: all(len(house.log(p)) == len(house.log(0)) for p in OWNERS), 10, "log")
    return away, keeps


def _views(house, before=None):
    return [[l for l in house.machines.words(p).splitlines() if "INFO view" in l][-8:] for p in OWNERS]


def _probe(house):
    t = time.monotonic()
    r = house.join(house.code())
    print("decides", r, time.monotonic() - t)


def run(house, name, **a):
    n = len(house.log())
    b = [house.read(p) for p in OWNERS]
    print("=====", name)
    try:
        print(house.attack(name, agents=house.agents, **a))
    except AssertionError as e:
        print("ATTACK FAILED", e)
    time.sleep(1.0)
    for p in OWNERS:
        r = house.read(p)
        words = house.machines.words(p).splitlines()[b[p].words:]
        print(p, b[p], r, "rss+", (r.rss - b[p].rss) / 2**20, "views+", r.view - b[p].view, "lines+", len(words))
        seen = {}
        for w in words:
            k = re.sub(r"[0-9]+", "N", w[24:])[:150]
            seen[k] = seen.get(k, 0) + 1
        for k, v in list(seen.items())[:25]:
            print("     ", v, k)
    print("log", n, len(house.log()))
    _probe(house)


def test_g_decides(house, guests):
    run(house, "guest_decides", keep=guests[1][1], friend="ab" * 32, times=30)

def test_g_lies(house, guests):
    run(house, "guests_lie", keeps=guests[1][1:], away=guests[0], seconds=2.0)

def test_g_poses(house, guests):
    run(house, "guest_poses", keep=guests[1][1], away=guests[0], seconds=3.0)

def test_g_babbles(house, guests):
    run(house, "guest_babbles", keep=guests[1][1], times=5)

def test_g_fills(house, guests):
    run(house, "guest_fills", keep=guests[1][1], links=100, chunks=100000, names=300)
