"""`barnraise plan` and `barnraise run --dry-run` on three machines of a lab, typed as a person types them."""

from __future__ import annotations

import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.agent_client.run_requests import RunsRequest, RunsResponse
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine
from lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

import barnraise

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(4096, 256))
run = barnraise.init(checkpoint_s=0.01)
model, optimizer, batches = run.prepare(model, optimizer, DataLoader(data, batch_size=192))
print("the script's own words")
for epoch in run.epochs(100000):
    for batch in batches:
        for (x,) in batch:
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
run.save("model.safetensors")
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Lab(hosts=3, rate="1gbit") as lab, Machines(lab.hosts) as formed:
        formed.form()
        yield formed


@pytest.fixture
def line(machines: Machines) -> CommandLine:
    """All devices are measured; links that are not yet are assumed."""

    def is_measured() -> bool:
        return all(any(device.tflops for device in row.devices) for row in machines.status(0).nodes)

    machines.until(is_measured, 240.0, "all is measured")
    return CommandLine(machines)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    return folder


def test_plan_from_model_size_names_machines(line: CommandLine, project: Path) -> None:
    done = line.run(0, "plan", "--parameters", "20M", "--tokens", "64", "--picture", "p.svg", folder=project)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert {line.split()[0] for line in done.stdout.splitlines() if "estimated from" in line} == {
        "h0",
        "h1",
        "h2",
    }
    assert "Chosen: " in done.stdout
    # Which of them, depends on how busy each was while it was measured.
    assert re.search(r"h\d(, h\d)? and h\d: every step", done.stdout)
    ElementTree.parse(project / "p.svg")
    words = ("--parameters", "20M", "--on", "h1,h2", "--add", "4090@1gbit", "--json")
    plan = json.loads(line.run(0, "plan", *words, folder=project).stdout)
    assert [machine["name"] for machine in plan["machines"]] == ["4090@1gbit", "h1", "h2"]
    assert plan["ranking"]["chosen"]["name"] == "4090@1gbit alone"


def test_dry_run_measures_and_leaves_no_files(line: CommandLine, machines: Machines, project: Path) -> None:
    done = line.run(0, "run", "--dry-run", "train.py", folder=project, timeout=200)
    assert done.returncode == 0, done.stderr
    print(done.stderr, done.stdout)
    assert done.stdout.count("measured with this model") == 3
    assert "the script's own words" in done.stderr
    assert "the script's own words" not in done.stdout
    assert "Measured in the dry run with h0, h1 and h2" in done.stdout
    assert sorted(path.name for path in project.iterdir()) == ["train.py"]
    run = machines.ask(0, RunsRequest(), RunsResponse).runs[-1].run
    assert not [path for place in range(3) for path in machines.state(place).rglob(f"{run}/checkpoints/*")]

    words = ("--dry-run", "--on", "h1", "--json", "train.py")
    steps = []
    for _ in range(4):  # a moment without a processor is in one of the two figures only
        plan = json.loads(line.run(0, "run", *words, folder=project, timeout=200).stdout)
        assert plan["model"]["parameters"] == 256 * 1024 * 2 + 1024 + 256
        assert (plan["profile"]["batch"], plan["profile"]["unit"]) == (192, 24)
        assert [machine["name"] for machine in plan["machines"]] == ["h1"]
        steps.append((plan["ranking"]["chosen"]["step_s"], plan["measured_step_s"]))
        if steps[-1][0] == pytest.approx(steps[-1][1], rel=0.5):
            break
    else:
        raise AssertionError(f"planned and measured: {steps}")


BY_LEVEL = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

import barnraise
from barnraise.core import metrics

model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run = barnraise.init()
loader = DataLoader(TensorDataset(torch.randn(1024, 256)), batch_size=64)
model, optimizer, batches = run.prepare(model, optimizer, loader)
for batch in batches:
    for (x,) in batch:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
name = "barnraise_collective_duration_seconds_count"
samples = [sample for sample in metrics.registry.samples() if sample.name == name]
taken = {sample.labels[1] for sample in samples if sample.labels[0] == "all_reduce"}
print("TAKEN", run.done, run.world, *sorted(taken), flush=True)
"""


def test_sums_go_as_a_person_has_fixed_it(line: CommandLine, project: Path) -> None:
    (project / "train.py").write_text(BY_LEVEL)
    for strategy in ("star", "tree"):
        (project / "levels.toml").write_text(f'[inside]\nall_reduce = "{strategy}"\n')
        done = line.run(0, "run", "--levels", "levels.toml", "train.py", folder=project, timeout=200)
        assert done.returncode == 0, done.stderr
        assert re.search(rf"TAKEN 16 [23] {strategy}$", done.stdout, re.MULTILINE), done.stdout


def test_links_that_share_a_line_are_measured_one_after_the_other() -> None:
    """Four machines find each other at the same moment, and each of six links is worth its whole line."""
    with Lab(hosts=4, rate="20mbit") as lab, Machines(lab.hosts) as machines:
        machines.form()

        def rates() -> list[float]:
            return [link.mbps for link in machines.status(0).links if link.mbps is not None]

        machines.until(lambda: len(rates()) == 6, 400.0, "all links are measured")
        # Of three at once each would see a third. One or the other may suffer from a machine that stalls.
        assert 13.0 < statistics.median(rates()) < 25.0, rates()
        assert min(rates()) > 8.0, rates()


def test_dry_run_without_session_says_what_to_do(line: CommandLine, project: Path) -> None:
    (project / "plain.py").write_text("import time\ntime.sleep(600)\n")
    (project / "train.py").unlink()
    done = line.run(0, "run", "--dry-run", "plain.py", folder=project)
    assert done.returncode == 1
    assert "does not train in a session" in done.stderr
    assert "barnraise plan --parameters" in done.stderr


SLOW = """\
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import barnraise

torch.set_num_threads(1)
model = torch.nn.Linear(1000, 500)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(16 * 120, 1000)), batch_size=16)
run = barnraise.init()
model, optimizer, batches = run.prepare(model, optimizer, loader)
seen = []
run.on_commit(lambda commit: seen.append((time.monotonic(), commit.done, commit.sync)))
for batch in batches:
    for (x,) in batch:
        time.sleep(0.02 * len(x))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def seconds(sync):
    same = [commit for commit in seen if commit[2] == sync]
    return (same[-1][0] - same[0][0]) / (same[-1][1] - same[0][1])


if run.is_main:
    first, last = seen[0][2], seen[-1][2]
    print("WAY", run.done, last.period, last.codec, seconds(first), seconds(last), flush=True)
"""


def test_with_the_users_word_a_slow_link_changes_the_way(tmp_path: Path) -> None:
    """The first steps are exact; then the planner's way is taken, said, and faster."""
    (tmp_path / "train.py").write_text(SLOW)
    with Lab(hosts=2, rate="20mbit") as lab, Machines(lab.hosts) as machines:
        machines.form()
        machines.until(
            lambda: all(link.mbps for link in machines.status(0).links), 300.0, "the link is measured"
        )
        done = CommandLine(machines).run(0, "run", "--sync", "auto", "train.py", folder=tmp_path, timeout=300)
    print(done.stderr, done.stdout)
    assert done.returncode == 0
    match = re.search(r"WAY (\d+) (\d+) (\S+) (\S+) (\S+)", done.stdout)
    assert match is not None
    batches, period, codec, first_s, last_s = match.groups()
    assert batches == "120"
    assert (period, codec) != ("1", "exact")
    assert float(last_s) < 0.7 * float(first_s)
    assert re.search(r"from step \d+ on: ", done.stdout + done.stderr)


LAME = """\
import os
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import barnraise

torch.set_num_threads(1)
model = torch.nn.Linear(500, 500)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(16 * 40, 500)), batch_size=16)
run = barnraise.init()
model, optimizer, batches = run.prepare(model, optimizer, loader)
for batch in batches:
    for (x,) in batch:
        time.sleep((0.25 if os.environ["RANK"] == "2" else 0.01) * len(x))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if run.is_main:
    print("DONE", run.done, run.world, flush=True)
"""


def test_machine_that_slows_the_group_is_paused(tmp_path: Path) -> None:
    """Its line is slow and it computes slowly: the planner leaves it out, and every batch counts."""
    (tmp_path / "train.py").write_text(LAME)
    with Lab(hosts=3, rate="1gbit") as lab, Machines(lab.hosts) as machines:
        lab.set_rate(lab.hosts[2], "1mbit")
        machines.form()

        def is_measured() -> bool:
            return sum(bool(link.mbps) for link in machines.status(0).links) == 3

        machines.until(is_measured, 300.0, "the links are measured")
        done = CommandLine(machines).run(0, "run", "--sync", "auto", "train.py", folder=tmp_path, timeout=300)
        words = CommandLine(machines).run(0, "ps", "train").stdout
    print(done.stderr, done.stdout, words)
    assert done.returncode == 0
    assert re.search(r"h2 is paused: h0 and h1 are predicted to be \S+ times as fast", done.stderr)
    assert "DONE 40 2" in done.stdout
