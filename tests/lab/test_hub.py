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
from tests.stand_in_mnist import write_mnist
from tests.unit.hub.reverse_proxies import make_certificates

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
KEPT = ["audit.log", "node.key"]  # on a friend's machine after it has left
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
    for batch in batches:
        for a, b in batch:
            loss = torch.nn.functional.cross_entropy(model(a), b)
            loss.backward()
            time.sleep(0.01)
            run.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
print("trained", run.done)
"""


class LabHub:
    """A hub at the lab's public host, and its members."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.project = folder / "project"
        self.project.mkdir()
        (self.project / "train.py").write_text(TRAIN)
        self.directory = self.state("hub") / "hub" / "fireside"
        self.running: list[LabProcess] = []

    def state(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    def type(self, host: Host, name: str, *words: str, answers: str = "", **variables: str) -> LabProcess:
        environment = {
            "BARNRAISE_STATE_DIRECTORY": str(self.state(name)),
            "PYTHONPATH": str(REPOSITORY / "src"),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        command = [sys.executable, "-m", "barnraise.cli.main", *words]
        if answers:
            (self.folder / "answers").write_text(answers)
            command = ["sh", "-c", 'exec "$@" < "$0"', str(self.folder / "answers"), *command]
        started = host.start(command, env=environment, cwd=self.project)
        self.running.append(started)
        return started

    def up(self, *words: str) -> LabProcess:
        host = self.lab.hosts[0]
        address = f"https://{host.address}:52480"
        return self.type(host, "hub", "hub", "up", "--name", "fireside", "--address", address, *words)

    def invite(self, hub: LabProcess) -> str:
        self.until(lambda: "barnraise-invite:" in hub.output(), 200.0, "the hub prints an invite", hub)
        match = re.search(r"barnraise-invite:\S+", hub.output())
        assert match is not None
        return match[0]

    def join(self, host: Host, name: str, invite: str) -> LabProcess:
        return self.type(host, name, "join", "--invite", invite, "--yes", "--name", name)

    def members(self) -> dict[str, MemberRecord]:
        log = HubLog(self.directory)
        try:
            return {member.name: member for member in log.read().members.values()}
        finally:
            log.close()

    def rounds(self, name: str) -> int:
        member = self.members().get(name)
        return 0 if member is None else member.accepted

    def until(self, is_true: Callable[[], bool], seconds: float, what: str, *processes: LabProcess) -> float:
        begin = time.monotonic()
        while not is_true():
            words = "\n---\n".join(process.output()[-3000:] for process in processes)
            ended = any(process.poll() is not None for process in processes)
            assert not ended, f"a process has exited: {what}\n{words}"
            assert time.monotonic() - begin < seconds, f"not within {seconds:g} s: {what}\n{words}"
            time.sleep(0.1)
        return time.monotonic() - begin

    def until_rounds(
        self, friends: dict[str, LabProcess], counts: dict[str, int], seconds: float, hub: LabProcess
    ) -> None:
        """Wait until each member has contributed this number of rounds."""

        def is_true() -> bool:
            return all(self.rounds(name) >= count for name, count in counts.items())

        self.until(is_true, seconds, f"{counts} rounds", *friends.values(), hub)

    def close(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.signal(signal.SIGTERM)
        for process in self.running:
            with contextlib.suppress(Exception):
                process.wait(20)
            process.kill()


@pytest.fixture
def lab_hub(tmp_path: Path) -> Iterator[LabHub]:
    with Lab(hosts=1, nat=[1, 1], rate="50mbit", delay="20ms") as lab:
        hub = LabHub(lab, tmp_path)
        yield hub
        hub.close()


def listening(host: Host) -> list[str]:
    """The ports on which anything in this host could be reached."""
    text = host.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout
    rows = [line.split() for line in text.splitlines()]
    return [row[1] for row in rows if len(row) > 3 and row[3] == "0A"]


def test_friends_join_train_outlive_the_hub_and_leave(lab_hub: LabHub) -> None:
    hub = lab_hub.up("--round", "2s", "--no-train", "--uses", "2", "train.py", "100000")
    invite = lab_hub.invite(hub)
    hosts = [nat.hosts[0] for nat in lab_hub.lab.nats]
    began = time.monotonic()
    anna, ben = (lab_hub.join(host, name, invite) for host, name in zip(hosts, ("anna", "ben"), strict=True))
    both = {"anna": anna, "ben": ben}
    lab_hub.until_rounds(both, dict.fromkeys(both, 1), 240.0, hub)
    first_s = time.monotonic() - began
    print(f"from join --invite to the first contributed round of both: {first_s:.1f} s")
    assert first_s <= 200.0  # alone on a machine, a fifth of that
    assert [listening(host) for host in hosts] == [[], []]

    # The hub is killed at any moment; it restarts with its state, and the members continue.
    before = {name: lab_hub.rounds(name) for name in both}
    for pid in lab_hub.lab.hosts[0].pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    again = lab_hub.up("--no-train")
    lab_hub.invite(again)
    lab_hub.until_rounds(both, {name: count + 2 for name, count in before.items()}, 240.0, again)

    # One member leaves with Ctrl-C: nothing of the run stays on its host, and the other continues.
    anna.signal(signal.SIGINT)
    assert anna.wait(120) == 130, anna.output()
    assert "nothing of the run is kept here" in anna.output()
    lab_hub.until(lambda: hosts[0].pids() == [], 60.0, "nothing runs there")
    assert sorted(path.name for path in lab_hub.state("anna").iterdir()) == KEPT
    now = lab_hub.rounds("ben")
    lab_hub.until(lambda: lab_hub.rounds("ben") > now + 2, 240.0, "the other one goes on", ben, again)

    # A returning friend is the same member, and does not use up the invite.
    friends = len(lab_hub.members())
    back = lab_hub.join(hosts[0], "anna", invite)
    count = lab_hub.rounds("anna")
    lab_hub.until(lambda: lab_hub.rounds("anna") > count, 240.0, "anna is back", back, again)
    assert len(lab_hub.members()) == friends


def test_example_digits_trains_at_a_hub(lab_hub: LabHub) -> None:
    """The file is the one that runs alone; its data are in the folder that the hub sends."""
    (lab_hub.project / "train.py").unlink()
    for name in ("digits.py", "evaluate_digits.py"):
        text = (REPOSITORY / "examples" / name).read_text(encoding="utf-8")
        (lab_hub.project / name).write_text(text, encoding="utf-8")
    count = 6144  # so that the owner still trains when anna has joined
    write_mnist(lab_hub.project / "mnist", count, 500)
    hub = lab_hub.up("--round", "1s", "digits.py", "--epochs", "20", "--batch", "64")
    anna = lab_hub.join(lab_hub.lab.nats[0].hosts[0], "anna", lab_hub.invite(hub))
    assert anna.wait(300) == 0, anna.output()
    assert anna.output().count("saved: digits.safetensors") == 1
    lab_hub.until(lambda: "own part ended with code 0" in hub.output(), 120.0, "the host's part ends", hub)
    members = lab_hub.members()
    assert members["anna"].samples > 0
    assert members["anna"].samples + members["owner"].samples >= 20 * count
    # Anna may join when most of the training is done, so the first loss is the owner's.
    first, *_ = re.findall(r"epoch \d+ of 20: loss ([\d.]+)", hub.output())
    *_, last = re.findall(r"epoch \d+ of 20: loss ([\d.]+)", anna.output())
    assert float(last) < float(first)
    (model,) = (lab_hub.project / "barnraise-runs").glob("*/digits.safetensors")
    model.rename(lab_hub.project / model.name)
    tested = lab_hub.lab.hosts[0].run(
        [sys.executable, "evaluate_digits.py"],
        env={"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"},
        cwd=lab_hub.project,
    )
    match = re.search(r"([\d.]+)% of 500 images are right", tested.stdout)
    assert match is not None
    assert float(match[1]) > 70


def test_hub_run_finishes_on_every_machine(lab_hub: LabHub) -> None:
    hub = lab_hub.up("--round", "1s", "train.py", "6")
    invite = lab_hub.invite(hub)
    anna = lab_hub.join(lab_hub.lab.nats[0].hosts[0], "anna", invite)
    assert anna.wait(300) == 0, anna.output()
    assert "trained" in anna.output()
    lab_hub.until(lambda: "own part ended with code 0" in hub.output(), 120.0, "the host's part ends", hub)
    members = lab_hub.members()
    assert members["anna"].samples + members["owner"].samples >= 6 * 2048
    hub.signal(signal.SIGINT)
    assert hub.wait(120) == 130, hub.output()
    lab_hub.until(lambda: lab_hub.lab.hosts[0].pids() == [], 60.0, "nothing runs there")


# Ends TLS in front of the hub, sees every request in clear, and joins with what a friend sends.
PROXY = """\
import http.client, json, ssl, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from barnraise.core.errors import HubRefused
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.messages import JoinRequest, JoinResponse, decode_message
from barnraise.identity.keys import NodeKey
from barnraise.identity.node_id import NodeId

def steal(body, headers):
    seen = decode_message(JoinRequest, body)
    thief = HubClient(["http://127.0.0.1:52480"], NodeId.parse(headers["barnraise-hub"]), NodeKey.generate())
    try:
        thief.ask("POST", "/v1/members", JoinResponse, seen)
        result = "joined"
    except HubRefused as error:
        result = error.kind
    with open(sys.argv[3], "a") as file:
        file.write(result + " " + body.decode() + "\\n")

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def carry(self):
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        if self.path == "/v1/members":
            steal(body, self.headers)
        line = http.client.HTTPConnection("127.0.0.1", 52480, timeout=90)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        line.request(self.command, self.path, body or None, headers)
        answer = line.getresponse()
        data = answer.read()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "connection"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    do_GET = do_POST = do_PATCH = carry
    def log_message(self, *given):
        pass

server = ThreadingHTTPServer(("0.0.0.0", 8443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1], sys.argv[2])
server.socket = context.wrap_socket(server.socket, server_side=True)
print("the proxy listens", flush=True)
server.serve_forever()
"""


def test_proxy_that_ends_tls_learns_nothing_that_joins(lab_hub: LabHub) -> None:
    """The proxy has a certificate that the friend trusts, and tries each request to join for itself."""
    host, home = lab_hub.lab.hosts[0], lab_hub.lab.nats[0].hosts[0]
    address, seen = f"https://{host.address}:8443", lab_hub.folder / "seen"
    names = ("root.pem", "chain.pem", "key.pem")
    for name, data in zip(names, make_certificates(host.address), strict=True):
        (lab_hub.folder / name).write_bytes(data)
    root, chain, key = (str(lab_hub.folder / name) for name in names)
    (lab_hub.folder / "proxy.py").write_text(PROXY)
    command = [sys.executable, str(lab_hub.folder / "proxy.py"), chain, key, str(seen)]
    proxy = host.start(command, env={"PYTHONPATH": str(REPOSITORY / "src")})
    lab_hub.running.append(proxy)
    words = ("--name", "fireside", "--plain", "--address", address, "--round", "2s", "--no-train")
    hub = lab_hub.type(host, "hub", "hub", "up", *words, "train.py", "100000")
    invite = lab_hub.invite(hub)
    lab_hub.until(lambda: "listens" in proxy.output(), 60.0, "the proxy listens", proxy)
    friend = lab_hub.type(
        home,
        "anna",
        # Without the sandbox, which has only the authorities of the system.
        *("join", "--invite", "-", "--yes", "--name", "anna", "--no-sandbox"),
        answers=f"{invite}\n",
        SSL_CERT_FILE=root,
    )
    lab_hub.until_rounds({"anna": friend}, {"anna": 1}, 240.0, hub)
    results = [line.partition(" ")[0] for line in seen.read_text().splitlines()]
    assert results
    assert set(results) == {"invite"}, "the hub refused what the proxy had"
    assert [member.name for member in lab_hub.members().values() if member.role == "friend"] == ["anna"]
    assert invite not in seen.read_text()
    arguments = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (*host.pids(), *home.pids())]
    assert not any("barnraise-invite:" in words for words in arguments), "the invite came by standard input"


PAGE = REPOSITORY / "docs" / "friends.md"


def test_friends_page_matches_real_commands(lab_hub: LabHub) -> None:
    """Run the commands of the page in their order."""
    page = PAGE.read_text(encoding="utf-8")
    typed = re.findall(r"^(host|friend)\$ (barnraise .*?)(?:  +for .*)?$", page, re.M)
    host, friends_host = lab_hub.lab.hosts[0], lab_hub.lab.nats[0].hosts[0]
    (lab_hub.project / "train.py").unlink()
    (lab_hub.project / "friends.py").write_text((REPOSITORY / "examples" / "friends.py").read_text())
    words = [(role, line.split()[1:]) for role, line in typed]
    assert words[:3] == [
        ("host", ["hub", "up", "friends.py"]),
        ("friend", ["join", "--invite", "barnraise-invite:3kYzlZG2aHR0cDov..."]),
        ("host", ["hub", "status"]),
    ]
    hub = lab_hub.type(host, "hub", *words[0][1])
    lab_hub.directory = lab_hub.state("hub") / "hub" / "friends"
    invite = lab_hub.invite(hub)
    assert f"The run friends is at https://{host.address}:52480. Friends join it with:" in hub.output()
    friend = lab_hub.type(friends_host, "friend", "join", "--invite", invite, answers="y\n")
    lab_hub.until(
        lambda: "friend" in {member.role for member in lab_hub.members().values()}, 240.0, "a friend", friend
    )
    assert re.search(r"command +python friends\.py\n +files +1 file", friend.output()), friend.output()
    assert "Run it here? [y/N]:" in friend.output()
    name = next(member.name for member in lab_hub.members().values() if member.role == "friend")
    lab_hub.until(lambda: lab_hub.rounds(name) > 0, 240.0, "its first contribution", friend, hub)
    lab_hub.until(lambda: len(lab_hub.members()) == 2, 120.0, "the host takes part, too", friend, hub)
    for role, line in words[2:]:
        assert role == "host"
        if line[0] != "hub" or line == ["hub", "status"]:
            process = lab_hub.type(host, "hub", *line)
            assert process.wait(150) == 0, process.output()
            shown = r"barnraise-invite:\S+|uses left|friends: version \d+, .*2 members"
            assert re.search(shown, process.output()), line
    friend.signal(signal.SIGINT)
    assert friend.wait(120) == 130, friend.output()
    assert sorted(path.name for path in lab_hub.state("friend").iterdir()) == KEPT
