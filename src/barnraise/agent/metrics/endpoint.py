"""Endpoint for Prometheus: ``GET /metrics`` over HTTP, for programs of this machine only."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CONTENT_TYPE_LATEST

from barnraise.core.host_header import host_name, is_loopback

_REQUEST_S = 5.0
_MAX_REQUESTS = 8
_HOST = "127.0.0.1"

log = logging.getLogger(__name__)

Environment = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], object]


def respond(environment: Environment, start: StartResponse, collect: Callable[[], bytes]) -> Iterable[bytes]:
    """Answer one WSGI request; a page of the web that leads its own name to this machine gets nothing."""
    named = environment.get("HTTP_HOST", "")
    if not is_loopback(host_name(named)):
        status, body = "421 Misdirected Request", b"Ask for 127.0.0.1.\n"
    elif environment["PATH_INFO"] != "/metrics":
        status, body = "404 Not Found", b"The metrics are at /metrics.\n"
    elif environment["REQUEST_METHOD"] not in ("GET", "HEAD"):
        status, body = "405 Method Not Allowed", b"Use GET.\n"
    else:
        try:
            status, body = "200 OK", collect()
        except TimeoutError:  # the machine is overloaded; Prometheus asks again
            status, body = "503 Service Unavailable", b"The agent is busy.\n"
    kind = CONTENT_TYPE_LATEST if status.startswith("200") else "text/plain; charset=utf-8"
    headers = [
        ("Content-Type", kind),
        ("Content-Length", str(len(body))),
        ("X-Content-Type-Options", "nosniff"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
    ]
    start(status, headers)
    return [b"" if environment["REQUEST_METHOD"] == "HEAD" else body]


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
    """Server on a port of 127.0.0.1, in threads of its own. ``collect`` runs on the loop of the agent."""

    def __init__(self, port: int, collect: Callable[[], Awaitable[bytes]]) -> None:
        """Open the port and start to answer. Raise OSError if another program has it."""
        self._loop = asyncio.get_running_loop()
        self._collect = collect

        def serve(environment: Environment, start: StartResponse) -> Iterable[bytes]:
            return respond(environment, start, self._collected)

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

    def _collected(self) -> bytes:
        return asyncio.run_coroutine_threadsafe(self._collect_on_loop(), self._loop).result(_REQUEST_S)

    async def _collect_on_loop(self) -> bytes:
        return await self._collect()
