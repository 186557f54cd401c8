"""A cluster under attack, and how to tell whether it minds: for the tests of attacks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import psutil

from barnraise.agent_client.cluster_requests import OfferRequest, OfferResponse, PairRequest, StatusResponse
from barnraise.identity.trust import Role, TrustLog, decode_entry
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.attacks.__main__ import LIMIT_S
from lab import Host, Lab

T = TypeVar("T")
OWNERS = range(3)
NAMES = {"h0", "h1", "h2"}
PORT = 52416
MOST_LINES = 20
MOST_GROWTH = 8 << 20
# The allocator returns what is freed at once, so that what an agent holds is what it is seen to hold. By
# itself it learns from large messages to keep some of their size, and when depends on who came before.
RETURNS_WHAT_IS_FREED = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


class Place(Protocol):
    """The machines under attack, shared by the tests of a module."""

    def settle_again(self) -> None:
        """Wait until the machines are as before, after a failed test."""


def settles_after_a_failure(test: Callable[..., T]) -> Callable[..., T]:
    """A failed test must not disturb those after it, which use the same machines."""

    @functools.wraps(test)
    def tried(**named: Any) -> T:
        place: Place = named["house"] if "house" in named else named["yard"]
        try:
            return test(**named)
        except Exception:
            with contextlib.suppress(Exception):  # the test's own failure is what counts
                place.settle_again()
            raise

    return tried


class Reading(NamedTuple):
    """Values of an agent that an attack could change."""

    told: StatusResponse
    rss: int
    descriptors: int
    lines: int


class Running:
    """An attack that goes on in another host."""

    def __init__(self, tool: str, name: str, arguments: dict[str, Any]) -> None:
        self._name = name
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(tool)
        self._socket.sendall(json.dumps([name, arguments]).encode() + b"\n")
        self._socket.settimeout(0.1)
        self._deadline = time.monotonic() + LIMIT_S + 10.0
        self._said = b""
        self._result: dict[str, Any] | None = None

    def result(self) -> dict[str, Any] | None:
        """None while it goes on."""
        if self._result is not None:
            return self._result
        assert time.monotonic() < self._deadline, self._name
        with contextlib.suppress(TimeoutError):
            data = self._socket.recv(65536)
            assert data, f"{self._name} ended without a word"
            self._said += data
        for line in self._said.splitlines(keepends=True):
            if line.startswith(b"{") and line.endswith(b"\n"):
                self._socket.close()
                self._result = json.loads(line)
                assert "failed" not in self._result, self._result["failed"]
        return self._result

    def await_ready(self) -> Running:
        while b"ready" not in self._said:
            assert self.result() is None, f"{self._name} ended too soon"
        return self


class House:
    """Three agents of owners, and two hosts that are not paired."""

    def __init__(self, lab: Lab, machines: Machines) -> None:
        self.machines = machines
        self.stranger, self.friend = lab.hosts[3], lab.hosts[4]
        self.room = machines.state(0).parent
        self.addresses = [host.address for host in lab.hosts[:3]]
        self.door = {"host": self.addresses[0], "port": PORT}
        self.doors = [(address, PORT) for address in self.addresses]
        self.most_descriptors = 0
        self._names = 0
        self._tools: dict[str, str] = {}
        for host in (self.stranger, self.friend):
            path = self._tools[host.name] = self.new_path()
            arguments = json.dumps({"path": path, "seconds": 3600})
            command = [sys.executable, "-P", "-m", "benchmarks.attacks", "serve", arguments]
            host.start(command, env=machines.environment(0), cwd=REPOSITORY)
        machines.until(lambda: all(map(os.path.exists, self._tools.values())), 90.0, "the tools are ready")

    def log(self, place: int = 0) -> TrustLog:
        """As a member has it on its disk, with the secrets that some attacks are given."""
        base = sqlite3.connect(f"file:{self.machines.state(place) / 'cluster.db'}?mode=ro", uri=True)
        with contextlib.closing(base):
            rows = base.execute("SELECT entry FROM trust ORDER BY place").fetchall()
        return TrustLog.read(decode_entry(row[0]) for row in rows)

    @property
    def nodes(self) -> list[str]:
        return [node.raw.hex() for node in self.log().members][:3]

    @property
    def agents(self) -> list[tuple[str, int, str]]:
        return [(*door, node) for door, node in zip(self.doors, self.nodes, strict=True)]

    def new_path(self) -> str:
        self._names += 1
        return str(self.room / f"path{self._names}")

    def new_port(self) -> int:
        """An attack of an earlier trial may still have the last one."""
        self._names += 1
        return 7000 + self._names

    def words(self, place: int, since: int = 0) -> list[str]:
        return self.machines.words(place).splitlines()[since:]

    # people

    def code(self, role: Role = "owner") -> str:
        return self.machines.ask(0, PairRequest(role), OfferResponse).code

    def offer(self) -> str:
        return self.machines.ask(0, OfferRequest(), OfferResponse).state

    def until_burned(self) -> None:
        """The guesser may know before the agent has written it down."""
        self.machines.until(lambda: self.offer() == "burned", 30.0, "the code is burned")

    def until_named(self, place: int, words: str) -> list[str]:
        """The lines of its log with these words in them, once there is one."""
        self.machines.until(lambda: words in self.machines.words(place), 30.0, f"h{place} says {words!r}")
        return [line for line in self.words(place) if words in line]

    def join(self, code: str, source: Host | None = None, /, **more: Any) -> dict[str, Any]:
        """Pair a host with the first machine, as machines do but without an agent."""
        return self.end(self.start(source or self.friend, "join", code=code, **{**self.door, **more}))

    # attacks

    def start(self, source: Host, name: str, /, **arguments: Any) -> Running:
        return Running(self._tools[source.name], name, arguments)

    def end(self, running: Running) -> dict[str, Any]:
        """Return the result of an attack; all agents answer meanwhile."""
        while (result := running.result()) is None:
            found = [self.read(place).descriptors for place in OWNERS]
            self.most_descriptors = max(self.most_descriptors, *found)
        return result

    def attack(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        return self.end(self.start(self.stranger, name, **arguments))

    # what must not change

    def read(self, place: int) -> Reading:
        told = self.machines.status(place)
        process = psutil.Process(told.pid)
        return Reading(told, process.memory_info().rss, process.num_fds(), len(self.words(place)))

    @contextlib.contextmanager
    def undisturbed(
        self,
        *,
        decisions: int = 0,
        views: int = 0,
        growth: int = MOST_GROWTH,
        descriptors: int = 24,
    ) -> Iterator[None]:
        """Afterwards all is as before, but for the decisions that the test itself asks for.

        ``views``: how many more may come and go with guests. ``descriptors``: how many more meanwhile.
        """
        self.machines.until(lambda: self.machines.agree(OWNERS), 90.0, "the owners agree")
        before = [self.read(place) for place in OWNERS]
        length = len(self.log())
        self.most_descriptors = 0
        yield
        self._settle()
        assert self.most_descriptors <= max(one.descriptors for one in before) + descriptors
        assert len(self.log()) == length + decisions
        for place, old in enumerate(before):
            self.machines.until(
                lambda place=place, old=old: self.read(place).descriptors <= old.descriptors + 4,  # type: ignore[misc]
                40.0,
                f"agent {place} has {old.descriptors} descriptors again",
            )
            new, said = self.read(place), self.words(place, old.lines)
            shown = "\n".join(said[-40:])
            changes = new.told.view - old.told.view
            assert new.told.branch == old.told.branch, shown
            assert decisions <= changes <= decisions + views, shown
            assert all(set(members(line)) >= NAMES for line in said if members(line)), shown
            assert len(said) <= MOST_LINES + changes, f"{len(said)} lines:\n{shown}"
            assert new.rss - old.rss < growth, f"{(new.rss - old.rss) / 2**20:.1f} MB more"
            assert "\x1b" not in shown, "what a stranger wrote commands a terminal"

    def settle_again(self) -> None:
        self._settle()

    def _settle(self) -> None:
        """One view of the three owners, and idle agents."""
        self.machines.until(lambda: self.machines.agree(OWNERS), 90.0, "the owners agree")
        self.machines.until(self._are_calm, 90.0, "the agents idle")

    def _are_calm(self) -> bool:
        processes = [psutil.Process(self.machines.process(place).pid) for place in OWNERS]
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(0.2)
        after = [sum(process.cpu_times()[:2]) for process in processes]
        return all(new - old < 0.1 for old, new in zip(before, after, strict=True))


def members(line: str) -> list[str]:
    """Return the machines that a log line about a new view names."""
    _, is_view, rest = line.partition(" INFO view ")
    return rest.partition(": ")[2].partition(" (")[0].split(", ") if is_view else []
