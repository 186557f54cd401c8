"""``barnraise hub status`` and ``hub export``: members and results of a hub."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec

from barnraise.cli.child_process import say
from barnraise.cli.hub.directories import addresses_from_here, is_pinned, kept_hub
from barnraise.cli.hub.join import require_hub_parts
from barnraise.cli.tables import table
from barnraise.cli.terminal import wrapped
from barnraise.core.config import load_settings
from barnraise.core.errors import HubError, HubRefused
from barnraise.core.units import counted
from barnraise.hub.storage.addresses import known_addresses
from barnraise.identity.keys import NodeKey


def export(*, folder: Path, name: str) -> int:
    """Export the newest version from the disk."""
    require_hub_parts()
    from barnraise.hub.storage.export import FILE_NAME, export_model  # torch, which takes a while

    directory = kept_hub(name, load_settings())
    number = export_model(directory, folder)
    say(f"{folder / FILE_NAME} is the model of {directory.name} at version {number}")
    return 0


def status(*, name: str, as_json: bool) -> int:
    """Show a hub's log from disk, and whether each of its addresses answers."""
    require_hub_parts()
    from barnraise.hub.storage.log import HubLog

    directory = kept_hub(name, load_settings())
    log = HubLog(directory)
    try:
        state = log.read()
    finally:
        log.close()
    newest = state.versions[-1] if state.versions else None
    report = HubStatusReport(
        directory.name,
        newest.number if newest else None,
        newest.loss if newest else None,
        tuple(
            MemberContribution(
                member.name, member.node[:9], member.role, member.accepted, member.samples, member.quarantine
            )
            for member in sorted(state.members.values(), key=lambda member: -member.samples)
        ),
        {address: _reached(directory, address) for address in known_addresses(directory)},
        _waits(directory, newest.number if newest else None),
    )
    click.echo(json.dumps(msgspec.to_builtins(report), indent=2) if as_json else _described(report))
    if not as_json and any(report.addresses.values()):
        say("friends get no answer there; docs/friends.md explains how they reach this machine")
    return 0


class MemberContribution(msgspec.Struct, frozen=True):
    name: str
    node: str
    role: str
    rounds: int
    samples: int
    quarantine: str  # why, if it is


class HubStatusReport(msgspec.Struct, frozen=True):
    """Status of one hub, for people and as JSON."""

    name: str
    version: int | None
    loss: float | None
    members: tuple[MemberContribution, ...]
    addresses: dict[str, str]  # with what is wrong there
    waits: str  # what the hub waits for, or why that is unknown


def _described(report: HubStatusReport) -> str:
    version = (
        f"version {report.version}" if report.version is not None else "its owner's model is not there yet"
    )
    loss = f", loss {report.loss:.4g}" if report.loss is not None else ""
    lines = [f"{report.name}: {version}{loss}, {counted(len(report.members), 'member')}"]
    lines.append(wrapped(f"  {report.waits}", indent="  "))
    if report.members:
        rows = [("machine", "role", "rounds", "samples", "state")]
        rows += [
            (member.name, member.role, f"{member.rounds:,}", f"{member.samples:,}", _state(member))
            for member in report.members
        ]
        lines.append(table(rows, words=(0,), wraps=True, indent="  "))
    lines += [
        wrapped(f"  {address} {why or 'answers with the right key'}", indent="    ")
        for address, why in report.addresses.items()
    ]
    return "\n".join(lines)


def _state(member: MemberContribution) -> str:
    return f"quarantined: {member.quarantine}" if member.quarantine else "fine"


def _waits(directory: Path, version: int | None) -> str:
    """Ask the running hub which members hold samples of the open round, and since when."""
    from barnraise.hub.client.client import HubClient
    from barnraise.hub.protocol.messages import VersionHead
    from barnraise.hub.storage.create import hub_key

    key, addresses = hub_key(directory), addresses_from_here(directory)
    if not addresses:
        return "it was never up; start it: barnraise hub up"
    token = load_settings().hosting.proxy_token
    client = HubClient(addresses, key.id, key, pinned=is_pinned(directory), proxy_token=token)
    try:
        head = client.ask("GET", "/v1/head", VersionHead, query={} if version is None else {"after": version})
    except HubRefused as error:
        return error.message
    except HubError:
        return f"it is not up; start it: barnraise hub up --name {directory.name}"
    finally:
        client.close()
    if head.finished:
        return "all samples of the run are trained on"
    return head.waits_for or f"version {head.version} has just come"


def _reached(directory: Path, address: str) -> str:
    """Empty if the hub answers there, with its key; otherwise why not."""
    from barnraise.hub.client.client import HubClient
    from barnraise.hub.protocol.messages import RunDescription
    from barnraise.hub.storage.create import hub_key

    hub, pinned, token = hub_key(directory).id, is_pinned(directory), load_settings().hosting.proxy_token
    client = HubClient([address], hub, NodeKey.generate(), pinned=pinned, proxy_token=token)
    try:
        client.ask("GET", "/v1/run", RunDescription)
    except HubError as error:
        return f"does not answer: {error.message}"
    finally:
        client.close()
    return ""
