"""``barnraise hub follow``, ``hand-over``, ``take-over``: a second machine takes over if the hub is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import click

from barnraise.cli.child_process import LEFT, say, until_left
from barnraise.cli.hub.directories import kept_hub, start_hub, top_folder
from barnraise.cli.hub.join import open_workspace, require_hub_parts
from barnraise.core.config import load_settings
from barnraise.core.errors import HubError
from barnraise.identity.node_id import NodeId


def follow(*, invite: str, name: str, host: str, port: int) -> int:
    """Run a mirror until Ctrl-C."""
    require_hub_parts()
    from barnraise.hub.protocol.invites import read_invite
    from barnraise.hub.storage.create import hub_key
    from barnraise.hub.storage.directory_lock import check_mirror, read_facts

    settings = load_settings()
    parsed_invite = read_invite(invite)
    directory = top_folder(settings) / (name or f"{parsed_invite.run}-mirror")
    if directory.exists():
        check_mirror(read_facts(directory), directory, parsed_invite.hub_id)
    key = hub_key(directory)
    say(f"a copy of {parsed_invite.run} is kept here; its owner allows it to take over with:")
    click.echo(f"  barnraise hub hand-over {key.id}")

    async def serve(place: Path) -> int:
        kept = await start_hub(directory, ["--follow", invite, "--host", host, "--port", str(port)], place)
        try:
            await kept.until_ended()
        except asyncio.CancelledError:
            return LEFT
        finally:
            await kept.stop()
        say(f"the mirror {kept.how()}")
        return kept.code

    with open_workspace(settings, directory.name) as place:
        return until_left(serve(place))


def hand_over(*, node: str, name: str) -> int:
    """Write the hub's signed statement that another machine may take over. It outlives this machine."""
    require_hub_parts()
    from barnraise.hub.mirror.mirror import sign_handover
    from barnraise.hub.storage.create import hub_key, is_mirror

    directory = kept_hub(name, load_settings())
    if is_mirror(directory):
        raise HubError(
            f"{directory.name} is a mirror of another hub, and its word would count nowhere",
            hint="Run it on the machine that keeps the hub.",
        )
    key = hub_key(directory)
    click.echo(sign_handover(key, key.id, NodeId.parse(node), int(time.time())))
    say("on the other machine, if this hub is lost: barnraise hub take-over WORD")
    return 0


def take_over(*, word: str, name: str) -> int:
    require_hub_parts()
    from barnraise.hub.mirror.mirror import take_over as succeed

    directory = kept_hub(name, load_settings())
    succeed(directory, word)
    say(f"this is the hub now: barnraise hub up --no-train --name {directory.name}; friends need new invites")
    return 0
