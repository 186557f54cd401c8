"""Checks of the hubs that this machine hosts or trains for.

Each address is asked once, all at the same time, and each wait ends after a few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from barnraise.cli.doctor.facts import HubAddressFacts, HubFacts
from barnraise.cli.hub.directories import is_pinned, kept_hubs, workspaces_with
from barnraise.cli.hub.join import CREDENTIALS_FILE, fit_name, require_hub_parts
from barnraise.core.config import Settings, load_settings
from barnraise.core.errors import HubAway, HubError, HubRefused
from barnraise.core.flow.background import DeadlineCall, DeadlineExceeded
from barnraise.hub.storage.addresses import known_addresses
from barnraise.identity.keys import NodeKey

if TYPE_CHECKING:
    from barnraise.identity.node_id import NodeId

_ANSWER_S = 2.0  # for each step of a connection
_ALL_S = 4.0


class _Known(NamedTuple):
    """A hub, before it is asked."""

    hub: HubFacts
    id: NodeId
    addresses: Sequence[str]
    pinned: bool


def hubs(settings: Settings) -> list[HubFacts]:
    """Return facts about every hub. Raise HubError if there are hubs and their packages are not installed."""
    known = [*_kept(settings)]
    own = {entry.id for entry in known}
    known += [entry for entry in _joined(settings) if entry.id not in own]
    calls = [
        [DeadlineCall(("hub",), partial(ask, address, entry.id, entry.pinned)) for address in entry.addresses]
        for entry in known
    ]
    deadline = time.monotonic() + _ALL_S
    facts = []
    for entry, waiting in zip(known, calls, strict=True):
        pairs = zip(entry.addresses, waiting, strict=True)
        ways = tuple(_way(address, call.result(deadline)) for address, call in pairs)
        facts.append(replace(entry.hub, ways=ways))
    return facts


def ask(address: str, hub: NodeId, pinned: bool = True) -> HubAddressFacts:
    """Ask a hub as an unknown client, so that the request does not count against this machine's limits."""
    from barnraise.hub.client.client import HubClient
    from barnraise.hub.protocol.messages import RunDescription

    token = load_settings().hosting.proxy_token
    client = HubClient(
        [address], hub, NodeKey.generate(), pinned=pinned, proxy_token=token, answer_s=_ANSWER_S
    )
    try:
        client.ask("GET", "/v1/run", RunDescription)
    except HubAway as error:
        return HubAddressFacts(address, words=error.message, other=error.answered)
    except HubRefused:
        pass  # by the hub itself
    except HubError as error:
        return HubAddressFacts(address, words=error.message)
    finally:
        client.close()
    return HubAddressFacts(address, answers=True, ahead_s=client.ahead_s)


def _way(address: str, result: HubAddressFacts | DeadlineExceeded) -> HubAddressFacts:
    return (
        HubAddressFacts(address, words=f"{address}: {result.why}")
        if isinstance(result, DeadlineExceeded)
        else result
    )


def _kept(settings: Settings) -> Iterator[_Known]:
    """Yield the hubs hosted here that have an address, because they ran at least once."""
    up = {workspace.name.rsplit("-", 2)[0] for workspace in workspaces_with(settings, "hub.output")}
    for directory in kept_hubs(settings):
        addresses = known_addresses(directory)
        if not addresses:
            continue
        require_hub_parts()
        from barnraise.hub.storage.create import hub_key, owner_of

        key = hub_key(directory).id
        is_up = fit_name(directory.name) in up
        # A region is its own owner: its members are the machines of one network.
        hub = HubFacts(directory.name, kept=True, up=is_up, region=owner_of(directory) == str(key))
        yield _Known(hub, key, addresses, is_pinned(directory))


def _joined(settings: Settings) -> Iterator[_Known]:
    for workspace in workspaces_with(settings, CREDENTIALS_FILE):
        require_hub_parts()
        from barnraise.hub.client.credentials import read_credentials

        credentials = read_credentials(workspace / CREDENTIALS_FILE)
        facts = HubFacts(credentials.run)
        yield _Known(facts, credentials.hub_id, credentials.addresses, credentials.pinned)
