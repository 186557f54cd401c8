"""The regional hub's server process."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import NamedTuple

from barnraise.artifacts import folder_limits
from barnraise.core.config import ContributorSettings, load_settings
from barnraise.core.flow.supervised_task import run_until_done
from barnraise.core.flow.uplink_limiter import UplinkLimiter
from barnraise.hub.aggregation.aggregator import Aggregator
from barnraise.hub.client.bandwidth_policy import (
    A_BETTER_TIME,
    PolicyGate,
    policy_from_settings,
)
from barnraise.hub.client.client import HubClient
from barnraise.hub.object_store.s3 import BucketUrl
from barnraise.hub.protocol.invites import Invite
from barnraise.hub.protocol.messages import (
    MOST_SEATS,
    JoinResponse,
    RegionOffer,
    RegionOrders,
    RoundConfig,
    VectorLayout,
)
from barnraise.hub.region.placement import REPEATED_S
from barnraise.hub.server.hub import Hub
from barnraise.hub.server.membership import SeatsForParent, taken_seats
from barnraise.hub.server.server import ListenOptions, bind_listener, running_hub, serve_app
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.create import has_hub, hub_blobs, hub_key
from barnraise.hub.storage.directory_lock import check_region, read_facts
from barnraise.identity.keys import NodeKey

logger = logging.getLogger(__name__)
_PAUSE_S = 1.0


class MemberSeats(NamedTuple):
    """Number of the parent's new members that a region accepts, and its addresses."""

    max_members: int
    addresses: tuple[str, ...]
    pinned: bool


async def serve_region(
    directory: Path,
    invite: Invite,
    listening: ListenOptions,
    seats: MemberSeats | None,
    store: BucketUrl | None = None,
) -> None:
    """Serve a regional hub until SIGINT or SIGTERM."""
    with bind_listener(listening) as listener:
        check_region(read_facts(directory), directory, invite.hub_id)
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
        create_region,
        run_region,
    )

    key, blobs, settings = hub_key(directory), hub_blobs(directory), load_settings()
    client = parent_client(invite, key, settings.contributing)
    parent = ParentHub(client, blobs, directory / "uploads", folder_limits(settings))
    message = invite.request(key.id, "region")
    joined = await asyncio.to_thread(client.ask_with_retries, "POST", "/v1/members", JoinResponse, message)
    client.accept_store(joined.description.store)
    if not has_hub(directory):
        await asyncio.to_thread(create_region, directory, parent, joined.description, key.id, invite.hub_id)

    def pass_up(blobs: BlobStore, terms: RoundConfig, layout: VectorLayout) -> Aggregator:
        return RegionAggregator(blobs, terms, layout, parent)

    async with running_hub(directory, make_finisher=pass_up, is_region=True, store=store) as (hub, app):
        working = [asyncio.create_task(run_region(hub, parent))]
        if joined.role == "region" and seats is not None:
            hub.seats = SeatsForParent(seats.max_members)
            # For a thread of its own.
            above = HubClient(invite.addresses, invite.hub_id, key, pinned=invite.pinned)
            working.append(asyncio.create_task(keep_offering(hub, above, seats)))
        try:
            await serve_app(directory, hub, app, listening, listener)
        finally:
            for task in working:
                task.cancel()
            client.close()


def parent_client(invite: Invite, key: NodeKey, wishes: ContributorSettings) -> HubClient:
    """Return a client of the parent hub that follows this machine's bandwidth policy."""
    manners = policy_from_settings(wishes)
    courtesy = PolicyGate(manners)
    pace = UplinkLimiter(manners.uplink_bytes_s)
    client = HubClient(invite.addresses, invite.hub_id, key, pinned=invite.pinned, pace=pace)
    client.wait_for_policy = lambda: courtesy.wait(client.backoff(A_BETTER_TIME))
    return client


async def keep_offering(hub: Hub, above: HubClient, seats: MemberSeats) -> None:
    """Repeat the region's offer to its parent while the region has a model, and follow the answers."""

    async def turn() -> bool:
        if hub.version is None:
            await asyncio.sleep(_PAUSE_S)
            return False
        free = max(0, seats.max_members - taken_seats(hub.members))
        offer = RegionOffer(addresses=seats.addresses, pinned=seats.pinned, seats=min(free, MOST_SEATS))
        orders = await asyncio.to_thread(above.ask_with_retries, "POST", "/v1/regions", RegionOrders, offer)
        await hub.follow_orders(orders)
        await asyncio.sleep(REPEATED_S)
        return False

    try:
        await run_until_done(turn, "the region could not offer its places", REPEATED_S)
    finally:
        above.close()
