"""HTTP proxy of a sandbox, behind a real broker."""

from __future__ import annotations

import asyncio
import http.server
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.core.errors import ProtocolError
from barnraise.sandbox.proxy import ProxyRequest, parse_request, start_proxy
from barnraise.transport.ipc.dial_broker import EVERYWHERE, DialBroker, DialRules

posix = pytest.mark.skipif(sys.platform == "win32", reason="there is no broker on Windows")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"CONNECT hub.example:8443 HTTP/1.1\r\nHost: x", ProxyRequest("hub.example", 8443, b"")),
        (b"CONNECT [2001:db8::1]:443 HTTP/1.1", ProxyRequest("2001:db8::1", 443, b"")),
        (
            b"GET http://hub.example/v1/run?x=1 HTTP/1.1\r\nHost: hub.example\r\nConnection: keep-alive",
            ProxyRequest(
                "hub.example",
                80,
                b"GET /v1/run?x=1 HTTP/1.1\r\nConnection: close\r\nHost: hub.example",
            ),
        ),
    ],
)
def test_parse_request_returns_place_and_first_bytes(header: bytes, expected: ProxyRequest) -> None:
    assert parse_request(header) == expected


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"GET / HTTP/1.1",
        b"GET ftp://x/ HTTP/1.1",
        b"CONNECT x:99999 HTTP/1.1",
        b"get http://x/ HTTP/1.1",
    ],
)
def test_parse_request_of_other_requests_raises(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_request(header)


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"{self.path} for {self.headers['Host']}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield web.server_address[1]
        web.shutdown()


@posix
def test_proxy_serves_what_the_broker_permits_and_tells_why_not(tmp_path: Path, server: int) -> None:
    async def run() -> None:
        rules = DialRules(named={("127.0.0.1", server): EVERYWHERE})
        broker = DialBroker(tmp_path, lambda: rules)
        broker.start()
        port = await asyncio.to_thread(start_proxy, str(broker.path))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": f"127.0.0.1:{port}"}))

        def read(url: str) -> str:
            with opener.open(url, timeout=30) as response:
                return str(response.read().decode())

        try:
            page = await asyncio.to_thread(read, f"http://127.0.0.1:{server}/a?b")
            assert page == f"/a?b for 127.0.0.1:{server}"
            with pytest.raises(urllib.error.HTTPError) as raised:
                await asyncio.to_thread(read, "http://127.0.0.1:9/")
            assert raised.value.code == 403
            assert b"does not permit 127.0.0.1:9" in raised.value.read()
        finally:
            broker.close()

    asyncio.run(run())
