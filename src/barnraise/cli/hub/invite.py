"""``barnraise invite``: make, list and withdraw invites of a hub."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from barnraise.cli.child_process import say
from barnraise.cli.hub.directories import is_pinned, kept_hub
from barnraise.cli.hub.join import require_hub_parts
from barnraise.cli.tables import table
from barnraise.core.config import load_settings
from barnraise.core.errors import HubError
from barnraise.core.units import counted, parse_duration
from barnraise.hub.storage.addresses import add_addresses, known_addresses

if TYPE_CHECKING:
    from barnraise.hub.protocol.invites import InviteGrant
    from barnraise.hub.protocol.messages import Role
    from barnraise.hub.storage.log import MemberRecord

_JOINS: Mapping[str, str] = {
    "mirror": "barnraise hub follow -",
    "region": "barnraise hub up --parent -",
}


class InviteOptions(NamedTuple):
    name: str
    uses: int
    lasts: str
    stranger: bool
    mirror: bool
    region: bool
    address: tuple[str, ...]
    listed: bool
    revoke: str


def run(options: InviteOptions) -> int:
    require_hub_parts()
    directory = kept_hub(options.name, load_settings())
    if options.revoke:
        return _revoke(directory, options.revoke)
    return _list(directory) if options.listed else _make(directory, options)


def _make(directory: Path, options: InviteOptions) -> int:
    from barnraise.hub.protocol.invites import invite_text, short_key
    from barnraise.hub.storage.create import create_invite

    role = _role(options)
    addresses = options.address or known_addresses(directory)
    if not addresses:
        raise HubError("the hub has no address yet", hint="Start it first: barnraise hub up")
    made = create_invite(
        directory,
        addresses,
        role=role,
        uses=options.uses,
        valid_s=parse_duration(options.lasts),
        pinned=is_pinned(directory),
    )
    add_addresses(directory, options.address)  # a hub behind a proxy accepts only names that it knows
    click.echo(invite_text(made))
    key, until = short_key(str(made.signer.id)), _moment(made.expires)
    joins = _JOINS.get(role, "barnraise join --invite -")
    say(f"invite {key} for {counted(options.uses, 'machine')} until {until}: {joins}")
    return 0


def _role(options: InviteOptions) -> Role:
    requested: dict[Role, bool] = {
        "stranger": options.stranger,
        "mirror": options.mirror,
        "region": options.region,
    }
    wanted = [role for role, is_wanted in requested.items() if is_wanted]
    if len(wanted) > 1:
        raise HubError(f"an invite is for a {' or for a '.join(wanted)}", hint="Leave out all but one.")
    return wanted[0] if wanted else "friend"


def _list(directory: Path) -> int:
    from barnraise.hub.storage.create import known_invites

    grants, members = known_invites(directory)
    rows = [
        _row(grant, members)
        for grant in grants
        if not _why_not(grant) or any(member.invite == grant.key for member in members.values())
    ]
    if not rows:
        click.echo(f"{directory.name} has no invites that can be used; make one: barnraise invite")
        return 0
    click.echo(table([("invite", "role", "uses left", "state", "machines"), *rows], words=(3,), wraps=True))
    return 0


def _row(grant: InviteGrant, members: Mapping[str, MemberRecord]) -> tuple[str, ...]:
    from barnraise.hub.protocol.invites import short_key

    state = _why_not(grant) or f"until {_moment(grant.expires)}"
    names = [
        f"{member.name} (excluded)" if member.quarantine else member.name
        for member in members.values()
        if member.invite == grant.key
    ]
    return short_key(grant.key), grant.role, str(grant.uses), state, ", ".join(names)


def _why_not(grant: InviteGrant) -> str:
    """Return why an invite cannot be used any more; empty if it can."""
    if grant.withdrawn:
        return "withdrawn"
    if grant.uses < 1:
        return "used"
    return "expired" if grant.expires < time.time() else ""


def _revoke(directory: Path, wanted: str) -> int:
    from barnraise.hub.protocol.invites import short_key
    from barnraise.hub.storage.create import known_invites, withdraw_invite

    grants, members = known_invites(directory)
    matches = [grant.key for grant in grants if grant.key.startswith(wanted.upper())]
    if len(matches) != 1:
        count = f"{len(matches)} invites" if matches else "no invite"
        raise HubError(
            f"{count} of {directory.name} can be meant by {wanted!r}",
            hint="Give an id that `barnraise invite --list` shows.",
        )
    withdraw_invite(directory, matches[0])
    say(f"the invite {short_key(matches[0])} is withdrawn; no machine can join with it any more")
    names = _came_with(matches[0], members)
    if names:
        say(f"came with it, and still take part: {', '.join(names)}; exclude one: barnraise hub expel NAME")
    return 0


def _came_with(key: str, members: Mapping[str, MemberRecord]) -> list[str]:
    return [member.name for member in members.values() if member.invite == key and not member.quarantine]


def _moment(expires: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(expires))
