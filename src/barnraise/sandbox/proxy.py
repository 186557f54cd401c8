"""Small HTTP proxy inside of a sandbox. It has no network: the broker opens each connection.

CONNECT opens a tunnel. A request with a full ``http://`` address is sent on, one for each connection.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from barnraise.core.errors import BarnraiseError, ProtocolError
from barnraise.transport.ipc.dial_request import open_by_broker

_MOST_HEADER = 64 << 10
_MOST_CONNECTIONS = 256
_HEADER_S = 30.0
_CONNECT_S = 60.0
_CHUNK = 64 << 10
_WORD = re.compile(r"[A-Z]{1,20}")


class ProxyRequest(NamedTuple):
    """Place that a client wants to reach, and the first bytes for it; none for a tunnel."""

    host: str
    port: int
    first: bytes


def parse_request(header: bytes) -> ProxyRequest:
    """Return what the header of a request asks for; raise ProtocolError if it cannot be served. Pure."""
    line, _, rest = header.partition(b"\r\n")
    words = line.decode("latin-1").split(" ")
    if len(words) != 3 or not _WORD.fullmatch(words[0]):
        raise ProtocolError("the request line cannot be read")
    method, target, version = words
    try:
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ProtocolError("the address cannot be read") from error
    if not host:
        raise ProtocolError("the request has no full address")
    if method == "CONNECT":
        return ProxyRequest(host, port or 443, b"")
    if parts.scheme != "http":
        raise ProtocolError(f"the scheme {parts.scheme[:20]!r} is not supported")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    kept = [
        field
        for field in rest.split(b"\r\n")
        if not field.lower().startswith((b"connection:", b"proxy-connection:", b"proxy-authorization:"))
    ]
    # The next request of the client may be for another host, so this connection serves one only.
    first = f"{method} {path} {version}\r\nConnection: close\r\n".encode("latin-1") + b"\r\n".join(kept)
    return ProxyRequest(host, port or 80, first)


def start_proxy(broker: str, port: int = 0) -> int:
    """Serve on a loopback port, in threads that end with this process; return the port."""
    server = socket.create_server(("127.0.0.1", port), backlog=64)
    slots = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                continue
            slots.acquire()
            threading.Thread(target=_serve, args=(client, Path(broker), slots), daemon=True).start()

    threading.Thread(target=serve, name="proxy", daemon=True).start()
    own_port: int = server.getsockname()[1]
    return own_port


def _serve(client: socket.socket, broker: Path, slots: threading.BoundedSemaphore) -> None:
    try:
        with client, contextlib.suppress(OSError):
            _answer(client, broker)
    finally:
        slots.release()


def _answer(client: socket.socket, broker: Path) -> None:
    client.settimeout(_HEADER_S)
    try:
        header, body = _read_header(client)
        request = parse_request(header)
        upstream = open_by_broker(broker, request.host, request.port, _CONNECT_S)
    except BarnraiseError as error:
        text = error.message.encode()
        client.sendall(
            b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(text), text)
        )
        return
    with upstream:
        if request.first:
            upstream.sendall(request.first + b"\r\n\r\n" + body)
        else:
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            if body:
                upstream.sendall(body)
        client.settimeout(None)
        upstream.settimeout(None)
        back = threading.Thread(target=_copy, args=(upstream, client), daemon=True)
        back.start()
        _copy(client, upstream)
        back.join()


def _read_header(client: socket.socket) -> tuple[bytes, bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        if len(received) > _MOST_HEADER:
            raise ProtocolError("the header is too long")
        data = client.recv(_CHUNK)
        if not data:
            raise ProtocolError("the request is not complete")
        received += data
    header, _, body = received.partition(b"\r\n\r\n")
    return header, body


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until one side ends, and tell the other side."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
