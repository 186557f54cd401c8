"""``barnraise hub pardon`` and ``expel``: what only the machine that keeps a hub may say to it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from barnraise.cli.child_process import say
from barnraise.cli.hub.directories import addresses_from_here, is_pinned, kept_hub
from barnraise.cli.hub.join import require_hub_parts
from barnraise.core.config import load_settings
from barnraise.core.errors import HubError

T = TypeVar("T", bound=msgspec.Struct)


def pardon(*, member: str, name: str) -> int:
    require_hub_parts()
    from barnraise.hub.protocol.messages import RunDescription

    called, _ = _decide(member, name, "pardon", RunDescription)
    say(f"{called} may take part again")
    return 0


def expel(*, member: str, name: str) -> int:
    require_hub_parts()
    from barnraise.hub.protocol.invites import short_key
    from barnraise.hub.protocol.messages import ExpelResponse

    called, result = _decide(member, name, "expel", ExpelResponse)
    say(f"{called} is excluded; `barnraise hub pardon` accepts it again")
    if result.invite:
        say(f"its invite {short_key(result.invite)} is withdrawn")
    if result.others:
        say(f"came with the same invite, and still take part: {', '.join(result.others)}")
    return 0


def _decide(member: str, name: str, word: str, kind: type[T]) -> tuple[str, T]:
    """Send the owner's decision about a member, and return the member's name and the hub's answer."""
    from barnraise.hub.client.client import HubClient
    from barnraise.hub.storage.create import hub_key

    settings = load_settings()
    directory = kept_hub(name, settings)
    called, node = _member(directory, member)
    key = hub_key(directory)
    token = settings.hosting.proxy_token
    client = HubClient(
        addresses_from_here(directory), key.id, key, pinned=is_pinned(directory), proxy_token=token
    )
    try:
        return called, client.ask("POST", f"/v1/members/{node}/{word}", kind)
    finally:
        client.close()


def _member(directory: Path, wanted: str) -> tuple[str, str]:
    """Name and id of the only member of this name, or whose id begins so."""
    from barnraise.hub.storage.log import HubLog

    log = HubLog(directory)
    try:
        members = log.read().members.values()
    finally:
        log.close()
    matches = [member for member in members if member.name == wanted or member.node.startswith(wanted)]
    if len(matches) != 1:
        count = f"{len(matches)} members" if matches else "no member"
        raise HubError(
            f"{count} of {directory.name} can be meant by {wanted!r}",
            hint="Give the name or the beginning of the id as the hub's page shows them.",
        )
    return matches[0].name, matches[0].node
