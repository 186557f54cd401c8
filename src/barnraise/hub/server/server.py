"""The hub's server process: uvicorn with connection limits, and a clean shutdown."""

from __future__ import annotations

import asyncio
import asyncio.constants
import asyncio.sslproto
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from uvicorn.protocols.http import h11_impl

from barnraise.core.config import load_settings
from barnraise.core.errors import HubError, HubRefused
from barnraise.hub.aggregation.aggregator import Aggregator
from barnraise.hub.protocol.messages import RoundConfig, VectorLayout
from barnraise.hub.protocol.tls import server_context
from barnraise.hub.server.app import HubApp, error_response, make_app
from barnraise.hub.server.connection_limits import (
    MOST,
    ConnectionLimiter,
    LimitedServer,
    SlowClientProtocol,
    connections_within,
    raise_file_limit,
)
from barnraise.hub.server.host_guard import BROWSER_HEADERS, GuardedApp, KnownHosts
from barnraise.hub.server.hub import Hub, MakeAggregator
from barnraise.hub.server.unsigned_allowance import UnsignedLimits
from barnraise.hub.server.uploads import HeldOut, UploadService
from barnraise.hub.storage.addresses import all_addresses
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.create import hub_key
from barnraise.hub.storage.directory_lock import check_hub, read_facts

if TYPE_CHECKING:
    from barnraise.hub.object_store.s3 import BucketUrl
    from barnraise.hub.object_store.uploader import BucketUploader

logger = logging.getLogger(__name__)
_KEEP_ALIVE_S = 75
_FEW = 256  # connections
_BACKLOG = 2048
_TLS_BUFFER = 16 << 10
_BODY_BUFFER = 16 << 10  # of a body that waits for an upload slot; uvicorn would read 64 KiB of it
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ListenOptions(NamedTuple):
    """Address to listen on, and when to stop. ``plain``: no TLS, for a proxy on the same machine."""

    host: str
    port: int
    plain: bool = False
    with_parent: bool = False  # until standard input ends


def make_outer_step(blobs: BlobStore, terms: RoundConfig, layout: VectorLayout) -> Aggregator:
    """Make the aggregator of a hub. Imports torch."""
    from barnraise.hub.aggregation.outer_step import OuterStep  # torch, which takes a while

    return OuterStep(blobs, terms, layout)


@contextlib.asynccontextmanager
async def running_hub(
    directory: Path,
    *,
    held_out: Path | None = None,
    make_finisher: MakeAggregator = make_outer_step,
    is_region: bool = False,
    store: BucketUrl | None = None,
    limits: UnsignedLimits | None = None,
) -> AsyncIterator[tuple[Hub, Starlette]]:
    """Run a hub and yield it with its ASGI application.

    ``held_out``: the owner's file that validates updates. ``limits``: by default those of the settings.
    """
    key = hub_key(directory)
    hub = Hub(directory, key.id, make_finisher, is_region)
    try:
        await hub.start()
        async with _bucket_uploader(hub, store) as stock, _held_out_check(hub, held_out) as check:
            reception = HubApp(hub, UploadService(hub, check), key, stock, limits or limits_from_settings())
            yield hub, make_app(reception)
    finally:
        await hub.close()


@contextlib.asynccontextmanager
async def _bucket_uploader(hub: Hub, store: BucketUrl | None) -> AsyncIterator[BucketUploader | None]:
    """Upload the hub's blobs to the object store, if one is configured, while the context is open."""
    if store is None:
        yield None
        return
    from barnraise.hub.object_store.s3 import S3Bucket  # a hub without a store starts without it
    from barnraise.hub.object_store.uploader import BucketUploader

    stock = BucketUploader(hub, await asyncio.to_thread(S3Bucket, store, str(hub.id)))
    hub.store = stock.origin
    keeping = asyncio.create_task(stock.run())
    try:
        yield stock
    finally:
        keeping.cancel()


@contextlib.asynccontextmanager
async def _held_out_check(hub: Hub, held_out: Path | None) -> AsyncIterator[HeldOut | None]:
    """Yield the held-out check, or None if the owner gave no file."""
    if held_out is None:
        yield None
        return
    from barnraise.hub.aggregation.held_out_validation import HeldOutCheck  # torch

    check = await asyncio.to_thread(HeldOutCheck, hub, held_out)
    try:
        yield check
    finally:
        check.close()


async def serve(
    directory: Path, listening: ListenOptions, store: BucketUrl | None = None, held_out: Path | None = None
) -> None:
    """Serve a hub until SIGINT or SIGTERM. Raise HubError if the port is taken."""
    with bind_listener(listening) as listener:
        check_hub(read_facts(directory), directory)
        async with running_hub(directory, store=store, held_out=held_out) as (hub, app):
            await serve_app(directory, hub, app, listening, listener)


def limits_from_settings() -> UnsignedLimits:
    """Return this machine's limits for clients that are no members."""
    settings = load_settings().hosting
    return UnsignedLimits(settings.unsigned_mbps * 1e6 / 8, settings.forwarded == "believe")


async def serve_app(
    directory: Path, hub: Hub, app: Starlette, listening: ListenOptions, listener: socket.socket
) -> None:
    """Serve an application on a bound socket until SIGINT or SIGTERM."""
    key = hub_key(directory)

    def respond(request_headers: Mapping[str, str], error: HubRefused) -> Response:
        answer = error_response(key, request_headers, error, hub.clock())
        answer.headers.update(BROWSER_HEADERS)
        return answer

    hosts = KnownHosts(lambda: all_addresses(directory)) if listening.plain else None
    config = uvicorn.Config(
        GuardedApp(app, respond, hosts, load_settings().hosting.proxy_token or ""),
        http=SlowClientProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        lifespan="off",
        server_header=False,
        h11_max_incomplete_event_size=64 << 10,
    )
    h11_impl.HIGH_WATER_LIMIT = _BODY_BUFFER  # type: ignore[attr-defined]  # it has no option for this
    if not listening.plain:
        # asyncio would give each TLS connection 256 KiB to read into, 256 KiB of what waits to be read, and
        # 512 KiB, which its buffer doubles, of what a slow reader has not taken yet: 1.5 GiB of a thousand.
        asyncio.sslproto.SSLProtocol.max_size = _TLS_BUFFER
        asyncio.constants.FLOW_CONTROL_HIGH_WATER_SSL_READ = _TLS_BUFFER >> 10  # type: ignore[misc]
        asyncio.constants.FLOW_CONTROL_HIGH_WATER_SSL_WRITE = _TLS_BUFFER >> 10  # type: ignore[misc]
        context = server_context(directory, key)
        config.ssl_context_factory = lambda *_: context
    doors = ConnectionLimiter(connections_within(raise_file_limit(), MOST))
    if doors.max_connections < _FEW:
        logger.warning(
            "the limit of open files permits only %d connections: raise `ulimit -Hn`",
            doors.max_connections,
        )
    server = LimitedServer(config, doors, hub.health, respond)
    _listen(listening, listener)
    name, bound = hub.founding.name, listener.getsockname()[1]
    logger.info("the hub of %s listens at port %d", name, bound)
    if listening.with_parent:
        threading.Thread(target=_stop_with_input, args=(server,), daemon=True).start()
    await server.serve(sockets=[listener])


def _stop_with_input(server: uvicorn.Server) -> None:
    """Stop the server when standard input closes: the process that started this one has ended."""
    while sys.stdin.buffer.read(1):
        pass
    server.should_exit = True


def bind_listener(listening: ListenOptions) -> socket.socket:
    """Bind the port before any other work, without listening yet. Raise HubError if it is taken."""
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    # Named TCP, so that asyncio sends small answers at once instead of waiting for the ones before.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if not hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # on Windows the reuse option lets others in
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((listening.host, listening.port))
    except OSError as error:
        listener.close()
        raise _listen_error(listening, error) from error
    listener.setblocking(False)
    return listener


def _listen(listening: ListenOptions, listener: socket.socket) -> None:
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # another process bound the port, too, and listened first
        raise _listen_error(listening, error) from error


def _listen_error(listening: ListenOptions, error: OSError) -> HubError:
    return HubError(
        f"the hub cannot listen at {listening.host} port {listening.port}: {error.strerror or error}",
        hint="Stop what uses the port, or give another one with `--port`.",
    )


def check_plain(listening: ListenOptions) -> None:
    """Raise HubError if a hub without TLS would listen on a public address."""
    if listening.plain and listening.host not in _LOOPBACK:
        raise HubError(
            f"a hub without TLS may not listen at {listening.host}",
            hint="Leave out `--plain`, or listen at 127.0.0.1 with a proxy before it.",
        )
