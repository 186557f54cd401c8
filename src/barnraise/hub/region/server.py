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
from barnraise.hub.aggregation.aggregator import Aggregator
from barnraise.hub.client.bandwidth_policy import (
    A_BETTER_TIME,
    PolicyGate,
    UplinkLimiter,
    policy_from_settings,
)
from barnraise.hub.client.client import HubClient
from barnraise.hub.object_store.s3 import BucketUrl
from barnraise.hub.protocol.invites import Invite, invite_text
from barnraise.hub.protocol.messages import (
    MOST_OFFERED,
    JoinRequest,
    JoinResponse,
    RegionOffer,
    Role,
    RoundConfig,
    RunDescription,
    VectorLayout,
)
from barnraise.hub.region.placement import REPEATED_S
from barnraise.hub.server.hub import Hub
from barnraise.hub.server.server import ListenOptions, bind_listener, running_hub, serve_app
from barnraise.hub.storage.blobs import BlobStore
from barnraise.hub.storage.create import create_invite, has_hub, hub_blobs, hub_key, usable_invites
from barnraise.hub.storage.directory_lock import check_region, read_facts
from barnraise.identity.keys import NodeKey

logger = logging.getLogger(__name__)
_PAUSE_S = 1.0
_OFFERED_S = 86400.0


class MemberSeats(NamedTuple):
    """Number of the parent's new members that a region accepts, and its addresses."""

    max_members: int
    addresses: tuple[str, ...]


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
    message = JoinRequest(token=invite.token_text, name="region")
    joined = await asyncio.to_thread(client.ask_with_retries, "POST", "/v1/members", JoinResponse, message)
    client.accept_store(joined.description.store)
    if not has_hub(directory):
        await asyncio.to_thread(create_region, directory, parent, joined.description, key.id, invite.hub_id)

    def pass_up(blobs: BlobStore, terms: RoundConfig, layout: VectorLayout) -> Aggregator:
        return RegionAggregator(blobs, terms, layout, parent)

    async with running_hub(directory, make_finisher=pass_up, is_region=True, store=store) as (hub, app):
        working = [asyncio.create_task(run_region(hub, parent))]
        if joined.role == "region" and seats is not None:
            above = HubClient(invite.addresses, invite.hub_id, key)  # for a thread of its own
            working.append(asyncio.create_task(keep_offering(hub, above, RegionOffers(directory, seats))))
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
    client = HubClient(invite.addresses, invite.hub_id, key, pace=UplinkLimiter(manners.uplink_bytes_s))
    client.wait_for_policy = lambda: courtesy.wait(client.backoff(A_BETTER_TIME))
    return client


class RegionOffers:
    """Single-use invites of a region for new members of its parent: one per free seat and role."""

    def __init__(self, directory: Path, seats: MemberSeats) -> None:
        self._directory, self._seats = directory, seats
        self._open: dict[Role, list[Invite]] = {"friend": [], "stranger": []}

    def offer(self, taken: int, clock: float) -> RegionOffer:
        """Return the unused invites, topped up with new ones. Blocks."""
        for role, known in self._open.items():
            known[:] = usable_invites(self._directory, known, clock)
            for _ in range(min(MOST_OFFERED, self._seats.max_members - taken) - len(known)):
                known.append(
                    create_invite(self._directory, self._seats.addresses, role=role, valid_s=_OFFERED_S)
                )
        return RegionOffer(
            friends=tuple(invite_text(invite) for invite in self._open["friend"]),
            strangers=tuple(invite_text(invite) for invite in self._open["stranger"]),
        )


async def keep_offering(hub: Hub, above: HubClient, offering: RegionOffers) -> None:
    """Repeat the region's offer to its parent while the region has a model."""

    async def turn() -> bool:
        if hub.version is None:
            await asyncio.sleep(_PAUSE_S)
            return False
        taken = sum(member.role != "owner" for member in hub.members.values())
        offer = await asyncio.to_thread(offering.offer, taken, hub.clock())
        await asyncio.to_thread(above.ask_with_retries, "POST", "/v1/regions", RunDescription, offer)
        await asyncio.sleep(REPEATED_S)
        return False

    try:
        await run_until_done(turn, "the region could not offer its places", REPEATED_S)
    finally:
        above.close()
