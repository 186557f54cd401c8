"""``barnraise hub follow``, ``hand-over``, ``take-over``: a second machine takes over if the hub is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import click

from barnraise.cli.child_process import LEFT, say, until_left
from barnraise.cli.hub.directories import kept_hub, start_hub, top_folder
from barnraise.cli.hub.join import open_workspace, require_hub_parts
from barnraise.cli.terminal import read_secret
from barnraise.core.config import load_settings
from barnraise.core.errors import HubError
from barnraise.core.units import parse_duration
from barnraise.identity.node_id import NodeId


def follow(*, invite: str, name: str, host: str, port: int) -> int:
    """Run a mirror until Ctrl-C."""
    require_hub_parts()
    from barnraise.hub.private_options import PrivateOptions
    from barnraise.hub.protocol.invites import read_invite
    from barnraise.hub.storage.create import hub_key
    from barnraise.hub.storage.directory_lock import check_mirror, read_facts

    settings = load_settings()
    text = read_secret(invite, "Invite")
    parsed_invite = read_invite(text)
    if parsed_invite.role != "mirror":
        raise HubError(
            f"this invite is for a {parsed_invite.role}, and not for a mirror",
            hint="Ask the owner of the hub for one that is: `barnraise invite --mirror`.",
        )
    directory = top_folder(settings) / (name or f"{parsed_invite.run}-mirror")
    if directory.exists():
        check_mirror(read_facts(directory), directory, parsed_invite.hub_id)
    key = hub_key(directory)
    say(f"a copy of {parsed_invite.run} is kept here; its owner allows it to take over with:")
    click.echo(f"  barnraise hub hand-over {key.id}")

    async def serve(place: Path) -> int:
        private = PrivateOptions(follow=text)
        kept = await start_hub(directory, ["--host", host, "--port", str(port)], place, private)
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


def hand_over(*, node: str, name: str, lasts: str = "2160h", revoke: bool = False) -> int:
    """Print the hub's signed statement that another machine may take over, or withdraw it."""
    require_hub_parts()
    from barnraise.hub.mirror.handover import sign_handover, withdraw_handovers
    from barnraise.hub.storage.create import hub_key, is_mirror

    directory = kept_hub(name, load_settings())
    if is_mirror(directory):
        raise HubError(
            f"{directory.name} is a mirror of another hub, and its word would count nowhere",
            hint="Run it on the machine that keeps the hub.",
        )
    key, successor, now = hub_key(directory), NodeId.parse(node), int(time.time())
    if revoke:
        withdraw_handovers(directory, successor, now)
        say(f"{successor.short} may not take over any more; it learns this when it follows this hub next")
        return 0
    expires = now + int(parse_duration(lasts))
    click.echo(sign_handover(key, key.id, successor, now, expires))
    until = time.strftime("%Y-%m-%d", time.localtime(expires))
    say(f"on the other machine, if this hub is lost before {until}: barnraise hub take-over -")
    return 0


def take_over(*, word: str, name: str) -> int:
    require_hub_parts()
    from barnraise.hub.mirror.handover import take_over as succeed

    directory = kept_hub(name, load_settings())
    succeed(directory, read_secret(word, "Word"), time.time())
    say(f"this is the hub now: barnraise hub up --no-train --name {directory.name}; friends need new invites")
    return 0
