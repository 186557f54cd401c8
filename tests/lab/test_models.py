"""`barnraise run --model` on three machines of a lab: what crosses the network, and what the script finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.agent_client.run_requests import RunsRequest, RunsResponse
from benchmarks.agents.machines import Machines
from benchmarks.agents.runs import CommandLine, write_folder
from lab import Lab
from tests.unit.artifacts.models.caches import MODEL, weights, write_cache

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(300)]

FILES = {"config.json": b"{}", **{f"{number}.safetensors": weights(number, 6) for number in range(3)}}
SIZE = sum(map(len, FILES.values()))
SCRIPT = """
import hashlib, os
import barnraise
folder = barnraise.model_path("base")
by_id = os.path.join(os.environ["HF_HUB_CACHE"], "models--some-org--Some-Model.1B")
commit = open(os.path.join(by_id, "refs", "main")).read()
for top in (folder, os.path.join(by_id, "snapshots", commit)):
    digest = hashlib.sha256()
    for name in sorted(os.listdir(top)):
        digest.update(open(os.path.join(top, name), "rb").read())
    print("DIGEST", digest.hexdigest())
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    room = tmp_path_factory.mktemp("caches")
    with Lab(hosts=3, rate="200mbit") as lab, Machines(lab.hosts) as formed:
        for place, own in enumerate(formed.own):
            own["HF_HUB_CACHE"] = str(room / str(place))
        formed.form()
        formed.until(lambda: formed.are_links_measured(3), 120.0, "links are measured, which sends megabytes")
        yield formed


def carried(machines: Machines) -> list[tuple[int, int]]:
    """Return the bytes that each machine has received and sent."""
    rows = []
    for host in machines.hosts:
        text = host.run(["cat", "/proc/net/dev"]).stdout
        card = next(line for line in text.splitlines() if line.strip().startswith("eth0"))
        fields = card.split(":")[1].split()
        rows.append((int(fields[0]), int(fields[8])))
    return rows


def test_machine_with_the_model_fetches_nothing_and_the_third_fetches_from_both(
    machines: Machines, tmp_path: Path
) -> None:
    for place in (0, 1):
        write_cache(Path(machines.own[place]["HF_HUB_CACHE"]), MODEL, FILES)
    write_folder(tmp_path / "project", SCRIPT)
    line = CommandLine(machines)
    before = carried(machines)
    done = line.run(
        *(0, "run", "--all", "--separate", "--model", f"base={MODEL}", "train.py"),
        folder=tmp_path / "project",
    )
    after = carried(machines)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("DIGEST", done.stdout)) == 6, done.stdout
    assert len(set(re.findall(r"DIGEST (\w+)", done.stdout))) == 1, done.stdout
    received = [now[0] - was[0] for now, was in zip(after, before, strict=True)]
    sent = [now[1] - was[1] for now, was in zip(after, before, strict=True)]
    assert received[1] < 0.06 * SIZE, "acknowledgements of what it sends, and the talk of the agents"
    assert SIZE < received[2] < 1.2 * SIZE
    assert min(sent[0], sent[1]) > 0.25 * SIZE, "from both"
    again = line.run(
        0, "run", "--separate", "--model", f"base={MODEL}", "train.py", folder=tmp_path / "project"
    )
    assert again.returncode == 0, again.stderr
    assert carried(machines)[2][0] - after[2][0] < 0.06 * SIZE, "the second run sends nothing"


def test_transfer_that_a_power_cut_interrupts_resumes(machines: Machines, tmp_path: Path) -> None:
    files = {f"{number}.safetensors": weights(100 + number, 10) for number in range(3)}
    size = sum(map(len, files.values()))
    write_cache(Path(machines.own[0]["HF_HUB_CACHE"]), "org/other", files)
    write_folder(tmp_path / "project", "import barnraise\nprint('AT', barnraise.model_path('base'))\n")
    line = CommandLine(machines)
    words = ("run", "--separate", "--on", "h0,h2", "--model", "base=org/other")
    begin = carried(machines)[2][0]
    started = line.run(0, *words, "--detach", "train.py", folder=tmp_path / "project")
    assert started.returncode == 0, started.stderr
    machines.until(lambda: carried(machines)[2][0] - begin > size // 4, 60.0, "a part has arrived")
    machines.kill(2)
    arrived = carried(machines)[2][0] - begin
    assert arrived < 0.9 * size, "it was not interrupted"
    run = machines.ask(0, RunsRequest(), RunsResponse).runs[-1].run
    line.run(0, "stop", "--hard", run)
    machines.start(2)
    machines.until(lambda: machines.agree(range(3)), 90.0, "all are here")
    begin = carried(machines)[2][0]
    done = line.run(0, *words, "train.py", folder=tmp_path / "project")
    assert done.returncode == 0, done.stderr
    assert "AT " in done.stdout
    assert carried(machines)[2][0] - begin < 1.1 * size - 0.7 * arrived
