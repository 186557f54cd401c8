"""Friends of a hub behind nginx and Caddy, configured as in docs/friends.md and docs/hub.md."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from barnraise.hub.client.client import HubClient
from barnraise.hub.client.contributor import Contributor
from barnraise.hub.protocol.invites import Invite, invite_text
from barnraise.hub.protocol.messages import (
    PIECE_BYTES,
    JoinResponse,
    RunDescription,
    VersionHead,
)
from barnraise.hub.storage.create import create_invite
from barnraise.hub.storage.log import HubLog
from barnraise.identity import NodeKey
from benchmarks.hub.process import free_port
from tests.repository import ROOT
from tests.unit.hub.reverse_proxies import HIDDEN, Caddy, Nginx, program, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SOURCES = ROOT / "src"
LONGEST_WAIT_S = 60.0
# A model whose updates, one byte for each number, are sent in three pieces.
TRAIN = """\
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import barnraise

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(2048, 16)
y = (x[:, :4].abs() + x[:, 4:8]).argmax(1)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 2048), torch.nn.ReLU(),
    torch.nn.Linear(2048, 4),
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
run = barnraise.init(seed=1)
model, optimizer, batches = run.prepare(model, optimizer, loader)
for epoch in run.epochs(int(sys.argv[1])):
    for batch in batches:
        for a, b in batch:
            loss = torch.nn.functional.cross_entropy(model(a), b)
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
"""


class Typed:
    """A Barnraise command in its own process, with its output in a file."""

    def __init__(self, room: Path, name: str, *words: str) -> None:
        (room / name).mkdir(exist_ok=True)
        self._output = room / f"{name}.output"
        environment = {**os.environ, "BARNRAISE_STATE_DIRECTORY": str(room / name), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(SOURCES)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "barnraise.cli.main", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=room / "project",
                env=environment,
            )

    def output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> int:
        """Interrupt the command as Ctrl-C does."""
        if not self.has_ended():
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


class HubBehindProxies:
    """Hub that listens on loopback only, and the addresses of its proxies."""

    def __init__(self, room: Path, port: int, addresses: dict[str, str]) -> None:
        self.room, self.addresses = room, addresses
        (room / "project").mkdir()
        (room / "project" / "train.py").write_text(TRAIN)
        options = ("--plain", "--port", str(port), "--address", next(iter(addresses.values())))
        script = ("--no-train", "--round", "1s", "train.py", "100000")
        self.hub = Typed(room, "host", "hub", "up", "--name", "fireside", *options, *script)
        self.directory = room / "host" / "hub" / "fireside"

    def invite(self, site: str) -> Invite:
        return create_invite(self.directory, [self.addresses[site]], pinned=False)

    def rounds(self, name: str) -> int:
        log = HubLog(self.directory)
        try:
            return sum(member.accepted for member in log.read().members.values() if member.name == name)
        finally:
            log.close()

    def until(self, is_so: Callable[[], bool], seconds: float, what: str, *typed: Typed) -> None:
        begin = time.monotonic()
        while not is_so():
            words = "\n---\n".join(process.output()[-3000:] for process in (self.hub, *typed))
            assert not any(process.has_ended() for process in (self.hub, *typed)), (
                f"a process has exited: {what}\n{words}"
            )
            assert time.monotonic() - begin < seconds, f"not within {seconds:g} s: {what}\n{words}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def fireside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubBehindProxies]:
    """Start a hub with all proxies that are installed."""
    if not any(map(program, ("nginx", "caddy"))):
        pytest.skip("neither nginx nor caddy is installed")
    room, port = tmp_path_factory.mktemp("fireside"), free_port()
    addresses, roots = {}, []
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for name, kind in (("nginx", Nginx), ("caddy", Caddy)):
            if program(name) is None:
                continue
            (room / name).mkdir()
            plain, hidden = free_port(), free_port()
            proxy = kind(room / name, port, plain, hidden)
            stack.enter_context(running(proxy, plain, hidden))
            roots.append(proxy.root.read_text())
            addresses[name] = f"https://localhost:{plain}"
            addresses[f"{name}-hidden"] = f"https://localhost:{hidden}{HIDDEN}"
        (room / "roots.pem").write_text("\n".join(roots))
        # The authorities that this machine trusts: how proxies with ordinary certificates are known.
        patch.setenv("SSL_CERT_FILE", str(room / "roots.pem"))
        patch.setenv("NO_PROXY", "localhost")
        made = HubBehindProxies(room, port, addresses)
        stack.callback(made.hub.end)
        made.until(lambda: "barnraise-invite:" in made.hub.output(), 120.0, "the hub prints an invite")
        yield made


def _needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(program(name) is None, reason=f"{name} is not installed")


OPEN = [pytest.param(name, marks=_needs(name)) for name in ("nginx", "caddy")]
HIDDEN_ONES = [pytest.param(f"{name}-hidden", marks=_needs(name)) for name in ("nginx", "caddy")]


@pytest.mark.parametrize("site", OPEN)
def test_friend_joins_trains_and_leaves_through_proxy(fireside: HubBehindProxies, site: str) -> None:
    typed = invite_text(fireside.invite(site))
    friend = Typed(fireside.room, site, "join", "--invite", typed, "--yes", "--name", f"{site} friend")
    try:
        fireside.until(lambda: fireside.rounds(f"{site} friend") >= 3, 120.0, "three rounds", friend)
    finally:
        code = friend.end()
    assert code == 130, friend.output()
    assert "nothing of the run is kept here" in friend.output()
    assert not re.search("waiting for|does not answer|cannot be reached", friend.output()), friend.output()


def test_host_sees_reachable_address(fireside: HubBehindProxies) -> None:
    address = next(iter(fireside.addresses.values()))
    assert (
        f"only this machine itself reaches {address}. Give the address of the proxy" in fireside.hub.output()
    )


@pytest.mark.parametrize("site", [*OPEN, *HIDDEN_ONES])
def test_member_uploads_pieces_and_downloads_parts_through_proxy(
    fireside: HubBehindProxies, site: str, tmp_path: Path
) -> None:
    """The client rejects every response that the hub's key did not sign for its request."""
    invite = fireside.invite(site)
    key = NodeKey.generate()
    client = HubClient(invite.addresses, invite.hub_id, key, pinned=invite.pinned)
    assert client.ask("POST", "/v1/members", JoinResponse, invite.request(key.id, site)).role
    described = client.ask("GET", "/v1/run", RunDescription)
    assert described.layout is not None
    assert described.course is not None
    state = torch.zeros(described.layout.numel)
    member = Contributor(client, tmp_path, metered=lambda: False)
    lease = member.start(described.layout, described.course, state)
    for _ in range(2):
        assert lease is not None
        sent, version = client.sent_bytes, member.version
        change = torch.randn(state.numel()) * 1e-5
        lease = member.exchange(change, state, samples=lease.samples, loss=1.0, speed=100.0)
        assert client.sent_bytes - sent > 2 * PIECE_BYTES, "three pieces"
        assert member.version != version, "the round was waited for"
    member.leave()
    assert member.contributed == 2

    step = client.ask("GET", "/v1/head", VersionHead).steps[0]
    client.fetch(step.sha256, tmp_path / "whole", size=step.size)
    begun = step.size // 3
    (tmp_path / "again.part").write_bytes((tmp_path / "whole").read_bytes()[:begun])
    before = client.received_bytes
    client.fetch(step.sha256, tmp_path / "again", size=step.size)
    assert client.received_bytes - before == step.size - begun, "only what was missing came"
    client.close()


def test_longest_poll_is_answered_through_proxy(fireside: HubBehindProxies) -> None:
    """The hub answers in time, and no proxy gives up before."""
    answers: dict[str, object] = {}

    def wait(site: str) -> None:
        invite = fireside.invite(site)
        client = HubClient(invite.addresses, invite.hub_id, NodeKey.generate(), pinned=invite.pinned)
        try:
            began, head = time.monotonic(), client.ask("GET", "/v1/head", VersionHead)
            query = {"after": head.version, "wait": LONGEST_WAIT_S}
            later = client.ask("GET", "/v1/head", VersionHead, query=query, wait_s=LONGEST_WAIT_S)
            answers[site] = (later.steps, time.monotonic() - began >= LONGEST_WAIT_S - 1)
        except Exception as error:
            answers[site] = error
        client.close()

    threads = [threading.Thread(target=wait, args=(site,)) for site in fireside.addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == dict.fromkeys(fireside.addresses, ((), True))


@pytest.mark.parametrize("site", HIDDEN_ONES)
def test_hidden_path_is_required(fireside: HubBehindProxies, site: str) -> None:
    address = fireside.addresses[site]
    with httpx.Client(verify=ssl.create_default_context(), trust_env=False, timeout=60) as stranger:
        assert "fireside" in stranger.get(f"{address}/").text
        assert "fireside" in stranger.get(f"{address}/v1/run").text
        for path in ("", "/", "/v1/run", "/v1/head", "/metrics", HIDDEN[:-1], f"{HIDDEN[:-1]}/v1/run"):
            answer = stranger.get(f"{address.removesuffix(HIDDEN)}{path}")
            assert (answer.status_code, "fireside" in answer.text) == (404, False), path
