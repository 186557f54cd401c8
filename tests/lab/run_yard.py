"""Two owners with a run at work, a guest, and an attacker with keys of both kinds: for attacks on runs."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from barnraise.agent_client.cluster_requests import OfferResponse, PairRequest
from barnraise.agent_client.run_requests import (
    FollowPosition,
    RunsRequest,
    RunsResponse,
    WatchRequest,
    WatchResponse,
)
from barnraise.core.errors import BarnraiseError
from barnraise.identity.trust import Role, TrustLog, decode_entry
from barnraise.runs.record import RunRecord, decode_record
from benchmarks.agents.machines import REPOSITORY, Machines
from benchmarks.agents.runs import CommandLine, write_folder
from lab import Lab
from tests.lab.besieged import MOST_GROWTH, MOST_LINES, PORT, Running

OWNERS = (0, 1)
GUEST = 2  # an honest one, with an agent
EVERYBODY = range(3)
LIVES = """\
import os, time
place = os.path.join(os.environ["MARKS"], os.environ["RANK"])
with open(place + "-pids", "a") as pids:
    pids.write(str(os.getpid()) + " ")
while True:
    print("rank", os.environ["RANK"], "lives", flush=True)
    with open(place, "w") as mark:
        mark.write(repr(time.time()))
    time.sleep(0.1)
"""


class Yard:
    """Two owners' agents with a run, a guest's agent, and a host with keys of a guest and of an owner."""

    def __init__(self, lab: Lab, machines: Machines) -> None:
        self.machines, self.line = machines, CommandLine(machines)
        self.room = machines.state(0).parent
        self.marks, self.canary = self.room / "marks", self.room / "canary"
        self.marks.mkdir()
        self.tool = str(self.room / "tool")
        served = json.dumps({"path": self.tool, "seconds": 3600})
        command = [sys.executable, "-P", "-m", "benchmarks.attacks.runs", "serve", served]
        lab.hosts[3].start(command, env=machines.environment(0), cwd=REPOSITORY)
        machines.until(lambda: os.path.exists(self.tool), 90.0, "the tool is ready")
        self.addresses = [host.address for host in lab.hosts[:3]]
        self.guest, self.owner = str(self.room / "guest"), str(self.room / "owner")
        self.guest_id = self._join("guest", self.guest, "mallory")
        self.owner_id = self._join("owner", self.owner, "trudy")
        write_folder(self.room / "bystander", LIVES)
        self.run = self.begin("h0,h1", self.room / "bystander", "--restarts", "1000")
        self.generation = 1
        machines.until(lambda: self.alive() == 2, 90.0, "the run of the two owners is at work")

    def _join(self, role: Role, keep: str, name: str) -> str:
        code = self.machines.ask(0, PairRequest(role), OfferResponse).code
        joined = self.attack("join", code=code, host=self.addresses[0], port=PORT, keep=keep, name=name)
        assert joined["joined"], joined
        return str(joined["node"])

    def attack(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        return self.end(self.start(name, **arguments))

    def start(self, name: str, /, **arguments: Any) -> Running:
        return Running(self.tool, name, arguments)

    def end(self, running: Running) -> dict[str, Any]:
        """Return the result of an attack; the owners answer meanwhile."""
        while (result := running.result()) is None:
            for place in OWNERS:
                self.machines.status(place)
        return result

    # what there is

    @property
    def agents(self) -> list[tuple[str, int, str]]:
        nodes = [node.raw.hex() for node in self.log().members][:2]
        return [(address, PORT, node) for address, node in zip(self.addresses, nodes, strict=False)]

    def log(self, place: int = 0) -> TrustLog:
        rows = self.rows(place, "SELECT entry FROM trust ORDER BY place")
        return TrustLog.read(decode_entry(row[0]) for row in rows)

    def record(self, run: str, place: int = 0) -> RunRecord:
        found = dict(self.rows(place, "SELECT name, record FROM run"))
        return decode_record(found[run])

    def rows(self, place: int, query: str) -> list[Any]:
        base = sqlite3.connect(f"file:{self.machines.state(place) / 'cluster.db'}?mode=ro", uri=True)
        with contextlib.closing(base):
            return base.execute(query).fetchall()

    def watch(self, run: str, place: int = 0, **more: Any) -> WatchResponse:
        return self.machines.ask(place, WatchRequest(run=run, wait_s=0, **more), WatchResponse)

    def said(self, run: str, rank: int) -> str:
        """Return the output of this worker, as far as its machine has answered."""
        return "".join(
            one.data.decode() for one in self.watch(run, follow=(FollowPosition(rank, 1, 0),)).heard
        )

    def phase(self, run: str, place: int = 0) -> str:
        return self.watch(run, place).row.phase

    def runs(self, place: int) -> list[str]:
        return [row.run for row in self.machines.ask(place, RunsRequest(), RunsResponse).runs]

    def words(self, place: int, since: int = 0) -> list[str]:
        return self.machines.words(place).splitlines()[since:]

    def begin(self, on: str, folder: Path, *more: str) -> str:
        """An owner's own run; its name."""
        words = ("run", "--detach", "--on", on, "--set", f"MARKS={self.marks}", *more, "train.py")
        done = self.line.run(0, *words, folder=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def alive(self) -> int:
        """Return the number of workers of the bystanders' run that wrote in the last seconds."""
        times = [self.marks / str(rank) for rank in range(2)]
        return sum(path.exists() and time.time() - path.stat().st_mtime < 3.0 for path in times)

    # what must not change

    @contextlib.contextmanager
    def undisturbed(self, *, growth: int = MOST_GROWTH, lines: int = MOST_LINES) -> Iterator[None]:
        """The same agents go on, and so does the run; nobody's disk has anything new."""
        self._settle()
        agents = [psutil.Process(self.machines.process(place).pid) for place in EVERYBODY]
        sizes = [agent.memory_info().rss for agent in agents]
        said = [len(self.words(place)) for place in EVERYBODY]
        entries = len(self.log())
        yield
        self._settle()
        for place, agent in enumerate(agents):
            shown = "\n".join(self.words(place, said[place])[-40:])
            assert agent.is_running(), f"the agent of h{place} has ended:\n{shown}"
            assert "Traceback" not in shown, shown
            assert "\x1b" not in shown, "what a member wrote commands a terminal"
            assert len(self.words(place, said[place])) <= lines, shown
            grown = agent.memory_info().rss - sizes[place]
            assert grown < growth, f"h{place} holds {grown / 2**20:.1f} MB more"
        assert len(self.log()) == entries
        assert not self.canary.exists(), "it was executed"
        assert not self.strays(), "it was written outside the store"
        self.bystanders_go_on()

    def bystanders_go_on(self) -> None:
        row = self.watch(self.run).row
        assert (row.phase, row.generation) == ("running", self.generation), row
        self.machines.until(lambda: self.alive() == 2, 60.0, "the run goes on")
        started = [(self.marks / f"{rank}-pids").read_text().split() for rank in range(2)]
        assert [len(pids) for pids in started] == [self.generation] * 2, "a worker was started anew"

    def strays(self) -> list[Path]:
        """Files that an attacker's list names, anywhere that such a name could lead to."""
        tops = [self.room, Path("/tmp"), Path("/"), *(self.machines.state(place) for place in EVERYBODY)]
        tops += [self.machines.state(place) / "runs" for place in EVERYBODY]
        return [path for top in tops for name in ("x", "C:", "..\\..\\x") if (path := top / name).exists()]

    def settle_again(self) -> None:
        self._settle()
        self.machines.until(lambda: self.alive() == 2, 90.0, "the run goes on again")
        self.generation = self.watch(self.run).row.generation

    def _settle(self) -> None:
        self.machines.until(self._agree, 90.0, "the agents agree")

    def _agree(self) -> bool:
        try:
            told = [self.machines.status(place) for place in EVERYBODY]
        except BarnraiseError:
            return False
        here = [{row.name for row in one.nodes if row.seniority is not None} for one in told]
        return len({(one.branch, one.view) for one in told}) == 1 and all(
            names == {"h0", "h1", "h2"} for names in here
        )
