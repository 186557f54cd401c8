"""Server of the page: uvicorn on a loopback port, with limits for connections and slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from barnraise.core.errors import AgentError
from barnraise.hub.server.connection_limits import SlowClientProtocol
from barnraise.page.access.local_users import is_of_other_user

_MOST_CONNECTIONS = 64
_KEEP_ALIVE_S = 30
_STOP_S = 1
_HEADER_BYTES = 16 << 10
_LOOPBACK = "127.0.0.1"


class PageProtocol(SlowClientProtocol):
    """HTTP/1.1 protocol that closes excess connections, and those of other users, before it reads a byte."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        source, target = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        if len(self.connections) > _MOST_CONNECTIONS or is_of_other_user(source[:2], target[:2]):
            transport.abort()


class _QuietServer(uvicorn.Server):
    """uvicorn server in the agent's event loop: signals stay with the agent."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class PageServer:
    """The page on a port of loopback, from `start` to `stop`."""

    def __init__(self, app: ASGIApp, port: int = 0) -> None:
        self._app, self._wanted = app, port
        self._server: _QuietServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen and serve; raise AgentError if the port is taken."""
        listener = _bind(self._wanted)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            http=PageProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_S,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        self._server = _QuietServer(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        """Close all connections and the port."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)
        self._server = self._serving = None


def _bind(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # On Windows, reuse would let another program share the port; elsewhere, old connections would hold it.
    exclusive = getattr(socket, "SO_EXCLUSIVEADDRUSE", None)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR if exclusive is None else exclusive, 1)
        listener.bind((_LOOPBACK, port))
        listener.listen(_MOST_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise AgentError(
            f"the page cannot listen at port {port} of {_LOOPBACK}: {error.strerror or error}",
            hint="Set another port, or 0 for any free one: [page] port",
        ) from error
    return listener
