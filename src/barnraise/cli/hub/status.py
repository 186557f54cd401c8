"""``barnraise hub status`` and ``hub export``: members and results of a hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from barnraise.cli.child_process import say
from barnraise.cli.hub.directories import addresses_from_here, is_pinned, kept_hub
from barnraise.cli.hub.join import require_hub_parts
from barnraise.cli.tables import table
from barnraise.cli.terminal import wrapped
from barnraise.core.config import load_settings
from barnraise.core.errors import HubError, HubRefused
from barnraise.core.units import counted, format_duration
from barnraise.hub.storage.addresses import known_addresses
from barnraise.identity.keys import NodeKey

if TYPE_CHECKING:
    from barnraise.hub.protocol.messages import RoundConfig


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
    from barnraise.hub.storage.create import FOUNDING, HubFounding
    from barnraise.hub.storage.log import HubLog, read_fact

    directory = kept_hub(name, load_settings())
    log = HubLog(directory)
    try:
        state = log.read()
    finally:
        log.close()
    newest = state.versions[-1] if state.versions else None
    founding = read_fact(state.facts, FOUNDING, HubFounding)
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
        None if founding is None else _rules(founding.terms),
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


class RoundRules(msgspec.Struct, frozen=True):
    """Rules of a hub's rounds, which were fixed when it was created."""

    round_s: float
    codec: str
    wait_for: int  # members that the first round starts with
    quorum: float  # share of the members
    max_staleness: int  # versions
    linear_scaling: bool = False
    rounds: int = 0  # after which the run is over; 0: without a limit


class HubStatusReport(msgspec.Struct, frozen=True):
    """Status of one hub, for people and as JSON."""

    name: str
    version: int | None
    loss: float | None
    members: tuple[MemberContribution, ...]
    addresses: dict[str, str]  # with what is wrong there
    waits: str  # what the hub waits for, or why that is unknown
    rounds: RoundRules | None = None  # None of a mirror that has not copied its hub yet


def _described(report: HubStatusReport) -> str:
    version = (
        f"version {report.version}" if report.version is not None else "its owner's model is not there yet"
    )
    loss = f", loss {report.loss:.4g}" if report.loss is not None else ""
    lines = [f"{report.name}: {version}{loss}, {counted(len(report.members), 'member')}"]
    lines.append(wrapped(f"  {report.waits}", indent="  "))
    if report.rounds is not None:
        lines.append(wrapped(f"  {_rules_text(report.rounds)}", indent="  "))
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


def _rules(terms: RoundConfig) -> RoundRules:
    return RoundRules(
        terms.round_s,
        terms.codec,
        terms.wait_for,
        terms.quorum,
        terms.stale_limit,
        terms.linear_scaling,
        terms.rounds,
    )


def _rules_text(rules: RoundRules) -> str:
    start = f"the first one starts with {counted(rules.wait_for, 'member')}, "
    rates = ", learning rates times the members" if rules.linear_scaling else ""
    end = f", {counted(rules.rounds, 'round')} in all" if rules.rounds else ""
    return (
        f"rounds of {format_duration(rules.round_s)} in {rules.codec}: {start if rules.wait_for > 1 else ''}"
        f"{100 * rules.quorum:g} % of the members end one, and an update may be "
        f"{counted(rules.max_staleness, 'version')} late{rates}{end}"
    )


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
        return "the run is over"
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
