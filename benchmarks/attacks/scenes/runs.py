"""A cluster with a run of two owners, a guest, and an attacker with the keys of a guest and an owner."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

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
from benchmarks.agents.runs import CommandLine
from benchmarks.attacks.registry import undisturbed
from benchmarks.attacks.scenes.bystanders import Bystanders
from benchmarks.attacks.scenes.cluster import (
    ALLOCATOR_ENVIRONMENT,
    MAX_GROWTH,
    MAX_LINES,
    PORT,
    RunningAttack,
)
from benchmarks.attacks.tools.toolbox import STRAY
from lab import Lab

OWNERS = (0, 1)
GUEST = 2  # honest, with an agent
ALL_MACHINES = range(3)


class RunCluster:
    """Agents of two owners with a run, an agent of a guest, and an attacker's host with two keys."""

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Self]:
        """Start three agents, pair them and start the attacker's process."""
        with Lab(hosts=4) as lab, Machines(lab.hosts[:3]) as machines:
            machines.extra |= ALLOCATOR_ENVIRONMENT
            for place in ALL_MACHINES:
                machines.launch(place)
            for place in ALL_MACHINES:
                machines.await_answer(place)
                machines.rename(place, f"h{place}")
            machines.pair(0, 1)
            machines.pair(0, GUEST, guest=True)
            yield cls(lab, machines)

    def __init__(self, lab: Lab, machines: Machines) -> None:
        self.machines, self.line = machines, CommandLine(machines)
        self.directory = machines.state(0).parent
        self.canary = self.directory / "canary"
        self._folders = 0
        self.attack_server = str(self.directory / "tool")
        arguments = json.dumps({"path": self.attack_server, "seconds": 7200})
        command = [sys.executable, "-P", "-m", "benchmarks.attacks.tools", "serve", arguments]
        self.outside = lab.hosts[3]
        self.outside.start(command, env=machines.environment(0), cwd=REPOSITORY)
        machines.until(lambda: os.path.exists(self.attack_server), 90.0, "the tool is ready")
        self.addresses = [host.address for host in lab.hosts[:3]]
        self.guest, self.owner = str(self.directory / "guest"), str(self.directory / "owner")
        self.guest_id = self._join("guest", self.guest, "mallory")
        self.owner_id = self._join("owner", self.owner, "trudy")
        self.bystanders = Bystanders(machines)
        self.run = self.bystanders.run

    @property
    def generation(self) -> int:
        return self.bystanders.generation

    def new_folder(self) -> Path:
        """Return the path of a new working folder."""
        self._folders += 1
        return self.directory / f"folder{self._folders}"

    def new_port(self) -> int:
        """Return an unused port."""
        self._folders += 1
        return 7300 + self._folders

    def _join(self, role: Role, keep: str, name: str) -> str:
        code = self.machines.ask(0, PairRequest(role), OfferResponse).code
        joined = self.attack("join", code=code, host=self.addresses[0], port=PORT, keep=keep, name=name)
        assert joined["joined"], joined
        return str(joined["node"])

    def attack(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        return self.await_result(self.start(name, **arguments))

    def start(self, name: str, /, **arguments: Any) -> RunningAttack:
        return RunningAttack(self.attack_server, name, arguments)

    def await_result(self, running: RunningAttack) -> dict[str, Any]:
        """Return the result of an attack; the owners respond meanwhile."""
        while (result := running.result()) is None:
            for place in OWNERS:
                self.machines.status(place)
        return result

    # state of the cluster

    @property
    def agents(self) -> list[tuple[str, int, str]]:
        nodes = [node.raw.hex() for node in self.trust_log().members][:2]
        return [(address, PORT, node) for address, node in zip(self.addresses, nodes, strict=False)]

    def trust_log(self, place: int = 0) -> TrustLog:
        rows = self.rows(place, "SELECT entry FROM trust ORDER BY place")
        return TrustLog.read(decode_entry(row[0]) for row in rows)

    def record(self, run: str, place: int = 0) -> RunRecord:
        records = dict(self.rows(place, "SELECT name, record FROM run"))
        return decode_record(records[run])

    def rows(self, place: int, query: str) -> list[Any]:
        base = sqlite3.connect(f"file:{self.machines.state(place) / 'cluster.db'}?mode=ro", uri=True)
        with contextlib.closing(base):
            return base.execute(query).fetchall()

    def watch(self, run: str, place: int = 0, **more: Any) -> WatchResponse:
        return self.machines.ask(place, WatchRequest(run=run, wait_s=0, **more), WatchResponse)

    def output(self, run: str, rank: int) -> str:
        """Return the output of this worker, as far as its machine has answered."""
        return "".join(
            chunk.data.decode() for chunk in self.watch(run, follow=(FollowPosition(rank, 0),)).heard
        )

    def phase(self, run: str, place: int = 0) -> str:
        return self.watch(run, place).row.phase

    def runs(self, place: int) -> list[str]:
        return [row.run for row in self.machines.ask(place, RunsRequest(), RunsResponse).runs]

    def log_lines(self, place: int, since: int = 0) -> list[str]:
        return self.machines.agent_log(place).splitlines()[since:]

    def start_run(self, on: str, folder: Path, *more: str) -> str:
        """Start a run of the first owner and return its name."""
        return self.bystanders.start_run(on, folder, *more)

    # checks

    @contextlib.contextmanager
    def unchanged(self, *, growth: int = MAX_GROWTH, lines: int = MAX_LINES) -> Iterator[None]:
        """Check that the agents are as before, and that no file was written."""
        self._settle()
        agents = [psutil.Process(self.machines.process(place).pid) for place in ALL_MACHINES]
        sizes = [agent.memory_info().rss for agent in agents]
        line_counts = [len(self.log_lines(place)) for place in ALL_MACHINES]
        entries = len(self.trust_log())
        yield
        self._settle()
        assert len(self.trust_log()) == entries, "the trust log was changed"
        assert not self.canary.exists(), "code of the attacker was executed"
        assert not self.stray_files(), "a file was written outside the store"
        for place, agent in enumerate(agents):
            new_lines = self.log_lines(place, line_counts[place])
            shown = "\n".join(new_lines[-40:])
            assert "\x1b" not in shown, "text of a member has terminal escapes"
            undisturbed(agent.is_running(), f"the agent of h{place} has stopped\n{shown}")
            undisturbed("Traceback" not in shown, f"an error in the agent of h{place}\n{shown}")
            undisturbed(len(new_lines) <= lines, f"{len(new_lines)} lines\n{shown}")
            grown = agent.memory_info().rss - sizes[place]
            undisturbed(grown < growth, f"h{place} holds {grown / 2**20:.1f} MB more")

    def honest_work(self) -> contextlib.AbstractContextManager[None]:
        """Watch the run of two owners and the status of an agent."""
        return self.bystanders.watched()

    def stray_files(self) -> list[Path]:
        """Return the files that an attacker's list names, in every folder where they could land."""
        tops = [
            self.directory,
            Path("/tmp"),
            Path("/"),
            *(self.machines.state(place) for place in ALL_MACHINES),
        ]
        tops += [self.machines.state(place) / "runs" for place in ALL_MACHINES]
        names = (STRAY, "C:", f"..\\..\\{STRAY}")
        return [path for top in tops for name in names if (path := top / name).exists()]

    def restore(self) -> None:
        """Wait until the agents agree and the run continues."""
        self._settle()
        self.bystanders.restore()

    def _settle(self) -> None:
        self.machines.until(self._agree, 90.0, "the agents agree")

    def _agree(self) -> bool:
        try:
            statuses = [self.machines.status(place) for place in ALL_MACHINES]
        except BarnraiseError:
            return False
        here = [{row.name for row in status.nodes if row.seniority is not None} for status in statuses]
        return len({(status.branch, status.view) for status in statuses}) == 1 and all(
            names == {"h0", "h1", "h2"} for names in here
        )
