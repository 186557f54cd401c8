"""The mirror's server process: follow a hub and serve the copy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from barnraise.artifacts import folder_limits
from barnraise.core.config import load_settings
from barnraise.core.errors import HubRefused
from barnraise.core.flow.supervised_task import run_until_done
from barnraise.hub.client.client import HubClient
from barnraise.hub.mirror.mirror import HubMirror
from barnraise.hub.protocol.invites import Invite
from barnraise.hub.protocol.messages import JoinResponse
from barnraise.hub.server.app import HubApp, make_app
from barnraise.hub.server.hub import Hub
from barnraise.hub.server.server import (
    ListenOptions,
    bind_listener,
    limits_from_settings,
    make_outer_step,
    serve_app,
)
from barnraise.hub.server.uploads import UploadService
from barnraise.hub.storage.create import has_hub, hub_key
from barnraise.hub.storage.directory_lock import check_mirror, read_facts

logger = logging.getLogger(__name__)
_WAIT_S, _PAUSE_S = 30.0, 5.0


async def serve_mirror(directory: Path, invite: Invite, listening: ListenOptions) -> None:
    """Follow a hub and serve the copy until SIGINT or SIGTERM.

    A mirror that has a copy already starts without the hub.
    """
    with bind_listener(listening) as listener:
        check_mirror(read_facts(directory), directory, invite.hub_id)
        key = hub_key(directory)
        client = HubClient(invite.addresses, invite.hub_id, key, pinned=invite.pinned)
        mirror = HubMirror(directory, client, invite.hub_id, folder_limits(load_settings()))
        joined = invite.request(key.id, "mirror")

        def join(patience_s: float | None = 0.0) -> None:
            answer = client.ask_with_retries(
                "POST", "/v1/members", JoinResponse, joined, patience_s=patience_s
            )
            client.accept_store(answer.description.store)

        is_new = not has_hub(directory)
        if is_new:
            await asyncio.to_thread(join, None)
            await asyncio.to_thread(mirror.follow, 0.0)
        hub = Hub(directory, key.id, make_outer_step)
        hub.reload()
        following = asyncio.create_task(keep_following(mirror, hub, join=None if is_new else join))
        try:
            app = make_app(HubApp(hub, UploadService(hub), key, limits=limits_from_settings()))
            await serve_app(directory, hub, app, listening, listener)
        finally:
            following.cancel()
            client.close()


async def keep_following(
    mirror: HubMirror,
    hub: Hub,
    pause_s: float = _PAUSE_S,
    join: Callable[[], None] | None = None,
) -> None:
    """Copy new versions without end; ``hub`` serves them. ``join``: called once before."""

    async def turn() -> bool:
        nonlocal join
        if join is not None:
            try:
                await asyncio.to_thread(join)
            except HubRefused as error:  # it may be a member by an older invite
                logger.warning("%s. %s", error.message, error.hint)
            join = None
        await asyncio.to_thread(mirror.follow, _WAIT_S)
        hub.reload()
        return False

    await run_until_done(turn, "the hub could not be followed", pause_s)
