"""The hub's process: uvicorn, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import asyncio.constants
import asyncio.sslproto
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import uvicorn
from starlette.applications import Starlette

from barnraise.artifacts import folder_limits
from barnraise.core.config import ContributorSettings, load_settings
from barnraise.core.errors import HubError, HubRefused
from barnraise.core.flow.supervised_task import run_until_done
from barnraise.hub.aggregation.aggregator import Aggregator
from barnraise.hub.client.bandwidth_policy import A_BETTER_TIME, PolicyGate, UplinkLimiter, manners_of
from barnraise.hub.client.client import HubClient
from barnraise.hub.mirror.mirror import HubMirror
from barnraise.hub.object_store.s3 import BucketUrl, S3Bucket
from barnraise.hub.object_store.uploader import BucketUploader
from barnraise.hub.protocol.invites import Invite, invite_text
from barnraise.hub.protocol.messages import (
    MOST_OFFERED,
    CodeOffer,
    JoinRequest,
    JoinResponse,
    Role,
    RoundConfig,
    RunDescription,
    VectorLayout,
)
from barnraise.hub.protocol.tls import server_context
from barnraise.hub.region.placement import REPEATED_S
from barnraise.hub.server.app import HubApp, make_app
from barnraise.hub.server.connection_limits import MOST, ConnectionLimiter, LimitedServer, SlowClientProtocol
from barnraise.hub.server.hub import Hub, MakeFinisher
from barnraise.hub.server.open_files import connections_within, raise_limit
from barnraise.hub.server.uploads import HeldOut, UploadService
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.create import has_hub, hub_blobs, hub_key, invite_to, still_open
from barnraise.hub.storage.directory_lock import check_hub, check_mirror, check_region, facts_in, held
from barnraise.identity.keys import NodeKey

logger = logging.getLogger(__name__)
PORT = 52480
_KEEP_ALIVE_S = 75
_FEW = 256  # connections
_BACKLOG = 2048
_TLS_BUFFER = 16 << 10
_MIRROR_WAIT_S, _MIRROR_PAUSE_S = 30.0, 5.0
_PAUSE_S = 1.0
_OFFERED_S = 86400.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class MemberSeats(NamedTuple):
    """How many of those who join its parent a region takes in, and how they reach it."""

    most: int
    addresses: tuple[str, ...]


class ListenOptions(NamedTuple):
    """Where a hub listens, and until when. TLS, unless it is for a proxy on the same machine that speaks it
    itself (``plain``)."""

    host: str
    port: int
    plain: bool = False
    with_parent: bool = False  # until standard input ends


def outer_step(blobs: BlobStore, terms: RoundConfig, layout: VectorLayout) -> Aggregator:
    from barnraise.hub.aggregation.outer_step import OuterStep  # torch, which takes a while

    return OuterStep(blobs, terms, layout)


@contextlib.asynccontextmanager
async def running(
    directory: Path,
    *,
    held_out: Path | None = None,
    make_finisher: MakeFinisher = outer_step,
    is_region: bool = False,
    store: BucketUrl | None = None,
) -> AsyncIterator[tuple[Hub, Starlette]]:
    """A hub that works, and its application. ``held_out``: the owner's file that tries updates."""
    key = hub_key(directory)
    hub = Hub(directory, key.id, make_finisher, is_region)
    try:
        await hub.start()
        async with _stocked(hub, store) as stock, _trying(hub, held_out) as check:
            yield hub, make_app(HubApp(hub, UploadService(hub, check), key, stock))
    finally:
        await hub.close()


@contextlib.asynccontextmanager
async def _stocked(hub: Hub, store: BucketUrl | None) -> AsyncIterator[BucketUploader | None]:
    """The hub's blobs in the store, if there is to be one, for as long as this lasts."""
    if store is None:
        yield None
        return
    stock = BucketUploader(hub, await asyncio.to_thread(S3Bucket, store, str(hub.id)))
    hub.store = stock.origin
    keeping = asyncio.create_task(stock.keep())
    try:
        yield stock
    finally:
        keeping.cancel()


@contextlib.asynccontextmanager
async def _trying(hub: Hub, held_out: Path | None) -> AsyncIterator[HeldOut | None]:
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
    """Until SIGINT or SIGTERM. HubError if the port is taken."""
    with _bound(listening) as listener:
        check_hub(facts_in(directory), directory)
        async with running(directory, store=store, held_out=held_out) as (hub, app):
            await _serve(directory, hub, app, listening, listener)


async def serve_mirror(directory: Path, invite: Invite, listening: ListenOptions) -> None:
    """Follow a hub, and serve what was mirrored to anybody, until SIGINT or SIGTERM. A mirror that has some
    state of the hub does not wait for it: the hub may be away just now."""
    with _bound(listening) as listener:
        check_mirror(facts_in(directory), directory, invite.hub_id)
        key = hub_key(directory)
        client = HubClient(invite.addresses, invite.hub_id, key)
        mirror = HubMirror(directory, client, invite.hub_id, folder_limits(load_settings()))
        joined = JoinRequest(token=invite.token_text, name="mirror")

        def join(patience_s: float | None = 0.0) -> None:
            answer = client.patiently("POST", "/v1/members", JoinResponse, joined, patience_s=patience_s)
            client.accept_store(answer.description.store)

        is_new = not has_hub(directory)
        if is_new:
            await asyncio.to_thread(join, None)
            await asyncio.to_thread(mirror.follow, 0.0)
        hub = Hub(directory, key.id, outer_step)
        hub.read()
        following = asyncio.create_task(keep_following(mirror, hub, join=None if is_new else join))
        try:
            app = make_app(HubApp(hub, UploadService(hub), key))
            await _serve(directory, hub, app, listening, listener)
        finally:
            following.cancel()
            client.close()


async def keep_following(
    mirror: HubMirror,
    hub: Hub,
    pause_s: float = _MIRROR_PAUSE_S,
    join: Callable[[], None] | None = None,
) -> None:
    """For ever, after a word to the hub if there is one to say: ``hub`` serves what is mirrored."""

    async def turn() -> bool:
        nonlocal join
        if join is not None:
            try:
                await asyncio.to_thread(join)
            except HubRefused as error:  # it may be a member by an older invite
                logger.warning("%s. %s", error.message, error.hint)
            join = None
        await asyncio.to_thread(mirror.follow, _MIRROR_WAIT_S)
        hub.read()
        return False

    await run_until_done(turn, "the hub could not be followed", pause_s)


async def serve_region(
    directory: Path,
    invite: Invite,
    listening: ListenOptions,
    seats: MemberSeats | None,
    store: BucketUrl | None = None,
) -> None:
    """A member of the invite's hub that has members of its own, until SIGINT or SIGTERM."""
    with _bound(listening) as listener:
        check_region(facts_in(directory), directory, invite.hub_id)
        await _serve_region(directory, invite, listening, listener, seats, store)


async def _serve_region(
    directory: Path,
    invite: Invite,
    listening: ListenOptions,
    listener: socket.socket,
    seats: MemberSeats | None,
    store: BucketUrl | None,
) -> None:
    from barnraise.hub.region.region import (  # torch, which takes a while
        ParentHub,
        RegionAggregator,
        found_region,
        run_region,
    )

    key, blobs, settings = hub_key(directory), hub_blobs(directory), load_settings()
    client = polite_client(invite, key, settings.contributing)
    parent = ParentHub(client, blobs, directory / "uploads", folder_limits(settings))
    message = JoinRequest(token=invite.token_text, name="region")
    joined = await asyncio.to_thread(client.patiently, "POST", "/v1/members", JoinResponse, message)
    client.accept_store(joined.description.store)
    if not has_hub(directory):
        await asyncio.to_thread(found_region, directory, parent, joined.description, key.id, invite.hub_id)

    def pass_up(blobs: BlobStore, terms: RoundConfig, layout: VectorLayout) -> Aggregator:
        return RegionAggregator(blobs, terms, layout, parent)

    async with running(directory, make_finisher=pass_up, is_region=True, store=store) as (hub, app):
        working = [asyncio.create_task(run_region(hub, parent))]
        if joined.role == "region" and seats is not None:
            above = HubClient(invite.addresses, invite.hub_id, key)  # for a thread of its own
            working.append(asyncio.create_task(keep_offering(hub, above, OfferOptions(directory, seats))))
        try:
            await _serve(directory, hub, app, listening, listener)
        finally:
            for task in working:
                task.cancel()
            client.close()


def polite_client(invite: Invite, key: NodeKey, wishes: ContributorSettings) -> HubClient:
    """To the hub above, as the owner of this machine wants its line to be used."""
    manners = manners_of(wishes)
    courtesy = PolicyGate(manners)
    client = HubClient(invite.addresses, invite.hub_id, key, pace=UplinkLimiter(manners.uplink_bytes_s))
    client.wait_politely = lambda: courtesy.wait(client.waiting(A_BETTER_TIME))
    return client


class OfferOptions:
    """Invites of a region for who joins its parent, each for one: for each role as many as seats are left."""

    def __init__(self, directory: Path, seats: MemberSeats) -> None:
        self._directory, self._seats = directory, seats
        self._open: dict[Role, list[Invite]] = {"friend": [], "stranger": []}

    def offer(self, taken: int, clock: float) -> CodeOffer:
        """Those that are still to be used, and new ones. Blocks."""
        for role, known in self._open.items():
            known[:] = still_open(self._directory, known, clock)
            for _ in range(min(MOST_OFFERED, self._seats.most - taken) - len(known)):
                known.append(invite_to(self._directory, self._seats.addresses, role=role, valid_s=_OFFERED_S))
        return CodeOffer(
            friends=tuple(invite_text(one) for one in self._open["friend"]),
            strangers=tuple(invite_text(one) for one in self._open["stranger"]),
        )


async def keep_offering(hub: Hub, above: HubClient, offering: OfferOptions) -> None:
    """For as long as the region has a model to give."""

    async def turn() -> bool:
        if hub.version is None:
            await asyncio.sleep(_PAUSE_S)
            return False
        taken = sum(member.role != "owner" for member in hub.members.values())
        offer = await asyncio.to_thread(offering.offer, taken, hub.clock())
        await asyncio.to_thread(above.patiently, "POST", "/v1/regions", RunDescription, offer)
        await asyncio.sleep(REPEATED_S)
        return False

    try:
        await run_until_done(turn, "the region could not say that it takes members in", REPEATED_S)
    finally:
        above.close()


async def _serve(
    directory: Path, hub: Hub, app: Starlette, listening: ListenOptions, listener: socket.socket
) -> None:
    config = uvicorn.Config(
        app,
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
    if not listening.plain:
        # asyncio would give each TLS connection 256 KiB to read into, 256 KiB of what waits to be read, and
        # 512 KiB, which its buffer doubles, of what a slow reader has not taken yet: 1.5 GiB of a thousand.
        asyncio.sslproto.SSLProtocol.max_size = _TLS_BUFFER
        asyncio.constants.FLOW_CONTROL_HIGH_WATER_SSL_READ = _TLS_BUFFER >> 10  # type: ignore[misc]
        asyncio.constants.FLOW_CONTROL_HIGH_WATER_SSL_WRITE = _TLS_BUFFER >> 10  # type: ignore[misc]
        context = server_context(directory, hub_key(directory))
        config.ssl_context_factory = lambda *_: context
    doors = ConnectionLimiter(connections_within(raise_limit(), MOST))
    if doors.most < _FEW:
        logger.warning(
            "this process may open so few files that %d connections are possible: raise `ulimit -Hn`",
            doors.most,
        )
    server = LimitedServer(config, doors, hub.troubles, hub_key(directory), hub.clock)
    _listen(listening, listener)
    name, bound = hub.founding.name, listener.getsockname()[1]
    logger.info("the hub of %s listens at port %d", name, bound)
    if listening.with_parent:
        threading.Thread(target=_stop_with_input, args=(server,), daemon=True).start()
    await server.serve(sockets=[listener])


def _check_plain(listening: ListenOptions) -> None:
    if listening.plain and listening.host not in _LOOPBACK:
        raise HubError(
            f"a hub without TLS may not listen at {listening.host}",
            hint="Leave out `--plain`, or listen at 127.0.0.1 with a proxy before it.",
        )


def _stop_with_input(server: uvicorn.Server) -> None:
    """Whoever started this process holds the other end, and is gone when it closes."""
    while sys.stdin.buffer.read(1):
        pass
    server.should_exit = True


def _bound(listening: ListenOptions) -> socket.socket:
    """The port, before anything is begun that would need it; nobody is kept waiting there before `_listen`.
    HubError if it is taken."""
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    # Named TCP, so that asyncio sends small answers at once instead of waiting for the ones before.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if not hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # on Windows the reuse option lets others in
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((listening.host, listening.port))
    except OSError as error:
        listener.close()
        raise _taken(listening, error) from error
    listener.setblocking(False)
    return listener


def _listen(listening: ListenOptions, listener: socket.socket) -> None:
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # somebody else bound it, too, and listened first
        raise _taken(listening, error) from error


def _taken(listening: ListenOptions, error: OSError) -> HubError:
    return HubError(
        f"the hub cannot listen at {listening.host} port {listening.port}: {error.strerror or error}",
        hint="Stop what uses the port, or give another one with `--port`.",
    )


def run(
    directory: Path,
    listening: ListenOptions,
    *,
    follow: Invite | None = None,
    parent: Invite | None = None,
    seats: MemberSeats | None = None,
    store: BucketUrl | None = None,
    held_out: Path | None = None,
) -> None:
    """HubError if another process is in this directory, or the port is taken: before anything is touched."""
    _check_plain(listening)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with held(directory):  # until its last thread has ended
        if follow is not None:
            asyncio.run(serve_mirror(directory, follow, listening))
        elif parent is not None:
            asyncio.run(serve_region(directory, parent, listening, seats, store))
        else:
            asyncio.run(serve(directory, listening, store, held_out))
