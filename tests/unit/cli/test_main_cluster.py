"""Verbs and options of a cluster as they are typed, at an owner, a guest and a witness."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hub.process import free_port
from tests.unit.cli.typed import Machine, Typed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Cluster:
    """Three machines, whose agents were typed."""

    agent: Typed  # of the first

    def __init__(self, room: Path) -> None:
        discovery = str(free_port())
        names = ("oak", "ash", "elm")
        self.oak, self.ash, self.elm = (
            Machine(room, name, BARNRAISE_NETWORK_DISCOVERY_PORT=discovery) for name in names
        )

    def nodes(self) -> dict[str, dict[str, object]]:
        status = json.loads(self.oak.type("status", "--json"))
        return {row["name"]: row for row in status["nodes"]}

    def rates(self) -> dict[str, object]:
        """Ask what the links of the first machine carry."""
        return {name: row["mbps"] for name, row in self.nodes().items() if name != self.oak.name}

    def admit(self, machine: Machine, agent: Typed, *words: str) -> str:
        """Pair a machine by a code and an address, as `barnraise join CODE --at HOST:PORT`."""
        code = json.loads(self.oak.type("pair", "--no-wait", "--json", *words))["code"]
        output = machine.type("join", code, "--at", f"127.0.0.1:{self.oak.port}", *words)
        agent.until(lambda: self.nodes().get(machine.name, {}).get("seniority") is not None, "one view")
        return output


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="by-", ignore_cleanup_errors=True) as room,
        contextlib.ExitStack() as running,
    ):
        cluster = Cluster(Path(room))
        options = {"oak": (), "ash": (), "elm": ("--witness",)}
        agents = {}
        for machine in (cluster.oak, cluster.ash, cluster.elm):
            agent = running.enter_context(machine.typing("up", *options[machine.name]))
            agent.until(lambda machine=machine: _answers(machine), f"the agent of {machine.name}")  # type: ignore[misc]
            machine.type("rename", machine.name)
            agents[machine.name] = agent
        assert "guest" in cluster.admit(cluster.ash, agents["ash"], "--guest")
        cluster.admit(cluster.elm, agents["elm"])
        cluster.agent = agents["oak"]
        yield cluster


def _answers(machine: Machine) -> bool:
    try:
        machine.type("status")
    except AssertionError:  # it has not begun
        return False
    return True


def test_join_with_at_and_guest_admits_a_machine_in_that_role(cluster: Cluster) -> None:
    assert {name: row["role"] for name, row in cluster.nodes().items()} == {
        "oak": "owner",
        "ash": "guest",
        "elm": "owner",
    }


def test_join_with_at_a_place_where_no_agent_is_ends_with_a_sentence(cluster: Cluster) -> None:
    alone = Machine(cluster.oak.room, "alone")
    with alone.typing("up") as agent:
        agent.until(lambda: _answers(alone), "the agent")
        output = alone.type("join", "7-crossover-clockwork-zebra", "--at", f"127.0.0.1:{free_port()}", code=1)
        assert "Traceback" not in output
        assert "[" in output, "an error with its code"
        assert "not an address" in alone.type(
            "join", "7-crossover-clockwork-zebra", "--at", "here:there", code=1
        )


def test_up_with_witness_votes_and_takes_no_work(cluster: Cluster) -> None:
    assert {name: row["works"] for name, row in cluster.nodes().items()} == {
        "oak": True,
        "ash": True,
        "elm": False,
    }
    assert "online, witness" in cluster.oak.type("status")
    output = _run(cluster.oak, "--per-node", "1", "print(1)")
    assert "1 worker on 1 machine" in output
    assert "elm" not in output


def test_status_with_measure_has_links_measured_again(cluster: Cluster) -> None:
    """By itself an agent measures a link once, and again after hours."""
    cluster.agent.until(lambda: None not in cluster.rates().values(), "the first measurement")
    before = cluster.rates()
    assert "measured" in cluster.oak.type("status", "--measure").splitlines()[0]
    cluster.agent.until(lambda: cluster.rates() != before, "the second measurement")


@pytest.mark.parametrize("role", ["owner", "guest"])
def test_psk_new_with_output_writes_a_key_that_only_its_owner_reads(cluster: Cluster, role: str) -> None:
    file = cluster.oak.room / f"{role}.psk"
    options = ("--guest",) if role == "guest" else ()
    output = cluster.oak.type("psk", "new", *options, "--output", file.name)
    assert f"barnraise up --psk-file {file.name}" in output
    secret = file.read_text().strip()
    assert secret not in output
    if sys.platform != "win32":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "exists already" in cluster.oak.type("psk", "new", "--output", file.name, code=1)
    report = json.loads(cluster.oak.type("psk", "new", *options, "--json"))
    assert report["secret"] != secret
    assert role in report["sentence"] or role == "owner"


def test_run_with_more_min_nodes_than_machines_is_refused_and_with_fewer_is_not(cluster: Cluster) -> None:
    words = ("--on", "oak", "--per-node", "1", "--wait", "2s")
    output = _run(cluster.oak, *words, "--min-nodes", "2", "print('began')", code=1)
    assert "began" not in output
    assert re.search(r"\b2\b", output), output
    assert "began" in _run(cluster.oak, *words, "--min-nodes", "1", "print('began')")


@pytest.mark.skipif(sys.platform == "win32", reason="priorities have no number there")
def test_run_with_nice_starts_workers_of_that_priority(cluster: Cluster) -> None:
    if os.nice(0) > 7:
        pytest.skip("these tests have a lower priority, and only root could raise it for a worker")
    words = ("--on", "oak", "--per-node", "1", "--nice", "7")
    assert "nice 7" in _run(cluster.oak, *words, "import os; print('nice', os.nice(0))")


def test_names_of_machines_and_runs_may_be_shortened(cluster: Cluster) -> None:
    output = _run(cluster.oak, "--on", "o", "--per-node", "1", "--name", "shortened", "print('began')")
    assert "began" in output
    assert "on oak" in output
    assert "began" in cluster.oak.type("logs", "short")
    mistyped = _run(cluster.oak, "--on", "oka", "print('began')", code=1)
    assert "[membership] no machine is called 'oka'" in mistyped
    assert "Did you mean oak? There are: " in mistyped
    assert "no run is called 'shrotened'" in cluster.oak.type("logs", "shrotened", code=1)


@pytest.mark.parametrize("words", [("unpair", "as", "--yes"), ("continue", "--without", "as")])
def test_commands_that_cannot_be_undone_need_the_whole_name(cluster: Cluster, words: tuple[str, ...]) -> None:
    output = cluster.oak.type(*words, code=1)
    assert "This cannot be undone, so it needs the whole name: ash." in output
    assert "ash" in cluster.nodes()


def test_accept_with_refuse_keeps_a_run_from_a_guest(cluster: Cluster) -> None:
    words = ("--on", "ash", "--per-node", "1", "--detach", "--wait", "60s")
    run = _run(cluster.oak, *words, "open('ran', 'w')").split()[-1]
    output = cluster.ash.type("accept", run, "--refuse")
    assert "refus" in output or "not" in output, output
    attached_output = cluster.oak.type("attach", run, code=1)
    assert "ash" in attached_output
    assert not list(cluster.ash.state.rglob("ran")), "nothing of it ran there"


def test_pair_starts_agent_once_and_says_how_to_stop_it() -> None:
    with tempfile.TemporaryDirectory(prefix="by-", ignore_cleanup_errors=True) as room:
        machine = Machine(Path(room), "yew", BARNRAISE_NETWORK_DISCOVERY_PORT=str(free_port()))
        assert "waits for each machine" in machine.type("pair", "--machines", "2", "--json", code=1)
        output = machine.type("pair", "--no-wait")
        try:
            assert "Started the agent" in output
            assert "barnraise down" in output
            assert "Started" not in machine.type("pair", "--no-wait")
        finally:
            machine.type("down")


def _run(machine: Machine, *words: str, code: int = 0) -> str:
    """Run a script of one line; the last word is the script."""
    *options, script = words
    folder = machine.room / "project"
    folder.mkdir(exist_ok=True)
    (folder / "line.py").write_text(script)
    return machine.type(
        "run", "--env", "agent", "--folder", str(folder), *options, str(folder / "line.py"), code=code
    )
