"""``barnraise hub pardon`` and ``expel``: what only the machine that keeps a hub may say to it."""

from __future__ import annotations

from pathlib import Path

from barnraise.cli.child_process import say
from barnraise.cli.hub.directories import addresses_from_here, kept_hub
from barnraise.cli.hub.join import require_hub_parts
from barnraise.core.config import load_settings
from barnraise.core.errors import HubError


def pardon(*, member: str, name: str) -> int:
    say(f"{_told(member, name, 'pardon')} may take part again")
    return 0


def expel(*, member: str, name: str) -> int:
    say(f"{_told(member, name, 'expel')} is excluded; `barnraise hub pardon` accepts it again")
    return 0


def _told(member: str, name: str, word: str) -> str:
    """Send the owner's decision about a member, and return the member's name."""
    require_hub_parts()
    from barnraise.hub.client.client import HubClient
    from barnraise.hub.protocol.messages import RunDescription
    from barnraise.hub.storage.create import hub_key

    settings = load_settings()
    directory = kept_hub(name, settings)
    called, node = _member(directory, member)
    key = hub_key(directory)
    client = HubClient(addresses_from_here(directory), key.id, key, proxy_token=settings.hosting.proxy_token)
    try:
        client.ask("POST", f"/v1/members/{node}/{word}", RunDescription)
    finally:
        client.close()
    return called


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
