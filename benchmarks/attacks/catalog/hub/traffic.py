"""Attacks on the traffic of a hub: by strangers, by members, and by a hub on its friends."""

from __future__ import annotations

import gzip
import http.client
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from msgspec.structs import replace

from barnraise.core.errors import HubRefused
from barnraise.hub.protocol.invites import invite_text
from barnraise.hub.protocol.messages import RunDescription, encode_message
from barnraise.hub.protocol.signatures import sign_request
from barnraise.hub.protocol.tls import server_context
from barnraise.hub.protocol.vector_file import MAGIC, VectorForm
from barnraise.hub.storage.create import hub_key
from benchmarks.attacks.registry import attack
from benchmarks.attacks.scenes.hub import NUMBERS, AttackedHubRun
from benchmarks.hub.emulated_members import Leaf
from benchmarks.hub.process import UNVERIFIED
from benchmarks.report import REPOSITORY

_MAX_FRIEND = 400 << 20  # bytes of memory of `barnraise join`; without torch it takes about 60 MB
_JOIN_S = 120.0
_INFINITE, _NOT_A_NUMBER = b"\x00\x00\x80\x7f", b"\xff"  # as float32, and as every other type of floats


def _call(scene: AttackedHubRun, method: str, path: str, body: bytes, headers: dict[str, str]) -> int:
    line = http.client.HTTPSConnection("127.0.0.1", scene.hub.port, timeout=30.0, context=UNVERIFIED)
    try:
        line.putrequest(method, path, skip_accept_encoding=True)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            line.putheader(name, value)
        line.endheaders(body)
        answer = line.getresponse()
        answer.read()
        return answer.status
    finally:
        line.close()


def _description(scene: AttackedHubRun) -> RunDescription:
    return scene.run(Leaf(scene.hub.invite(), "reader").ask("GET", "/v1/run", RunDescription))


# without a key


@attack(
    "stranger-sends-unsigned",
    "stranger at a hub",
    "joins, leases and uploads without a signature",
    AttackedHubRun,
)
def send_unsigned(scene: AttackedHubRun) -> str:
    invite = scene.hub.invite()
    request = encode_message(invite.request(Leaf(invite, "x").key.id, "unsigned"))
    tries = [("POST", "/v1/members", request), ("POST", "/v1/leases", b"{}"), ("POST", "/v1/uploads", b"{}")]
    statuses = {_call(scene, *words, headers={}) for words in tries}
    assert statuses == {401}, f"the hub answered {statuses}"
    assert "unsigned" not in scene.members(), "it is a member"
    return "each got the status 401, and it is no member"


@attack(
    "stranger-replays-request",
    "stranger at a hub",
    "sends a member's signed request once more",
    AttackedHubRun,
)
def replay_request(scene: AttackedHubRun) -> str:
    invite = scene.hub.invite(uses=5)
    leaf = Leaf(invite, "replayed")
    body = encode_message(invite.request(leaf.key.id, "replayed"))
    headers = sign_request(leaf.key, "POST", "/v1/members", "", body, invite.hub_id, time.time())
    assert _call(scene, "POST", "/v1/members", body, headers) == 200, (
        "the first request failed: nothing was tried"
    )
    again = _call(scene, "POST", "/v1/members", body, headers)
    assert again in (401, 409), f"the replay got the status {again}"
    moved = _call(scene, "POST", "/v1/leases", body, headers)
    assert moved == 401, f"the signature was accepted for another path: {moved}"
    return "refused, and the signature is good for no other path"


@attack(
    "stranger-leaves-folder", "stranger at a hub", "asks for files outside of the hub's blobs", AttackedHubRun
)
def leave_folder(scene: AttackedHubRun) -> str:
    names = ("..%2fhub.key", "%2e%2e/hub.key", "../log.db", "..%5chub.key", "%00", "a" * 5000)
    prefixes = ("/v1/blobs/", "/v1/uploads/", "/")
    statuses = {_call(scene, "GET", prefix + name, b"", {}) for prefix in prefixes for name in names}
    assert not any(status < 400 for status in statuses), f"the hub answered {statuses}"
    return f"only refusals: {sorted(statuses)}"


# as a member


@attack("friend-sends-poison", "friend", "sends updates of infinite and broken numbers", AttackedHubRun)
def send_poison(scene: AttackedHubRun) -> str:
    leaf = scene.join(scene.hub.invite(), "poisoner")
    description = _description(scene)
    refusals: list[str] = []
    for pattern in (_INFINITE, _NOT_A_NUMBER, None):
        leaf.version = scene.run(leaf.ask("GET", "/v1/run", RunDescription)).version
        try:
            scene.run(leaf.take_lease())
            assert leaf.lease is not None
            form = VectorForm(NUMBERS, description.terms.chunk, description.terms.codec, leaf.lease.version)
            data = os.urandom(300) if pattern is None else _vector(form, pattern)
            scene.run(leaf.push(data))
        except HubRefused as error:
            refusals.append(error.kind)
    assert len(refusals) == 3, f"an update was accepted; refused were {refusals}"
    member = scene.members()["poisoner"]
    assert member.accepted == 0, "an update of it counts"
    return f"refused: {', '.join(dict.fromkeys(refusals))}"


def _vector(form: VectorForm, pattern: bytes) -> bytes:
    """Return an update with right lengths, in which every number and every scale has this pattern."""
    data = MAGIC
    for index in range(form.count):
        chunk = form.encode(torch.ones(form.chunk_size(index)), index)
        data += chunk[:4] + (pattern * len(chunk))[: len(chunk) - 4]
    return data


# a hub on its friends


class _BombServer(ThreadingHTTPServer):
    """Server with the key of a hub that answers everything with two layers of gzip."""

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Bomber)
        self.asked = 0
        self.body = gzip.compress(gzip.compress(bytes(1 << 30), 9), 9)
        self.socket = server_context(directory, hub_key(directory)).wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Bomber(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _BombServer

    def _answer(self) -> None:
        self.server.asked += 1
        self.send_response_only(200)
        self.send_header("content-encoding", "gzip, gzip")
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@attack(
    "hub-sends-bomb",
    "hub's owner",
    "answers a friend's first question with a gigabyte in two gzip layers",
    AttackedHubRun,
)
def send_bomb(scene: AttackedHubRun) -> str:
    server = _BombServer(scene.hub.directory)
    try:
        address = f"https://127.0.0.1:{server.server_port}"
        invite = replace(scene.hub.invite(), addresses=(address,))
        peak, words = _join(scene, invite_text(invite))
    finally:
        server.shutdown()
        server.server_close()
    assert server.asked, f"the friend asked nothing, so nothing was tried: {words}"
    assert peak < _MAX_FRIEND, f"the friend's process took {peak >> 20} MB"
    return f"the friend took {peak >> 20} MB in all, for {len(server.body)} bytes on the wire"


def _join(scene: AttackedHubRun, invite: str) -> tuple[int, str]:
    """Type `barnraise join --invite` as a friend; return the peak of its memory, and its last words."""
    state, log = scene.folder / "bombed", scene.folder / "bombed.log"
    state.mkdir(mode=0o700, exist_ok=True)
    environment = {
        **os.environ,
        "BARNRAISE_STATE_DIRECTORY": str(state),
        "PYTHONPATH": str(REPOSITORY / "src"),
    }
    command = [
        sys.executable,
        "-m",
        "barnraise.cli.main",
        "join",
        "--invite",
        "-",
        "--yes",
        "--name",
        "friend",
    ]
    with log.open("wb") as output:
        friend = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
        )
        assert friend.stdin is not None
        friend.stdin.write(invite.encode() + b"\n")
        friend.stdin.close()
        peak, deadline = 0, time.monotonic() + _JOIN_S
        while friend.poll() is None and time.monotonic() < deadline:
            peak = max(peak, _peak_of(friend.pid))
            if peak > _MAX_FRIEND:
                break
            time.sleep(0.02)
        friend.kill()
        friend.wait()
    return peak, log.read_text("utf-8", "replace")[-300:]


def _peak_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
