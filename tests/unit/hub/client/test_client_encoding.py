"""A server that compresses its answers: the client never unpacks them."""

from __future__ import annotations

import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from barnraise.core.errors import HubAway
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.messages import RunDescription
from barnraise.identity import NodeKey

UNPACKED = 256 << 20
ROOM = 96 << 20
# A member in a process of its own, because the limit holds for the process.
MEMBER = f"""
import resource, sys
from pathlib import Path
from barnraise.core.errors import HubAway
from barnraise.hub.client.client import HubClient
from barnraise.hub.protocol.messages import RunDescription
from barnraise.identity import NodeKey

def give_up(seconds):
    raise TimeoutError

client = HubClient([sys.argv[1]], NodeKey.generate().id, NodeKey.generate(), sleep=give_up, say=print)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {ROOM}, used + {ROOM}))
try:
    client.ask("GET", "/v1/run", RunDescription)
except HubAway as error:
    print(error.message)
try:
    client.fetch("0" * 64, Path(sys.argv[2]) / "blob", size=1 << 30)
except TimeoutError:
    print("the blob is asked for again later")
"""


def _packed(layers: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(1 << 20)
    data = b"".join(packer.compress(zeros) for _ in range(UNPACKED >> 20)) + packer.flush()
    for _ in range(layers - 1):
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        data = packer.compress(data) + packer.flush()
    return data


class _Compressing(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.accepted.append(self.headers.get("accept-encoding"))
        self.send_response(200)
        self.send_header("content-encoding", self.server.encoding)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Server that answers everything with the same compressed body."""

    daemon_threads = True

    def __init__(self, encoding: str, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Compressing)
        self.encoding, self.body = encoding, body
        self.accepted: list[str | None] = []
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    running: list[Server] = []
    yield running
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of memory is read from /proc")
def test_answer_in_two_gzip_layers_takes_no_memory(servers: list[Server], tmp_path: Path) -> None:
    """A few hundred bytes that unpack to 256 MiB, for a member that has 96 MiB left."""
    body = _packed(2)
    assert len(body) < 2000
    servers.append(server := Server("gzip, gzip", body))
    member = subprocess.run(
        [sys.executable, "-c", MEMBER, server.address, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert member.returncode == 0, member.stderr
    assert "127.0.0.1 compresses its answers (gzip, gzip), and a hub never does" in member.stdout
    assert member.stdout.rstrip().endswith("the blob is asked for again later")
    assert set(server.accepted) == {"identity"}


@pytest.mark.parametrize("encoding", ["gzip", "br", "x-unknown", "identity, gzip", "g\x7fzip"])
def test_compressed_answer_counts_as_hub_away(servers: list[Server], encoding: str) -> None:
    servers.append(server := Server(encoding, b"{}"))
    client = HubClient([server.address], NodeKey.generate().id, NodeKey.generate())
    with pytest.raises(HubAway, match="compresses its answers") as caught:
        client.ask("GET", "/v1/run", RunDescription)
    assert caught.value.message.isprintable()
    client.close()


def test_answer_named_identity_is_read(servers: list[Server]) -> None:
    servers.append(server := Server("identity", b"{}"))
    client = HubClient([server.address], NodeKey.generate().id, NodeKey.generate())
    with pytest.raises(HubAway, match="the hub did not sign the response"):
        client.ask("GET", "/v1/run", RunDescription)
    client.close()
