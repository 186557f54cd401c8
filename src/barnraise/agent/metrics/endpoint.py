"""Endpoint for Prometheus and other monitors: ``GET /metrics`` and ``GET /health`` over HTTP.

It is for programs of this machine only.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from barnraise.core.host_header import host_name, is_loopback

_REQUEST_S = 5.0
_MAX_REQUESTS = 8
_HOST = "127.0.0.1"

log = logging.getLogger(__name__)

Environment = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], object]
_TEXT = "text/plain; charset=utf-8"


class Page(NamedTuple):
    """Content of one path: status, content type and body."""

    status: str
    kind: str
    body: bytes


Collect = Callable[[], Awaitable[Page]]


def respond(
    environment: Environment, start: StartResponse, pages: Mapping[str, Callable[[], Page]]
) -> Iterable[bytes]:
    """Answer one WSGI request; a page of the web that leads its own name to this machine gets nothing."""
    named, collect = environment.get("HTTP_HOST", ""), pages.get(environment["PATH_INFO"])
    if not is_loopback(host_name(named)):
        page = Page("421 Misdirected Request", _TEXT, b"Ask for 127.0.0.1.\n")
    elif collect is None:
        page = Page("404 Not Found", _TEXT, f"There are {' and '.join(pages)}.\n".encode())
    elif environment["REQUEST_METHOD"] not in ("GET", "HEAD"):
        page = Page("405 Method Not Allowed", _TEXT, b"Use GET.\n")
    else:
        try:
            page = collect()
        except TimeoutError:  # the machine is overloaded; a monitor asks again
            page = Page("503 Service Unavailable", _TEXT, b"The agent is busy.\n")
    headers = [
        ("Content-Type", page.kind),
        ("Content-Length", str(len(page.body))),
        ("X-Content-Type-Options", "nosniff"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
    ]
    start(page.status, headers)
    return [b"" if environment["REQUEST_METHOD"] == "HEAD" else page.body]


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    """Server with a thread for each request, of which there are few at a time."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._free = threading.BoundedSemaphore(_MAX_REQUESTS)

    def server_bind(self) -> None:
        """Bind the port; WSGIServer would look up the name of the host, which may take seconds."""
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows: no other program may share the port
            self.allow_reuse_address = False
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        super(WSGIServer, self).server_bind()
        self.server_name, self.server_port = _HOST, self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for the metrics failed", exc_info=True)


class MetricsEndpoint:
    """Server on a port of 127.0.0.1, in threads of its own. ``pages``: by path, made on the agent's loop."""

    def __init__(self, port: int, pages: Mapping[str, Collect]) -> None:
        """Open the port and start to answer. Raise OSError if another program has it."""
        self._loop = asyncio.get_running_loop()
        made = {path: partial(self._collected, collect) for path, collect in pages.items()}

        def serve(environment: Environment, start: StartResponse) -> Iterable[bytes]:
            return respond(environment, start, made)

        self._server = make_server(_HOST, port, serve, _Server, _Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="barnraise-metrics", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        """Stop to answer and close the port."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()

    def _collected(self, collect: Collect) -> Page:
        return asyncio.run_coroutine_threadsafe(_collect(collect), self._loop).result(_REQUEST_S)


async def _collect(collect: Collect) -> Page:
    return await collect()
