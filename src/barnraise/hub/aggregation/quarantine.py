"""Who may take part, by the owner's word."""

from __future__ import annotations

import msgspec

from barnraise.core.errors import HubRefused
from barnraise.hub.rounds import state_machine
from barnraise.hub.server.hub import Hub
from barnraise.hub.storage.log import HubLog, change


async def pardon(hub: Hub, node: str) -> None:
    await _set_quarantine(hub, node, "")


async def expel(hub: Hub, node: str) -> None:
    """Until the owner pardons. What waits for its round already still counts."""
    if node == hub.founding.owner:
        raise HubRefused(403, "role", "the owner cannot be sent away", hint="Name another member.")
    await _set_quarantine(hub, node, "the owner sent this machine away")
    await hub.step(state_machine.LeaseAbandoned(node))


async def _set_quarantine(hub: Hub, node: str, why: str) -> None:
    member = hub.members.get(node)
    if member is None:
        raise HubRefused(404, "member", "nobody has this id here", hint="Copy it from the hub's page.")
    after = msgspec.structs.replace(member, refusals=0, quarantine=why)
    hub.members[node] = after
    await hub.write([change(HubLog.put_member, after)])
