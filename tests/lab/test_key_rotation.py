"""A machine changes its key while it trains with others: the run goes on, and the machine comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.identity import NodeKey
from benchmarks.agents.commits import read_commits
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine
from lab import Lab
from tests.lab.test_session import alone, check_equal, check_trace, finals, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_ROTATED = 1


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Lab(hosts=3) as lab, Machines(lab.hosts) as formed:
        formed.form()
        yield formed


def test_run_continues_while_a_machine_changes_its_key(machines: Machines, tmp_path: Path) -> None:
    line = CommandLine(machines)
    machines.until(lambda: machines.agree(range(3)), 90.0, "all are here")
    key_file = machines.state(_ROTATED) / "node.key"
    before, old_file = NodeKey.load_or_create(key_file).id, key_file.read_bytes()
    trace, hold = tmp_path / "trace", tmp_path / "hold"
    hold.touch()
    options = {"MODEL": "images", "OPTIMIZER": "sgd", "EPOCHS": "20"}
    running = start(line, tmp_path / "project", trace, "h0,h1,h2", DELAY="0.05", HOLD=str(hold), **options)
    machines.until(lambda: len(read_commits(trace)) > 10, 90.0, "they train")

    done = line.run(_ROTATED, "identity", "rotate", "--yes")
    assert done.returncode == 0, done.stderr
    assert "new key" in done.stdout
    after = NodeKey.load_or_create(key_file).id
    assert after != before
    machines.until(lambda: machines.agree(range(3)), 90.0, "it is here with its new key")
    for place in range(3):
        rows = {row.node: row for row in machines.status(place).nodes}
        assert (rows[str(after)].name, rows[str(after)].role) == (f"h{_ROTATED}", "owner")
        assert str(before) not in rows
    worlds = [commit.world for commit in read_commits(trace)]
    machines.until(
        lambda: [commit.world for commit in read_commits(trace)][len(worlds) :].count(3) > 3,
        150.0,
        "it trains again",
    )
    hold.unlink()
    assert running.wait(300) == 0, running.output()
    check_equal(finals(running.output()), alone(**options))
    check_trace(trace, units=8, kills=1)

    events = json.loads(line.run(_ROTATED, "audit", "--json").stdout)["entries"]
    assert any(entry["event"] == "identity-changed" and after.short in entry["subject"] for entry in events)
    # The old key, on the same machine: no other lets it in.
    machines.kill(_ROTATED)
    key_file.unlink()
    key_file.write_bytes(old_file)
    key_file.chmod(0o600)
    machines.start(_ROTATED)
    machines.until(lambda: not machines.agree(range(3)), 60.0, "the machine was lost")
    for place in (0, 2):
        assert str(before) not in {row.node for row in machines.status(place).nodes}
