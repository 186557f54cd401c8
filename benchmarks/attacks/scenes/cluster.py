"""A cluster under attack, and the checks that the attack changed nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import psutil

from barnraise.agent_client.cluster_requests import OfferRequest, OfferResponse, PairRequest, StatusResponse
from barnraise.identity.trust import Role, TrustLog, decode_entry
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.attacks.registry import undisturbed
from benchmarks.attacks.scenes.bystanders import Bystanders
from benchmarks.attacks.tools.toolbox import LIMIT_S
from lab import Host, Lab

OWNERS = range(3)
NAMES = {"h0", "h1", "h2"}
PORT = 52416
MAX_LINES = 20
MAX_GROWTH = 8 << 20
# glibc's allocator raises these thresholds after large messages and then keeps freed memory. With fixed
# thresholds it returns freed memory at once, so the resident size shows what an agent really holds.
ALLOCATOR_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


class Reading(NamedTuple):
    """Values of an agent that an attack could change."""

    status: StatusResponse
    rss: int
    descriptors: int
    lines: int


class Guests(NamedTuple):
    """Keys of two guests, and of an owner in the log that was never online."""

    keeps: tuple[str, str]
    away: str


class RunningAttack:
    """An attack that runs on another host."""

    def __init__(self, tool: str, name: str, arguments: dict[str, Any]) -> None:
        self._name = name
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(tool)
        self._socket.sendall(json.dumps([name, arguments]).encode() + b"\n")
        self._socket.settimeout(0.1)
        self._deadline = time.monotonic() + LIMIT_S + 10.0
        self._received = b""
        self._result: dict[str, Any] | None = None

    def result(self) -> dict[str, Any] | None:
        """Return the result of the attack, or None while it runs."""
        if self._result is not None:
            return self._result
        assert time.monotonic() < self._deadline, self._name
        with contextlib.suppress(TimeoutError):
            data = self._socket.recv(65536)
            assert data, f"{self._name} stopped without a result"
            self._received += data
        for line in self._received.splitlines(keepends=True):
            if line.startswith(b"{") and line.endswith(b"\n"):
                self._socket.close()
                self._result = json.loads(line)
                assert "failed" not in self._result, self._result["failed"]
        return self._result

    def await_ready(self) -> RunningAttack:
        while b"ready" not in self._received:
            assert self.result() is None, f"{self._name} stopped too soon"
        return self


class AttackedCluster:
    """Three agents of owners with a run of two of them, and two hosts that are not paired."""

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Self]:
        """Start three agents, pair them and start the attacker's processes."""
        with Lab(hosts=5) as lab, Machines(lab.hosts[:3]) as machines:
            machines.extra |= ALLOCATOR_ENVIRONMENT
            machines.form()
            yield cls(lab, machines)

    def __init__(self, lab: Lab, machines: Machines) -> None:
        self.machines, self._lab = machines, lab
        self.stranger, self.friend = lab.hosts[3], lab.hosts[4]
        self.directory = machines.state(0).parent
        self.addresses = [host.address for host in lab.hosts[:3]]
        self.target = {"host": self.addresses[0], "port": PORT}
        self.endpoints = [(address, PORT) for address in self.addresses]
        self.max_descriptors = 0
        self._names = 0
        self._attack_servers: dict[str, str] = {}
        for host in (self.stranger, self.friend):
            path = self._attack_servers[host.name] = self.new_path()
            arguments = json.dumps({"path": path, "seconds": 7200})
            command = [sys.executable, "-P", "-m", "benchmarks.attacks.tools", "serve", arguments]
            host.start(command, env=machines.environment(0), cwd=REPOSITORY)
        machines.until(
            lambda: all(map(os.path.exists, self._attack_servers.values())), 90.0, "the tools are ready"
        )
        self.bystanders = Bystanders(machines)
        self._guests: Guests | None = None

    @property
    def guests(self) -> Guests:
        """Return the guests; they join at the first use."""
        if self._guests is None:
            keeps = (self.new_path(), self.new_path())
            away = self.join(self.pairing_code(), name="away")
            assert away["joined"], away
            for keep in keeps:
                joined = self.join(self.pairing_code("guest"), self.stranger, keep=keep, name="guest")
                assert joined.get("role") == "guest", joined
            self._guests = Guests(keeps, away["node"])
        return self._guests

    def trust_log(self, place: int = 0) -> TrustLog:
        """Return the trust log on a member's disk, with the secrets that some attacks are given."""
        base = sqlite3.connect(f"file:{self.machines.state(place) / 'cluster.db'}?mode=ro", uri=True)
        with contextlib.closing(base):
            rows = base.execute("SELECT entry FROM trust ORDER BY place").fetchall()
        return TrustLog.read(decode_entry(row[0]) for row in rows)

    @property
    def nodes(self) -> list[str]:
        return [node.raw.hex() for node in self.trust_log().members][:3]

    @property
    def agents(self) -> list[tuple[str, int, str]]:
        return [(*endpoint, node) for endpoint, node in zip(self.endpoints, self.nodes, strict=True)]

    def new_path(self) -> str:
        self._names += 1
        return str(self.directory / f"path{self._names}")

    def new_port(self) -> int:
        """Return an unused port; an earlier attack may still hold the last one."""
        self._names += 1
        return 7000 + self._names

    def log_lines(self, place: int, since: int = 0) -> list[str]:
        return self.machines.agent_log(place).splitlines()[since:]

    # pairing

    def pairing_code(self, role: Role = "owner") -> str:
        return self.machines.ask(0, PairRequest(role), OfferResponse).code

    def offer_state(self) -> str:
        return self.machines.ask(0, OfferRequest(), OfferResponse).state

    def await_burned_code(self) -> None:
        """Wait until the code is burned; the attacker may know it before the agent has saved it."""
        self.machines.until(lambda: self.offer_state() == "burned", 30.0, "the code is burned")

    def await_log_lines(self, place: int, words: str) -> list[str]:
        """Wait for log lines with this text, and return them."""
        self.machines.until(lambda: words in self.machines.agent_log(place), 30.0, f"h{place} logs {words!r}")
        return [line for line in self.log_lines(place) if words in line]

    def join(self, code: str, source: Host | None = None, /, **more: Any) -> dict[str, Any]:
        """Pair a host with the first machine, without an agent on the host."""
        return self.await_result(
            self.start(source or self.friend, "join", code=code, **{**self.target, **more})
        )

    # attacks

    def start(self, source: Host, name: str, /, **arguments: Any) -> RunningAttack:
        return RunningAttack(self._attack_servers[source.name], name, arguments)

    def await_result(self, running: RunningAttack) -> dict[str, Any]:
        """Return the result of an attack; all agents respond meanwhile."""
        while (result := running.result()) is None:
            counts = [self.measure(place).descriptors for place in OWNERS]
            self.max_descriptors = max(self.max_descriptors, *counts)
        return result

    def attack(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        return self.await_result(self.start(self.stranger, name, **arguments))

    # checks

    def measure(self, place: int) -> Reading:
        status = self.machines.status(place)
        process = psutil.Process(status.pid)
        return Reading(status, process.memory_info().rss, process.num_fds(), len(self.log_lines(place)))

    @contextlib.contextmanager
    def unchanged(
        self,
        *,
        decisions: int = 0,
        views: int = 0,
        growth: int = MAX_GROWTH,
        descriptors: int = 24,
    ) -> Iterator[None]:
        """Check that the attack changes nothing but the ``decisions`` that the test itself requests.

        ``views``: number of further views that guests may cause. ``descriptors``: open files of an agent that
        the attack may add while it runs.
        """
        self.machines.until(lambda: self.machines.agree(OWNERS), 90.0, "the owners agree")
        before = [self.measure(place) for place in OWNERS]
        length = len(self.trust_log())
        self.max_descriptors = 0
        yield
        self._settle()
        undisturbed(
            self.max_descriptors <= max(reading.descriptors for reading in before) + descriptors,
            f"an agent had {self.max_descriptors} descriptors",
        )
        assert len(self.trust_log()) == length + decisions, "the trust log was changed"
        for place, old in enumerate(before):
            self.machines.until(
                lambda place=place, old=old: self.measure(place).descriptors <= old.descriptors + 4,  # type: ignore[misc]
                40.0,
                f"agent {place} has {old.descriptors} descriptors again",
            )
            new, new_lines = self.measure(place), self.log_lines(place, old.lines)
            shown = "\n".join(new_lines[-40:])
            changes = new.status.view - old.status.view
            assert new.status.branch == old.status.branch, f"the branch was changed\n{shown}"
            assert "\x1b" not in shown, "text of a stranger has terminal escapes"
            undisturbed(decisions <= changes <= decisions + views, f"{changes} views\n{shown}")
            present = [members(line) for line in new_lines if members(line)]
            undisturbed(all(set(names) >= NAMES for names in present), f"an owner was left out\n{shown}")
            undisturbed(len(new_lines) <= MAX_LINES + changes, f"{len(new_lines)} lines\n{shown}")
            undisturbed(new.rss - old.rss < growth, f"{(new.rss - old.rss) / 2**20:.1f} MB more")

    @contextlib.contextmanager
    def cut_off(self, place: int) -> Iterator[None]:
        """Let one owner's machine reach the attackers only."""
        hosts = self.machines.hosts
        others = [hosts[other] for other in OWNERS if other != place]
        for other in others:
            self._lab.cut(hosts[place], other)
        try:
            yield
        finally:
            for other in others:
                self._lab.heal(hosts[place], other)

    def honest_work(self) -> contextlib.AbstractContextManager[None]:
        """Watch the run of two owners and the status of an agent."""
        return self.bystanders.watched()

    def restore(self) -> None:
        """Wait until the agents agree and the run continues."""
        self._settle()
        self.bystanders.restore()

    def _settle(self) -> None:
        """Wait for one view of the three owners, and for idle agents."""
        self.machines.until(lambda: self.machines.agree(OWNERS), 90.0, "the owners agree")
        self.machines.until(self._are_idle, 90.0, "the agents idle")

    def _are_idle(self) -> bool:
        processes = [psutil.Process(self.machines.process(place).pid) for place in OWNERS]
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(0.2)
        after = [sum(process.cpu_times()[:2]) for process in processes]
        return all(new - old < 0.1 for old, new in zip(before, after, strict=True))


def members(line: str) -> list[str]:
    """Return the machines that a log line about a new view names."""
    _, is_view, rest = line.partition(" INFO view ")
    return rest.partition(": ")[2].partition(" (")[0].split(", ") if is_view else []
