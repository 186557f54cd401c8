"""A hub on a public host and friends behind home routers, as they type it: they join, train and leave."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from barnraise.hub.storage.log import HubLog, MemberRecord
from lab import Host, Lab, LabProcess

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
TRAIN = """\
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import barnraise

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(2048, 16)
y = (x[:, :4].abs() + x[:, 4:8]).argmax(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
run = barnraise.init(seed=1)
model, optimizer, batches = run.prepare(model, optimizer, loader)
for epoch in run.epochs(int(sys.argv[1])):
    for a, b in batches:
        loss = torch.nn.functional.cross_entropy(model(a), b)
        loss.backward()
        time.sleep(0.01)
        run.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
print("trained", run.done)
"""


class Fireside:
    """A hub at the lab's public host, and its members."""

    def __init__(self, lab: Lab, room: Path) -> None:
        self.lab, self.room = lab, room
        self.project = room / "project"
        self.project.mkdir()
        (self.project / "train.py").write_text(TRAIN)
        self.directory = self.state("hub") / "hub" / "fireside"
        self.running: list[LabProcess] = []

    def state(self, name: str) -> Path:
        path = self.room / name
        path.mkdir(exist_ok=True)
        return path

    def type(self, host: Host, name: str, *words: str, answers: str = "") -> LabProcess:
        environment = {
            "BARNRAISE_STATE_DIRECTORY": str(self.state(name)),
            "PYTHONPATH": str(REPOSITORY / "src"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "barnraise.cli.main", *words]
        if answers:
            (self.room / "answers").write_text(answers)
            command = ["sh", "-c", 'exec "$@" < "$0"', str(self.room / "answers"), *command]
        started = host.start(command, env=environment, cwd=self.project)
        self.running.append(started)
        return started

    def up(self, *words: str) -> LabProcess:
        host = self.lab.hosts[0]
        address = f"https://{host.address}:52480"
        return self.type(host, "hub", "hub", "up", "--name", "fireside", "--address", address, *words)

    def invite(self, hub: LabProcess) -> str:
        self.until(lambda: "barnraise-invite:" in hub.output(), 200.0, "the hub prints an invite", hub)
        found = re.search(r"barnraise-invite:\S+", hub.output())
        assert found is not None
        return found[0]

    def join(self, host: Host, name: str, invite: str) -> LabProcess:
        return self.type(host, name, "join", "--invite", invite, "--yes", "--name", name)

    def members(self) -> dict[str, MemberRecord]:
        log = HubLog(self.directory)
        try:
            return {one.name: one for one in log.read().members.values()}
        finally:
            log.close()

    def rounds(self, name: str) -> int:
        member = self.members().get(name)
        return 0 if member is None else member.accepted

    def until(self, is_so: Callable[[], bool], seconds: float, what: str, *said: LabProcess) -> float:
        begin = time.monotonic()
        while not is_so():
            words = "\n---\n".join(one.output()[-3000:] for one in said)
            ended = any(one.poll() is not None for one in said)
            assert not ended, f"somebody has ended: {what}\n{words}"
            assert time.monotonic() - begin < seconds, f"not within {seconds:g} s: {what}\n{words}"
            time.sleep(0.1)
        return time.monotonic() - begin

    def until_rounds(
        self, friends: dict[str, LabProcess], counts: dict[str, int], seconds: float, hub: LabProcess
    ) -> None:
        """Until each has contributed so often."""

        def is_so() -> bool:
            return all(self.rounds(name) >= count for name, count in counts.items())

        self.until(is_so, seconds, f"{counts} rounds", *friends.values(), hub)

    def close(self) -> None:
        for one in self.running:
            if one.poll() is None:
                one.signal(signal.SIGTERM)
        for one in self.running:
            with contextlib.suppress(Exception):
                one.wait(20)
            one.kill()


@pytest.fixture
def fireside(tmp_path: Path) -> Iterator[Fireside]:
    with Lab(hosts=1, nat=[1, 1], rate="50mbit", delay="20ms") as lab:
        found = Fireside(lab, tmp_path)
        yield found
        found.close()


def listening(host: Host) -> list[str]:
    """The ports on which anything in this host could be reached."""
    text = host.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout
    rows = [line.split() for line in text.splitlines()]
    return [row[1] for row in rows if len(row) > 3 and row[3] == "0A"]


def test_friends_join_train_outlive_the_hub_and_leave(fireside: Fireside) -> None:
    hub = fireside.up("--round", "2s", "--no-train", "train.py", "100000")
    invite = fireside.invite(hub)
    hosts = [nat.hosts[0] for nat in fireside.lab.nats]
    began = time.monotonic()
    anna, ben = (fireside.join(host, name, invite) for host, name in zip(hosts, ("anna", "ben"), strict=True))
    both = {"anna": anna, "ben": ben}
    fireside.until_rounds(both, dict.fromkeys(both, 1), 240.0, hub)
    first_s = time.monotonic() - began
    print(f"from join --invite to the first contributed round of both: {first_s:.1f} s")
    assert first_s <= 200.0  # alone on a machine, a fifth of that
    assert [listening(host) for host in hosts] == [[], []]

    # The hub is killed in the middle of everything; it comes back where it was, and they go on.
    before = {name: fireside.rounds(name) for name in both}
    for pid in fireside.lab.hosts[0].pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    again = fireside.up("--no-train")
    fireside.invite(again)
    fireside.until_rounds(both, {name: count + 2 for name, count in before.items()}, 240.0, again)

    # One leaves with Ctrl-C: nothing of the run stays, and the other does not wait for it.
    anna.signal(signal.SIGINT)
    assert anna.wait(120) == 130, anna.output()
    assert "nothing of the run is kept here" in anna.output()
    fireside.until(lambda: hosts[0].pids() == [], 60.0, "nothing runs there")
    assert sorted(path.name for path in fireside.state("anna").iterdir()) == ["node.key"]
    now = fireside.rounds("ben")
    fireside.until(lambda: fireside.rounds("ben") > now + 2, 240.0, "the other one goes on", ben, again)

    # Whoever comes back is the same member: the invite is not used up by that.
    friends = len(fireside.members())
    back = fireside.join(hosts[0], "anna", invite)
    count = fireside.rounds("anna")
    fireside.until(lambda: fireside.rounds("anna") > count, 240.0, "anna is back", back, again)
    assert len(fireside.members()) == friends


def test_hub_run_finishes_on_every_machine(fireside: Fireside) -> None:
    hub = fireside.up("--round", "1s", "train.py", "6")
    invite = fireside.invite(hub)
    anna = fireside.join(fireside.lab.nats[0].hosts[0], "anna", invite)
    assert anna.wait(300) == 0, anna.output()
    assert "trained" in anna.output()
    fireside.until(lambda: "own part ended with code 0" in hub.output(), 120.0, "the host's part ends", hub)
    members = fireside.members()
    assert members["anna"].samples + members["owner"].samples >= 6 * 2048
    hub.signal(signal.SIGINT)
    assert hub.wait(120) == 130, hub.output()
    fireside.until(lambda: fireside.lab.hosts[0].pids() == [], 60.0, "nothing runs there")


PAGE = REPOSITORY / "docs" / "friends.md"


def test_friends_page_matches_real_commands(fireside: Fireside) -> None:
    """Its commands, in its order, as it writes them."""
    page = PAGE.read_text(encoding="utf-8")
    typed = re.findall(r"^(host|friend)\$ (barnraise .*?)(?:  +for .*)?$", page, re.M)
    host, friends_host = fireside.lab.hosts[0], fireside.lab.nats[0].hosts[0]
    (fireside.project / "train.py").unlink()
    (fireside.project / "friends.py").write_text((REPOSITORY / "examples" / "friends.py").read_text())
    words = [(who, line.split()[1:]) for who, line in typed]
    assert words[:3] == [
        ("host", ["hub", "up", "friends.py"]),
        ("friend", ["join", "--invite", "barnraise-invite:3kYzlZG2aHR0cDov..."]),
        ("host", ["hub", "status"]),
    ]
    hub = fireside.type(host, "hub", *words[0][1])
    fireside.directory = fireside.state("hub") / "hub" / "friends"
    invite = fireside.invite(hub)
    assert f"The run friends is at https://{host.address}:52480. Friends join it with:" in hub.output()
    friend = fireside.type(friends_host, "friend", "join", "--invite", invite, answers="y\n")
    fireside.until(
        lambda: "friend" in {one.role for one in fireside.members().values()}, 240.0, "a friend", friend
    )
    assert "  python friends.py\nfrom 1 file" in friend.output()
    assert "Run it here? [y/N]:" in friend.output()
    name = next(one.name for one in fireside.members().values() if one.role == "friend")
    fireside.until(lambda: fireside.rounds(name) > 0, 240.0, "its first contribution", friend, hub)
    fireside.until(lambda: len(fireside.members()) == 2, 120.0, "the host takes part, too", friend, hub)
    for who, line in words[2:]:
        assert who == "host"
        if line[0] != "hub" or line == ["hub", "status"]:
            said = fireside.type(host, "hub", *line)
            assert said.wait(150) == 0, said.output()
            assert re.search(r"barnraise-invite:\S+|friends: version \d+, .*2 members", said.output()), line
    friend.signal(signal.SIGINT)
    assert friend.wait(120) == 130, friend.output()
    assert [path.name for path in fireside.state("friend").iterdir()] == ["node.key"]
