"""`barnraise join --invite --site`, as it is typed: two machines of one home, a hub, and another member."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from barnraise.agent_client.cluster_requests import (
    JoinClusterRequest,
    OfferResponse,
    PairRequest,
    RenameRequest,
    RequestDone,
    StatusRequest,
    StatusResponse,
)
from barnraise.cli.machine.self_test import SelfTestNode
from barnraise.hub.storage.log import HubLog, MemberRecord
from benchmarks.hub.process import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRAIN = """\
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import barnraise

room = sys.argv[1]
site = "BARNRAISE_SITE" in os.environ
if site:
    os.environ["BARNRAISE_TRACE_COMMITS"] = os.path.join(room, "trace")
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(2048, 16)
y = (x[:, :4].abs() + x[:, 4:8]).argmax(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
run = barnraise.init(seed=1)


def note(run):
    data = run._data
    with open(os.path.join(room, "places"), "a") as file:
        name = json.loads(data.lease.token)["id"]
        file.write(f"{name} {data.offset} {data.leased_samples}\\n")


model, optimizer, batches = run.prepare(model, optimizer, loader)
if site:
    run.on_commit(note)
for epoch in run.epochs(100000):
    for batch in batches:
        for a, b in batch:
            loss = torch.nn.functional.cross_entropy(model(a), b)
            loss.backward()
            time.sleep(0.02)
            run.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
"""


class Commit(NamedTuple):
    """A line of the trace."""

    done: int
    rank: int
    world: int
    digest: str
    pid: int
    of: int
    units: tuple[int, ...]


class Fireside:
    def __init__(self, room: Path) -> None:
        self.room = room
        self.project = room / "project"
        self.project.mkdir()
        (self.project / "train.py").write_text(TRAIN)
        (room / "config.toml").touch()
        self.running: list[subprocess.Popen[bytes]] = []
        discovery = free_port()
        self.nodes = [SelfTestNode(name, room, discovery) for name in ("ada", "ben")]

    def pair(self) -> None:
        first, second = self.nodes
        for node in self.nodes:
            self.until(node.answers, f"the agent of {node.name} answers")
            node.ask(RenameRequest(node.name), RequestDone)
        code = first.ask(PairRequest(), OfferResponse).code
        second.ask(JoinClusterRequest(code, at=f"127.0.0.1:{first.port}"), RequestDone)
        self.until(lambda: self._members() == 2, "both are in one view")

    def _members(self) -> int:
        status = self.nodes[0].ask(StatusRequest(), StatusResponse, 5.0)
        return sum(row.seniority is not None for row in status.nodes)

    def type(self, name: str, environment: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
        with open(self.room / f"{name}.output", "wb") as output:
            command = [sys.executable, "-m", "barnraise.cli.main", *words]
            started = subprocess.Popen(
                command,
                cwd=self.project,
                env={**environment, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        self.running.append(started)
        return started

    def hub(self) -> str:
        """Start the hub, with the host's own machine as a member, and return the invite."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BARNRAISE_")}
        environment = {**kept, "BARNRAISE_CONFIG": str(self.room / "config.toml")}
        environment["BARNRAISE_STATE_DIRECTORY"] = str(self.room / "host")
        (self.room / "host").mkdir(mode=0o700)
        port = str(free_port())
        place = ("--plain", "--host", "127.0.0.1", "--port", port, "--address", f"http://127.0.0.1:{port}")
        self.type("hub", environment, "hub", "up", *place, "--round", "5s", "train.py", str(self.room))
        self.until(lambda: "barnraise-invite:" in self.output("hub"), "the hub prints an invite")
        invite = re.search(r"barnraise-invite:\S+", self.output("hub"))
        assert invite is not None
        return invite[0]

    def site(self, invite: str) -> subprocess.Popen[bytes]:
        words = ("join", "--invite", invite, "--site", "--yes", "--name", "home")
        return self.type("site", self.nodes[0].environment, *words)

    def leave(self, site: subprocess.Popen[bytes]) -> None:
        site.send_signal(signal.SIGINT)
        assert site.wait(120) == 130, self.output("site")
        assert "this site has left" in self.output("site")
        self.running.remove(site)

    def output(self, name: str) -> str:
        return (self.room / f"{name}.output").read_text(errors="replace")

    def members(self) -> dict[str, MemberRecord]:
        """The home, and the host's own machine."""
        log = HubLog(self.room / "host" / "hub" / "train")
        try:
            return {member.role: member for member in log.read().members.values()}
        finally:
            log.close()

    def rounds(self) -> int:
        """Return the number of rounds that the home has contributed to."""
        home = self.members().get("friend")
        return 0 if home is None else home.accepted

    def until_rounds(self, more: int) -> None:
        goal = self.rounds() + more
        self.until(lambda: self.rounds() >= goal, f"{goal} rounds of the home count")

    def commits(self) -> list[Commit]:
        path = self.room / "trace"
        commits = []
        for line in path.read_text().splitlines() if path.exists() else ():
            head, _, computed = line.partition("[")
            _, done, _, rank, world, digest, pid, of = head.split()
            units = tuple(int(number) for number in computed.strip(" ]").split(", ") if number)
            commits.append(Commit(int(done), int(rank), int(world), digest, int(pid), int(of), units))
        return commits

    def pid_of(self, rank: int) -> int:
        return next(
            commit.pid for commit in reversed(self.commits()) if commit.rank == rank and commit.world == 2
        )

    def both_train(self) -> bool:
        return any(commit.world == 2 for commit in self.commits()[-4:])

    def until(self, is_so: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
        begin = time.monotonic()
        while not is_so():
            names = [file.stem for file in self.room.glob("*.output")]
            words = "\n---\n".join(f"{name}: {self.output(name)[-3000:]}" for name in names)
            assert all(process.poll() is None for process in self.running), (
                f"a process has exited: {what}\n{words}"
            )
            assert time.monotonic() - begin < seconds, f"not within {seconds:g} s: {what}\n{words}"
            time.sleep(0.1)

    def close(self) -> None:
        for process in reversed(self.running):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
            process.kill()
            process.wait()
        for node in self.nodes:
            node.end()


@pytest.fixture
def fireside() -> Iterator[Fireside]:
    with tempfile.TemporaryDirectory(prefix="by-", ignore_cleanup_errors=True) as name:
        scene = Fireside(Path(name))
        try:
            yield scene
        finally:
            scene.close()


def test_site_counts_as_one_member_after_any_death(fireside: Fireside) -> None:
    invite = fireside.hub()
    fireside.pair()
    site = fireside.site(invite)
    fireside.until_rounds(2)
    fireside.until(fireside.both_train, "both machines train")

    os.kill(fireside.pid_of(1), signal.SIGKILL)
    fireside.until_rounds(2)
    fireside.until(fireside.both_train, "the killed worker is back")
    os.kill(fireside.pid_of(0), signal.SIGKILL)  # rank 0 exchanges updates with the hub
    fireside.until_rounds(2)
    fireside.until(fireside.both_train, "the worker that spoke with the hub is back")
    fireside.until_rounds(1)

    fireside.leave(site)
    _check_commits(fireside.commits())
    counted = _trained(fireside.room / "places")
    members = fireside.members()
    home = members["friend"]
    assert home.name == "home"
    assert members["owner"].accepted > 0
    assert not home.quarantine
    # Only the lease that was under way at the end may be missing.
    assert home.samples in (counted, counted + _last_lease(fireside.room / "places"))

    # Start the site again, and kill both workers at once: the hub has their state.
    (fireside.room / "trace").unlink()
    site = fireside.site(invite)
    fireside.until(fireside.both_train, "both machines train again")
    for rank in (0, 1):
        os.kill(fireside.pid_of(rank), signal.SIGKILL)
    fireside.until_rounds(2)
    fireside.leave(site)
    assert len(fireside.members()) == 2


def _check_commits(commits: list[Commit]) -> None:
    """All members hold the same after each commit; each of its units was computed by one of them."""
    by_step: dict[int, list[Commit]] = {}
    for commit in commits:
        by_step.setdefault(commit.done, []).append(commit)
    for done, step_commits in by_step.items():
        assert len({commit.digest for commit in step_commits}) == 1, done
        units = [unit for commit in step_commits for unit in commit.units]
        assert len(units) == len(set(units)), done
        if len(step_commits) == step_commits[0].world:
            assert sorted(units) == list(range(step_commits[0].of)), done
    assert any(
        len([commit for commit in step_commits if commit.units]) == 2 for step_commits in by_step.values()
    )


def _lines(path: Path) -> list[tuple[str, int, int]]:
    lines: list[tuple[str, int, int]] = []
    for line in path.read_text().splitlines():
        name, place, leased = line.split()
        lines.append((name, int(place), int(leased)))
    return lines


def _trained(path: Path) -> int:
    """Samples of all leases that were trained to their end and exchanged; none was trained beyond it."""
    names = list(dict.fromkeys(name for name, _, _ in _lines(path)))
    total = 0
    for name in names[:-1]:
        places = sorted({(place, leased) for lease, place, leased in _lines(path) if lease == name})
        assert {leased for _, leased in places} == {places[0][1]}
        assert places[-1][0] == places[-1][1], "every sample of the lease was trained"
        total += places[0][1]
    return total


def _last_lease(path: Path) -> int:
    return _lines(path)[-1][2]
